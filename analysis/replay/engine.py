"""A pipeline job ready to be replayed with any costs.

In: a `Trace`. Out: a `JobReplay`, of a graph with corrected clocks.

A recorded step begins when its last worker begins it. If the stages of a pipeline end a step one after the other, the
early ones have begun the next step by then, in every step. A replay in which all workers began at once would take
longer than the recording. A stage that ends a step earlier in a scenario also begins the next one earlier in it: its
lead over the last stage changes with the lead with which it ended the previous step. The same holds for the DP ranks of
a stage: while one of them still updates its weights, the others are in their next forward. So ops that wait for nothing
begin as early as they usually did (`with_early_beginnings`), or would in a scenario (`EarlyBeginnings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph, Template
from tracekit.analysis.graph.lanes import JobLanes, Lanes, StructureKey
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.clocks import Clocks, measure_clocks, with_clocks_set
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import Costs, LanesToReplay, replay_timelines
from tracekit.analysis.replay.pipeline_costs import ideal_rows, keeps_delay, measure_durations
from tracekit.base.errors import GraphError, SelectionError
from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS, P2P, OpKind

#: If this many steps have all DP ranks, or half of the steps of a short trace, other steps are left out. Chosen.
ENOUGH_STEPS = 3
#: Look at this many steps at most, spread over the trace; at fewer if they had more than this many ops in all.
MOST_STEPS, MOST_OPS, FEWEST_STEPS = 32, 1 << 20, 4
#: Adjust beginnings to ends this many times at most, until none moves by more than this share of the step. Chosen.
MOST_TURNS, SETTLED_SHARE = 8, 1e-4
#: DP ranks begin a step together unless one of them begins this share of it before the last rank of its stage. Chosen.
SMALLEST_SHARE = 5e-3
_IS_TRANSFER = np.array([kind in P2P for kind in KINDS])
#: A block with the cost, the launch delay and the ideal of its ops.
_Part = tuple[Block, Floats, Floats, Floats]
_Begins = tuple[Mapping[StructureKey, Floats], Floats, Floats]


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
        zeros = np.zeros(len(self.graph.steps))
        return zeros if self.stalled_s is None else self.stalled_s, zeros if self.overlap_s is None else self.overlap_s

    def begun(self, costs: Sequence[Costs]) -> JobReplay:
        """See `GraphReplay.begun`."""
        early = self._early_beginnings
        return self if early is None else replace(self, graph=early.as_ended(costs, self.graph))

    def sampled_from(self, whole: Whole) -> JobReplay:
        """The same job, if it is some steps of `whole`, with `sampled` steps of all of it."""
        if not (whole.divided and self.graph.begins_early):
            return self
        chosen = sampled_steps(self.graph.job.steps, self.graph.job.ops)
        positions = np.flatnonzero(np.isin(self.graph.steps, chosen))
        steps, parts = whole.combined(lambda: (self.graph.steps[positions], self._parts(positions)[1]), _joined_samples)
        return replace(self, sampled=self._of_parts(replace(self.graph, steps=steps), parts))

    @cached_property
    def _early_beginnings(self) -> EarlyBeginnings | None:
        if not self.graph.begins_early:
            return None
        if self.sampled is not None:
            return EarlyBeginnings.of(self.sampled.graph, self.sampled.graph.steps)
        return EarlyBeginnings.of(self.graph, sampled_steps(self.graph.steps, self.graph.ops))

    def lanes(self, costs: Sequence[Costs]) -> list[LanesToReplay]:
        """See `GraphReplay.lanes`."""
        return with_beginnings(self.graph, costs)

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
        graph, parts = self._parts(wanted)
        return self._of_parts(graph, [part for part in parts if part[0].lanes])

    def _parts(self, wanted: Ints) -> tuple[DependencyGraph, list[_Part]]:
        """The graph with the steps at these positions, and its blocks, even without lanes, with their costs."""
        graph, lanes_of_blocks = self.graph.only_steps(wanted)
        parts = []
        for number, (block, lanes) in enumerate(zip(graph.blocks, lanes_of_blocks, strict=True)):
            cost, delay, ideal = (
                matrices[number] if matrices[number].ndim == 1 else np.ascontiguousarray(matrices[number][:, lanes])
                for matrices in (self.durations.cost, self.durations.launch_delay, self.durations.ideal)
            )
            parts.append((block, cost, delay, ideal))
        return graph, parts

    def _of_parts(self, graph: DependencyGraph, parts: Sequence[_Part]) -> JobReplay:
        """The replay of the graph with these `_parts` as its blocks."""
        blocks, cost, delay, ideal = zip(*parts, strict=True)
        return JobReplay(
            replace(graph, blocks=blocks),
            replace(self.durations, cost=cost, launch_delay=delay, ideal=ideal),
            self.clocks,
        )


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
        infer = method is not Method.PUBLISHED
        cut: tuple[int, ...] = ()
        try:
            graph = DependencyGraph.from_trace(trace, infer=infer, whole=whole, lanes=lanes)
        except GraphError:
            cut = cut_steps(trace)
            if whole.divided or not 0 < len(cut) < len(trace.steps):
                raise
            trace = trace.without_steps(cut)
            graph = DependencyGraph.from_trace(trace, infer=infer)
        if not infer:
            return cls(graph, Clocks.right(graph), method, cut, whole=whole)
        left_out = incomplete_steps(graph.job)
        if left_out:
            trace = trace.without_steps(left_out)
            graph = replace(DependencyGraph.from_trace(trace, infer=True), dropped_lanes=graph.dropped_lanes)
        dropped = graph.dropped_lanes
        left_out = tuple(sorted((*cut, *left_out)))
        clocks = measure_clocks(graph, trace.step_starts, whole)
        if trace.one_host and (clocks.moves or clocks.doubts or not clocks.any_off):
            # A shared clock does not move relative to itself: such doubts come from ranks that wake up unevenly.
            clocks = Clocks.correct(graph.steps, clocks.linked)
        if clocks.any_off:
            trace = with_clocks_set(reread() if reread else trace, graph, clocks)
            graph = replace(DependencyGraph.from_trace(trace, infer=True, whole=whole), dropped_lanes=dropped)
        graph = with_early_beginnings(graph, whole)
        if not graph.gaps:
            return cls(graph, clocks, method, left_out, whole=whole)
        # A missing member ends when its peers did, by the corrected clocks.
        if reread and not clocks.any_off:
            trace = reread()
        rebuilt = DependencyGraph.from_trace(trace, reconstruct=True, infer=True, whole=whole, lanes=graph.lanes)
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


def with_early_beginnings(graph: DependencyGraph, whole: Whole = UNDIVIDED) -> DependencyGraph:
    """The graph in which ops that wait for nothing begin as early as they usually did, at the latest at 0. `whole`: the
    job of which the graph may be some steps.
    """
    if graph.job.first_s >= 0:
        return graph
    usual_s, rank_begin_s = whole.combined(lambda: _recorded_begins(graph), _usual_begins)
    early = rank_begin_s is not None or any(begin_s.any() for begin_s in usual_s.values())
    blocks = tuple(_begun_early(block, usual_s[block.key]) for block in graph.blocks)
    return replace(graph, blocks=blocks, rank_begin_s=rank_begin_s, begins_early=early)


def sampled_steps(steps: Int32s, ops: int) -> Int32s:
    """Some of a job's steps, spread over it. `ops`: the number of ops of all `steps`."""
    most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_OPS * len(steps) // max(ops, 1)))
    return steps[np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(np.int64))]


class EarlyBeginnings(Struct, frozen=True, eq=False):
    """Some steps of a graph whose workers begin early, as recorded.

    `sample`: the graph of these steps; a block may have no lane in it. `lanes`: the lanes of each block in these steps.
    `between_s`: loss of an op that waits for nothing from its lead over the last stage, between the end of a step and
    the next one, seconds, [rows that wait for nothing] per block; `rank_between_s`: the same for the lead of each rank
    over the last one of its stage, [stages, dp_ranks].
    """

    sample: DependencyGraph
    lanes: tuple[Ints, ...]
    between_s: tuple[Floats, ...]
    rank_between_s: Floats

    @classmethod
    def of(cls, graph: DependencyGraph, numbers: Int32s) -> EarlyBeginnings:
        """Of the steps with these `numbers`."""
        sample, lanes = graph.only_steps(np.flatnonzero(np.isin(graph.steps, numbers)))
        recorded = _recorded_ends(sample)
        between = [
            block.template.begin[rows] - recorded.stage_s[block.template.pp_rank[rows]]
            for block in sample.blocks
            for rows in (_firsts(block.template),)
        ]
        rank_begin_s = np.zeros_like(recorded.rank_s) if sample.rank_begin_s is None else sample.rank_begin_s
        return cls(sample, tuple(lanes), tuple(between), rank_begin_s - recorded.rank_s)

    def as_ended(self, costs: Sequence[Costs], graph: DependencyGraph) -> DependencyGraph:
        """The `graph`, of any steps of the job, with the beginnings that follow from the ends of each worker's steps.

        `costs`: of the graph of which this has some steps.
        """
        sample = self.sample
        costs = [cost.only_lanes(mask) for cost, mask in zip(costs, self.lanes, strict=True)]
        for _ in range(MOST_TURNS):
            ends = _replayed_ends(sample, costs)
            moved_s, blocks = 0.0, []
            for block, between_s in zip(sample.blocks, self.between_s, strict=True):
                rows, begin = _firsts(block.template), block.template.begin.copy()
                begin[rows] = np.minimum(between_s + ends.stage_s[block.template.pp_rank[rows]], 0.0)
                moved_s = max(moved_s, float(np.abs(begin - block.template.begin).max()))
                blocks.append(replace(block, template=replace(block.template, begin=begin)))
            sample = replace(sample, blocks=tuple(blocks))
            if sample.rank_begin_s is not None:
                rank_begin_s = self.rank_between_s + ends.rank_s
                rank_begin_s -= rank_begin_s.max(axis=1, keepdims=True)
                moved_s = max(moved_s, float(np.abs(rank_begin_s - sample.rank_begin_s).max()))
                sample = replace(sample, rank_begin_s=rank_begin_s)
            if moved_s <= SETTLED_SHARE * float(np.median(ends.step_s)):
                break
        return _begun_as_in(sample, graph)


def _begun_as_in(sample: DependencyGraph, graph: DependencyGraph) -> DependencyGraph:
    """The graph with the beginnings in `sample` steps of its job."""
    begin_of = {block.key: block.template.begin for block in sample.blocks}
    blocks = [replace(block, template=replace(block.template, begin=begin_of[block.key])) for block in graph.blocks]
    graph = replace(graph, blocks=tuple(blocks))
    if graph.rank_begin_s is None:
        return graph
    rank_begin_s = graph.rank_begin_s.copy()
    rank_begin_s[:, np.searchsorted(graph.dp_ranks, sample.dp_ranks)] = sample.rank_begin_s
    return replace(graph, rank_begin_s=rank_begin_s)


def with_beginnings(graph: DependencyGraph, costs: Sequence[Costs]) -> list[LanesToReplay]:
    """The lanes of each block with these costs; ops that wait for nothing begin as early as their ranks."""
    return [
        LanesToReplay(block.template, block.step, block.first_lane, _begun(graph, block, cost))
        for block, cost in zip(graph.blocks, costs, strict=True)
    ]


class _Ends(Struct, frozen=True):
    """Ends of the steps on each worker.

    `step_s`: end of the last worker, [steps]. `stage_s`: end of the last rank of each stage relative to it, [stages];
    `rank_s`: end of each rank relative to the last one of its stage, [stages, dp_ranks]; both medians over the steps,
    at most 0. Seconds.
    """

    step_s: Floats
    stage_s: Floats
    rank_s: Floats


def _firsts(template: Template) -> Ints:
    """The rows that wait for nothing."""
    return np.flatnonzero(np.diff(template.first_wait) == 0)


def _begun(graph: DependencyGraph, block: Block, costs: Costs) -> Costs:
    if graph.rank_begin_s is None:
        return costs
    firsts = _firsts(block.template)
    early = graph.rank_begins(block, firsts)
    delayed = np.flatnonzero(costs.delay_row[firsts] >= 0)
    early[delayed] += costs.delays_of(firsts[delayed])
    return costs.with_delays(firsts, early)


def _begin_s(graph: DependencyGraph) -> Floats:
    """Begin of each step on each worker, at the latest at 0, seconds, [stages, dp_ranks, steps]; -inf if it was not
    recorded.

    If steps count from the first worker instead of the last, no worker begins early: `with_step_delays` finds the
    late ones.
    """
    begin_s = np.full((graph.layout.pp, len(graph.dp_ranks), len(graph.steps)), -np.inf)
    for block in graph.blocks:
        firsts = _firsts(block.template)
        stages = block.template.pp_rank[firsts]
        for stage in np.unique(stages).tolist():
            first_s = block.start[firsts[stages == stage]].min(axis=0)
            begin_s[stage, graph.dp_index(block), block.step] = np.minimum(first_s, 0.0)
    return begin_s


def _before_last_s(times: Floats) -> Floats:
    """Time of each rank relative to the last one of its stage, median over the steps, at most 0, [stages, dp_ranks].

    `times`: [stages, dp_ranks, steps], -inf if there is none.
    """
    recorded = np.isfinite(times)
    before = np.where(recorded, times, np.nan) - times.max(axis=1, keepdims=True)
    before[~recorded.any(axis=2)] = 0.0
    median = np.median(before, axis=2) if recorded.all() else np.nanmedian(before, axis=2)
    return np.asarray(median - median.max(axis=1, keepdims=True))


def _recorded_begins(graph: DependencyGraph) -> _Begins:
    """What some steps show of beginnings, in seconds: for each structure, the latest begin of each op that waits for
    nothing, [ops, steps]; the begin of each worker, see `_begin_s`; the end of each step, [steps].
    """
    begin_s = _begin_s(graph)
    last_begin_s = begin_s.max(axis=1)
    latest = {}
    for block in graph.blocks:
        firsts, first_lanes = _firsts(block.template), block.first_lane[:-1]
        # An absent op at the start of a lane has the start of the op after it.
        last = np.maximum.reduceat(block.start[firsts], first_lanes, axis=1)
        of_stage = last_begin_s[block.template.pp_rank[firsts]][:, block.step[first_lanes]]
        latest[block.key] = np.maximum(last, of_stage)
    return latest, begin_s, _recorded_ends(graph).step_s


def _usual_begins(parts: Sequence[_Begins]) -> tuple[dict[StructureKey, Floats], Floats | None]:
    """The usual begin of each op that waits for nothing, and of each worker, None if they begin together, in seconds.

    In: `_recorded_begins` of batches of steps.
    """
    latest, begin_s, step_s = zip(*parts, strict=True)
    usual_s = {
        key: np.minimum(np.median(np.concatenate(times, axis=1), axis=1), 0.0) for key, times in by_name(latest).items()
    }
    rank_begin_s = _before_last_s(np.concatenate(begin_s, axis=2))
    begin_together = rank_begin_s.min() > -SMALLEST_SHARE * float(np.median(np.concatenate(step_s)))
    return usual_s, None if begin_together else rank_begin_s


def _begun_early(block: Block, begin_s: Floats) -> Block:
    """The block whose ops that wait for nothing begin at `begin_s`, [such ops]."""
    template, begin = block.template, np.zeros(block.template.rows)
    begin[_firsts(template)] = begin_s
    for row in template.order.tolist():
        waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
        if len(waits):
            begin[row] = begin[waits].max()
    return replace(block, template=replace(template, begin=begin))


def _recorded_ends(graph: DependencyGraph) -> _Ends:
    return _ends(graph, [block.start + block.duration for block in graph.blocks])


def _replayed_ends(graph: DependencyGraph, costs: Sequence[Costs]) -> _Ends:
    parts = [part for part in with_beginnings(graph, costs) if len(part.step)]
    ends = iter(timeline.end for timeline in replay_timelines(parts, graph.rendezvous_count, meet=graph.blocks_meet))
    return _ends(graph, [next(ends) if block.lanes else block.start for block in graph.blocks])


def _ends(graph: DependencyGraph, ends: Sequence[Floats]) -> _Ends:
    """The ends of workers, given those of their ops, [rows, lanes] per block.

    Transfers do not count: a stage can continue without waiting for them.
    """
    end_s = np.full((graph.layout.pp, len(graph.dp_ranks), len(graph.steps)), -np.inf)
    for block, end in zip(graph.blocks, ends, strict=True):
        counts = ~_IS_TRANSFER[block.template.kind]
        for stage in range(len(end_s)):
            rows = np.flatnonzero(counts & (block.template.pp_rank == stage))
            if len(rows):
                end_s[stage, graph.dp_index(block), block.step] = end[rows].max(axis=0)
    last = end_s.max(axis=1)
    complete = np.isfinite(last).all(axis=0)
    last, end_s = last[:, complete], end_s[:, :, complete]
    step_s = last.max(axis=0)
    return _Ends(step_s, np.median(last - step_s, axis=1), _before_last_s(end_s))
