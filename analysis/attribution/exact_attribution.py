"""Exact cost of each DP rank or worker alone, without one replay per rank.

In: a `JobReplay` and the rows to add back. Out: step times [steps, dp_ranks].

In "ideal except DP rank d" all other DP ranks are identical. So two lanes replay the whole job: d and one stand-in for
all others. All DP ranks together cost two passes over the trace, all workers two passes per stage. Only if ideal lanes
differ (for example, if most workers collect garbage, at different places) does every DP rank take a replay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.template import Template, build_coupled_template
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, replay_lanes
from tracekit.analysis.whatif.interventions import changed, step_times
from tracekit.analysis.whatif.paper import IDEAL, addition
from tracekit.analysis.whatif.selection import dp_rank, labelled


class RepresentativeLanes(Struct, frozen=True, eq=False):
    """Lanes of one structure, each coupled with ideal stand-ins for the other lanes of its step.

    Member 0 of `template` is the lane itself; `cost`: its costs, [rows of member 0, lanes]. `ideal`: ideal costs of all
    members, [rows of the template]. `step`, `dp_index` (position in `graph.dp_ranks`): [lanes].
    """

    template: Template
    cost: Floats
    ideal: Floats
    step: Int32s
    dp_index: npt.NDArray[np.int64]


def representative_lanes(replay: JobReplay) -> tuple[RepresentativeLanes, ...]:
    """Every lane of the job with its stand-ins: one for each structure that the other lanes of its step have.

    Empty if the ideal lanes of a structure differ.
    """
    if any(ideal.ndim > 1 for ideal in replay.durations.ideal):
        return ()
    ideal = changed(replay, IDEAL)
    graph = replay.graph_begun(ideal.costs(), ideal.sampled_costs())
    lanes_here = np.zeros((len(graph.blocks), len(graph.steps)), np.int64)
    for number, block in enumerate(graph.blocks):
        lanes_here[number] = np.bincount(block.step, minlength=len(graph.steps))
    dp_ranks = np.array(graph.dp_ranks)
    represented = []
    for number, block in enumerate(graph.blocks):
        others = lanes_here[:, block.step].T > 0
        others[:, number] = lanes_here[number, block.step] > 1
        for company in np.unique(others, axis=0):
            lanes = np.flatnonzero((others == company).all(axis=1))
            members = [number, *np.flatnonzero(company).tolist()]
            coupled = build_coupled_template([graph.blocks[member].structure for member in members])
            begin = np.concatenate([graph.blocks[member].template.begin for member in members])
            cost = replay.durations.cost[number]
            represented.append(
                RepresentativeLanes(
                    template=replace(coupled, begin=begin),
                    ideal=np.concatenate([replay.durations.ideal[member] for member in members]),
                    cost=cost if len(lanes) == block.lanes else np.ascontiguousarray(cost[:, lanes]),
                    step=block.step[lanes],
                    dp_index=np.searchsorted(dp_ranks, block.dp_rank[lanes]),
                )
            )
    return tuple(represented)


def add_back_lanes(replay: JobReplay, represented: tuple[RepresentativeLanes, ...], stage: int | None = None) -> Floats:
    """Step times, seconds, [steps, dp_ranks], with everything ideal except that DP rank, or its worker on `stage`."""
    if not represented:
        return _one_by_one(replay, stage)
    graph = replay.graph
    times = np.repeat(step_times(replay, IDEAL)[:, None], len(graph.dp_ranks), axis=1)
    for part in represented:
        template = part.template
        chosen = template.member == 0 if stage is None else (template.member == 0) & (template.pp_rank == stage)
        rows = np.where(chosen, np.arange(template.rows), -1)
        none = np.full(template.rows, -1)
        costs = Costs(part.cost, rows, part.ideal, NO_MATRIX, none)
        times[part.step, part.dp_index] = replay_lanes(template, np.arange(len(part.step) + 1), costs)
    return times


def _one_by_one(replay: JobReplay, stage: int | None) -> Floats:
    """The result of `add_back_lanes`, from one replay per DP rank."""
    ranks = (dp_rank(rank) for rank in replay.graph.dp_ranks)
    chosen = ranks if stage is None else (rank & labelled("stage", stage) for rank in ranks)
    return np.stack([step_times(replay, addition(of)) for of in chosen], axis=1)
