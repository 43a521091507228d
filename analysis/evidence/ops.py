"""The evidence on a job of any shape: an op trace, or a recording of GPUs.

In: an op trace, its graph and its replay. Out: `OpEvidence`, which detectors read (`Detector.in_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE, STRAGGLING_SLOWDOWN, Trust
from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.whatif.interventions import Intervention, SetSomeOps, Together, step_times
from tracekit.base.text import seconds
from tracekit.report.verdict import LossKind

if TYPE_CHECKING:
    from tracekit.analysis.detectors.detector import Candidate, Detector
    from tracekit.analysis.fixes.plan import Plan
    from tracekit.analysis.gpu.behind import Behind, Culprit
    from tracekit.analysis.gpu.pace import PaceOfPeers
    from tracekit.analysis.gpu.part import Part
    from tracekit.analysis.gpu.recorded import Kept, Recorded
    from tracekit.analysis.gpu.trust import Unexplained
    from tracekit.analysis.gpu.waits import Waits
    from tracekit.analysis.graph.fold import FoldedGraph
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.report.finding import Finding, Place
    from tracekit.trace.model import Worker
    from tracekit.trace.op import OpTrace


class Times(Struct, frozen=True, eq=False):
    """Step times, seconds, [steps]: as recorded; replayed with launch delays, without them, and with every op at its
    ideal; and the ideal job with the noise of the run.
    """

    recorded: Floats
    with_delays: Floats
    original: Floats
    ideal: Floats
    noisy: Floats

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        ideal_s = float(self.ideal.mean())
        return float(self.original.mean()) / ideal_s if ideal_s else float("nan")


class OpEvidence(Struct, frozen=True, eq=False, dict=True):
    """The evidence on one job. `recorded`: what a recording of GPUs shows beside its ops, None for other op traces."""

    trace: OpTrace
    graph: FoldedGraph
    replay: GraphReplay
    times: Times
    recorded: Recorded | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs of the job."""
        return (self.kept and self.kept.world_size) or len(self.ranks)

    @cached_property
    def kept(self) -> Kept | None:
        """What is known of a recording of GPUs beside its ops, also if only its op trace is left; None for others."""
        from tracekit.analysis.gpu.recorded import Kept

        return Kept.read(self.trace.metadata) if self.recorded is None else self.recorded.kept

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The recorded ranks, ascending."""
        return tuple(int(rank) for rank in self.graph.ops.mesh.ranks)

    @property
    def steps(self) -> Int32s:
        """The step numbers; a recording of GPUs is one step."""
        return self.graph.ops.steps

    @property
    def whole(self) -> str:
        """What the times are of: "step" or "recording"."""
        return "step" if self.kept is None else "recording"

    @property
    def steps_in_whole(self) -> int:
        """The number of training steps in one of those."""
        return 1 if self.kept is None else max(self.kept.steps, 1)

    @cached_property
    def ops(self) -> pl.DataFrame:
        """The ops in the order of the graph."""
        ops = self.trace.ops
        return ops.sort("step", maintain_order=True) if "step" in ops.columns else ops

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        if not {"rank", "host"} <= set(self.ops.columns):
            return {}
        named = self.ops.select("rank", pl.col("host").cast(pl.String)).drop_nulls().unique("rank")
        return dict(named.sort("rank").iter_rows())

    @property
    def names(self) -> Names:
        """The names of places in the job."""
        return Names(ranks={}, hosts={}, stages=1, host_of_rank=self.hosts)

    @property
    def on_cpus(self) -> bool:
        """Whether no GPU takes part in the job; nobody knows that of an op trace."""
        return False

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free metadata of the trace."""
        return self.trace.metadata

    @cached_property
    def pace(self) -> PaceOfPeers:
        """The ranks of the job, each compared with the others."""
        from tracekit.analysis.gpu.pace import PaceOfPeers

        return PaceOfPeers(self.graph, self.replay)

    @cached_property
    def culprit(self) -> Culprit | None:
        """The rank that the others wait for, None if no rank stands out."""
        from tracekit.analysis.gpu.behind import find_culprit

        return find_culprit(self.pace, self.ops, self.waits)

    @cached_property
    def waits(self) -> Waits | None:
        """Which rank of a recording waits for which; None for other op traces."""
        from tracekit.analysis.gpu.waits import waits_of_ops

        if self.recorded is not None:
            return self.recorded.waits
        return None if self.kept is None else waits_of_ops(self.ops, self.ranks)

    @cached_property
    def unexplained(self) -> Unexplained:
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

    @cached_property
    def unchanged(self) -> Floats:
        """Step times with launch delays, seconds, [steps]."""
        return self.step_times(())

    @property
    def unchanged_s(self) -> float:
        """Mean step with launch delays, seconds."""
        return float(self.unchanged.mean())

    @property
    def recorded_s(self) -> float:
        """Mean recorded step; of a recording, from its first event to its last; seconds."""
        return float(self.times.recorded.mean())

    @property
    def straggling(self) -> bool:
        """Whether S >= 1.1."""
        return self.times.slowdown >= STRAGGLING_SLOWDOWN

    @cached_property
    def noise(self) -> Parts:
        """What the noise of the run makes of S."""
        return Parts.of(self.times.original, self.times.ideal, self.times.noisy)

    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        """Return the duration of each step after these changes, seconds, [steps]."""
        return step_times(self.replay, changes)

    def at_pace(self, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
        """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

        `freed`: without the calls in which the rank waits for its GPU and its peers do not.
        """
        from tracekit.analysis.gpu.behind import SMALLEST_SHARE

        cost = self.pace.costs(rank, ops)
        edit = SetSomeOps(cost != self.pace.cost, cost)
        faster = self.pace.freed((rank,), SMALLEST_SHARE * self.pace.recorded_s) if freed else None
        return edit if faster is None else Together((faster, edit))

    def begins(self, rank: int, begin_s: float) -> Intervention:
        """Return the job in which the recording of a rank begins `begin_s` seconds after that of the job."""
        cost = self.pace.with_window(rank, begin_s)
        return SetSomeOps(cost != self.pace.cost, cost)

    def candidates(self, detector: Detector) -> Iterator[Candidate]:
        """Yield what a detector finds in the job."""
        return detector.in_ops(self)

    def reviewed(self, detector: Detector, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates of all detectors; none reviews those of others in ops."""
        del detector
        return candidates

    @property
    def op(self) -> str:
        """What an op is called that runs on a GPU: "kernel" in a recording."""
        return "op" if self.kept is None else "kernel"

    def window_s(self, rank: int) -> float:
        """Return how late the recording of a rank begins, seconds."""
        return float(self.ops.filter(kind="window", rank=rank)["duration"].sum())

    @property
    def named_s(self) -> float:
        """What the rank that stands out costs, seconds; 0 if there is none."""
        return 0.0 if self.culprit is None else self.culprit.saved_s

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
        return {
            LossKind.STRAGGLER: straggling_s,
            LossKind.HOST: idle_s,
            LossKind.COMMUNICATION: max(self.exposed_communication_s, 0.0),
        }

    @property
    def leading(self) -> LossKind:
        """The kind of loss that costs most: one rank, or what all ranks lose together."""
        kind = max(self.losses_s, key=lambda one: self.losses_s[one])
        if self.losses_s[kind] >= SMALLEST_HEADLINE_SHARE * (self.recorded_s or 1.0):
            return kind
        return LossKind.BALANCED if self.culprit is None else LossKind.MINOR

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal)."""
        return self.times.slowdown

    @property
    def measured_s(self) -> float:
        """The mean step as measured, seconds."""
        return self.recorded_s

    @property
    def replay_error(self) -> float:
        """How far the replay with launch delays misses the recording, as a share of it."""
        return abs(float(self.times.with_delays.mean()) - self.recorded_s) / (self.recorded_s or float("nan"))

    @property
    def discrepancy(self) -> float:
        """The share of time that launch delays add, T(recorded) / T(original) - 1."""
        return self.recorded_s / (float(self.times.original.mean()) or float("nan")) - 1

    @property
    def smallest_cost_s(self) -> float:
        """Findings that cost less are not reported, seconds; `behind.py` has weighed their parts already."""
        return 0.0

    def fixes(self, detector: Detector, found: Finding) -> Iterator[Plan]:
        """Yield a detector's fixes of one of its findings."""
        return detector.fixes(found)

    def seen(self, found: Finding) -> str:
        """Return when a finding acts, or how long the others wait for it, in words that follow its place."""
        if self.kept is None:
            return f", {found.when}"
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
        """Return how much of the job the graph explains, or why it is not trusted, in words."""
        if not trust.trustworthy:
            return "; ".join(trust.reasons)
        if self.kept is None:
            return f"replay error {trust.replay_error:.2%}, launch delays add {trust.discrepancy:.1%}"
        left = self.unexplained
        longest = seconds(max(left.communication_gap_s, left.compute_gap_s))
        figures = [
            f"replay error {trust.replay_error:.2%}",
            f"unexplained gaps {trust.discrepancy:.1%}, 99 % of them below {longest}",
            f"{left.inferred:,} of {left.edges:,} dependencies inferred, {left.violations:,} contradicted",
        ]
        if len(self.ranks) > 1:
            figures.append(f"{self.kept.matched:,} collectives matched, {self.kept.unmatched:,} kernels not")
        if without := self.kept.without_launch:
            figures.append(f"{without:,} GPU ops launched outside the recording")
        return "; ".join(figures)

    def undecided(self) -> str:
        """Return who looks slow, but no more so than chance explains; empty, because that is not looked for."""
        return ""

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        """Yield the ranks of a place; none for the whole job."""
        yield from ((rank, None) for rank in where.ranks)

    def has(self, where: Place) -> bool:
        """Return whether the job has a place."""
        of_pipelines = where.workers or where.pp_ranks or where.dp_ranks or where.links
        return not of_pipelines and {*where.ranks} <= {*self.ranks} and where.host in {None, *self.hosts.values()}

    def machines_at_fault(self, where: Place) -> bool:
        """Return whether the recording shows that a machine is at fault; recordings have no clocks of GPUs."""
        del where
        return False
