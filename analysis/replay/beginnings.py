"""Workers that begin a step before others have ended the one before.

In: a `DependencyGraph`. Out: the same, whose first ops begin when they usually did; and, given the costs of a scenario,
when they would begin in it.

A recorded step begins when its last worker begins it. Where the stages of a pipeline end a step one after the other,
those that are done early have begun the next step by then, in every step. A replay that began on all workers at once
would take longer than the recording. And a scenario in which a stage ends earlier has it begin earlier: a stage begins
a step as long before the last one as it ended the step before, in that scenario. DP ranks are not told apart: if one of
them begins early, another was late at the end of the step before, and that goes with its cause.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph, first_lanes
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.kernel import (
    Costs,
    LanesToReplay,
    Timeline,
    replay_meeting_timelines,
    replay_timeline,
)
from tracekit.model import KINDS, P2P

#: Look at this many steps at most, spread over the trace, and fewer if they have more ops together.
MOST_STEPS, MOST_OPS, FEWEST_STEPS = 32, 1 << 20, 4
#: Beginnings and ends agree after a few turns. They do if no beginning moves by more than this share of the step.
MOST_TURNS, SETTLED_SHARE = 8, 1e-4
_IS_TRANSFER = np.array([kind in P2P for kind in KINDS])


def with_early_beginnings(graph: DependencyGraph) -> DependencyGraph:
    """The graph in which ops that wait for nothing begin as early as they usually did, at the latest at 0."""
    if not any((block.start[_firsts(block.template)] < 0).any() for block in graph.blocks):
        return graph
    begin_s = _last_begin_s(graph)
    return replace(graph, blocks=tuple(_begun_early(block, begin_s) for block in graph.blocks))


def begins_early(graph: DependencyGraph) -> bool:
    """Whether some stage usually begins a step before the last one does."""
    return any(block.template.begin.any() for block in graph.blocks)


def begun_as_ended(graph: DependencyGraph, costs: Sequence[Costs]) -> list[Template]:
    """The template of each block, with the beginnings that follow from when each stage ends under these costs."""
    steps = _some_steps(graph)
    lanes = [np.flatnonzero(np.isin(block.step, steps)) for block in graph.blocks]
    parts = [
        LanesToReplay(block.template, step, first_lanes(step), _of_lanes(cost, here, block.lanes))
        for block, cost, here in zip(graph.blocks, costs, lanes, strict=True)
        if len(step := block.step[here])
    ]
    recorded = [block.start[:, here] + block.duration[:, here] for block, here in zip(graph.blocks, lanes, strict=True)]
    early_s, _ = _early_s(graph, lanes, recorded)
    firsts = [_firsts(block.template) for block in graph.blocks]
    # What a stage takes between a step's end and its next beginning, beside the op for it.
    between = [
        block.template.begin[rows] - early_s[block.template.pp_rank[rows]]
        for block, rows in zip(graph.blocks, firsts, strict=True)
    ]
    templates = [block.template for block in graph.blocks]
    for _ in range(MOST_TURNS):
        moved_s = 0.0
        ends = _ends(graph, templates, parts, lanes)
        early_s, step_s = _early_s(graph, lanes, ends)
        for at, (template, rows) in enumerate(zip(templates, firsts, strict=True)):
            begin = template.begin.copy()
            begin[rows] = np.minimum(between[at] + early_s[template.pp_rank[rows]], 0.0)
            moved_s = max(moved_s, float(np.abs(begin - template.begin).max()))
            templates[at] = replace(template, begin=begin)
        if moved_s <= SETTLED_SHARE * step_s:
            break
    return templates


def _firsts(template: Template) -> Ints:
    """The rows that wait for nothing."""
    return np.flatnonzero(np.diff(template.first_wait) == 0)


def _last_begin_s(graph: DependencyGraph) -> Floats:
    """When the last worker of each stage begins each step, seconds, [stages, steps]."""
    last = np.full((graph.layout.pp, len(graph.steps)), -np.inf)
    for block in graph.blocks:
        firsts = _firsts(block.template)
        stages = block.template.pp_rank[firsts]
        for stage in np.unique(stages).tolist():
            np.maximum.at(last[stage], block.step, block.start[firsts[stages == stage]].min(axis=0))
    return last


def _begun_early(block: Block, last_begin_s: Floats) -> Block:
    template, begin = block.template, np.zeros(block.template.rows)
    firsts, firsts_of_step = _firsts(template), block.first_lane[:-1]
    # An absent op at the start of a lane has the start of the op after it.
    last = np.maximum.reduceat(block.start[firsts], firsts_of_step, axis=1)
    of_stage = last_begin_s[template.pp_rank[firsts]][:, block.step[firsts_of_step]]
    begin[firsts] = np.minimum(np.median(np.maximum(last, of_stage), axis=1), 0.0)
    for row in template.order.tolist():
        waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
        if len(waits):
            begin[row] = begin[waits].max()
    return replace(block, template=replace(template, begin=begin))


def _some_steps(graph: DependencyGraph) -> Ints:
    """Positions of steps spread over the trace."""
    steps = len(graph.steps)
    most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_OPS * steps // max(graph.ops, 1)))
    return np.unique(np.linspace(0, steps - 1, min(most, steps)).round().astype(np.int64))


def _of_lanes(costs: Costs, lanes: Ints, count: int) -> Costs:
    """The costs of some of `count` lanes."""
    if len(lanes) == count:
        return costs
    names = ("matrix", "delay", "changed")
    return replace(costs, **{name: part[:, lanes] for name in names if len(part := getattr(costs, name))})


def _ends(
    graph: DependencyGraph, templates: Sequence[Template], parts: Sequence[LanesToReplay], lanes: Sequence[Ints]
) -> list[Floats]:
    """When each op of these lanes ends, [rows, lanes] per block."""
    replayed: list[Timeline]
    here = [number for number, some in enumerate(lanes) if len(some)]
    parts = [replace(part, template=templates[number]) for number, part in zip(here, parts, strict=True)]
    if graph.blocks_meet:
        replayed = replay_meeting_timelines(parts, graph.rendezvous_count)
    else:
        replayed = [replay_timeline(part.template, part.first_lane, part.costs) for part in parts]
    ends = [np.empty((template.rows, 0)) for template in templates]
    for number, timeline in zip(here, replayed, strict=True):
        ends[number] = timeline.end
    return ends


def _early_s(graph: DependencyGraph, lanes: Sequence[Ints], ends: Sequence[Floats]) -> tuple[Floats, float]:
    """How long before the last stage each one ends a step, median over these steps, at most 0, [stages]; and how long
    these steps take, median. Seconds.

    Transfers do not count: a stage need not wait for them to go on.
    """
    last = np.full((graph.layout.pp, len(graph.steps)), -np.inf)
    for block, here, end in zip(graph.blocks, lanes, ends, strict=True):
        counts = ~_IS_TRANSFER[block.template.kind]
        for stage in range(len(last)):
            rows = np.flatnonzero(counts & (block.template.pp_rank == stage))
            if len(rows) and len(here):
                np.maximum.at(last[stage], block.step[here], end[rows].max(axis=0))
    last = last[:, np.isfinite(last).all(axis=0)]
    step_s = last.max(axis=0)
    return np.median(last - step_s, axis=1), float(np.median(step_s))
