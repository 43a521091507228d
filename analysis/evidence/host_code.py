"""What hosts do to a pipeline: their launch delays, input data, their own code, their scheduler.

In: a pipeline. Out: delays and waits by op and worker, and what explains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import comb, log

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.off_cpu import off_cpu_s, stops_of
from tracekit.analysis.evidence.pipeline_subject import (
    PipelineSubject,
    backwards,
    data_loads,
    first_forwards,
    first_gathers,
    forwards,
)
from tracekit.analysis.evidence.significance import Episodes, episodes_of
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.graph.megatron import GRADIENT_REDUCTION
from tracekit.analysis.graph.op_grid import OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import median, of_peers, safe, sampled
from tracekit.analysis.whatif.interventions import Intervention, NoDelays, Scale, ScaleDelays, Together
from tracekit.trace.canonical import RUN_QUEUE
from tracekit.trace.model import LONGEST_S, OpKind

_NO_DELAYS = NoDelays()


class HostCodeThresholds(Struct, frozen=True):
    """When hosts come late. `frameworks`: real trainings with slowed data and host code in benchmarks/RESULTS.md."""

    #: Without peers of its own stage, a worker stands out at this many times the usual host code. Chosen: stages
    #: differ by design.
    without_peers: float = 2.0
    #: Waiting for data at least this long, seconds, means late data. Benchmark `frameworks`.
    data_s: float = 5e-3
    #: In short steps, so does recorded loading that takes this share of the step. Benchmark `frameworks`.
    data_share: float = 0.05
    #: A first op waits for data if its delay is at least this many times the worker's usual launch delay. Benchmark
    #: `causes`.
    own_delays: float = 2.0
    #: Data is late on a rank in a step if its wait exceeds the shortest by this share of the longest excess ...
    #: Definition: nearer to the latest than to none.
    of_worst: float = 0.5
    #: ... which is this share of the mean of these. Benchmark `causes`.
    of_usual: float = 0.25
    #: It is late on few ranks if they have this share of these waits ... Benchmark `causes`.
    of_few_share: float = 0.9
    #: ... and each of them makes that so many times likelier than chance does. Statistic.
    likelier: float = 2.5


HOST_CODE = HostCodeThresholds()
_BETWEEN_STEPS, _WITHIN_STEPS = "between steps", "between the ops of a step"
#: Place in the step, by the kinds of op that the thread is late for.
_PLACES = {
    "before forwards": (OpKind.FORWARD_COMPUTE,),
    "between forward and backward, the loss included": (OpKind.LOSS,),
    "before backwards": (OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT),
    "before the optimizer": (OpKind.OPTIMIZER,),
    "before gradients are reduced": GRADIENT_REDUCTION,
    "before collectives between computes": (OpKind.FORWARD_COLLECTIVES, OpKind.BACKWARD_COLLECTIVES),
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
_DIFFER_BY_STAGE = ("before forwards", "before backwards", "before collectives between computes", _WITHIN_STEPS)
#: Ops that are host code themselves.
_HOST_OPS = frozenset({OpKind.LOSS, OpKind.HOST_DELAY})


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
        hit = self.episodes.slow & self.episodes.significant(smallest)[:, None]
        hit = hit.reshape(stages, dp_ranks, steps).transpose(0, 2, 1)
        if dp_ranks == 1:
            total, usual = self.taken_s.sum(axis=0), self.usual_s.sum(axis=0)
            hit = hit & (total.mean(axis=1) > HOST_CODE.without_peers * usual.mean(axis=1))[:, None]
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

    def only_excess(self, slow: Bools) -> Intervention:
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
                    grid.gather(delay) for delay in (self.job.replay.durations.launch_delay, launch_delays(self.job))
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
    taken_s = [_host_code_s(job, grid, _PLACES[place], cells[place]) for place, grid in grids.items()]
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
    first_begin = np.full((grid.shape[0], 1, *grid.shape[2:]), np.inf)
    if not forwards(job).empty:
        np.fmin(first_begin, np.fmin.reduce(forwards(job).gather(starts), axis=1, keepdims=True), out=first_begin)
    before = grid.gather(starts) < first_begin
    return before if place == _BETWEEN_STEPS else ~before


def _host_code_s(job: PipelineSubject, grid: OpGrid, kinds: tuple[OpKind, ...], cells: Bools) -> Floats:
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


class DataWait(Struct, frozen=True, eq=False):
    """Ops in which, or before which, workers wait for data. `waits_s`: seconds; `late`: which are late; both like the
    grid.
    """

    ops: OpGrid
    waits_s: Floats
    late: Bools


class DataWaits(Struct, frozen=True, eq=False):
    """All data waits of a job. `recorded`: True if loading itself was recorded; `usual_s`: the usual delay; `least_s`:
    one that may be late.
    """

    recorded: bool
    usual_s: float
    least_s: float
    waits: tuple[DataWait, ...]


@evidence(PipelineSubject)
def data_waits_of(job: PipelineSubject) -> DataWaits:
    """Waits for data at the beginning of a step; none for a job without forwards and without recorded loading."""
    recorded = not data_loads(job).empty
    if recorded:
        sources = [(data_loads(job), data_loads(job).gather(job.replay.durations.cost))]
        smallest_s = min(HOST_CODE.data_s, HOST_CODE.data_share * job.unchanged_s)
        usual_s, least_s = 0.0, np.array(smallest_s)
    elif first_forwards(job).empty:
        return DataWaits(recorded, 0.0, HOST_CODE.data_s, ())
    else:
        # A training loop fetches data at its top, before it gathers parameters, or just before the first forward.
        grids = [grid for grid in (first_forwards(job), first_gathers(job)) if not grid.empty]
        sources = [(grid, np.nan_to_num(grid.gather(launch_delays(job)))) for grid in grids]
        usual_s = _typical_delay(job)
        smallest_s = HOST_CODE.data_s
        least_s = np.maximum(max(smallest_s, 10 * usual_s), HOST_CODE.own_delays * _own_delay(job))
    return DataWaits(
        recorded, usual_s, smallest_s, tuple(DataWait(ops, waits_s, waits_s > least_s) for ops, waits_s in sources)
    )


def late_ranks(late_s: Floats) -> Bools:
    """The DP ranks on which data is late, [dp_ranks]: the fewest with nearly all of it; all, if chance explains which
    have it. `late_s`: seconds, [steps, dp_ranks].
    """
    beyond_s = late_s - late_s.min(axis=1, keepdims=True)
    most_s = beyond_s.max(axis=1)
    hit = most_s > HOST_CODE.of_worst * late_s.max(axis=1)  # in other steps it is late on all
    hit &= most_s > HOST_CODE.of_usual * float(late_s.max(axis=1).mean())
    late = hit[:, None] & (beyond_s > HOST_CODE.of_worst * most_s[:, None])
    everybody, count = np.ones(late.shape[1], np.bool_), late.sum(axis=0)
    if late_s[hit].max(axis=1).sum() < HOST_CODE.of_worst * late_s.max(axis=1).sum():
        return everybody
    order = np.argsort(-count, kind="stable")
    few = int(np.searchsorted(np.cumsum(count[order]), HOST_CODE.of_few_share * count.sum())) + 1
    chosen = np.isin(np.arange(len(count)), order[:few])
    inside = ~late[:, ~chosen].any(axis=1)[hit]
    # How many ways there are for as many ranks to be late in a step, over those among the chosen ones.
    ways = sum(log(comb(len(count), hits)) - log(comb(few, hits)) for hits in late.sum(axis=1)[hit][inside].tolist())
    choices = log(comb(len(count), few)) + log(comb(len(inside), int(inside.sum())))
    return chosen if ways - choices > few * log(HOST_CODE.likelier) else everybody


def _own_delay(job: PipelineSubject) -> Floats:
    """The usual launch delay of each worker's computes, seconds, [stages, 1, 1, dp_ranks].

    A host that is late with every launch is also late with the first one; that is not a wait for data.
    """
    delays = launch_delays(job)
    of_forwards, of_backwards = (median(grid.gather(delays), (2,)) for grid in (forwards(job), backwards(job)))
    later = np.nan_to_num(np.concatenate([of_forwards[:, 1:], of_backwards], axis=1))
    longest: Floats = later.max(axis=1, initial=0.0)
    return longest[:, None, None, :]


def _typical_delay(job: PipelineSubject) -> float:
    """Median launch delay, seconds."""
    blocks, delays_s = job.replay.graph.blocks, job.replay.durations.launch_delay
    delays = np.concatenate(
        [
            sampled(delay if block.present is None else delay[block.present])
            for block, delay in zip(blocks, delays_s, strict=True)
        ]
    )
    return max(float(np.median(delays)), 0.0)


@evidence(PipelineSubject)
def delay_share(job: PipelineSubject) -> float:
    """The share that a step's own launch delays add to it; below 0 if ops overlap that the graph orders."""
    return float(job.replay.fit.with_delays.mean()) / job.attribution.original_s - 1


def delay_share_without(job: PipelineSubject, changes: Sequence[Intervention]) -> float:
    """As `delay_share`, without the launch delays that go with `changes`: the part left to explain, at least 0.

    Delays that only show once a change has made room for them cost the recorded step nothing.
    """
    gone_s = max(_delays_s(job, ()) - _delays_s(job, changes), 0.0)
    return max(delay_share(job) - gone_s / job.attribution.original_s, 0.0)


def _delays_s(job: PipelineSubject, changes: Sequence[Intervention]) -> float:
    """Seconds that the launch delays of compute ops add to the mean step after `changes`."""
    return float((job.step_times(changes) - job.step_times((*changes, _NO_DELAYS))).mean())


@evidence(PipelineSubject)
def launch_delays(job: PipelineSubject) -> tuple[Floats, ...]:
    """Launch delays without the parts due to paused processes and to breaks, seconds, one [rows, lanes] matrix per
    block.
    """
    paused = job.paused_starts
    delays = job.replay.durations.launch_delay if paused is None else paused.delays_left
    return delays if job.breaks is None else job.breaks.without(delays)


@evidence(PipelineSubject)
def run_queue_s(job: PipelineSubject) -> Floats:
    """Seconds per mean step that each worker's training thread waited in the run queue, [stages, dp_ranks].

    0 if the metadata does not give it.
    """
    stated, waits = job.trace.metadata.get(RUN_QUEUE), np.zeros((job.stages, len(job.dp_ranks)))
    by_rank = stated if isinstance(stated, dict) else {}
    for worker, rank in job.worker_ranks.items():
        seconds = by_rank.get(str(rank))
        if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_S and worker.dp_rank in job.dp_index:
            waits[worker.pp_rank, job.dp_index[worker.dp_rank]] = seconds
    return waits


@evidence(PipelineSubject)
def _off_cpu_s(job: PipelineSubject) -> Floats:
    """Seconds in which each worker neither ran nor was ready to run in its own ops, [stages, steps, dp_ranks].

    0 for workers of several ranks (see `Lockstep.off_s`).
    """
    off_s = off_cpu_s(job.trace, job.replay.graph)
    return off_s[..., 0] if off_s.shape[3] == 1 else np.zeros(off_s.shape[:3])


@evidence(PipelineSubject)
def process_stops_s(job: PipelineSubject) -> Floats:
    """Time in which the process of each worker is stopped, if it is stopped repeatedly, as the kernel counted it,
    seconds, [stages, steps, dp_ranks].
    """
    if job.table.empty:
        return np.zeros_like(_off_cpu_s(job))
    by_kind_s: Floats = np.nansum(job.table.grid, axis=(2, 3)).transpose(0, 1, 3, 2)
    return stops_of(_off_cpu_s(job).transpose(0, 2, 1), by_kind_s, job.unchanged_s)[0].transpose(0, 2, 1)


@evidence(PipelineSubject)
def stopped_processes(job: PipelineSubject) -> Bools:
    """Workers whose process is stopped in several steps, as the kernel counted it, [stages, dp_ranks]."""
    return np.asarray((process_stops_s(job) > 0).any(axis=1))


@evidence(PipelineSubject)
def steps_with_stops(job: PipelineSubject) -> Bools:
    """Steps with stops of the processes that count as stopped, [steps]."""
    steps = np.asarray((process_stops_s(job) > 0).any(axis=(0, 2)))
    if job.lockstep is not None:
        steps = steps | job.lockstep.stopped(job.unchanged_s)[0].any(axis=(0, 1))
    return steps
