"""Work of the training thread between the ops of its worker, and the workers that take longer for it than their peers.

In: launch delays of compute ops, recorded host work, and the time between a forward and its backward. Out: `HostCode`:
seconds by place in the step, and each worker's excess over its peers there. Does not include waits for data.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.data_waits import data_waits_of
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.grids import backwards, forwards
from tracekit.analysis.evidence.launch_delays import launch_delays
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.significance import Episodes, episodes_of
from tracekit.analysis.graph.op_grid import OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import of_peers, safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together
from tracekit.trace.model import OpKind

_BETWEEN_STEPS, _WITHIN_STEPS = "between steps", "between the ops of a step"
#: Place in the step, by the kinds of op that the thread is late for.
_PLACES = {
    "before forwards": (OpKind.FORWARD_COMPUTE,),
    "between forward and backward, the loss included": (OpKind.LOSS,),
    "before backwards": (OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT),
    "before the optimizer": (OpKind.OPTIMIZER,),
    _BETWEEN_STEPS: (OpKind.HOST_DELAY,),
    _WITHIN_STEPS: (OpKind.HOST_DELAY,),
    "around data loading, evaluation, checkpoints and gc": (
        OpKind.DATA_LOAD,
        OpKind.EVALUATION,
        OpKind.CHECKPOINT,
        OpKind.GC,
    ),
}
#: Stages of a pipeline differ in these by design: how much host work the schedule of a stage takes.
_DIFFER_BY_STAGE = ("before forwards", "before backwards", _WITHIN_STEPS)
#: Ops that are host code themselves.
_HOST_OPS = frozenset({OpKind.LOSS, OpKind.HOST_DELAY})
#: Without peers of its own stage, a worker stands out at this many times the usual host code.
FACTOR_WITHOUT_PEERS = 2.0


class HostCode(Struct, frozen=True, eq=False, dict=True):
    """Host code of each worker, by place. `taken_s`: seconds, [places, stages, steps, dp_ranks].

    `grids`: the ops of each place; `cells`: a mask of the cells of its grid that belong to the place.
    """

    job: PipelineSubject
    places: tuple[str, ...]
    grids: tuple[OpGrid, ...]
    cells: tuple[Bools, ...]
    taken_s: Floats

    @cached_property
    def usual_s(self) -> Floats:
        """Time that the peers of each worker take, seconds, shaped as `taken_s`; scaled up for a worker that computes
        slower. For a worker without peers, its own time.
        """
        usual: Floats = np.broadcast_to(_of_peers(self.taken_s) * self._slower, self.taken_s.shape)
        if self.taken_s.shape[-1] > 1:
            return usual
        without = np.isin(self.places, _DIFFER_BY_STAGE)
        return np.where(without[:, None, None, None], self.taken_s, usual)

    @cached_property
    def _slower(self) -> Floats:
        """Compute time of each worker over that of its peers, at least 1, [stages, steps, dp_ranks]."""
        cost = self.job.replay.durations.cost
        seconds = np.zeros(self.taken_s.shape[1:])
        for grid in (forwards(self.job), backwards(self.job)):
            if not grid.empty:
                seconds += np.nan_to_num(grid.gather(cost)).sum(axis=1)
        return np.asarray(np.maximum(seconds / safe(_of_peers(seconds)), 1.0))

    @cached_property
    def episodes(self) -> Episodes:
        """Steps in which a worker's host code takes longer than its peers', relative to the step; a series per
        worker.
        """
        step_s = self.job.unchanged_s
        beyond = (self.taken_s - self.usual_s).sum(axis=0) / step_s
        # As the logarithm of the step over the step without it.
        series = np.log1p(np.maximum(beyond, -0.5)).transpose(0, 2, 1)
        stages, dp_ranks, steps = series.shape
        return episodes_of(series.reshape(-1, steps), dp_ranks if dp_ranks > 1 else stages)

    def slow(self, smallest: float) -> Bools:
        """Workers whose host code exceeds their peers' by that share of the step, [stages, steps, dp_ranks]."""
        stages, steps, dp_ranks = self.taken_s.shape[1:]
        if not self.places or stages * dp_ranks < 2:
            return np.zeros((stages, steps, dp_ranks), np.bool_)
        hit = self.episodes.on & self.episodes.significant(smallest)[:, None]
        hit = hit.reshape(stages, dp_ranks, steps).transpose(0, 2, 1)
        if dp_ranks == 1:
            total, usual = self.taken_s.sum(axis=0), self.usual_s.sum(axis=0)
            hit = hit & (total.mean(axis=1) > FACTOR_WITHOUT_PEERS * usual.mean(axis=1))[:, None]
        return np.asarray(hit)

    def beyond_s(self, slow: Bools) -> Floats:
        """Excess of the workers over their peers, seconds per step averaged over those steps, [places, stages,
        dp_ranks].
        """
        beyond = np.where(slow, self.taken_s - self.usual_s, 0.0).sum(axis=2)
        return np.asarray(np.maximum(beyond / np.maximum(slow.sum(axis=1), 1), 0.0))

    def as_peers(self, slow: Bools) -> Intervention:
        """The job in which these workers, [stages, steps, dp_ranks], no longer exceed their peers.

        Removes their average share, so that their own scatter stays, also of code that sleeps now and then.
        """
        return self._scaled(np.where(slow, 1 - self._share_beyond(slow)[:, :, None], 1.0), _HOST_OPS)

    def _share_beyond(self, slow: Bools) -> Floats:
        """Share of the workers' time in those steps that exceeds their peers, [places, stages, dp_ranks]."""
        taken_s = np.where(slow, self.taken_s, 0.0).sum(axis=2) / np.maximum(slow.sum(axis=1), 1)
        return np.asarray(np.minimum(self.beyond_s(slow) / safe(taken_s), 1.0))

    def none_but_beyond(self, slow: Bools) -> Intervention:
        """The job without host code, except for these workers' excess over their peers. The loss is work, and stays."""
        return self._scaled(np.where(slow, self._share_beyond(slow)[:, :, None], 0.0), _HOST_OPS - {OpKind.LOSS})

    def _scaled(self, factor: Floats, ops: frozenset[OpKind]) -> Intervention:
        """Multiply host code by `factor`, shaped as `taken_s`; of the ops that are host code themselves, only `ops`."""
        changes: list[Intervention] = []
        for place, grid, cells, of_worker in zip(self.places, self.grids, self.cells, factor[:, :, None], strict=True):
            scale = np.where(cells, of_worker, 1.0)
            if ops.intersection(_PLACES[place]):
                changes.append(Scale(grid, scale))
            scale = np.where(_waits_for_data(self.job, grid, _PLACES[place]), 1.0, scale)
            if self.job.breaks is not None:  # time due to a break stays
                all_s, code_s = (
                    grid.gather(each) for each in (self.job.replay.durations.launch_delay, launch_delays(self.job))
                )
                scale = 1 - (1 - scale) * np.nan_to_num(code_s / safe(all_s))
            changes.append(ScaleDelays(grid, scale))
        return Together(tuple(changes))


@evidence(PipelineSubject)
def host_code_of(job: PipelineSubject) -> HostCode:
    """Work of the training threads between ops; a job has a place only if it has ops there."""
    graph = job.replay.graph
    grids = {place: grid for place, kinds in _PLACES.items() if not (grid := op_grid(graph, kinds)).empty}
    cells = {place: _cells(job, place, grid) for place, grid in grids.items()}
    grids = {place: grid for place, grid in grids.items() if cells[place].any()}
    taken_s = [_taken(job, grid, _PLACES[place], cells[place]) for place, grid in grids.items()]
    shape = job.stages, len(graph.steps), len(job.dp_ranks)
    return HostCode(
        job,
        tuple(grids),
        tuple(grids.values()),
        tuple(cells[place] for place in grids),
        np.stack(taken_s) if taken_s else np.zeros((0, *shape)),
    )


def _cells(job: PipelineSubject, place: str, grid: OpGrid) -> Bools:
    """The cells of a grid that belong to a place; host work up to a worker's first forward is between steps."""
    if place not in (_BETWEEN_STEPS, _WITHIN_STEPS):
        return np.ones((1, 1, 1, 1), np.bool_)
    starts = [block.start for block in job.replay.graph.blocks]
    begun = np.full((grid.shape[0], 1, *grid.shape[2:]), np.inf)
    if not forwards(job).empty:
        np.fmin(begun, np.fmin.reduce(forwards(job).gather(starts), axis=1, keepdims=True), out=begun)
    before = grid.gather(starts) < begun
    return before if place == _BETWEEN_STEPS else ~before


def _taken(job: PipelineSubject, grid: OpGrid, kinds: tuple[OpKind, ...], cells: Bools) -> Floats:
    """Seconds of host code before (and in) these cells of a grid, [stages, steps, dp_ranks]."""
    delays = np.maximum(np.nan_to_num(grid.gather(launch_delays(job))), 0.0)
    seconds = np.where(_waits_for_data(job, grid, kinds), 0.0, delays)
    if _HOST_OPS.intersection(kinds):
        seconds = seconds + np.nan_to_num(grid.gather(job.replay.durations.cost))
    return np.asarray(np.where(cells, seconds, 0.0).sum(axis=1))


def _waits_for_data(job: PipelineSubject, grid: OpGrid, kinds: tuple[OpKind, ...]) -> Bools:
    """Mask of the delays before the ops of a grid that are late data rather than host code, in its shape."""
    waits = np.zeros(grid.shape, np.bool_)
    if OpKind.FORWARD_COMPUTE in kinds and not data_waits_of(job).recorded:
        waits[:, :1] = data_waits_of(job).waits[0].late
    return waits


def _of_peers(values: Floats) -> Floats:
    """The usual value among the DP ranks of a stage, or among the stages of one DP rank."""
    return of_peers(values, -1 if values.shape[-1] > 1 else -3)
