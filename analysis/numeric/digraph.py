"""Directed graphs, as edges between numbered nodes: what is connected, and what can be reached."""

from __future__ import annotations

import numpy as np

from tracekit.analysis.numeric.arrays import Int32s, Ints
from tracekit.analysis.numeric.codes import dense


def adjacency(sources: Ints | Int32s, targets: Ints | Int32s, nodes: int) -> tuple[Int32s, Int32s]:
    """Edges grouped by source: where each node's targets begin, [nodes + 1], and the targets, [edges]."""
    order = np.argsort(sources, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=nodes))])
    return begins.astype(np.int32), targets[order].astype(np.int32, copy=False)


def strong_components(sources: Ints | Int32s, targets: Ints | Int32s, nodes: int) -> Ints:
    """The strongly connected component of each node, [nodes], by Tarjan's algorithm (1972)."""
    first, after = (part.tolist() for part in adjacency(sources, targets, nodes))
    following, discovered, earliest, component = first[:-1], [-1] * nodes, [-1] * nodes, [-1] * nodes
    count, unassigned = 0, []
    for root in np.flatnonzero(np.diff(first)).tolist():
        path = [root] if discovered[root] < 0 else []
        while path:
            node = path[-1]
            if discovered[node] < 0:
                discovered[node] = earliest[node] = count
                count += 1
                unassigned.append(node)
            if following[node] < first[node + 1]:
                target = after[following[node]]
                following[node] += 1
                if discovered[target] < 0:
                    path.append(target)
                elif component[target] < 0:
                    earliest[node] = min(earliest[node], earliest[target])
                continue
            path.pop()
            if path:
                earliest[path[-1]] = min(earliest[path[-1]], earliest[node])
            while earliest[node] == discovered[node] and component[node] < 0:
                component[unassigned.pop()] = node
    alone = np.array(component, np.int64)  # a node that no edge leaves or enters is a component, too
    return dense(np.where(alone < 0, np.arange(nodes), alone))


def reachable(first: Int32s, targets: Int32s, node: int) -> Ints:
    """The nodes that edges lead to from `node`, sorted, `node` among them; the edges as of `adjacency`."""
    reached = np.zeros(len(first) - 1, np.bool_)
    reached[node] = True
    pending = [node]
    while pending:
        current = pending.pop()
        new = targets[first[current] : first[current + 1]]
        new = new[~reached[new]]
        reached[new] = True
        pending.extend(new.tolist())
    return np.flatnonzero(reached)
