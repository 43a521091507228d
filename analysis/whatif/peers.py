"""Selected ops at the pace of their peers: the median of what comparable ops that are not selected cost.

In: a graph, the cost of each op, and which ops are selected. Out: costs, for a pipeline as an intervention.

In a pipeline, peers are the same op in the same step on other DP ranks. Where all of those are selected, they are the
ops of that kind in that step on other stages, then the worker's other ops of that kind in that step, then the same op
in other steps; if a whole kind is selected, each of its ops takes the median of the kind. Totals are compared, so that
ops that peers do not have, such as garbage collections, take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import GridPart, Mask
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, combinations, dense
from tracekit.analysis.replay.graph_replay import fill_an_axis
from tracekit.analysis.replay.pipeline_costs import OCCASIONAL, OCCASIONAL_BY_STAGE
from tracekit.analysis.whatif.interventions import SetParts
from tracekit.trace.model import KINDS, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import OpGraph


def usual_of_peers(totals: Floats, peers: Bools) -> Floats:
    """The median of each class over its peers, [classes], nan without peers. `totals`, `peers`: [classes, members]."""
    ordered, count = np.sort(np.where(peers, totals, np.inf), axis=1), peers.sum(axis=1)
    rows, last = np.arange(len(totals)), np.maximum(count, 1) - 1
    usual = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return np.where(count > 0, usual, np.nan)


def ops_at_the_pace_of_peers(graph: DependencyGraph, costs: Sequence[Floats], chosen: Sequence[Mask]) -> SetParts:
    """The `chosen` ops, [rows, lanes] per block, at the pace of their peers. `costs`: seconds, likewise."""
    steps, dp_ranks = len(graph.steps), len(graph.dp_ranks)
    recorded = np.zeros((steps, dp_ranks), np.bool_)
    for block in graph.blocks:
        recorded[block.step, graph.dp_index(block)] = True
    parts: list[GridPart] = []
    for kind in KINDS:
        places = [np.flatnonzero(block.template.kind == kind.code) for block in graph.blocks]
        if any(mask[rows].any() for mask, rows in zip(chosen, places, strict=True)):
            parts += _of_kind(kind, graph, costs, chosen, places, recorded)
    return SetParts(tuple(parts))


class _Ops(Struct, frozen=True, eq=False):
    """The ops of one kind: where each is, what it costs, and whether it is selected, [ops] each.

    `occasional`: an op that a worker lacks counts as one without cost. `recorded`: [steps, dp_ranks].
    """

    row: Ints
    stage: Ints
    step: Ints
    dp: Ints
    cost: Floats
    chosen: Bools
    occasional: bool
    recorded: Bools

    def at_pace(self) -> Floats:
        """What each selected op costs at the pace of its peers, seconds, [ops]; nan for the others."""
        steps, dp_ranks = self.recorded.shape
        worker, recorded = self.stage * dp_ranks + self.dp, self.recorded
        pace = _Pace(self.cost, self.chosen)
        in_step, of_rank = (lambda classes: recorded[classes % steps]), (lambda classes: recorded.T[classes % dp_ranks])
        pace.follow(self.row * steps + self.step, self.dp, in_step if self.occasional else None)
        pace.follow(self.step, worker, stay_ahead=True)  # stages differ by design
        pace.follow(worker * steps + self.step, self.row)
        pace.follow(self.row * dp_ranks + self.dp, self.step, of_rank if self.occasional else None)
        return np.where(self.chosen & np.isnan(pace.seconds), np.median(self.cost), pace.seconds)


class _Pace:
    """The pace of the selected ones of some ops: `seconds`, [ops], nan where it is not known yet."""

    def __init__(self, cost: Floats, chosen: Bools) -> None:
        self.cost, self.chosen = cost, chosen
        self.seconds = np.full(len(cost), np.nan)

    def follow(
        self, classes: Ints, member: Ints, members: Callable[[Ints], Bools] | None = None, *, stay_ahead: bool = False
    ) -> None:
        """Fill in the pace of selected ops whose class, [ops], has peers: members, [ops], without a selected op.

        `members`: which ones each of some classes has, [classes, members], so that those without an op of the class
        count as taking no time for it; None: only members with such an op count. `stay_ahead`: who is faster than its
        peers remains so.
        """
        wanted = np.unique(classes[self.chosen & np.isnan(self.seconds)])
        if not len(wanted):
            return
        place = np.minimum(np.searchsorted(wanted, classes), len(wanted) - 1)
        ops = np.flatnonzero(wanted[place] == classes)
        width = int(member.max()) + 1 if members is None else members(wanted[:1]).shape[1]
        cell = place[ops] * width + member[ops]

        def total(weights: Floats | None = None) -> Floats:
            return np.bincount(cell, weights, len(wanted) * width).reshape(-1, width).astype(np.float64)

        count, chosen = total(), total(self.chosen[ops].astype(np.float64))
        counted = count > 0 if members is None else members(wanted)
        took = total(self.cost[ops])
        usual = usual_of_peers(took, counted & (chosen == 0))[:, None]
        usual = np.minimum(usual, took if stay_ahead else np.inf)
        pending = self.chosen[ops] & np.isnan(self.seconds[ops])
        self.seconds[ops[pending]] = ((usual / np.maximum(count, 1)).ravel()[cell])[pending]


def _of_kind(
    kind: OpKind,
    graph: DependencyGraph,
    costs: Sequence[Floats],
    chosen: Sequence[Mask],
    places: Sequence[Ints],
    recorded: Bools,
) -> Iterator[GridPart]:
    """The selected ops of one kind; `places`: its rows in each block."""
    ids: list[list[Ints]] = []
    cost, selected, present = [], [], []
    for block, of_block, mask, rows in zip(graph.blocks, costs, chosen, places, strict=True):
        template, shape = block.template, (len(rows), block.lanes)
        where = (template.pp_rank[rows][:, None], template.chunk[rows][:, None], block.microbatch[rows],
                 block.step[None], graph.dp_index(block)[None])  # fmt: skip
        ids.append([np.broadcast_to(label, shape).ravel().astype(np.int64) for label in where])
        cost.append(of_block[rows].ravel())
        selected.append(mask[rows].ravel())
        present.append(np.ones(shape, np.bool_).ravel() if block.present is None else block.present[rows].ravel())
    exists = np.concatenate(present)
    stage, chunk, microbatch, step, dp = (np.concatenate(of_blocks)[exists] for of_blocks in zip(*ids, strict=True))
    ops = _Ops(
        row=combinations((stage, chunk, microbatch))[1],
        stage=stage,
        step=step,
        dp=dp,
        cost=np.concatenate(cost)[exists],
        chosen=np.concatenate(selected)[exists],
        occasional=kind in OCCASIONAL | OCCASIONAL_BY_STAGE,
        recorded=recorded,
    )
    pace = np.full(len(exists), np.nan)
    pace[exists] = ops.at_pace()
    first = 0
    for number, (block, rows) in enumerate(zip(graph.blocks, places, strict=True)):
        values = pace[first : first + len(rows) * block.lanes].reshape(len(rows), -1)
        first += values.size
        changed = ~np.isnan(values).all(axis=1)
        yield GridPart(number, rows[changed], values[changed])


def op_costs_at_the_pace_of_peers(ops: OpGraph, cost: Floats, chosen: Bools) -> Floats:
    """What each op of an op graph costs with the `chosen` ones at the pace of their peers, seconds, [ops].

    Peers are comparable ops in the same step on other ranks. Where all ranks have chosen ones, they are the rank's own
    in other steps; if a whole class is chosen, it takes its median. `cost`: seconds, [ops].
    """
    chosen = chosen if ops.comparable is None else chosen & ops.comparable
    step = ops.labels["profiler_step"].codes if "profiler_step" in ops.labels else ops.step
    peer, step = (dense(codes.astype(np.int64)) for codes in (ops.peer, step))
    ranks, rank, steps = len(ops.mesh.ranks), np.searchsorted(ops.mesh.ranks, ops.rank), int(step.max()) + 1

    def ranks_with_such_work(classes: Ints) -> Bools:
        """Work that all ranks along an axis of the mesh have belongs to their position; any rank may have other."""
        able = np.ones((len(classes), ranks), np.bool_)
        numbers, of_class = np.unique(classes // steps, return_inverse=True)
        has = np.zeros((len(numbers), ranks), np.bool_)
        place = np.minimum(np.searchsorted(numbers, peer), len(numbers) - 1)
        same = numbers[place] == peer
        has[place[same], rank[same]] = True
        for number, holds in enumerate(has):
            if fill_an_axis(ops.mesh, np.flatnonzero(holds)):
                able[of_class == number] = holds
        return able

    pace = _Pace(cost, chosen)
    pace.follow(peer * steps + step, rank, ranks_with_such_work)
    pace.follow(peer * ranks + rank, step, lambda classes: np.ones((len(classes), steps), np.bool_))
    pending = np.flatnonzero(chosen & np.isnan(pace.seconds))
    usual = {number: np.median(cost[peer == number]) for number in np.unique(peer[pending]).tolist()}
    pace.seconds[pending] = [usual[number] for number in peer[pending].tolist()]
    return np.where(np.isnan(pace.seconds), cost, pace.seconds)
