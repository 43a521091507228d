"""What each DP rank or worker costs alone, exactly, without a replay per rank.

In: a `JobReplay` and which rows to add back. Out: step times [steps, dp_ranks].
In "ideal except DP rank d" all other DP ranks are identical, so two lanes, d and one stand-in for all others, replay
the whole job. All DP ranks together cost two passes over the trace, all workers two passes per stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.analysis.durations import Durations
from tracekit.analysis.graph import Block, Template, build_template
from tracekit.analysis.job_replay import JobReplay
from tracekit.analysis.lanes import Int32s
from tracekit.analysis.replay import NO_MATRIX, Costs, replay_lanes
from tracekit.analysis.scenario import IDEAL
from tracekit.analysis.structure import Floats, Structure
from tracekit.model import KINDS

#: Which rows of a lane are added back as recorded: a template (of which the lane's own rows come first) to [rows].
Choice = Callable[[Template], npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Couple:
    """Lanes of one structure, each coupled with ideal stand-ins for the other DP ranks of its step.

    Member 0 of `template` is the lane itself; `own`: its costs, [rows of member 0, lanes]. `step`, `dp_index`
    (position in `graph.dp_ranks`): [lanes].
    """

    template: Template
    own: Floats
    step: Int32s
    dp_index: npt.NDArray[np.int64]


def couple_lanes(replay: JobReplay) -> tuple[Couple, ...]:
    """Every lane of the job with its stand-ins."""
    graph, durations = replay.graph, replay.durations
    dp_ranks = np.array(graph.dp_ranks)
    couples: list[Couple] = []
    for number, block in enumerate(graph.blocks):
        parts = _uniform(block, durations, number) if len(block.structures) == 1 else _mixed(block, durations, number)
        for template, own, step, dp_rank in parts:
            couples.append(Couple(template, own, step, np.searchsorted(dp_ranks, dp_rank)))
    return tuple(couples)


def add_back_lanes(replay: JobReplay, couples: tuple[Couple, ...], choice: Choice) -> Floats:
    """Step times, seconds, [steps, dp_ranks]: all ideal, but the chosen rows of that DP rank as recorded."""
    graph = replay.graph
    times = np.repeat(replay.step_times(IDEAL)[:, None], len(graph.dp_ranks), axis=1)
    table = np.array([replay.durations.ideal.get(kind, 0.0) for kind in KINDS])
    for couple in couples:
        template = couple.template
        chosen = choice(template) & (template.member == 0)
        rows = np.where(chosen, np.arange(template.rows), -1)
        none = np.full(template.rows, -1)
        costs = Costs(couple.own, rows, table[template.kind], NO_MATRIX, none)
        times[couple.step, couple.dp_index] = replay_lanes(template, np.arange(len(couple.step) + 1), costs)
    return times


_Part = tuple[Template, Floats, Int32s, Int32s]


def _uniform(block: Block, durations: Durations, number: int) -> Iterator[_Part]:
    """Lanes with company couple with one more of the same structure; a DP rank alone in its step needs none."""
    own = durations.own[number]
    structure = block.structures[0]
    company = np.repeat(np.diff(block.first_lane), np.diff(block.first_lane)) > 1
    for members, lanes in (([structure], np.flatnonzero(~company)), ([structure] * 2, np.flatnonzero(company))):
        if len(lanes):
            everything = len(lanes) == block.lanes
            yield (
                build_template(members, lanes_join=False),
                own if everything else np.ascontiguousarray(own[:, lanes]),
                block.step[lanes],
                block.dp_rank[0, lanes],
            )


def _mixed(block: Block, durations: Durations, number: int) -> Iterator[_Part]:
    """Each DP rank of a step of mixed structures couples with one of each structure among the others."""
    own = durations.own[number]
    templates: dict[tuple[int, ...], Template] = {}
    first = 0
    for member, structure in enumerate(block.structures):
        others = list({id(part): part for at, part in enumerate(block.structures) if at != member}.values())
        members: list[Structure] = [structure, *others]
        key = tuple(id(part) for part in members)
        if key not in templates:
            templates[key] = build_template(members, lanes_join=False)
        rows = slice(first, first + len(structure.kind))
        first = rows.stop
        dp_rank = np.full(block.lanes, block.dp_rank[rows.start, 0], np.int32)
        yield templates[key], own[rows], block.step, dp_rank
