"""A job of any shape under diagnosis, an op trace or a recording of GPUs: the rank that stands out, what its experts
explain, and its step without the profiler.

In: an op trace, its graph and its replay. Out: `GraphSubject`, or a `RecordingSubject` if the trace was a recording; a
`BlamedRank`, uneven experts, the job without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.attribution import VERDICT, Parts, noisy_step_times_of_ops
from tracekit.analysis.attribution.patterns import StepTimes
from tracekit.analysis.evidence.subject import Cause, JobKind, Names, Subject, evidence
from tracekit.analysis.gpu.pace import BlamedRank, PaceOfPeers, Part, find_culprit
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, Intervention, SetOps, Together, step_times
from tracekit.base.text import seconds
from tracekit.trace.facts import OP_TRACE, RECORDING, RECORDING_OF_ONE, Fact, Lack
from tracekit.trace.model import OpKind

if TYPE_CHECKING:
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.gpu.comparable import UnexplainedTime
    from tracekit.analysis.gpu.measured_steps import MeasuredSteps, StepsOfRecording, WithoutProfiler
    from tracekit.analysis.gpu.recorded import Kept, Recorded, Waits
    from tracekit.analysis.graph.op_graph import FoldedGraph
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.report.finding import Place
    from tracekit.report.hardware import GpuTimes
    from tracekit.report.questions import CauseOfImbalance
    from tracekit.trace.op import OpTrace

#: Of a recording in which launches have no GPU op.
LOST_OPS = Lack(
    Fact.COMPUTE,
    "GPU ops that were launched are not in the file",
    "record fewer steps at a time, and capture CUDA graphs before the recording begins",
)


class GraphTimes(StepTimes, frozen=True, eq=False):
    """Step times, seconds, [steps], also with launch delays, and of the ideal job with the noise of the run."""

    with_delays: Floats
    noisy: Floats

    @classmethod
    def of(cls, graph: FoldedGraph, replay: GraphReplay) -> GraphTimes:
        """The step times of a replay."""
        original, ideal = (step_times(replay, question) for question in (ORIGINAL, IDEAL))
        fit, noisy = replay.fit, noisy_step_times_of_ops(replay, graph)
        return cls(graph.ops.steps, fit.recorded, original, ideal, fit.with_delays, noisy)

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        ideal_s = float(self.ideal.mean())
        return float(self.original.mean()) / ideal_s if ideal_s else float("nan")


class GraphSubject(Subject, frozen=True, eq=False):
    """A job of any graph. `expert_loads`: tokens of each expert, if the job logged them.

    `summary`, `recorded`, `gpu`, `waits`: None but for a recording (`RecordingSubject`).
    """

    kind: ClassVar[JobKind] = JobKind.GRAPH
    #: What its ops are called.
    op_noun: ClassVar[str] = "op"
    trace: OpTrace
    graph: FoldedGraph
    replay: GraphReplay
    times: GraphTimes
    expert_loads: Loads | None = None

    @staticmethod
    def of(
        trace: OpTrace, graph: FoldedGraph, replay: GraphReplay, times: GraphTimes, recorded: Recorded | None = None
    ) -> GraphSubject:
        """The job of an op trace. `recorded`: the recording that it was made from, if that is at hand."""
        from tracekit.analysis.gpu.recorded import Kept

        summary = Kept.read(trace.metadata) if recorded is None else recorded.summary
        if summary is None:
            return GraphSubject(trace, graph, replay, times)
        return RecordingSubject(trace, graph, replay, times, summary=summary, recorded=recorded)

    @property
    def summary(self) -> Kept | None:
        return None

    @property
    def recorded(self) -> Recorded | None:
        return None

    @property
    def gpu(self) -> GpuTimes | None:
        return None

    @property
    def waits(self) -> Waits | None:
        return None

    @property
    def idle_s(self) -> float:
        """How long all GPUs idle at least, as far as known, seconds."""
        return 0.0

    @property
    def exchanges(self) -> GraphSubject | None:
        """See `Subject.exchanges`."""
        return self if self.expert_loads is not None or self._has_exchanges else None

    @cached_property
    def _has_exchanges(self) -> bool:
        """Whether ops are all-to-alls, as `experts.balance.members_of` tells them."""
        moved = pl.col("rows_received", "exchanges").is_not_null()
        met = pl.any_horizontal(moved, pl.col("kind").cast(pl.String) == OpKind.ALL_TO_ALL).any()
        return bool(self.columns("rows_received", "exchanges", "kind").select(met).item())

    @property
    def straggling_s(self) -> float:
        """What stragglers cost at least, by S, seconds."""
        return self.noise.lost_s * self.straggling

    @property
    def gpus(self) -> int:
        return len(self.ranks)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The recorded ranks, ascending."""
        return tuple(int(rank) for rank in self.graph.ops.mesh.ranks)

    @property
    def steps(self) -> Int32s:
        return self.graph.ops.steps

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return OP_TRACE.lacks

    @cached_property
    def ops(self) -> pl.DataFrame:
        """The ops in the order of the graph."""
        ops = self.trace.ops
        in_order = "step" not in ops.columns or ops["step"].is_sorted()
        return ops if in_order else ops.sort("step", maintain_order=True)

    def columns(self, *names: str) -> pl.DataFrame:
        """These columns of the ops, null in a trace that lacks one."""
        missing = [pl.lit(None, pl.String).alias(name) for name in names if name not in self.ops.columns]
        return self.ops.with_columns(missing).select(names)

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        if not {"rank", "host"} <= set(self.ops.columns):
            return {}
        named = self.ops.select("rank", "host").drop_nulls().unique("rank").sort("rank")
        return dict(named.with_columns(pl.col("host").cast(pl.String)).iter_rows())

    @property
    def names(self) -> Names:
        return Names(host_of_rank=self.hosts)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.trace.metadata

    @cached_property
    def pace(self) -> PaceOfPeers:
        """The ranks of the job, each compared with the others."""
        return PaceOfPeers(self.graph, self.replay)

    @cached_property
    def unexplained(self) -> UnexplainedTime:
        """What the graph leaves unexplained."""
        from tracekit.analysis.gpu.comparable import unexplained

        return unexplained(self.graph, self.replay.durations)

    @property
    def recorded_s(self) -> float:
        return float(self.times.recorded.mean())

    @cached_property
    def noise(self) -> Parts:
        return Parts.of(self.times.original, self.times.ideal, self.times.noisy)

    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        return step_times(self.replay, changes)

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal)."""
        return self.times.slowdown

    @property
    def replay_error(self) -> float:
        return abs(float(self.times.with_delays.mean()) - self.recorded_s) / (self.recorded_s or float("nan"))

    def has(self, where: Place) -> bool:
        of_pipelines = where.workers or where.pp_ranks or where.dp_ranks or where.links
        return not of_pipelines and {*where.ranks} <= {*self.ranks} and where.host in {None, *self.hosts.values()}


class RecordingSubject(GraphSubject, frozen=True, eq=False, kw_only=True):
    """A recording of GPUs. `summary`: what is known of it besides its ops; `recorded`: the recording itself, None if
    only its op trace is left; `measured`: steps of the same job without a profiler, None if it has not been timed.
    """

    kind: ClassVar[JobKind] = JobKind.GRAPH | JobKind.RECORDING
    op_noun: ClassVar[str] = "kernel"
    whole: ClassVar[str] = "recording"
    summary: Kept
    recorded: Recorded | None
    measured: MeasuredSteps | None = None

    @cached_property
    def gpu(self) -> GpuTimes | None:
        """What its GPU did; of several ranks, the one that is idle least."""
        return min(self.summary.gpus, key=lambda times: times.idle_s, default=None)

    @cached_property
    def waits(self) -> Waits:
        """Which rank waits for which."""
        from tracekit.analysis.gpu.recorded import waits_of_ops

        return waits_of_ops(self.ops, self.ranks) if self.recorded is None else self.recorded.waits

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    @property
    def idle_s(self) -> float:
        return self.summary.idle_s

    @property
    def straggling_s(self) -> float:
        """Nothing: S counts ranks with other work, too."""
        return 0.0

    @property
    def gpus(self) -> int:
        return self.summary.world_size or len(self.ranks)

    @property
    def gpu_model(self) -> str | None:
        return self.summary.gpu or None

    @property
    def ranks_of_job(self) -> int | None:
        """How many ranks the job has; None if its files do not tell, and one alone was recorded that has peers."""
        peers = self.alone and self.summary.matched + self.summary.unmatched > 0
        return None if peers and self.summary.world_size is None else self.gpus

    @property
    def unprofiled_step_words(self) -> str:
        step = self.unprofiled_step
        return super().unprofiled_step_words if step is None or self.measured is None else seconds(step.value)

    @property
    def all_workers_traced(self) -> bool:
        return self.ranks_of_job == len(self.ranks)

    @property
    def lacks(self) -> tuple[Lack, ...]:
        source = RECORDING_OF_ONE if self.alone else RECORDING
        return (*source.lacks, LOST_OPS) if self.summary.lost else source.lacks

    @property
    def steps_in_whole(self) -> int:
        return max(self.summary.steps, 1)

    @property
    def daily(self) -> bool:
        """Whether it shows enough of the job to say what a day of it costs: a few steps, not one of a single rank."""
        return not self.alone or self.steps_in_whole >= VERDICT.fewest_steps

    @property
    def everywhere(self) -> str:
        if self.alone and self.gpus > 1:
            return f"rank {self.ranks[0]}, the only one of {self.gpus:,} that was recorded"
        return super().everywhere

    @property
    def unprofiled_step(self) -> Estimate | None:
        """See `Subject.unprofiled_step`: as measured or else replayed."""
        without = unprofiled(self)
        if without is None or self.measured is None:
            return None if without is None else without.step_s
        return self.measured.step_s

    def saves_step(
        self, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
    ) -> Estimate | None:
        without = unprofiled(self)
        return None if without is None else without.saves(changes, bound=bound, after=after)

    def lost_by_step(self, change: Intervention, without: Floats) -> tuple[Sequence[int], Floats]:
        """See `Subject.lost_by_step`: of the steps that the profiler marked."""
        del without
        return marked_steps(self).numbers, self._replayed_s(()) - self._replayed_s((change,))

    @cached_property
    def _replayed_s(self) -> Callable[[tuple[Intervention, ...]], Floats]:
        """How long each marked step takes after changes, seconds, [steps]."""
        return cache(partial(marked_steps(self).replayed_s, self.replay))


@evidence(RecordingSubject)
def marked_steps(job: RecordingSubject) -> StepsOfRecording:
    """The training steps of a recording."""
    from tracekit.analysis.evidence.gpu_losses import arrives_s
    from tracekit.analysis.gpu.measured_steps import StepsOfRecording

    label = pl.col("profiler_step") if "profiler_step" in job.ops.columns else pl.lit(None, pl.Int32)
    on_gpu = job.ops["role"].eq("gpu").to_numpy()
    return StepsOfRecording.of(
        job.ops.select(rank="rank", step=label)["step"], job.graph.ops.start, on_gpu, arrives_s(job)
    )


@evidence(RecordingSubject)
def unprofiled(job: RecordingSubject) -> WithoutProfiler | None:
    """The job without the profiler that recorded it; None if what recording cost is not known of all ranks."""
    return unprofiled_after(job, ())


@evidence(RecordingSubject)
def recording_factors(job: RecordingSubject) -> tuple[float, ...]:
    """How many times recording costs what the recording shows of it: likely, at most, at least; or, if steps were
    measured without a profiler, the one factor with which the replay takes as long.

    Raises SelectionError if none does, as those steps are of another job.
    """
    from tracekit.analysis.gpu.measured_steps import WITH_STACKS, WITHOUT_STACKS

    if job.measured is None:
        return WITH_STACKS if all(cost.stacks for cost in job.summary.costs.values()) else WITHOUT_STACKS

    def step_s(factor: float) -> float:
        without = _at_factors(job, (factor,), ())
        return float("nan") if without is None else without.step_s.value

    return (job.measured.factor(job.trace.name, step_s),)


def unprofiled_after(
    job: RecordingSubject, after: Sequence[Intervention], *, bounds: bool = True
) -> WithoutProfiler | None:
    """Return the same after some changes. `bounds`: with the highest and lowest cost of recording, too."""
    factors = recording_factors(job)
    return _at_factors(job, factors if bounds else factors[:1], after)


def _at_factors(
    job: RecordingSubject, factors: Sequence[float], after: Sequence[Intervention]
) -> WithoutProfiler | None:
    """The job without the profiler after some changes, `factors`: as of `recording_factors`."""
    from tracekit.analysis.evidence.gpu_losses import arrives_s, host_time, in_queue_s, launch_latency_s
    from tracekit.analysis.gpu.measured_steps import OpLaunches, WithoutProfiler

    costs = job.summary.costs
    if not {*job.ranks} <= {*costs} or "recording_s" not in job.ops.columns:
        return None
    in_launch_s = np.array([costs[rank].in_launch for rank in job.ranks])
    launches = OpLaunches(
        in_launch_s[np.searchsorted(job.ranks, job.ops["rank"].to_numpy())],
        arrives_s(job),
        launch_latency_s(job),
        host_time(job).launched_by,
        in_queue_s(job),
    )
    recording_s = job.ops["recording_s"].fill_null(0.0).to_numpy()
    return WithoutProfiler.of(job.replay, marked_steps(job), recording_s, launches, factors, after)


@evidence(GraphSubject)
def profiled_steps_s(job: GraphSubject) -> Floats:
    """How long steps take as recorded, with the work that a GPU finishes after them, seconds, [steps]."""
    marked, ops = marked_steps(job), job.graph.ops
    return job.times.recorded if marked is None else marked.lengths_s(ops.start, ops.start + ops.duration)


def in_production_s(job: GraphSubject) -> float:
    """How long the steps that were recorded take without the profiler; if that is not known, the recording."""
    step = job.unprofiled_step
    return job.recorded_s if step is None else step.value * job.steps_in_whole


@evidence(RecordingSubject, otherwise=0.0)
def profiler_s(job: RecordingSubject) -> float:
    """By how much the profiler made the recorded steps longer, seconds; 0 if that is not known."""
    without = unprofiled(job)
    return 0.0 if without is None else max(float(profiled_steps_s(job).sum() - without.steps_s[0].sum()), 0.0)


def worth_s(job: Subject, finding: Cause) -> float:
    """Return what the end of a finding saves of the steps without the profiler, or of the recording, seconds."""
    in_production = job.unprofiled_step is not None and finding.saves_step_s is not None
    return finding.worth_s * job.steps_in_whole if in_production else finding.saved_s


@evidence(GraphSubject)
def experts_of(job: GraphSubject) -> ExpertLoads:
    """The loads of experts. Raises FormatError if those that the job logged are of another job."""
    from tracekit.analysis.experts.balance import ExpertJob, members_of
    from tracekit.analysis.experts.expert_loads import ExpertLoads

    experts = ExpertJob.of_ops(job.ops, job.pace, job.steps_in_whole)
    loads = ExpertLoads(experts, job.expert_loads, bool(_lists_cut(job)))
    if job.expert_loads is not None:
        if "exchanges" not in job.ops.columns and members_of(job.ops).is_empty():
            raise job.expert_loads.without_experts(job.trace.name)
        _ = loads.notes
    return loads


@evidence(RecordingSubject)
def _lists_cut(job: RecordingSubject) -> bool:
    """Whether the profiler cut lists of loads."""
    return job.recorded is not None and bool(job.recorded.recording.gpu_ops["received"].cat.ends_with("...]").any())


@evidence(GraphSubject)
def uneven_experts(job: GraphSubject) -> CauseOfImbalance | None:
    """Why ranks have unequal loads of experts, if the ops show it and it costs something."""
    return None if job.exchanges is None else next(iter(experts_of(job).causes()), None)


@evidence(GraphSubject)
def even_where_known(job: GraphSubject) -> PaceOfPeers:
    """The ranks with equal loads of the experts whose loads are known."""
    if job.exchanges is None:  # as of most jobs: they need no module of experts
        return job.pace
    return job.pace.with_cost(experts_of(job).job.balanced_cost) if experts_of(job).explain else job.pace


class UnknownLoads(Struct, frozen=True, eq=False):
    """`rank`: whose experts take `factor` times as long as those of its peers. `why`: its loads are not known.

    `cost`: of each op if no rank took longer for such experts than its peers, seconds, [ops]; `saved_s`: what that
    saves.
    """

    rank: int
    factor: float
    why: str
    cost: Floats
    saved_s: float


@evidence(GraphSubject)
def late_rank(job: GraphSubject) -> BlamedRank | None:
    """The rank that the others wait for beyond what known loads of experts explain."""
    return find_culprit(even_where_known(job), job.ops, job.waits)


@evidence(GraphSubject)
def unknown_loads(job: GraphSubject) -> UnknownLoads | None:
    """The rank that the others wait for, if most of what makes it late is experts whose loads are not known.

    A slow GPU takes longer for other kernels than those of experts, too. Experts that take longer by more than that
    have more tokens, or are slow for a reason of their own: only their loads would tell which.
    """
    if job.exchanges is None:
        return None
    from tracekit.analysis.experts.balance import between, find_exchanges, members_of

    loads, graph = experts_of(job), job.graph.ops
    whole = loads.job.members["group"].unique()
    members = members_of(job.ops, of_whole_groups=False).with_columns(whole=pl.col("group").is_in(whole.implode()))
    unknown = find_exchanges(members.filter(~pl.col("whole") | (not loads.tokens_known)), loads.job.layers)
    late = late_rank(job) if len(unknown.step) else None
    if late is None:
        return None
    computes = next((part.ops for part in late.behind if part.part is Part.COMPUTE), None)
    if computes is None:
        return None
    experts = computes & (between(graph, computes, unknown) >= 0)
    pace, index = even_where_known(job), job.ranks.index(late.rank)

    def taken_s(ops: Bools) -> tuple[float, float]:
        """How long these ops take on the rank, and usually on its peers."""
        by_rank = np.bincount(graph.rank[ops], pace.cost[ops], max(job.ranks) + 1)[list(job.ranks)]
        return float(by_rank[index]), float(np.median(np.delete(by_rank, index)))

    (mine_s, usual_s), (rest_s, usual_rest_s) = taken_s(experts), taken_s(computes & ~experts)
    slower = max(rest_s / usual_rest_s, 1.0) if usual_rest_s else 1.0
    if not usual_s or mine_s - slower * usual_s <= rest_s - usual_rest_s + (slower - 1) * usual_s:
        return None
    why = "the profiler cut the lists of its loads" if loads.cut else "its loads were not recorded"
    if members.filter("whole", rank=late.rank).is_empty():
        why = "not all ranks of its group were recorded"
    cost = np.minimum.reduce([pace.cost, *(pace.costs(rank, experts) for rank in job.ranks)])
    return UnknownLoads(late.rank, mine_s / usual_s, why, cost, pace.recorded_s - float(pace.times([cost])[0]))


@evidence(GraphSubject)
def even_pace(job: GraphSubject) -> PaceOfPeers:
    """The ranks as they would be without what loads of experts explain, or may explain."""
    pace, unknown = even_where_known(job), unknown_loads(job)
    return pace if unknown is None else pace.with_cost(unknown.cost)


@evidence(GraphSubject)
def culprit_of(job: GraphSubject) -> BlamedRank | None:
    """The `rank` that the others wait for, beyond what loads of experts may explain; None if no rank stands out."""
    return late_rank(job) if unknown_loads(job) is None else find_culprit(even_pace(job), job.ops, job.waits)


def at_pace(job: GraphSubject, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
    """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

    `freed`: without the calls in which the rank waits for its GPU and its peers do not.
    """
    cost = even_pace(job).costs(rank, ops)
    edit = SetOps(cost, cost != even_pace(job).cost)
    faster = job.pace.freed((rank,)) if freed else None
    return edit if faster is None else Together((faster, edit))
