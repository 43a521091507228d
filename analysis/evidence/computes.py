"""The computes of a job: their costs as a table, the factors behind them, and their pauses.

In: a `JobReplay`, the waits of threads for a processor, and the `Lockstep` of the ranks inside workers. Out:
`Computes`; each part is computed once, on first use. The waits of the other ranks show directly which rank holds up its
worker. That delay is removed first, or waits for a processor; workers, DP ranks and stages are compared by the rest.
"""

from __future__ import annotations

from functools import cached_property
from math import comb

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.compute_profile import BACKWARD, COMPUTES, FORWARD, ComputeProfile, profile_computes
from tracekit.analysis.evidence.hidden_slowness import PLACES, place_factor, usual_worker
from tracekit.analysis.evidence.off_cpu import WAITS, Lockstep, without_core_waits
from tracekit.analysis.evidence.significance import needed_nats
from tracekit.analysis.graph.op_grid import ComputeTable, OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import (
    MAD_TO_SIGMA,
    lower_median,
    lower_quantile,
    median,
    safe,
    sampled,
    spread_of_logs,
    student_beyond,
)
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.pipeline_costs import keeps_delay
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together, changed, scaled
from tracekit.trace.model import COMMUNICATION, OpKind

#: Look at a sample of this many computes before looking at all.
LARGEST_SAMPLE = 200_000


class PausedComputeThresholds(Struct, frozen=True):
    """When computes are paused, and by what. `causes`: the benchmark of 582 simulated jobs."""

    #: An excess of this many spreads ... Statistic: no normal compute of a million has it.
    spreads: float = 8.0
    #: ... and this share of the compute is not noise. Benchmark `causes`.
    share: float = 0.05
    #: Pauses of a job. Chosen: fewer are chance.
    fewest: int = 3
    #: Pauses of one origin differ in length by less than the inverse of this. Benchmark `causes`.
    of_usual: float = 0.25
    #: ... and those of a process that is stopped again and again, less than the inverse of this. Benchmark `causes`.
    of_longest: float = 0.2
    #: The length of process pauses depends on the computes that they hit by less than this share of proportional
    #: growth ... Definition: nearer to none than to that.
    own_length_share: float = 0.5
    #: ... and by chance it is so far away from it in this share of jobs. Statistic.
    proportion_chance: float = 0.001
    #: Standard error of the length below which half of the lost time lies, over that of a mean. Statistic: for
    #: lengths that scatter by a factor of e, sqrt(p (1 - p)) / density at p = 0.84.
    length_error: float = 1.51
    #: The least spread to assume from a few pauses. Chosen: a larger one proves less.
    length_spread: float = 0.05
    #: Large and small computes can be compared if the largest is this many times the smallest. Benchmark `causes`.
    contrast: float = 1.2
    #: Pauses spare backwards if pauses that hit all computes alike would miss this many backwards with a chance below
    #: this. Statistic.
    spared_chance: float = 0.05
    #: This many pauses ... Statistic: with the next.
    fewest_of_one: int = 8
    #: ... with all but a tenth of them on one worker, belong to that worker. Statistic: by chance in one of a hundred
    #: jobs with two workers.
    of_one_share: float = 0.9
    #: A stopped process loses most of its time in stops of at least this many times the range that holds eight of ten
    #: computes of its usual peer ... Benchmark `causes`.
    stop_ranges: float = 2.5
    #: ... and of this share of a compute. Benchmark `causes`.
    stop_share: float = 0.08
    #: Such stops are about equally long, whereas noise has all lengths: of computes that lose between this share of a
    #: stop ... Benchmark `causes`.
    part_of_stop: float = 0.25
    #: ... and this one ... Benchmark `causes`.
    whole_stop: float = 0.67
    #: ... there are at most so many for one that loses more. Benchmark `causes`.
    parts_share: float = 0.5
    #: Count as long the longest computes of all compared workers, as many as this share of one worker's computes.
    #: Benchmark `causes`.
    long_share: float = 0.25
    #: The fastest computes of a stopped process are as fast as its peers' up to this share. Definition:
    #: `COMPUTES.factor`.
    as_fast: float = 0.04


PAUSED_COMPUTES = PausedComputeThresholds()
#: Work that shows how fast a core is, in addition to the computes.
OTHER_WORK = (OpKind.OPTIMIZER, OpKind.LOSS, OpKind.HOST_DELAY, OpKind.DATA_LOAD)


class Computes(Struct, frozen=True, eq=False, dict=True):
    """The computes of a job. They do not depend on its launch delays.

    `queued_s`: [stages, steps, dp_ranks], None: unknown. `on_shared_cores`: all ranks compute on the cores of one host.
    """

    replay: JobReplay
    lockstep: Lockstep | None = None
    queued_s: Floats | None = None
    on_shared_cores: bool = False

    @cached_property
    def table(self) -> ComputeTable:
        """Their costs, as if no rank inside a worker were slower than the others, or waited for a processor, and no
        worker had more work than its peers at one place of each step.
        """
        return self._with_places if self.at_places is None else ComputeTable.of(self.replay.graph, self.costs)

    @cached_property
    def costs(self) -> tuple[Floats, ...]:
        """The costs of all ops behind the table, seconds, [rows, lanes] per block."""
        return self._with_places.costs if self.at_places is None else self._after(*self._explained)

    @cached_property
    def at_places(self) -> Floats | None:
        """How much longer single workers compute at one place of each step, see `place_factor`.

        Stops of a process that keep in step with it hit forwards alone, or backwards alone, at the same place.
        """
        table = self._with_places
        longer = None if table.empty else place_factor(table.grid, COMPUTES.position)
        if longer is None:
            return None
        of_one_kind = ((longer > 1).any(axis=(2, 3, 4)).sum(axis=0) == 1) & (len(longer) > 1)
        if of_one_kind.any():
            stopped = of_one_kind & find_pauses(table, of_one_kind).stopped
            longer = np.where(stopped[:, None, None, None], 1.0, longer)
        return longer if (longer > 1).any() else None

    @cached_property
    def _with_places(self) -> ComputeTable:
        return ComputeTable.of(self.replay.graph, self._after(*self._of_threads))

    @property
    def _explained(self) -> tuple[Intervention, ...]:
        """Changes that lead from the recorded costs to those behind the table."""
        if self.at_places is None:
            return self._of_threads
        return (*self._of_threads, Scale(self._with_places, 1 / self.at_places))

    @cached_property
    def _of_threads(self) -> tuple[Intervention, ...]:
        """Changes that make the ranks inside workers as fast as each other, or give each worker a processor."""
        if self.lockstep is not None and (slow := self.lockstep.slow(COMPUTES.factor)).any():
            return (self.lockstep.as_fast_as_peers(slow),)
        if self.queued_s is None:
            return ()
        own_ops = op_grid(self.replay.graph, frozenset(OpKind) - COMMUNICATION)
        return (without_core_waits(own_ops, self.replay.durations.cost, self.queued_s),)

    def _after(self, *changes: Intervention) -> tuple[Floats, ...]:
        """The costs of all ops after some changes."""
        if not changes:
            return self.replay.durations.cost
        return tuple(block.matrix() for block in changed(self.replay, changes).cost)

    @cached_property
    def profile(self) -> ComputeProfile | None:
        """The factors behind their costs; None if the job has neither forwards nor backwards."""
        return None if self.table.empty else profile_computes(self.table, self.optimizer, self._other_work_s)

    @property
    def _other_work_s(self) -> Floats | None:
        """Seconds of `OTHER_WORK`, on shared cores, [kinds, stages, steps, dp_ranks]; else None."""
        if not self.on_shared_cores:
            return None
        grids = (op_grid(self.replay.graph, (kind,)) for kind in OTHER_WORK)
        shape = self.table.shape[1], *self.table.shape[4:]
        return np.stack(
            [np.zeros(shape) if grid.empty else np.nansum(grid.gather(self.costs), axis=1) for grid in grids]
        )

    @cached_property
    def optimizer(self) -> Floats | None:
        """The optimizer of each worker over that of its peers, [stages, steps, dp_ranks]; None if not recorded."""
        grid = op_grid(self.replay.graph, (OpKind.OPTIMIZER,))
        if grid.empty:
            return None
        cost = np.nansum(grid.gather(self.costs), axis=1)
        peers = (
            usual_worker(cost, not self.on_shared_cores)[..., None]
            if cost.shape[2] > 1
            else lower_median(cost, axis=0)[None]
        )
        return np.where(cost > 0, cost / safe(peers), 1.0)

    @cached_property
    def pauses(self) -> Pauses | None:
        """Their pauses; None if the job has neither forwards nor backwards."""
        profile = self.profile
        if profile is None:
            return None
        table, suspects = self.table, profile.slow_workers | profile.slow_ranks
        rising = profile.slow_workers & profile.workers.rises.reshape(suspects.shape)
        changes, position = list[Intervention](), profile.position[:, None, None, :, None, None]
        if rising.any():  # no process is stopped a little longer in each step
            factor = np.where(rising[None, :, None], profile.slow_worker, 1.0)[:, :, None, None]
            changes.append(Scale(table, 1 / factor))
        if (position != 1).any():  # nor all of them at one place
            changes.append(Scale(table, 1 / position))
        if changes:
            table = ComputeTable.of(self.replay.graph, self._after(*self._explained, *changes))
        pauses = find_pauses(table, suspects)
        if (position != 1).any():
            pauses = replace(pauses, seconds=pauses.seconds * position, usual_s=pauses.usual_s * position)
        return pauses


class Pauses(Struct, frozen=True, eq=False):
    """`seconds`: of each pause, 0 for none, in the shape of the `ComputeTable`; all 0 for `stopped` workers.

    `stopped`: workers whose processes are stopped repeatedly, [stages, dp_ranks]; `stops_s`: by how long each of their
    computes that a stop hits is longer; `usual_s`: computes as their peers run them, like the table. `own_length`:
    pauses have a length of their own, not one in proportion to computes; `backward_share`: share of backwards in the
    time of computes.
    """

    seconds: Floats
    stopped: Bools
    stops_s: Floats
    usual_s: Floats
    own_length: bool
    backward_share: float

    @property
    def forwards(self) -> int:
        """The number of paused forwards."""
        return int((self.seconds[FORWARD] > 0).sum())

    @property
    def backwards(self) -> int:
        """The number of paused backwards."""
        return int((self.seconds[1:] > 0).sum())

    @property
    def of_processes(self) -> bool:
        """True if single computes pause as processes do, regardless of what they compute."""
        return self.forwards + self.backwards >= PAUSED_COMPUTES.fewest and self.own_length and not self.spare_backwards

    @property
    def spare_backwards(self) -> bool:
        """True if pauses hit forwards only, and often enough to rule out chance.

        Stops of a process hit each kind in proportion to the time spent in it.
        """
        forwards, backwards = self.forwards, self.backwards
        count = min(forwards + backwards, 1000)  # chance is ruled out long before
        few = round(backwards * count / max(forwards + backwards, 1))
        hit, spared = self.backward_share, 1 - self.backward_share
        chance = sum(comb(count, hits) * hit**hits * spared ** (count - hits) for hits in range(few + 1))
        return forwards > 0 and chance < PAUSED_COMPUTES.spared_chance and backwards <= 0.2 * forwards


def find_pauses(table: ComputeTable, suspects: Bools) -> Pauses:
    """The pauses in a job's computes. The table must not be empty.

    `suspects`: workers that stand out, [stages, dp_ranks]. On large jobs, a sample of the DP ranks, with all suspects,
    decides whether there are any pauses.

    A slowdown (a hot GPU, a long sequence, noise) prolongs a compute in proportion to it. A stop of its process (the
    operating system, a garbage collector, a debugger) takes as long in a forward as in a backward of twice its length.
    That difference, not a threshold, is the evidence.
    """
    grid = table.grid
    stride = max(1, grid.size // LARGEST_SAMPLE)
    chosen = suspects.any(axis=0) | (np.arange(grid.shape[-1]) % stride == 0)
    if chosen.all():
        return _pauses_in(grid)
    sample = _pauses_in(grid[..., chosen])
    if sample.stopped.any() or (sample.seconds > 0).any():
        return _pauses_in(grid)
    no_workers = np.zeros((grid.shape[1], grid.shape[-1]), np.bool_)
    return Pauses(np.broadcast_to(0.0, grid.shape), no_workers, np.zeros(0), grid, False, sample.backward_share)


def _pauses_in(grid: Floats) -> Pauses:
    """The pauses in all of a grid [kinds, stages, chunks, microbatches, steps, dp_ranks]."""
    base = median(grid, (3, 4))  # [kinds, stages, chunks, dp_ranks]
    relative = grid / safe(base)[:, :, :, None, None, :]
    cells = relative.reshape(-1, *grid.shape[3:])
    shared = lower_median(cells, axis=0)  # of microbatch, step, DP rank: a pause affects only one of its computes
    relative = relative / safe(shared)
    level = median(relative, (0, 2, 3))  # of a worker in a step: [stages, steps, dp_ranks]
    relative = relative / safe(level)[None, :, None, None]
    centre = np.array([float(median(sampled(of_kind), (0,))) for of_kind in relative])
    relative = relative / safe(centre)[:, None, None, None, None, None]
    sigma = max(spread_of_logs(sampled(of_kind)) for of_kind in relative)
    with np.errstate(invalid="ignore"):
        long = relative > 1 + max(PAUSED_COMPUTES.share, PAUSED_COMPUTES.spreads * sigma)
    beyond = np.where(long, grid * (1 - 1 / np.where(long, relative, 1.0)), 0.0)
    seconds = _without_noise(beyond, 1.0)
    stopped, usual_s = _stopped(grid, base, shared)
    by_kind = np.nansum(base, axis=(1, 2, 3))
    backward_share = float(by_kind[1:].sum() / max(by_kind.sum(), 1e-12))
    pauses = Pauses(seconds, stopped, np.zeros(0), usual_s, _own_length(beyond, base), backward_share)
    if pauses.own_length and not pauses.spare_backwards:
        stopped = stopped | _most_paused_worker(seconds)
    computes = stopped_cells(stopped, grid.shape)
    seconds[:, computes] = 0.0
    beyond = np.fmax((grid - usual_s)[:, computes], 0.0)
    return replace(
        pauses, stopped=stopped, stops_s=beyond[beyond > PAUSED_COMPUTES.of_longest * beyond.max(initial=0.0)]
    )


def _without_noise(seconds: Floats, usual: Floats | float) -> Floats:
    """`seconds` without what is much shorter, measured in `usual`, than the pauses in which most of the time is lost.

    Noise has a tail: a few computes stand out by a little. They cost next to nothing, but scattered over forwards and
    backwards they would look like process pauses.
    """
    measured = seconds / usual
    lengths = measured[measured > 0]
    return np.where(measured < PAUSED_COMPUTES.of_usual * _usual(lengths), 0.0, seconds) if len(lengths) else seconds


def stopped_cells(stopped: Bools, shape: tuple[int, ...]) -> Bools:
    """`stopped` [stages, dp_ranks] in the shape of one kind of a table."""
    return np.asarray(np.broadcast_to(stopped[:, None, None, None, :], shape[1:]))


def _most_paused_worker(seconds: Floats) -> Bools:
    """The one worker that nearly all pauses hit, if they are too many for chance, [stages, dp_ranks]."""
    count = (seconds > 0).sum(axis=(0, 2, 3, 4))
    return np.asarray(
        (count >= PAUSED_COMPUTES.fewest_of_one)
        & (count >= PAUSED_COMPUTES.of_one_share * count.sum())
        & (count.size > 1)
    )


def _own_length(beyond: Floats, base: Floats) -> bool:
    """True if pauses are as long in large computes as in small ones, and not in proportion to the compute.

    `beyond`: seconds beyond the usual, for computes that stand out, 0 elsewhere; `base`: the usual compute. A
    difference that chance could produce from proportional pauses proves nothing. So that hypothesis is tested on all
    computes that stand out by the same share, by the median pause of large computes over that of small ones.
    """
    usual = safe(base)[:, :, :, None, None, :]
    seconds = _without_noise(beyond, usual)
    cells = np.nonzero(seconds > 0)
    if not len(cells[0]):
        return False
    length, usual_length = np.log(seconds[cells]), np.log(np.broadcast_to(usual, seconds.shape)[cells])
    large = usual_length > (usual_length.min() + usual_length.max()) / 2
    if large.all() or np.ptp(usual_length) < np.log(PAUSED_COMPUTES.contrast):
        return False
    sides = [length[large], length[~large]]
    # Use the pauses in which most of the time is lost: a pause that began before the compute shows only its rest.
    centres = [_usual(np.exp(side)) for side in sides]
    off = np.concatenate([np.abs(side - np.log(centre)) for side, centre in zip(sides, centres, strict=True)])
    spread = max(MAD_TO_SIGMA * float(np.median(off)), PAUSED_COMPUTES.length_spread)
    error = PAUSED_COMPUTES.length_error * spread * float(np.sqrt(sum(1 / len(side) for side in sides)))
    grows = float(np.log(centres[0] / centres[1]))
    in_proportion = float(np.median(usual_length[large]) - np.median(usual_length[~large]))
    least = student_beyond(PAUSED_COMPUTES.proportion_chance, len(off) - 2) * error if len(off) > 2 else float("inf")
    return grows < PAUSED_COMPUTES.own_length_share * in_proportion and grows + least < in_proportion


def _usual(lengths: Floats) -> float:
    """The length below which half of the total time of the pauses lies."""
    ordered = np.sort(lengths)
    lost = np.cumsum(ordered)
    return float(ordered[np.searchsorted(lost, lost[-1] / 2)])


def _stopped(grid: Floats, base: Floats, shared: Floats) -> tuple[Bools, Floats]:
    """Workers whose processes are stopped repeatedly, and computes as their peers run them.

    A worker that is slow in some steps is steady within each of them, so the scatter within steps decides.
    """
    peers = lower_median(base, axis=-1)[:, :, :, None, None, None]
    even = spread_of_logs(sampled(shared)) <= PAUSED_COMPUTES.as_fast
    usual_s = np.broadcast_to(peers if even else peers * shared, grid.shape)
    no_workers = np.zeros((grid.shape[1], grid.shape[-1]), np.bool_)
    if grid.shape[-1] < 2:
        return no_workers, usual_s
    over_usual = grid / safe(usual_s)
    within = over_usual / safe(lower_median(over_usual, (0, 2, 3)))[None, :, None, None]
    of_worker = _by_worker(within)
    range_ = lower_quantile(of_worker, -1, 0.9) - lower_quantile(of_worker, -1, 0.1)
    usual = np.fmax(
        lower_median(range_, axis=2)[:, :, None], lower_median(range_.reshape(len(range_), -1), axis=1)[:, None, None]
    )
    stops = _stops(of_worker, np.maximum(PAUSED_COMPUTES.stop_ranges * usual, PAUSED_COMPUTES.stop_share))
    nats = np.where(stops, _nats_of_long(of_worker), 0.0)
    needed = needed_nats(nats[0].size)
    fastest = _between(grid / safe(peers), 0.1)
    fast = fastest < (1 + PAUSED_COMPUTES.as_fast) * lower_median(fastest, axis=-1)[..., None]
    in_both_kinds = stops.all(axis=0) & (nats.sum(axis=0) >= needed) & fast[BACKWARD]
    # A backward as long as the time between two stops is hit every time, by the same amount: slow, but steady. Then
    # the forwards alone must show that it is not slow itself.
    each_time = (nats[FORWARD] >= needed) & (_between(over_usual, 0.5)[BACKWARD] > 1 + PAUSED_COMPUTES.as_fast)
    stopped = (in_both_kinds | each_time) & fast[FORWARD] & ~_longer_work(within)
    return stopped if 2 * stopped.sum() <= stopped.size else no_workers, usual_s


def _longer_work(within: Floats) -> Bools:
    """Workers that lose most of their time in microbatches whose forwards and backwards are longer in proportion, as
    more work is and stops are not, [stages, dp_ranks].
    """
    beyond = np.fmax(within - 1, 0.0)
    in_proportion = beyond.max(axis=0) <= PLACES.kinds_alike * beyond.min(axis=0)
    of_work, all_of_it = ((beyond * which).sum(axis=(0, 2, 3, 4)) for which in (in_proportion, 1.0))
    return np.asarray((len(within) > 1) & (2 * of_work > all_of_it))


def _by_worker(values: Floats) -> Floats:
    """The computes of each worker, [kinds, stages, dp_ranks, computes]."""
    return np.moveaxis(values, -1, 2).reshape(*values.shape[:2], values.shape[-1], -1)


def _stops(within: Floats, least: Floats) -> Bools:
    """Mask of workers whose computes lose time in similar stops, at least `least` above 1, [kinds, stages, dp_ranks].

    `within`: [kinds, stages, dp_ranks, computes].
    """
    beyond = -np.sort(-np.fmax(within - 1, 0.0), axis=-1)
    lost = np.cumsum(beyond, axis=-1)
    half = (lost < lost[..., -1:] / 2).sum(axis=-1, keepdims=True)
    usual = np.take_along_axis(beyond, half, axis=-1)  # half of the lost time is in stops up to this long
    whole = (beyond >= PAUSED_COMPUTES.whole_stop * usual).sum(axis=-1)
    parts = (beyond >= PAUSED_COMPUTES.part_of_stop * usual).sum(axis=-1) - whole
    alike = parts.sum(axis=0) <= PAUSED_COMPUTES.parts_share * whole.sum(axis=0)
    return np.asarray((usual[..., 0] >= least) & alike)


def _nats_of_long(within: Floats) -> Floats:
    """Evidence that a worker's share of the long computes of its stage exceeds chance, nats, [kinds, stages, dp_ranks].

    `within`: [kinds, stages, dp_ranks, computes]. If all workers were alike, each would have its share of the longest
    computes (Chernoff bound of the binomial distribution).
    """
    present = np.isfinite(within)
    computes = present.sum(axis=-1)
    share = np.clip(computes / np.maximum(computes.sum(axis=-1, keepdims=True), 1), 1e-9, 1 - 1e-9)
    flat = np.where(present, within, -np.inf).reshape(*within.shape[:2], -1)
    long = max(1, round(PAUSED_COMPUTES.long_share * within.shape[-1]))
    longest = np.argpartition(flat, flat.shape[-1] - long, axis=-1)[..., flat.shape[-1] - long :]
    of_worker = longest // within.shape[-1]
    held = np.stack([(of_worker == worker).sum(axis=-1) for worker in range(within.shape[2])], axis=-1) / long
    with np.errstate(divide="ignore", invalid="ignore"):
        nats = held * np.log(held / share) + np.where(held < 1, (1 - held) * np.log((1 - held) / (1 - share)), 0.0)
    return np.asarray(np.where(held > share, long * nats, 0.0))


def _between(values: Floats, share: float) -> Floats:
    """The quantile of each worker's computes, [kinds, stages, dp_ranks]."""
    return lower_quantile(_by_worker(values), -1, share)


class PausedStarts(Struct, frozen=True, eq=False):
    """`ops`: every op of the job; `delay_share`: the share of their launch delays due to pauses, in the shape of its
    grid.

    `optimizers` and `optimizer_share`: the same for the durations of optimizers. `delays_left`: launch delays without
    the pauses, seconds, one [rows, lanes] matrix per block.

    A pause that begins while its process waits for a transfer, or between two ops, lengthens no compute: it delays the
    next op by its rest. The replay drops launch delays of communication, because most are waits; these are not, so they
    stay until the pauses go.
    """

    ops: OpGrid
    delay_share: Floats
    optimizers: OpGrid
    optimizer_share: Floats
    delays_left: tuple[Floats, ...]

    def change(self, workers: Bools) -> Intervention:
        """The job without the paused starts of `workers`, [stages, dp_ranks]."""
        cells = workers[:, None, None, :]
        changes: list[Intervention] = [ScaleDelays(self.ops, 1 - self.delay_share * cells)]
        if not self.optimizers.empty:
            changes.append(Scale(self.optimizers, 1 - self.optimizer_share * cells))
        return Together(tuple(changes))


def find_paused_starts(replay: JobReplay, pauses: Pauses | None) -> PausedStarts | None:
    """Find the effects of the pauses seen in computes on other ops; None if no computes of the job pause."""
    if pauses is None or not (pauses.of_processes or pauses.stopped.any()):
        return None
    ops, optimizers = op_grid(replay.graph, tuple(OpKind)), op_grid(replay.graph, (OpKind.OPTIMIZER,))
    delays = replay.durations.launch_delay
    share = paused_share(ops.gather(delays), pauses)
    return PausedStarts(
        ops,
        share,
        optimizers,
        paused_share(optimizers.gather(replay.durations.cost), pauses),
        scaled(delays, ops.parts(1 - share)),
    )


def with_paused_starts(replay: JobReplay, paused: PausedStarts | None) -> JobReplay:
    """The job whose replay keeps the launch delays due to pauses, including those of communication."""
    if paused is None:
        return replay
    delays = []
    for block, delay, without in zip(
        replay.graph.blocks, replay.durations.launch_delay, paused.delays_left, strict=True
    ):
        delays.append(np.where(keeps_delay(block.template)[:, None] | (without < delay), delay, 0.0))
    return replace(replay, kept_delay=tuple(delays))


def paused_share(seconds: Floats, pauses: Pauses) -> Floats:
    """The share of the time (or late start) of each op of a grid that is due to a pause or a stop; 0 for none.

    Only what lasts about as long as pauses of computes do counts: a worker that is late with an op in most steps is
    late for another reason, even if it is stopped too. `seconds`: [stages, ops, steps, dp_ranks].
    """
    share = np.zeros(seconds.shape)
    single_s = pauses.seconds[pauses.seconds > 0] if pauses.of_processes else np.zeros(0)
    for workers, lengths in ((pauses.stopped, pauses.stops_s), (~pauses.stopped, single_s)):
        if seconds.size and len(lengths):
            usual_s, longest_s = float(np.median(lengths)), WAITS.of_seen * float(lengths.max())
            for stage in np.flatnonzero(workers.any(axis=1)):  # one at a time, to keep temporary arrays small
                _add_pauses(share[stage], seconds[stage], workers[stage], usual_s, longest_s)
    return share


def _add_pauses(share: Floats, took: Floats, workers: Bools, usual_s: float, longest_s: float) -> None:
    """Fill in `share` of one stage, [ops, steps, dp_ranks], where one of `workers` pauses in an op or before it."""
    beyond = took - median(took, (1,))[:, None]
    off = np.abs(beyond)
    spread = MAD_TO_SIGMA * np.fmax(median(off, (1, 2))[:, None, None], median(off, (1,))[:, None])
    least = np.maximum(PAUSED_COMPUTES.spreads * spread, PAUSED_COMPUTES.share * usual_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        paused = (took > 0) & (beyond > least) & (beyond < longest_s) & workers
        share[...] = np.where(paused, np.minimum(beyond / took, 1.0), share)
