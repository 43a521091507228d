"""Places experts on ranks: as jobs do by default, and with replicas of those that have most tokens.

In: tokens of each expert. Out: pairs of expert and rank. Replicas of an expert share its tokens equally.

The expert with most tokens per replica gets the next replica. Replicas are packed by falling load onto the rank that
has least, then two of them change places as long as that lowers the load of the heaviest rank. With groups of experts,
the same is done with groups and nodes first, so that a group stays on one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.experts.loads import Loads
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.base.errors import SelectionError
from tracekit.report.experts import PlacedLayer, Placement


def default_placement(experts: int, ranks: int) -> Placement:
    """Experts in order on ranks in order, equally many on each. Raises SelectionError if that cannot be."""
    if experts % ranks:
        raise SelectionError(f"{experts} experts cannot be divided among {ranks} ranks equally")
    return [[expert, expert * ranks // experts] for expert in range(experts)]


def loads_of_ranks(tokens: Floats, placement: Placement, ranks: int) -> Floats:
    """The tokens of each rank, [any, ranks], from those of each expert, [any, experts]."""
    share = np.zeros((tokens.shape[-1], ranks))
    for expert, rank in placement:
        share[expert, rank] += 1
    return np.asarray(tokens @ (share / np.maximum(share.sum(axis=1, keepdims=True), 1)))


def balanced_placement(tokens: Floats, ranks: int, slots: int, nodes: int = 1, groups: int = 1) -> Placement:
    """Place experts with these tokens, [experts], in `slots` slots, equally many on each rank.

    `groups`: of experts in order, each on one of `nodes` equal runs of ranks. Raises SelectionError if that cannot be.
    """
    experts = len(tokens)
    for whole, part, what in (
        (slots, ranks, "slots among {} ranks"),
        (ranks, nodes, "ranks among {} nodes"),
        (groups, nodes, "groups among {} nodes"),
        (experts, groups, "experts among {} groups"),
    ):
        if part < 1 or whole % part:
            raise SelectionError(f"{whole} {what.format(part)}: not equally many; choose a multiple of {part}")
    if slots < experts:
        raise SelectionError(f"{slots} slots for {experts} experts; each needs at least one")
    members = np.arange(experts).reshape(groups, -1)
    node_of = _packed(tokens[members].sum(axis=1), nodes) if nodes > 1 else np.zeros(groups, np.int64)
    placement: Placement = []
    for node in range(nodes):
        on_node, width = members[node_of == node].ravel(), ranks // nodes
        if len(on_node) > slots // nodes:
            raise SelectionError(
                f"{slots // nodes} slots on a node for {len(on_node)} experts; each needs at least one"
            )
        counts = _replicas(tokens[on_node], slots // nodes)
        expert = np.repeat(np.arange(len(on_node)), counts)
        rank = _packed((tokens[on_node] / counts)[expert], width)
        placement += [[int(on_node[one]), node * width + int(at)] for one, at in zip(expert, rank, strict=True)]
    return sorted(placement)


def placed_layers(loads: Loads, ranks: int, slots: int, nodes: int, groups: int) -> list[PlacedLayer]:
    """Place the experts of each layer by their mean load over the steps, as `balanced_placement` does."""
    layers = []
    for layer, tokens in zip(loads.layers.tolist(), loads.tokens.mean(axis=0), strict=True):
        placement = balanced_placement(tokens, ranks, slots, nodes, groups)
        load = loads_of_ranks(tokens, placement, ranks)
        layers.append(PlacedLayer(layer, placement, float(load.max() / (load.mean() or 1.0))))
    return layers


def _replicas(tokens: Floats, slots: int) -> Ints:
    """How many slots each expert gets, [experts]."""
    counts = np.ones(len(tokens), np.int64)
    for _ in range(slots - len(tokens)):
        counts[int((tokens / counts).argmax())] += 1
    return counts


def _packed(load: Floats, bins: int) -> Ints:
    """The bin of each item, [items], equally many in each, so that the fullest has little."""
    size, bin_of = len(load) // bins, np.empty(len(load), np.int64)
    held, total = np.zeros(bins, np.int64), np.zeros(bins)
    for item in np.argsort(-load, kind="stable").tolist():
        free = np.flatnonzero(held < size)
        bin_of[item] = best = int(free[total[free].argmin()])
        held[best] += 1
        total[best] += load[item]
    while (swap := _better_swap(load, bin_of, total)) is not None:
        first, second = swap
        moved = load[first] - load[second]
        total[bin_of[first]] -= moved
        total[bin_of[second]] += moved
        bin_of[first], bin_of[second] = bin_of[second], bin_of[first]
    return bin_of


def _better_swap(load: Floats, bin_of: Ints, total: Floats) -> Sequence[int] | None:
    """Items whose exchange lowers the fullest bin most, and fills no other as much; None if there are none."""
    full = int(total.argmax())
    candidates, others = np.flatnonzero(bin_of == full), np.flatnonzero(bin_of != full)
    if not len(others):
        return None
    moved = load[candidates][:, None] - load[others]
    after = np.maximum(total[full] - moved, total[bin_of[others]] + moved)
    best = int(after.argmin())
    if not after.flat[best] < total[full] * (1 - 1e-12):
        return None
    return int(candidates[best // len(others)]), int(others[best % len(others)])
