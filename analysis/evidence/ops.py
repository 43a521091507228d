"""The evidence on a job of any shape: an op trace, or a recording of GPUs.

In: an op trace, its graph and its replay. Out: `OpEvidence`, which detectors read (`Detector.in_ops`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE, Trust
from tracekit.analysis.attribution.chance import Parts, noisy_step_times_of_ops
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.graph.op_graph import Why
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.analysis.whatif.interventions import (
    CostOverlay,
    Intervention,
    LessTime,
    QueuedAhead,
    SetSomeOps,
    Together,
    step_times,
)
from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL, RECORDED
from tracekit.base.text import code_name, counted, seconds
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import OP_TRACE, RECORDING, RECORDING_OF_ONE, Fact, Lack
from tracekit.trace.gpu_activity import NOT_THE_HOST, IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.detectors.detector import Candidate, Detector
    from tracekit.analysis.evidence.host_time import HostTime
    from tracekit.analysis.evidence.unknown_loads import UnknownLoads
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.fixes.plan import Plan
    from tracekit.analysis.gpu.behind import Behind, BlamedRank
    from tracekit.analysis.gpu.gpu_times import GpuTimes
    from tracekit.analysis.gpu.pace import PaceOfPeers
    from tracekit.analysis.gpu.part import Part
    from tracekit.analysis.gpu.recorded import Kept, Recorded
    from tracekit.analysis.gpu.trust import UnexplainedTime
    from tracekit.analysis.gpu.unprofiled import StepsOfRecording, WithoutProfiler
    from tracekit.analysis.gpu.waits import Waits
    from tracekit.analysis.graph.fold import FoldedGraph
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.report.experts import CauseOfImbalance
    from tracekit.report.finding import Finding, Place
    from tracekit.trace.model import Worker
    from tracekit.trace.op import OpTrace


#: Of a recording in which launches have no GPU op.
LOST_OPS = Lack(
    Fact.COMPUTE,
    "GPU ops that were launched are not in the file",
    "record fewer steps at a time, and capture CUDA graphs before the recording begins",
)
#: So many steps of one rank say what a day costs.
FEWEST_STEPS = 3
#: Findings on a rank alone that cost a smaller share of the recording are not reported.
SMALLEST_COST_SHARE = 0.005


#: An operator that takes longer than this each time does more than dispatch, seconds.
LONGEST_DISPATCH_S = 1e-3
#: A launched op that nothing else keeps waiting begins within this time, seconds.
LATEST_ARRIVAL_S = 100e-6


class Times(Struct, frozen=True, eq=False):
    """Step times, seconds, [steps]: as recorded; replayed with launch delays, without them, and with every op at its
    ideal; and the ideal job with the noise of the run.
    """

    recorded: Floats
    with_delays: Floats
    original: Floats
    ideal: Floats
    noisy: Floats

    @classmethod
    def of(cls, graph: FoldedGraph, replay: GraphReplay) -> Times:
        """The step times of a replay."""
        with_delays, original, ideal = (replay.step_times(scenario) for scenario in (RECORDED, ORIGINAL, IDEAL))
        return cls(replay.recorded_step_times(), with_delays, original, ideal, noisy_step_times_of_ops(replay, graph))

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        ideal_s = float(self.ideal.mean())
        return float(self.original.mean()) / ideal_s if ideal_s else float("nan")


class OpEvidence(Subject, frozen=True, eq=False):
    """The evidence on one job. `recorded`: what a recording of GPUs shows beside its ops, None for other op traces.

    `expert_loads`: tokens of each expert, if the job logged them.
    """

    trace: OpTrace
    graph: FoldedGraph
    replay: GraphReplay
    times: Times
    recorded: Recorded | None = None
    expert_loads: Loads | None = None

    @property
    def gpus(self) -> int:
        return (self.kept and self.kept.world_size) or len(self.ranks)

    @cached_property
    def kept(self) -> Kept | None:
        """What is known of a recording of GPUs beside its ops, also if only its op trace is left; None for others."""
        from tracekit.analysis.gpu.recorded import Kept

        return Kept.read(self.trace.metadata) if self.recorded is None else self.recorded.summary

    @cached_property
    def host_time(self) -> HostTime:
        """What the host threads of a recording spend their time on; nothing for other op traces."""
        from tracekit.analysis.evidence.host_time import HostTime

        return HostTime.of(self.ops, self.kept) if self.kept else HostTime.nothing(self.ops.height)

    @cached_property
    def first_launches(self) -> Ints:
        """A number for the kernel that the call at the end of each op launches first, -1 for none, [ops]."""
        launched_by = self.host_time.launched_by
        found, gpu = np.full(len(launched_by), -1, np.int64), np.flatnonzero(launched_by >= 0)[::-1]
        found[launched_by[gpu]] = numbered(*(self.ops[name].gather(gpu) for name in ("rank", "name")))
        return found

    @cached_property
    def in_head(self) -> Bools:
        """Which parts of `host_time` are before the first op of the GPU of their rank, [parts]."""
        ops, part = self.graph.ops, self.host_time.op
        on_gpu = self.ops["role"].eq("gpu").to_numpy()
        first_s = np.full(int(ops.rank.max(initial=0)) + 1, np.inf)
        np.minimum.at(first_s, ops.rank[on_gpu], ops.start[on_gpu])
        return np.asarray((ops.start + ops.duration)[part] <= first_s[ops.rank[part]])

    @cached_property
    def computes_on_host(self) -> Bools:
        """Which parts of `host_time` are of operators that take long each time and launch no kernel, [parts].

        The dispatch of an operator that launches kernels is none of these, however long it takes.
        """
        work = self.host_time
        found = work.mask(IdleReason.OPERATOR, where=lambda what: not what.launches) & ~self.in_head
        return np.asarray(found & (work.steady_s >= LONGEST_DISPATCH_S * work.pieces))

    @cached_property
    def arrives_s(self) -> Floats:
        """How long after its launch each op began, seconds, [ops]; nan if it was not launched, or waited for something.

        Beyond `LATEST_ARRIVAL_S`, an op waited for something else.
        """
        ops = self.graph.ops
        since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[self.host_time.launched_by]
        return np.where(since_s <= LATEST_ARRIVAL_S, since_s, np.nan)

    @cached_property
    def launch_latency_s(self) -> Floats:
        """How much of its launch delay each op owes to a launch of its own, seconds, [ops].

        Ops of a CUDA graph have one launch for all, and follow each other as those do that were launched long before.
        """
        delay_s = np.maximum(CostOverlay.recorded(self.replay).delay_of_ops(), 0.0)
        own = np.isfinite(self.arrives_s)
        in_queue = delay_s[~own & (self.host_time.launched_by >= 0)]
        usual_s = float(np.median(in_queue)) if len(in_queue) else 0.0
        return np.where(own, np.maximum(delay_s - usual_s, 0.0), 0.0)

    @cached_property
    def marked_steps(self) -> StepsOfRecording:
        """The training steps of a recording."""
        from tracekit.analysis.gpu.unprofiled import StepsOfRecording

        label = pl.col("profiler_step") if "profiler_step" in self.ops.columns else pl.lit(None, pl.Int32)
        on_gpu = self.ops["role"].eq("gpu").to_numpy()
        return StepsOfRecording.of(
            self.ops.select(rank="rank", step=label)["step"], self.graph.ops.start, on_gpu, self.arrives_s
        )

    @cached_property
    def unprofiled(self) -> WithoutProfiler | None:
        """The job without the profiler that recorded it; None if what recording cost is not known of all ranks."""
        from tracekit.analysis.gpu.unprofiled import OpLaunches, WithoutProfiler

        costs = {} if self.kept is None else self.kept.costs
        if not {*self.ranks} <= {*costs} or "recording_s" not in self.ops.columns:
            return None
        in_launch_s = np.array([costs[rank].in_launch for rank in self.ranks])
        launches = OpLaunches(
            in_launch_s[np.searchsorted(self.ranks, self.ops["rank"].to_numpy())],
            self.arrives_s,
            self.launch_latency_s,
            self.host_time.launched_by,
            self.in_queue_s,
        )
        recording_s = self.ops["recording_s"].fill_null(0.0).to_numpy()
        stacks = all(cost.stacks for cost in costs.values())
        return WithoutProfiler.of(self.replay, self.marked_steps, recording_s, launches, stacks=stacks)

    @property
    def unprofiled_step(self) -> Estimate | None:
        return None if self.unprofiled is None else self.unprofiled.step_s

    @cached_property
    def profiled_steps_s(self) -> Floats:
        """How long the steps of a recording take, with the work that a GPU finishes after them, seconds, [steps]."""
        ops = self.graph.ops
        return self.marked_steps.lengths_s(ops.start, ops.start + ops.duration)

    @property
    def in_production_s(self) -> float:
        """How long the steps that were recorded take without the profiler; if that is not known, the recording."""
        step = self.unprofiled_step
        return self.recorded_s if step is None else step.value * self.steps_in_whole

    @property
    def profiler_s(self) -> float:
        """By how much the profiler made the recorded steps longer, seconds; 0 if that is not known."""
        if self.unprofiled is None:
            return 0.0
        return max(float(self.profiled_steps_s.sum() - self.unprofiled.steps_s[0].sum()), 0.0)

    def worth_s(self, found: Finding) -> float:
        """Return what the end of a finding saves of `in_production_s`, seconds."""
        known = self.unprofiled_step is not None and found.saves_step_s is not None
        return found.worth_s * self.steps_in_whole if known else found.saved_s

    def saves_step(
        self, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
    ) -> Estimate | None:
        return None if self.unprofiled is None else self.unprofiled.saves(changes, bound=bound, after=after)

    @property
    def in_queue_s(self) -> float:
        """How long a GPU takes between an op and the next, if that was launched long before; seconds, 0 if none was."""
        ops, launched_by = self.graph.ops, self.host_time.launched_by
        since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[launched_by]
        delay_s = np.maximum(CostOverlay.recorded(self.replay).delay_of_ops(), 0.0)
        queued = (launched_by >= 0) & np.isnan(self.arrives_s) & (2 * delay_s < since_s)
        return float(np.median(delay_s[queued])) if queued.any() else 0.0

    def without_waits(self, calls: Bools, kept_s: Floats | float = 0.0) -> Intervention:
        """Return the job in which these calls do not wait for the GPU, and take only `kept_s`, seconds, [ops]."""
        ops = self.graph.ops
        on_gpu = self.ops["role"].eq("gpu").to_numpy()
        less = LessTime(np.where(calls, np.maximum(self.pace.cost - kept_s, 0.0), 0.0))
        gone = calls[ops.after] & on_gpu[ops.before]
        ahead = QueuedAhead(self.arrives_s, self.host_time.launched_by)
        return Together((self.pace.without_edges(gone), less, ahead)) if gone.any() else less

    @property
    def stream_waits_recorded(self) -> bool:
        """Whether the profiler recorded which stream waits for which."""
        return bool((self.graph.ops.why == Why.EVENT).any())

    @cached_property
    def repeats(self) -> bool:
        """Whether most marked steps launch the same kernels in the same order; of one step, nothing else is known."""
        if "profiler_step" not in self.ops.columns:
            return True
        ops = self.ops.select("role", "profiler_step", "name")
        gpu = ops.filter(pl.col("role") == "gpu", pl.col("profiler_step").is_not_null())
        name, step = numbered(gpu["name"]), gpu["profiler_step"].to_numpy()
        order = np.argsort(step, kind="stable")
        steps = Counter(mine.tobytes() for mine in np.split(name[order], np.flatnonzero(np.diff(step[order])) + 1))
        return len(steps) < 2 or 2 * max(steps.values()) >= steps.total()

    @cached_property
    def gpu(self) -> GpuTimes | None:
        """What the GPU of a recording of one rank did; of several, of the one that is idle least; None for others."""
        return min(self.kept.gpus, key=lambda one: one.idle_s, default=None) if self.kept else None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The recorded ranks, ascending."""
        return tuple(int(rank) for rank in self.graph.ops.mesh.ranks)

    @property
    def steps(self) -> Int32s:
        return self.graph.ops.steps

    @property
    def lacks(self) -> tuple[Lack, ...]:
        if self.kept is None:
            return OP_TRACE.lacks
        lost = [LOST_OPS] if self.kept.lost else []
        return (*(RECORDING_OF_ONE if self.alone else RECORDING).lacks, *lost)

    @property
    def whole(self) -> str:
        return "step" if self.kept is None else "recording"

    @property
    def steps_in_whole(self) -> int:
        return 1 if self.kept is None else max(self.kept.steps, 1)

    @property
    def daily(self) -> bool:
        """Whether it shows enough of the job to say what a day of it costs: a few steps, not one of a single rank."""
        return not self.alone or self.steps_in_whole >= FEWEST_STEPS

    @property
    def everywhere(self) -> str:
        if not self.alone or self.gpus == 1:
            return "all ranks" if self.gpus > 1 else "its only rank"
        return f"rank {self.ranks[0]}, the only one of {self.gpus:,} that was recorded"

    @cached_property
    def ops(self) -> pl.DataFrame:
        """The ops in the order of the graph."""
        ops = self.trace.ops
        in_order = "step" not in ops.columns or ops["step"].is_sorted()
        return ops if in_order else ops.sort("step", maintain_order=True)

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        if not {"rank", "host"} <= set(self.ops.columns):
            return {}
        named = self.ops.select("rank", "host").drop_nulls().unique("rank").sort("rank")
        return dict(named.with_columns(pl.col("host").cast(pl.String)).iter_rows())

    @property
    def names(self) -> Names:
        return Names(ranks={}, hosts={}, stages=1, host_of_rank=self.hosts)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.trace.metadata

    @cached_property
    def pace(self) -> PaceOfPeers:
        """The ranks of the job, each compared with the others."""
        from tracekit.analysis.gpu.pace import PaceOfPeers

        return PaceOfPeers(self.graph, self.replay)

    @cached_property
    def experts(self) -> ExpertLoads:
        """The loads of experts. Raises FormatError if those that the job logged are of another job."""
        from tracekit.analysis.experts.balance import ExpertJob
        from tracekit.analysis.experts.exchanges import members_of
        from tracekit.analysis.experts.expert_loads import ExpertLoads

        job = ExpertJob.of_ops(self.ops, self.pace, self.steps_in_whole)
        cut = self.recorded is not None and self.recorded.recording.gpu_ops["received"].cat.ends_with("...]").any()
        found = ExpertLoads(job, self.expert_loads, cut)
        if self.expert_loads is not None:
            if "exchanges" not in self.ops.columns and members_of(self.ops).is_empty():
                raise self.expert_loads.without_experts(self.trace.name)
            _ = found.notes
        return found

    @cached_property
    def uneven_experts(self) -> CauseOfImbalance | None:
        """Why ranks have unequal loads of experts, if the ops show it and it costs something."""
        return next(iter(self.experts.causes()), None)

    @cached_property
    def even_where_known(self) -> PaceOfPeers:
        """The ranks with equal loads of the experts whose loads are known."""
        return self.pace.at(self.experts.job.balanced_cost) if self.experts.explain else self.pace

    @cached_property
    def late(self) -> BlamedRank | None:
        """The rank that the others wait for beyond what known loads of experts explain."""
        from tracekit.analysis.gpu.behind import find_culprit

        return find_culprit(self.even_where_known, self.ops, self.waits)

    @cached_property
    def unknown_loads(self) -> UnknownLoads | None:
        """The rank that the others wait for, if its experts make it late and their loads are not known."""
        from tracekit.analysis.evidence.unknown_loads import find_unknown_loads

        return find_unknown_loads(self)

    @cached_property
    def even(self) -> PaceOfPeers:
        """The ranks as they would be without what loads of experts explain, or may explain."""
        return (
            self.even_where_known if self.unknown_loads is None else self.even_where_known.at(self.unknown_loads.cost)
        )

    @cached_property
    def culprit(self) -> BlamedRank | None:
        """The rank that the others wait for, None if no rank stands out: beyond what loads of experts may explain."""
        from tracekit.analysis.gpu.behind import find_culprit

        return self.late if self.unknown_loads is None else find_culprit(self.even, self.ops, self.waits)

    @cached_property
    def waits(self) -> Waits | None:
        """Which rank of a recording waits for which; None for other op traces."""
        from tracekit.analysis.gpu.waits import waits_of_ops

        if self.recorded is not None:
            return self.recorded.waits
        return None if self.kept is None else waits_of_ops(self.ops, self.ranks)

    @cached_property
    def unexplained(self) -> UnexplainedTime:
        """What the graph leaves unexplained."""
        from tracekit.analysis.gpu.trust import unexplained

        return unexplained(self.graph, self.replay.durations)

    def behind(self, part: Part) -> Behind | None:
        """Return how far the rank that stands out is behind its peers in one part of its time, if it is."""
        found = () if self.culprit is None else self.culprit.behind
        return next((one for one in found if one.part is part), None)

    @cached_property
    def exposed_communication_s(self) -> float:
        """What a recording would save if transfers took no time once all ranks have arrived, seconds."""
        from tracekit.analysis.gpu.behind import exposed_communication_s

        return 0.0 if self.kept is None else exposed_communication_s(self.pace, self.ops)

    @property
    def recorded_s(self) -> float:
        return float(self.times.recorded.mean())

    @cached_property
    def noise(self) -> Parts:
        return Parts.of(self.times.original, self.times.ideal, self.times.noisy)

    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        return step_times(self.replay, changes)

    def lost_by_step(self, change: Intervention, without: Floats) -> tuple[Sequence[int], Floats]:
        if self.kept is None:
            return super().lost_by_step(change, without)
        return self.marked_steps.numbers, self._marked_s - self.marked_steps.replayed_s(self.replay, (change,))

    @cached_property
    def _marked_s(self) -> Floats:
        """How long each marked step takes, as replayed, seconds, [steps]."""
        return self.marked_steps.replayed_s(self.replay, ())

    def at_pace(self, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
        """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

        `freed`: without the calls in which the rank waits for its GPU and its peers do not.
        """
        from tracekit.analysis.gpu.behind import SMALLEST_SHARE

        cost = self.even.costs(rank, ops)
        edit = SetSomeOps(cost != self.even.cost, cost)
        faster = self.pace.freed((rank,), SMALLEST_SHARE * self.pace.recorded_s) if freed else None
        return edit if faster is None else Together((faster, edit))

    def begins(self, rank: int, begin_s: float) -> Intervention:
        """Return the job in which the recording of a rank begins `begin_s` seconds after that of the job."""
        cost = self.pace.with_window(rank, begin_s)
        return SetSomeOps(cost != self.pace.cost, cost)

    def candidates(self, detector: Detector) -> Iterator[Candidate]:
        return detector.in_ops(self)

    @property
    def op(self) -> str:
        """What an op is called that runs on a GPU: "kernel" in a recording."""
        return "op" if self.kept is None else "kernel"

    def window_s(self, rank: int) -> float:
        """Return how late the recording of a rank begins, seconds."""
        return float(self.ops.filter(kind="window", rank=rank)["duration"].sum())

    @property
    def named_s(self) -> float:
        """What the rank that stands out and uneven experts cost, seconds; 0 if there are none."""
        uneven, found = self.uneven_experts, (self.unknown_loads, self.culprit)
        uneven_s = 0.0 if uneven is None else uneven.saved_s * self.steps_in_whole
        return uneven_s + sum(one.saved_s for one in found if one is not None)

    @cached_property
    def parts(self) -> Parts:
        """What S consists of: the rank that stands out, noise, and the rest. A rank alone is nobody's straggler."""
        explained_s = self.named_s if len(self.ranks) > 1 or self.kept is None else self.noise.lost_s
        return structs.replace(self.noise, explained_s=explained_s)

    @cached_property
    def losses_s(self) -> Mapping[LossKind, float]:
        """What each kind of loss costs, seconds. All ranks lose what the busiest GPU is idle."""
        straggling_s = self.named_s + self.parts.unexplained_s * self.parts.headline
        if self.kept is None:  # S counts what stragglers cost; in a recording, S also counts uneven ranks
            straggling_s = max(straggling_s, self.noise.lost_s * self.straggling)
        idle_s = 0.0 if self.kept is None else self.kept.idle_s
        if self.alone and self.gpu is not None:
            return {LossKind.COMMUNICATION: max(self.exposed_communication_s, 0.0), **self._idle_by_loss(self.gpu)}
        return {
            LossKind.STRAGGLER: straggling_s,
            LossKind.HOST: idle_s,
            LossKind.COMMUNICATION: max(self.exposed_communication_s, 0.0),
        }

    def _idle_by_loss(self, gpu: GpuTimes) -> dict[LossKind, float]:
        """The time in which one GPU does nothing, before its first op too, by the kind of loss; seconds."""
        found = dict.fromkeys((LossKind.HOST, LossKind.INPUT, LossKind.IDLE), 0.0)
        by_reason = [*((idle.reason, idle.seconds) for idle in gpu.idle_by_reason), *gpu.before_first.by_reason.items()]
        for reason, spent_s in by_reason:
            unseen = LossKind.IDLE if reason in NOT_THE_HOST else LossKind.HOST
            found[LossKind.INPUT if reason == str(IdleReason.LOADER) else unseen] += spent_s
        found[LossKind.IDLE] += self.unseen_head_s
        return found

    @property
    def leading(self) -> LossKind:
        """The kind of loss that costs most: one rank, or what all ranks lose together."""
        return self._leading(self.losses_s, self.recorded_s)

    def leads(self, kind: LossKind) -> bool:
        """Return whether this kind of loss costs most, as recorded or without the profiler."""
        return kind in {self.leading, self._leading(self.lost_in_production_s, self.in_production_s)}

    def _leading(self, losses_s: Mapping[LossKind, float], whole_s: float) -> LossKind:
        kind = max(losses_s, key=lambda one: losses_s[one])
        if losses_s[kind] >= SMALLEST_HEADLINE_SHARE * (whole_s or 1.0):
            return kind
        return LossKind.BALANCED if self.culprit is None else LossKind.MINOR

    @property
    def lost_in_production_s(self) -> Mapping[LossKind, float]:
        """What each kind of loss costs of `in_production_s`, seconds: of the hosts', without what is the profiler's."""
        losses_s = dict(self.losses_s)
        return losses_s | {LossKind.HOST: max(losses_s[LossKind.HOST] - self.profiler_s, 0.0)}

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal)."""
        return self.times.slowdown

    @property
    def measured_s(self) -> float:
        return self.recorded_s

    @property
    def replay_error(self) -> float:
        return abs(float(self.times.with_delays.mean()) - self.recorded_s) / (self.recorded_s or float("nan"))

    @property
    def discrepancy(self) -> float:
        """The share of time that launch delays add, T(recorded) / T(original) - 1.

        Without time in which the GPU of a rank alone idles, and its host is not late: a finding says so.
        """
        return (self.recorded_s - self.unseen_s) / (float(self.times.original.mean()) or float("nan")) - 1

    @cached_property
    def unseen_s(self) -> float:
        """How much of the time of a rank alone goes to what the recording does not show, by a finding, seconds."""
        if self.gpu is None or not self.alone:
            return 0.0
        idle_s = sum(idle.seconds for idle in self.gpu.idle_by_reason if idle.reason in NOT_THE_HOST)
        unseen_s = max(self.unseen_head_s, self._backlog_s) + idle_s
        return max(min(unseen_s, self.recorded_s - float(self.times.original.mean())), 0.0)

    @property
    def _backlog_s(self) -> float:
        """How long streams still did what had been launched before the recording, and is not in it, seconds."""
        first = self.ops.select(pl.struct("rank", "stream").is_first_distinct() & pl.col("role").eq("gpu"))
        before = first.to_series().fill_null(value=False).to_numpy() & (self.host_time.launched_by < 0)
        return float(CostOverlay.recorded(self.replay).delay_of_ops()[before].max(initial=0.0))

    @property
    def unseen_head_s(self) -> float:
        """How long the GPU of a rank alone did something from before the recording, seconds.

        That is from when the call returned that launched its first op, or from the beginning of a recording without
        that call, to when the op began.
        """
        head = self.gpu.before_first if self.alone and self.gpu is not None else None
        if head is None or not head.seconds:
            return 0.0
        on_gpu = self.ops["role"].eq("gpu").fill_null(value=False).to_numpy()
        first = int(np.where(on_gpu, self.graph.ops.start, np.inf).argmin())
        call_s = np.append(self.host_time.called_s, 0.0)[self.host_time.launched_by[first]]
        return max(head.seconds - sum(head.by_reason.values()) - float(call_s), 0.0)

    @property
    def smallest_cost_s(self) -> float:
        """Findings that cost less are not reported, seconds; of several ranks, `behind.py` has weighed their parts."""
        return SMALLEST_COST_SHARE * self.recorded_s if self.idles else 0.0

    @property
    def alone(self) -> bool:
        """Whether it is the recording of one rank, which is compared with nobody."""
        return self.kept is not None and len(self.ranks) == 1

    @property
    def idles(self) -> bool:
        """Whether to ask what the hosts do while GPUs idle: of a rank alone, or if nothing costs several ranks more."""
        return self.alone or (self.kept is not None and self.leads(LossKind.HOST))

    def fixes(self, detector: Detector, found: Finding) -> Iterator[Plan]:
        return detector.fixes(found)

    def seen(self, found: Finding) -> str:
        """Return when a finding acts, where in the code, or how long others wait for it, as the end of its place."""
        if self.kept is None:
            return f", {found.when}"
        if found.spent is not None:
            return f", at {code_name(found.spent.where)}" if found.spent.where else ""
        return (
            f": the others wait {seconds(self.culprit.waited_s)} for it in all"
            if self.culprit and found.where.ranks
            else ""
        )

    @property
    def clamped(self) -> int:
        """The number of transfers and launch delays that lie far below zero."""
        durations = self.replay.durations
        return durations.clamped_transfers + durations.clamped_delays

    def fit(self, trust: Trust) -> str:
        if not trust.trustworthy:
            return "; ".join(trust.reasons)
        gaps = f"gaps between ops add {trust.discrepancy:z.1%}"
        if self.unseen_s >= 0.0005 * self.recorded_s:
            gaps += f" and {self.unseen_s / self.recorded_s:.1%} that the recording does not show"
        figures = [f"replay within {trust.replay_error:.1%} of the recording; {gaps}"]
        if self.kept is not None:
            odd = (
                (self.unexplained.violations, "dependency", "contradicted"),
                (self.kept.unmatched * (not self.alone), "communication kernel", "without a partner"),
                (self.kept.without_launch, "GPU op", "launched outside the recording"),
            )
            figures += [f"{counted(number, noun)} {what}" for number, noun, what in odd if number]
        return "; ".join(figures)

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        yield from ((rank, None) for rank in where.ranks)

    def has(self, where: Place) -> bool:
        of_pipelines = where.workers or where.pp_ranks or where.dp_ranks or where.links
        return not of_pipelines and {*where.ranks} <= {*self.ranks} and where.host in {None, *self.hosts.values()}
