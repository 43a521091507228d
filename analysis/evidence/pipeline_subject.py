"""A pipeline under diagnosis, its ops by kind, and the time around its steps.

In: a `Trace` and its `JobReplay`. Out: `PipelineSubject`; an `OpGrid` for each kind of op; what keeps steps apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.attribution import Attribution, Parts, noisy_step_times
from tracekit.analysis.attribution.patterns import some_stand_apart
from tracekit.analysis.evidence.compute_profile import ComputeProfile
from tracekit.analysis.evidence.computes import Computes, PausedStarts, Pauses, find_paused_starts, with_paused_starts
from tracekit.analysis.evidence.off_cpu import Lockstep, on_shared_cores, queued_s
from tracekit.analysis.evidence.subject import Evidence, JobKind, Names, Subject, evidence
from tracekit.analysis.graph.op_grid import ComputeTable, OpGrid, TransferGrid, op_grid, transfer_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, median, safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, ScaleDelays, Together, scaled, step_times
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.model import COMMUNICATION, DP_COLLECTIVES, OpKind, Worker
from tracekit.trace.schema import RECEIVED, SENT

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.analysis.experts.loads import Loads
    from tracekit.report.finding import Place


class StepEdgeThresholds(Struct, frozen=True):
    """When time between steps is a stall or a break. `causes`: the benchmark of 582 simulated jobs."""

    #: Idle time of this share of the usual step, beyond the usual time between steps, is a stall ... Benchmark
    #: `causes`.
    stall_share: float = 0.1
    #: ... if it also exceeds the usual by this many spreads. Statistic: no normal step of a million.
    stall_spreads: float = 8.0
    #: Stalls in every other step must have happened this many times. Chosen: fewer are chance.
    fewest_turns: int = 3
    #: Steps that overlap by less than this share on average run one after the other. Benchmark `causes`.
    overlap_share: float = 0.005
    #: Clocks and rounding make a worker's steps overlap by less than this share of a step. Benchmark `clocks`.
    clock_share: float = 0.01
    #: Idle time in more than this share of the steps is how the job works, not a stall. Definition.
    steps_share: float = 0.5
    #: A worker has a break if it is late by this share of the worst. Definition: nearer to that than to none.
    of_worst: float = 0.5


STEP_EDGES = StepEdgeThresholds()


class PipelineSubject(Subject, frozen=True, eq=False):
    """A pipeline. `replay`: only with the launch delays of each step itself (`with_step_delays`); `plain`: as recorded.

    `attributed`: returns its attribution, which takes long and which a question does not need.
    `expert_loads`: tokens of each expert, if the job logged them.
    """

    kind: ClassVar[JobKind] = JobKind.PIPELINE
    trace: Trace
    replay: JobReplay
    plain: JobReplay
    attributed: Callable[[], Attribution]
    computes: Computes
    paused_starts: PausedStarts | None = None
    breaks: Breaks | None = None
    expert_loads: Loads | None = None

    @classmethod
    def of(
        cls, trace: Trace, replay: JobReplay, attributed: Callable[[], Attribution] | None = None
    ) -> PipelineSubject:
        """Take the job apart into delays of its steps, pauses and breaks.

        `attributed`: returns its attribution; by default, it is computed if needed.
        """
        by_step = with_step_delays(replay, trace.step_starts)
        computes = Computes(
            by_step, Lockstep.of(trace, by_step.graph), queued_s(trace, by_step.graph), on_shared_cores(trace)
        )
        paused = find_paused_starts(by_step, computes.pauses)
        by_step = with_paused_starts(by_step, paused)
        stalled = 0.0 if by_step.stalled_s is None else by_step.stalled_s
        busy_s = step_times(by_step, ()) - stalled  # a stall lies between two steps and belongs to neither
        by_step = with_overlap(by_step, trace.step_starts, busy_s)
        attributed = attributed or partial(attribute, replay)
        return cls(trace, by_step, replay, attributed, computes, paused, find_breaks(by_step))

    @cached_property
    def attribution(self) -> Attribution:
        """What stragglers cost, and which ones."""
        return self.attributed()

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """The DP ranks on the last axis of the grids."""
        return self.replay.graph.dp_ranks

    @cached_property
    def dp_index(self) -> dict[int, int]:
        """DP rank -> its index on the last axis of the grids."""
        return {dp_rank: index for index, dp_rank in enumerate(self.dp_ranks)}

    @property
    def stages(self) -> int:
        """Pipeline stages of the job."""
        return self.replay.graph.layout.pp

    @cached_property
    def all_lanes_replayed(self) -> bool:
        """Whether every DP rank of the layout is replayed in every step, so that nothing is missing."""
        graph = self.replay.graph
        lanes = sum(block.lanes for block in graph.blocks)
        return not graph.dropped_lanes and lanes == len(graph.steps) * graph.layout.dp_ranks

    @cached_property
    def all_workers_traced(self) -> bool:
        if self.all_lanes_replayed:
            return True
        coverage = self.trace.coverage()
        return coverage.workers_traced == coverage.workers_expected

    @property
    def gpus(self) -> int:
        return self.replay.graph.layout.world_size

    @property
    def steps(self) -> Int32s:
        return self.replay.graph.steps

    @cached_property
    def names(self) -> Names:
        layout = self.replay.graph.layout
        alike = layout.tp * layout.cp if self.lockstep is None else 1
        return Names(self.worker_ranks, self.hosts, self.stages, self.host_of_rank, alike)

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return self.trace.source_kind.lacks

    @property
    def daily(self) -> bool:
        """Whether a day of it follows: not of one step, nor if it is unknown what happens between collectives."""
        return self.shows(Fact.COMPUTE) and len(self.steps) > 1

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.trace.metadata

    @property
    def slowdown(self) -> float:
        return self.attribution.slowdown

    @property
    def measured_s(self) -> float:
        return self.plain.fit.recorded_s

    @property
    def replay_error(self) -> float:
        return self.plain.fit.error

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        for worker in self._workers_at(where):
            yield self.worker_ranks.get(worker), worker
        lockstep = self.lockstep
        if where.ranks and lockstep is not None:
            worker_of = {
                rank: worker
                for worker, ranks in zip(lockstep.workers, lockstep.ranks, strict=True)
                for rank in ranks or ()
            }
            yield from ((rank, worker_of[rank]) for rank in where.ranks)

    def has(self, where: Place) -> bool:
        workers = [*self._workers_at(where), *(Worker(self.dp_ranks[0], stage) for stage in where.pp_ranks)]
        return (
            all(worker.dp_rank in self.dp_index and 0 <= worker.pp_rank < self.stages for worker in workers)
            and all(0 <= rank < self.gpus for rank in where.ranks)
            and where.host in {None, *self.host_of_rank.values()}
        )

    def _workers_at(self, where: Place) -> Iterator[Worker]:
        """Yield the workers of a place; none for the whole job."""
        yield from where.workers
        for link in where.links:
            yield from link.ends
        for dp_rank in where.dp_ranks:
            yield from (Worker(dp_rank, stage) for stage in range(self.stages))

    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        """See `Subject.step_times`; the same changes are replayed once."""
        key = tuple(map(id, changes))
        if key not in self._replayed:
            times = step_times(self.replay, changes)
            times.flags.writeable = False
            self._replayed[key] = tuple(changes), times  # while a change is referenced, no other has its id
        return self._replayed[key][1]

    @cached_property
    def _replayed(self) -> dict[tuple[int, ...], tuple[tuple[Intervention, ...], Floats]]:
        return {}

    @cached_property
    def noise(self) -> Parts:
        return Parts.of(self.attribution.original, self.attribution.ideal, self.noisy)

    @cached_property
    def noisy(self) -> Floats:
        """Step times of the ideal job with the noise of the run, seconds, [steps]."""
        return noisy_step_times(self.replay)

    @property
    def recorded_s(self) -> float:
        """Mean step including stalls between steps, seconds."""
        return max(self.measured_s, self.unchanged_s)

    @property
    def table(self) -> ComputeTable:
        """The computes of the job."""
        return self.computes.table

    @property
    def profile(self) -> ComputeProfile | None:
        """The factors of compute costs; None if the job has neither forwards nor backwards."""
        return self.computes.profile

    @property
    def factors(self) -> ComputeProfile:
        """As `profile`, of a job that computes."""
        assert self.profile is not None, "the job computes"
        return self.profile

    @property
    def pauses(self) -> Pauses | None:
        """Pauses in computes; None if the job has neither forwards nor backwards."""
        return self.computes.pauses

    @property
    def exchanges(self) -> GraphSubject | None:
        if not {SENT, RECEIVED} <= {*self.trace.ops.columns} or self.stages > 1:
            return None  # as of most pipelines: they need no module of graphs
        from tracekit.analysis.evidence.pipeline_experts import exchanges_of

        return exchanges_of(self)

    def of_exchanges(self, change: Intervention) -> Intervention | None:
        """See `Subject.of_exchanges`: what loads of experts explain, or may explain, all together."""
        del change
        from tracekit.analysis.evidence.pipeline_experts import even_experts

        return even_experts(self)

    @property
    def beyond_experts(self) -> PipelineSubject:
        if self.exchanges is None:
            return self
        from tracekit.analysis.evidence.pipeline_experts import beyond_experts

        return beyond_experts(self) or self

    @property
    def beyond_one_offs(self) -> PipelineSubject:
        if not some_stand_apart(self.unchanged):
            return self
        from tracekit.analysis.evidence.one_offs import without_one_offs

        return without_one_offs(self)

    @property
    def lockstep(self) -> Lockstep | None:
        """The ranks inside workers; None if the trace lacks their waits for each other."""
        return self.computes.lockstep

    @cached_property
    def worker_ranks(self) -> dict[Worker, int]:
        """The recorded rank of each traced worker."""
        return self.trace.worker_ranks()

    @cached_property
    def host_of_rank(self) -> dict[int, str]:
        """The host of each rank, as far as the metadata gives it."""
        return self.trace.hosts

    @cached_property
    def hosts(self) -> dict[Worker, str]:
        """The host of each traced worker, as far as the metadata gives it."""
        hosts = self.host_of_rank
        return {worker: hosts[rank] for worker, rank in self.worker_ranks.items() if rank in hosts}

    def worker(self, stage: int, dp_index: int) -> Worker:
        """The worker at an index of the grids."""
        return Worker(self.dp_ranks[int(dp_index)], int(stage))

    def workers_where(self, hit: np.ndarray) -> tuple[Worker, ...]:
        """The workers where `hit` [stages, dp_ranks] is True, by DP rank, then stage."""
        return tuple(sorted(self.worker(stage, dp_index) for stage, dp_index in zip(*np.nonzero(hit), strict=True)))

    def cells_of(self, workers: Iterable[Worker]) -> np.ndarray:
        """True at the cells of these workers, [stages, dp_ranks]."""
        hit = np.zeros((self.stages, len(self.dp_ranks)), np.bool_)
        for worker in workers:
            hit[worker.pp_rank, self.dp_index[worker.dp_rank]] = True
        return hit


@evidence(PipelineSubject)
def transfers(job: PipelineSubject) -> TransferGrid:
    """The transfers between stages."""
    return transfer_grid(job.replay.graph)


def _grid(kinds: Collection[OpKind], *, most: int | None = None) -> Evidence[PipelineSubject, OpGrid]:
    """The ops of these kinds by stage; `most` as in `op_grid`."""

    def grid(job: PipelineSubject) -> OpGrid:
        return op_grid(job.replay.graph, kinds, most=most)

    return evidence(PipelineSubject)(grid)


#: The data-parallel collectives by stage.
collectives = _grid(DP_COLLECTIVES)
#: The exchange of embedding gradients on the first and the last stage.
embedding_exchanges = _grid((OpKind.EMBEDDING_GRADS_ALL_REDUCE,))
#: The optimizer of each stage.
optimizers = _grid((OpKind.OPTIMIZER,))
#: The forwards of each stage, in row order.
forwards = _grid((OpKind.FORWARD_COMPUTE,))
#: The backwards of each stage, in row order.
backwards = _grid((OpKind.BACKWARD_COMPUTE,))
#: The first forward of each stage.
first_forwards = _grid((OpKind.FORWARD_COMPUTE,), most=1)
#: The first gathering of parameters of each stage; a step with such ops begins with it.
first_gathers = _grid((OpKind.PARAMS_ALL_GATHER,), most=1)
#: The data loading of each stage, if it was recorded.
data_loads = _grid((OpKind.DATA_LOAD,))
#: Host work between other ops, if it was recorded.
host_work = _grid((OpKind.HOST_DELAY,))
#: Garbage collections between computes, if they were recorded.
collections = _grid((OpKind.GC,))
#: Checkpoints, if they were recorded.
checkpoints = _grid((OpKind.CHECKPOINT,))
#: Evaluations between training steps, if they were recorded.
evaluations = _grid((OpKind.EVALUATION,))
#: All ops of a worker.
all_ops = _grid(tuple(OpKind))
#: All communication of a worker.
communicating = _grid(COMMUNICATION)
#: Every op that is not communication; the host causes their launch delays.
computing = _grid(frozenset(OpKind) - COMMUNICATION)


def with_step_delays(replay: JobReplay, step_starts: Mapping[int, float]) -> JobReplay:
    """The job without stalls and late beginnings in its launch delays; its stalls are in `JobReplay.stalled_s`.

    `step_starts`: absolute starts of steps, seconds, if known.

    A recorded step begins when the first rank begins it, so two delays at its beginning are no op's launch delay. A
    rank that ended the previous step late begins this one late; the cause was counted there. And if all ranks are idle
    for a while, before the first one begins or between two steps, the job stalls.
    """
    graph = replay.graph
    begins, ends = _of_workers(replay)
    since = _distances(graph.steps, step_starts, begins, ends)
    if _contradict(begins, ends, since):
        since = np.full_like(since, np.nan)
    first = np.nanmin(begins, axis=(0, 2))
    last = np.r_[np.nan, np.nanmax(ends, axis=(0, 2))[:-1]]
    step_s = float(median(replay.recorded_step_times(), (0,)))
    stalls = stalls_in(first, step_s)
    late = _late(begins, ends, since)
    delays = []
    for number, block in enumerate(graph.blocks):
        template = block.template
        delay = replay.durations.launch_delay[number]
        first = block.begins()
        rows = np.flatnonzero(first.any(axis=1))
        lanes = graph.dp_index(block)
        excess = np.where(first[rows], stalls[block.step] + late[template.pp_rank[rows]][:, block.step, lanes], 0.0)
        if (excess > 0).any():
            delay = delay.copy()
            delay[rows] = np.where(delay[rows] > 0, np.maximum(delay[rows] - excess, 0.0), delay[rows])
        delays.append(delay)
    stalled = stalls + stalls_in(since - last, step_s)
    return replace(
        replay,
        durations=replace(replay.durations, launch_delay=tuple(delays)),
        stalled_s=stalled if (stalled > 0).any() else None,
    )


def _distances(steps: Int32s, step_starts: Mapping[int, float], begins: Floats, ends: Floats) -> Floats:
    """Seconds from the start of the step before, nan if that was not traced, [steps].

    If starts are relative to their step, uses the least distance that lets every worker end one step before it begins
    the next: nearly always, some worker goes on at once, and how late the others begin shows how late they ended. A
    step starts when the first worker has ended the one before, since from then on it may wait for data.
    """
    following = np.diff(steps) == 1
    starts = np.array([step_starts.get(int(step), np.nan) for step in steps])
    distance = np.diff(starts)
    if not step_starts:
        between = ends[:, :-1] - begins[:, 1:]
        distance = np.where(np.isfinite(between), between, -np.inf).max(axis=(0, 2), initial=-np.inf)
        first_done = np.where(np.isfinite(ends), ends, np.inf).min(axis=(0, 2))[:-1]
        distance = np.maximum(distance, np.where(np.isfinite(first_done), first_done, -np.inf))
    return np.asarray(np.r_[np.nan, np.where(following & np.isfinite(distance), distance, np.nan)])


def _contradict(begins: Floats, ends: Floats, since: Floats) -> bool:
    """True if a step begins, on all workers, before the previous one has ended: such starts were not measured.

    A worker runs its ops of a step before those of the next; only a single worker may still have a collective under
    way.
    """
    overlap = ends[:, :-1] - since[None, 1:, None] - begins[:, 1:]
    finite = np.isfinite(overlap)
    least = np.where(finite, overlap, np.inf).min(axis=(0, 2))
    step_s = np.nanmax(ends, axis=(0, 2))[:-1]
    return bool((np.isfinite(least) & (least > STEP_EDGES.clock_share * step_s)).any())


def with_overlap(replay: JobReplay, step_starts: Mapping[int, float], replayed_s: Floats) -> JobReplay:
    """The job with `JobReplay.overlap_s`: the excess of replayed steps, `replayed_s` [steps], over their distance.

    A worker that ends late may begin the next step late without harm, while the pipeline fills. So work that one worker
    alone does at the end of a step costs less than it lengthens the step.
    """
    since = _distances(replay.graph.steps, step_starts, *_of_workers(replay))
    distance = np.r_[since[1:], np.nan]
    stalled_s = 0.0 if replay.stalled_s is None else replay.stalled_s
    # A worker that ends so late that the next step waits for it lengthens the job: that step is longer than replayed.
    missing = np.nan_to_num(np.maximum(distance - stalled_s - replayed_s, 0.0))
    carried_s = stalls_in(missing, float(median(replayed_s, (0,))))
    overlap = np.maximum(replayed_s - distance - np.r_[carried_s[1:], 0.0], 0.0)
    if not np.isfinite(overlap).any() or np.nanmean(overlap) < STEP_EDGES.overlap_share * replayed_s.mean():
        return replay
    usual = float(median(overlap, (0,)))
    return replace(replay, overlap_s=np.where(np.isfinite(overlap), overlap, usual))


def _of_workers(replay: JobReplay) -> tuple[Floats, Floats]:
    """Begin and end of each worker's ops of a step, seconds, [stages, steps, dp_ranks] each; nan: no op."""
    graph = replay.graph
    shape = (graph.layout.pp, len(graph.steps), len(graph.dp_ranks))
    begins, ends = np.full(shape, np.nan), np.full(shape, np.nan)
    for block in graph.blocks:
        lanes = graph.dp_index(block)
        # Rows are ordered by stage.
        bounds = np.searchsorted(block.template.pp_rank, np.arange(shape[0] + 1))
        for stage, (first, last) in enumerate(pairwise(bounds)):
            if last > first:
                start = block.start[first:last]
                begins[stage, block.step, lanes] = start.min(axis=0)
                ends[stage, block.step, lanes] = (start + block.duration[first:last]).max(axis=0)
    return begins, ends


def stalls_in(idle: Floats, step_s: float) -> Floats:
    """The part of the idle seconds that is stalls; 0 elsewhere, [steps].

    `step_s`: usual length of a step.
    """
    finite = np.isfinite(idle)
    if finite.sum() < 2:
        return np.zeros(len(idle))
    ordered = np.sort(idle[finite])
    stalled = _beyond(idle, ordered, float(np.median(ordered)), step_s)
    hit = np.flatnonzero(stalled)
    if len(hit) and len(hit) <= STEP_EDGES.steps_share * len(idle):
        return stalled
    # If the job stalls in every other step, the usual step is one of the shorter half.
    shorter = ordered[: len(ordered) // 2]
    stalled = _beyond(idle, shorter, float(shorter[-1]), step_s)
    hit = np.flatnonzero(stalled)
    return stalled if len(hit) >= STEP_EDGES.fewest_turns and (np.diff(hit) == 2).all() else np.zeros(len(idle))


def _beyond(idle: Floats, among: Floats, usual: float, step_s: float) -> Floats:
    """Idle seconds beyond the usual where they exceed it by far, else 0, [steps]. `among`: what scatters around it."""
    spread = MAD_TO_SIGMA * float(np.median(np.abs(among - usual)))
    far = np.isfinite(idle) & (idle - usual > max(STEP_EDGES.stall_share * step_s, STEP_EDGES.stall_spreads * spread))
    return np.where(far, idle - usual, 0.0)


def _late(begins: Floats, ends: Floats, since: Floats) -> Floats:
    """Delay with which each worker begins because it ended the previous step late, seconds, [stages, steps, dp_ranks].

    If the previous step was not traced: the usual delay.
    """
    before = np.concatenate([np.full_like(ends[:, :1], np.nan), ends[:, :-1]], axis=1)
    overlap = before - since[None, :, None]  # seconds into this step
    late = np.clip(np.where(np.isfinite(overlap), overlap, np.nan), 0.0, np.fmax(begins, 0.0))
    usual = np.nan_to_num(median(late, (1,)))[:, None, :]
    return np.nan_to_num(np.where(np.isfinite(late), late, np.minimum(usual, np.maximum(begins, 0.0))))


#: A step begins with the first of these; each chunk gathers its parameters.
_FIRST = (OpKind.DATA_LOAD, OpKind.PARAMS_ALL_GATHER, OpKind.FORWARD_COMPUTE)


class Breaks(Struct, frozen=True, eq=False):
    """`late_s`: delay of each worker due to breaks, beyond the time in which all stand still, seconds, [stages, steps,
    dp_ranks]. `alone`: the workers that have breaks for which the others wait, [stages, dp_ranks].

    `grids`: the ops before which they are late; `remaining`: the share of their launch delays that is not due to
    breaks.
    """

    late_s: Floats
    alone: Bools
    grids: tuple[OpGrid, ...]
    remaining: tuple[Floats, ...]

    @property
    def change(self) -> Intervention:
        """The job without these delays."""
        return Together(tuple(ScaleDelays(grid, share) for grid, share in zip(self.grids, self.remaining, strict=True)))

    def without(self, delays: tuple[Floats, ...]) -> tuple[Floats, ...]:
        """Launch delays, seconds, one [rows, lanes] matrix per block, without those due to breaks."""
        for grid, share in zip(self.grids, self.remaining, strict=True):
            delays = scaled(delays, grid.parts(share))
        return delays


def find_breaks(replay: JobReplay) -> Breaks | None:
    """The breaks of a job; None if it has none.

    In a break, such as a checkpoint, all workers stand still. Or the first DP rank, or one of its workers, writes for
    all of them: it begins every n-th step late, and the others wait. Data and host code do not come late so regularly,
    except for a loader of which one process is slow; that may be on any rank.
    """
    graph = replay.graph
    first = (op_grid(graph, (kind,), most=graph.layout.vpp if kind in DP_COLLECTIVES else 1) for kind in _FIRST)
    grids = tuple(grid for grid in first if not grid.empty)
    if not grids:
        return None
    delays = [np.maximum(np.nan_to_num(grid.gather(replay.durations.launch_delay)), 0.0) for grid in grids]
    late_s = np.max([delay.max(axis=1) for delay in delays], axis=0)
    still = np.zeros(late_s.shape[1], np.bool_) if replay.stalled_s is None else replay.stalled_s > 0
    step_s = float(median(replay.recorded_step_times(), (0,)))
    others_s = np.where(still[:, None], 0.0, late_s)
    together = _together(others_s.max(axis=0), graph.steps, step_s)
    alone = np.zeros(late_s.shape, np.bool_) if together.any() else _alone(others_s, graph.steps, step_s)
    hit = (still | together)[None, :, None] | alone
    if not hit.any():
        return None
    quiet = ~hit.any(axis=(0, 2))
    usual = [median(delay[:, :, quiet], (2,))[:, :, None] for delay in delays]
    remaining = tuple(
        np.where(hit[:, None] & (delay > often), often / safe(delay), 1.0)
        for delay, often in zip(delays, usual, strict=True)
    )
    due_s = np.max([((1 - share) * delay).max(axis=1) for share, delay in zip(remaining, delays, strict=True)], axis=0)
    return Breaks(due_s, np.asarray(alone.any(axis=1)), grids, remaining)


def _together(late_s: Floats, steps: Int32s, step_s: float) -> Bools:
    """The steps before which all have a break of about the same length, [steps]. `late_s`: [steps, dp_ranks]."""
    hit = stalls_in(late_s.min(axis=1), step_s) > 0
    alike = (late_s.min(axis=1) > STEP_EDGES.of_worst * late_s.max(axis=1))[hit].all()
    return hit if alike and (hit.sum() == 1 or _regular(steps[hit], steps)) else np.zeros_like(hit)


def _alone(late_s: Floats, steps: Int32s, step_s: float) -> Bools:
    """Mask of breaks of the first DP rank's workers for which the others wait, [stages, steps, dp_ranks]."""
    mask = np.zeros(late_s.shape, np.bool_)
    hit = stalls_in(late_s[:, :, 0].max(axis=0), step_s) > 0
    if late_s.shape[2] > 1 and _regular(steps[hit], steps):
        beyond_s = late_s - median(late_s[:, ~hit], (1,))[:, None]
        least_s = STEP_EDGES.of_worst * beyond_s[:, hit, 0].max(axis=0).min()
        if beyond_s[:, :, 1:].max() < least_s:  # others are never as late
            mask[:, :, 0] = (beyond_s[:, hit, 0].mean(axis=1) > least_s)[:, None] & hit
    return mask


def _regular(hit: Int32s, steps: Int32s) -> bool:
    """True if `hit` are all those of `steps` that are a multiple of some number of steps apart."""
    if len(hit) < 2:
        return False
    interval = int(hit[1] - hit[0])
    return interval > 1 and bool(np.array_equal(steps[(steps - hit[0]) % interval == 0], hit))
