"""The evidence on a job of any shape: an op trace, or a recording of GPUs.

In: an op trace, its graph and its replay. Out: `GraphSubject`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.chance import Parts, noisy_step_times_of_ops
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.evidence.subject import JobKind, Subject
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.whatif.interventions import (
    Intervention,
    step_times,
)
from tracekit.analysis.whatif.paper import IDEAL, ORIGINAL
from tracekit.trace.facts import OP_TRACE, RECORDING, RECORDING_OF_ONE, Fact, Lack

if TYPE_CHECKING:
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.gpu.gpu_times import GpuTimes
    from tracekit.analysis.gpu.pace import PaceOfPeers
    from tracekit.analysis.gpu.recorded import Kept, Recorded
    from tracekit.analysis.gpu.trust import UnexplainedTime
    from tracekit.analysis.gpu.waits import Waits
    from tracekit.analysis.graph.fold import FoldedGraph
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.report.finding import Place
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
        original, ideal = (step_times(replay, question) for question in (ORIGINAL, IDEAL))
        return cls(replay.fit.recorded, replay.fit.with_delays, original, ideal, noisy_step_times_of_ops(replay, graph))

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        ideal_s = float(self.ideal.mean())
        return float(self.original.mean()) / ideal_s if ideal_s else float("nan")


class GraphSubject(Subject, frozen=True, eq=False):
    """A job of any graph. `recorded`: what a recording of GPUs shows beside its ops, None for other op traces.

    `expert_loads`: tokens of each expert, if the job logged them.
    """

    trace: OpTrace
    graph: FoldedGraph
    replay: GraphReplay
    times: Times
    recorded: Recorded | None = None
    expert_loads: Loads | None = None

    @property
    def kind(self) -> JobKind:
        return JobKind.GRAPH if self.kept is None else JobKind.GRAPH | JobKind.RECORDING

    @property
    def gpus(self) -> int:
        return (self.kept and self.kept.world_size) or len(self.ranks)

    @cached_property
    def kept(self) -> Kept | None:
        """What is known of a recording of GPUs beside its ops, also if only its op trace is left; None for others."""
        from tracekit.analysis.gpu.recorded import Kept

        return Kept.read(self.trace.metadata) if self.recorded is None else self.recorded.summary

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

    @property
    def alone(self) -> bool:
        """Whether it is the recording of one rank, which is compared with nobody."""
        return self.kept is not None and len(self.ranks) == 1

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        yield from ((rank, None) for rank in where.ranks)

    def has(self, where: Place) -> bool:
        of_pipelines = where.workers or where.pp_ranks or where.dp_ranks or where.links
        return not of_pipelines and {*where.ranks} <= {*self.ranks} and where.host in {None, *self.hosts.values()}
