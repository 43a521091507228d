"""A pipeline job ready to be replayed with any costs.

In: a `Trace`. Out: a `JobReplay`, of a graph with corrected clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.lanes import Lanes
from tracekit.analysis.graph.lanes_of_job import JobLanes, StructureKey
from tracekit.analysis.graph.rules.posting import PUBLISHED
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole
from tracekit.analysis.replay.clocks import Clocks, measure_clocks, with_clocks_set
from tracekit.analysis.replay.costs import keeps_delay, measure_durations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.ideal import ideal_rows
from tracekit.analysis.replay.kernel import Costs, LanesToReplay
from tracekit.analysis.replay.method import Method
from tracekit.analysis.replay.step_overlap import (
    EarlyBeginnings,
    sampled_steps,
    with_beginnings,
    with_early_beginnings,
)
from tracekit.base.errors import GraphError, SelectionError
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind

#: If this many steps have all DP ranks, or half of the steps of a short trace, other steps are left out.
ENOUGH_STEPS = 3


class JobReplay(GraphReplay, frozen=True, eq=False, dict=True):
    """The graph of a pipeline job and the cost of each op.

    `clocks`: the offsets that were subtracted from the recorded starts. `as_recorded`: the same job without
    reconstructed members of collectives, None if nothing was reconstructed. `left_out_steps`: steps with missing DP
    ranks, or cut. `stalled_s`: seconds of each step in which no rank does anything and which the graph leaves out,
    [steps], None if it leaves nothing out; `overlap_s`: seconds of each step in which the next step has begun, [steps].
    `kept_delay`: the launch delays that a repaired job keeps, one [rows, lanes] matrix per block; None: those of
    compute ops. `sampled`: the steps that tell when stages begin in a scenario, None: some of its own.
    """

    graph: DependencyGraph
    clocks: Clocks
    as_recorded: JobReplay | None = None
    left_out_steps: tuple[int, ...] = ()
    stalled_s: Floats | None = None
    overlap_s: Floats | None = None
    kept_delay: tuple[Floats, ...] | None = None
    sampled: JobReplay | None = None

    @classmethod
    def from_trace(cls, trace: Trace, method: Method = Method.TRACEKIT) -> JobReplay:
        """The replay of a trace, see `JobGraph.from_trace`."""
        return JobGraph.from_trace(trace, method).replay

    @property
    def has_few_lanes(self) -> bool:
        """See `GraphReplay.has_few_lanes`; when stages begin depends on the costs."""
        return self._early_beginnings is None and super().has_few_lanes

    @cached_property
    def kept_delays(self) -> list[tuple[Floats, Bools]]:
        """See `GraphReplay.kept_delays`."""
        if self.kept_delay is not None:
            return [(delay, np.asarray(delay.any(axis=1))) for delay in self.kept_delay]
        blocks = zip(self.durations.launch_delay, self.graph.blocks, strict=True)
        return [(delay, keeps_delay(block.template)) for delay, block in blocks]

    def between_steps_s(self) -> tuple[Floats, Floats]:
        """See `GraphReplay.between_steps_s`."""
        none = np.zeros(len(self.graph.steps))
        return none if self.stalled_s is None else self.stalled_s, none if self.overlap_s is None else self.overlap_s

    def graph_begun(self, costs: Sequence[Costs], sampled: Sequence[Costs] = ()) -> DependencyGraph:
        """The graph whose stages begin a step as early as they would with these costs. `sampled`: those of the
        `sampled` steps.
        """
        early = self._early_beginnings
        if early is None:
            return self.graph
        assert (self.sampled is None) == (not sampled), "some steps do not show when the stages of others begin"
        return early.as_ended(sampled or costs, self.graph)

    def sampled_from(self, whole: Whole) -> JobReplay:
        """The same job, if it is some steps of `whole`, with `sampled` steps of all of it."""
        if not (whole.divided and self.graph.begins_early):
            return self
        chosen = sampled_steps(self.graph.job.steps, self.graph.job.ops)
        positions = np.flatnonzero(np.isin(self.graph.steps, chosen))
        steps, parts = whole.agreed(lambda: (self.graph.steps[positions], self._parts(positions)), _joined_samples)
        return replace(self, sampled=self._of_parts(steps, parts))

    @cached_property
    def _early_beginnings(self) -> EarlyBeginnings | None:
        if not self.graph.begins_early:
            return None
        if self.sampled is not None:
            return EarlyBeginnings.of(self.sampled.graph, self.sampled.graph.steps)
        return EarlyBeginnings.of(self.graph, sampled_steps(self.graph.steps, self.graph.ops))

    def _with_delays(self) -> Floats:
        return self.step_times(self.recorded_costs(), () if self.sampled is None else self.sampled.recorded_costs())

    def lanes(self, costs: Sequence[Costs], sampled: Sequence[Costs] = ()) -> list[LanesToReplay]:
        """See `GraphReplay.lanes`."""
        return with_beginnings(self.graph_begun(costs, sampled), costs)

    def with_ideals(self, method: Method) -> JobReplay:
        """The same job with the ideal costs of that method."""
        durations = self.durations
        ideal = ideal_rows(self.graph.blocks, durations.cost, self.graph.layout.pp, method, durations.ideal)
        return replace(self, durations=replace(durations, ideal=ideal))

    def with_published_rules(self) -> JobReplay:
        """The same job by the published method, of a trace from which the replay left out nothing and in which it
        corrected no clock.
        """
        graph = self.graph.as_published()
        return JobReplay(graph, measure_durations(graph, Method.PUBLISHED), Clocks.right(graph))

    def only_steps(self, steps: Sequence[int]) -> JobReplay:
        """The same job with only these step numbers; ideal costs stay those of the whole job.

        Raises SelectionError if none of them is in the job.
        """
        wanted = np.flatnonzero(np.isin(self.graph.steps, list(steps)))
        if not len(wanted):
            raise SelectionError(
                f"none of these steps is in the job; it has {len(self.graph.steps)} steps from {self.graph.steps[0]} to"
                f" {self.graph.steps[-1]}"
            )
        return self._of_parts(self.graph.steps[wanted], [part for part in self._parts(wanted) if part[0].lanes])

    def _parts(self, wanted: Ints) -> list[_Part]:
        """The lanes of each block in the steps at these positions; of a block without any, none."""
        parts = []
        for number, block in enumerate(self.graph.blocks):
            lanes = np.flatnonzero(np.isin(block.step, wanted))
            part = block.only_lanes(lanes, np.searchsorted(wanted, block.step[lanes]).astype(np.int32))
            cost, delay, ideal = (
                of[number] if of[number].ndim == 1 else np.ascontiguousarray(of[number][:, lanes])
                for of in (self.durations.cost, self.durations.launch_delay, self.durations.ideal)
            )
            parts.append((part, cost, delay, ideal))
        return parts

    def _of_parts(self, steps: Int32s, parts: Sequence[_Part]) -> JobReplay:
        """The replay of these `_parts`, whose steps have these numbers."""
        blocks, cost, delay, ideal = zip(*parts, strict=True)
        return JobReplay(
            replace(self.graph, steps=steps, blocks=blocks),
            replace(self.durations, cost=cost, launch_delay=delay, ideal=ideal),
            self.clocks,
        )


#: A block with the cost, the launch delay and the ideal of its ops.
_Part = tuple[Block, Floats, Floats, Floats]


def _joined_samples(samples: Sequence[tuple[Int32s, Sequence[_Part]]]) -> tuple[Int32s, list[_Part]]:
    """The sampled steps of all batches of a job, and each of its blocks, even without lanes."""
    first: dict[StructureKey, Block] = {}
    joined, count = [], 0
    for steps, parts in samples:
        for block, cost, delay, ideal in parts:
            same = first.setdefault(block.key, block)
            if block.lanes or same is block:
                moved = replace(block, step=block.step + count, template=same.template, structure=same.structure)
                joined.append((moved, cost, delay, ideal))
        count += len(steps)
    return np.concatenate([steps for steps, _ in samples]), joined


class JobGraph(Struct, frozen=True, eq=False, dict=True):
    """The graph of a pipeline job with corrected clocks: what its replay needs of the trace, in half the memory.

    `as_recorded`: the graph without reconstructed members of collectives, None if nothing was reconstructed.
    `left_out_steps`: as in `JobReplay`. `whole`: the job of which this may be some steps.
    """

    graph: DependencyGraph
    clocks: Clocks
    method: Method
    left_out_steps: tuple[int, ...]
    as_recorded: DependencyGraph | None = None
    whole: Whole = UNDIVIDED

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        method: Method = Method.TRACEKIT,
        whole: Whole = UNDIVIDED,
        lanes: Lanes | None = None,
        reread: Callable[[], Trace] | None = None,
    ) -> JobGraph:
        """Build the graph of `trace` and correct its clocks.

        The published method does not correct clocks. Raises GraphError if the ops contradict each other; steps whose
        recording was cut are left out. If `trace` is some steps of a job, `whole`, these must be whole; Raises
        SelectionError for what only a job in one piece can answer. `lanes`: those of the trace, which then may be an
        outline; `reread`: reads all of it.
        """
        posting = PUBLISHED if method is Method.PUBLISHED else None
        cut: tuple[int, ...] = ()
        try:
            graph = DependencyGraph.from_trace(trace, posting=posting, whole=whole, lanes=lanes)
        except GraphError:
            cut = cut_steps(trace)
            if whole.divided or not 0 < len(cut) < len(trace.steps):
                raise
            trace = trace.without_steps(cut)
            graph = DependencyGraph.from_trace(trace, posting=posting)
        if method is Method.PUBLISHED:
            return cls(graph, Clocks.right(graph), method, cut, whole=whole)
        left_out = incomplete_steps(graph.job)
        if left_out:
            trace = trace.without_steps(left_out)
            graph = replace(DependencyGraph.from_trace(trace, posting=None), dropped_lanes=graph.dropped_lanes)
        dropped = graph.dropped_lanes
        left_out = tuple(sorted((*cut, *left_out)))
        clocks = measure_clocks(graph, trace.step_starts, whole)
        if trace.one_host and (clocks.moves or clocks.doubts or not clocks.any_off):
            # A shared clock does not move relative to itself: such doubts come from ranks that wake up unevenly.
            clocks = Clocks.correct(graph.steps, clocks.linked)
        if clocks.any_off:
            trace = with_clocks_set(reread() if reread else trace, graph, clocks)
            graph = replace(DependencyGraph.from_trace(trace, posting=None, whole=whole), dropped_lanes=dropped)
        graph = with_early_beginnings(graph, whole)
        if not graph.gaps:
            return cls(graph, clocks, method, left_out, whole=whole)
        # A missing member ends when its peers did, by the corrected clocks.
        if reread and not clocks.any_off:
            trace = reread()
        rebuilt = DependencyGraph.from_trace(trace, reconstruct=True, posting=None, whole=whole, lanes=graph.lanes)
        rebuilt = with_early_beginnings(replace(rebuilt, dropped_lanes=dropped, gaps=graph.gaps), whole)
        return cls(rebuilt, clocks, method, left_out, as_recorded=graph, whole=whole)

    @cached_property
    def replay(self) -> JobReplay:
        """The job with the cost of each op."""
        recorded = None if self.as_recorded is None else self._measured(self.as_recorded)
        return replace(self._measured(self.graph), as_recorded=recorded)

    def _measured(self, graph: DependencyGraph) -> JobReplay:
        durations = measure_durations(graph, self.method, self.whole)
        return JobReplay(graph, durations, self.clocks, left_out_steps=self.left_out_steps)


def cut_steps(trace: Trace) -> tuple[int, ...]:
    """The numbers of the steps in which a worker has not as many backwards as forwards, or as the other stages."""
    kind = pl.col("kind")
    counts = trace.ops.group_by("step", "dp_rank", "pp_rank").agg(
        (kind == OpKind.FORWARD_COMPUTE).sum().alias("forwards"),
        (kind == OpKind.BACKWARD_COMPUTE).sum().alias("backwards"),
    )
    of_lane = counts.group_by("step", "dp_rank").agg(
        fewest=pl.min_horizontal(pl.col("forwards").min(), pl.col("backwards").min()),
        most=pl.max_horizontal(pl.col("forwards").max(), pl.col("backwards").max()),
    )
    return tuple(of_lane.filter(pl.col("fewest") < pl.col("most"))["step"].unique().sort().to_list())


def incomplete_steps(job: JobLanes) -> tuple[int, ...]:
    """The numbers of the steps with missing DP ranks, if enough others are complete: waiting for an unrecorded rank
    would count as communication.
    """
    complete = job.lanes_of_step == len(job.dp_ranks)
    if complete.all() or complete.sum() < min(ENOUGH_STEPS, len(complete) / 2) or not complete.any():
        return ()
    return tuple(job.steps[~complete].tolist())
