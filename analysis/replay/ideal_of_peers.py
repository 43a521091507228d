"""The ideal cost of every op of an op graph: the usual cost of its peers.

In: a folded graph and the own cost of each op. Out: the ideal cost of each row of each block.

Ops of one peer class are compared: work by the mean, transfers by the median. A class that some ranks or steps do not
have is compared as a total per rank and step, zero where it is absent, so that work done by one rank only (garbage
collection, a checkpoint) is excess and not its own ideal. Its peers depend on which ranks could have it. If all ranks
along some axis of the mesh have it, it belongs to their position (the embedding of the first stage), and its peers are
the ranks that have it; otherwise its peers are all ranks. The ideal of an op without comparable ops is its own cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.codes import combinations
from tracekit.analysis.numeric.robust import lower_median_of

if TYPE_CHECKING:
    from tracekit.analysis.graph.fold import FoldedGraph
    from tracekit.analysis.graph.op_graph import Mesh


def ideals_of_peers(graph: FoldedGraph, costs: Sequence[Floats]) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if that of some ops is their own cost.

    `costs`: cost of each op, seconds, [rows, lanes] per block.
    """
    ops = graph.ops
    cost = graph.of_ops(costs)
    ranks, steps = ops.mesh.ranks, len(graph.steps)
    # A cell is all ops of a class on one rank in one step.
    cells, cell = combinations([ops.peer, ops.rank, ops.step])
    ops_in_cell = np.bincount(cell)
    total = np.bincount(cell, weights=cost).astype(np.float64)
    peer_of_cell, rank_of_cell = cells[:, 0], np.searchsorted(ranks, cells[:, 1])
    ideal = _usual_of_ops(ops.peer, ops.rendezvous >= 0, cost, len(ops.peer_names))[ops.peer]
    bounds = np.searchsorted(peer_of_cell, np.arange(len(ops.peer_names) + 1))
    usual_total = np.full(len(cells), np.nan)
    for peer in range(len(ops.peer_names)):
        of_peer = slice(bounds[peer], bounds[peer + 1])
        holders = np.unique(rank_of_cell[of_peer])
        expected = len(holders) if fill_an_axis(ops.mesh, holders) else len(ranks)
        present = bounds[peer + 1] - bounds[peer]
        if present == expected * steps and (ops_in_cell[of_peer] == ops_in_cell[bounds[peer]]).all():
            continue
        usual_total[of_peer] = lower_median_of(total[of_peer], expected * steps)
    occasional = ~np.isnan(usual_total[cell])
    ideal[occasional] = (usual_total / ops_in_cell)[cell[occasional]]
    if ops.comparable is not None:
        ideal[~ops.comparable] = cost[~ops.comparable]
        return tuple(ideal[block.op] for block in graph.blocks)
    return tuple(ideal[block.op[:, 0]] for block in graph.blocks)


def _usual_of_ops(peer: npt.NDArray[np.int32], transfers: npt.NDArray[np.bool_], cost: Floats, classes: int) -> Floats:
    """Mean, or median if the ops of the class are transfers, seconds, [classes]."""
    counts = np.bincount(peer, minlength=classes)
    usual: Floats = np.bincount(peer, weights=cost, minlength=classes) / np.maximum(counts, 1)
    synchronises = np.bincount(peer[transfers], minlength=classes) > 0
    transferred = np.flatnonzero(synchronises[peer])
    order, count = transferred[np.lexsort((cost[transferred], peer[transferred]))], counts[synchronises]
    first = np.cumsum(count) - count
    low, high = cost[order[first + (count - 1) // 2]], cost[order[first + count // 2]]
    usual[synchronises] = (low + high) / 2
    return usual


def fill_an_axis(mesh: Mesh, holders: Ints) -> bool:
    """True if, along some axis, all ranks next to a holder are holders too. `holders`: indices into `mesh.ranks`."""
    if len(holders) == len(mesh.ranks):
        return True
    for axis, size in enumerate(mesh.axes.values()):
        if size == 1:
            continue
        line = np.zeros(len(mesh.ranks), np.int64)
        for other, width in enumerate(mesh.axes.values()):
            if other != axis:
                line = line * width + mesh.coordinates[:, other]
        if np.isin(line, line[holders]).sum() == len(holders):
            return True
    return False
