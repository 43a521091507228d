"""Arrays of integers: types for signatures, codes for values, directed graphs, and coincidences.

In: columns and arrays. Out: codes from 0 for values or combinations of them, so that what follows works on integers;
components of graphs; gaps that end because something else ended, more often than by chance. Most sets of values are
dense: a lookup table then numbers them ten times faster than sorting millions of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
#: Above this many table entries per value, a table is slower than sorting.
_PLACES_PER_VALUE = 8
_LARGEST_NUMBER, _LARGEST_SPAN = 1 << 62, 1 << 31
#: The gaps of a group count as waits if chance explains them in fewer than one in this many jobs. Definition.
_ONE_IN = 1000
_SMALLEST = 1e-12


def number(value: float | None) -> float | None:
    """A figure as JSON has it: None if it is unknown, undefined or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


def dense(values: Ints | Int32s) -> Ints:
    """A code for each value, in the order of the values and without gaps; equal values get equal codes."""
    lowest = int(values.min(initial=0))
    places = int(values.max(initial=0)) - lowest + 1
    if places > _PLACES_PER_VALUE * (len(values) + 1024):
        return np.asarray(np.unique(values, return_inverse=True)[1], np.int64)
    occurs = np.zeros(places, np.bool_)
    place = values - lowest if lowest else values
    occurs[place] = True
    code = np.cumsum(occurs, dtype=np.int64)
    code -= 1
    return code.take(place)


def combinations(codes: Sequence[Ints] | Sequence[Int32s]) -> tuple[Ints, Ints]:
    """The combinations of codes that occur, in ascending order, [combinations, codes], and the index of each row's
    combination, [rows].
    """
    number = np.zeros(len(codes[0]), np.int64)
    for code in codes:
        least = int(code.min(initial=0))
        number = dense(number * (int(code.max(initial=0)) - least + 1) + code - least)
    row = np.empty(int(number.max(initial=-1)) + 1, np.int64)  # one that has the combination
    row[number] = np.arange(len(number))
    return np.stack([code[row] for code in codes], axis=1), number


def codes_of(column: pl.Series) -> tuple[Ints, int]:
    """A code for each value of a column, and the number of possible codes; null is a value, the last one."""
    whole = column.cast(pl.Categorical).to_physical() if column.dtype in (pl.String, pl.Categorical) else column
    code = whole.cast(pl.Int64).fill_null(0).to_numpy()
    lowest, values = int(code.min(initial=0)), int(code.max(initial=0)) - int(code.min(initial=0)) + 2
    if values - 2 >= _LARGEST_SPAN:
        code = dense(code)
        lowest, values = 0, int(code.max(initial=0)) + 2
    code = code - lowest if lowest else code
    return (np.where(whole.is_null().to_numpy(), values - 1, code) if whole.null_count() else code), values


def numbered(*columns: pl.Series) -> Ints:
    """A code for each combination of values, without gaps, [rows]; null is a value."""
    codes, size = codes_of(columns[0])
    for column in columns[1:]:
        code, values = codes_of(column)
        if size * values >= _LARGEST_NUMBER:
            codes = dense(codes)
            size = int(codes.max(initial=0)) + 1
        codes = codes * values + code
        size *= values
    return dense(codes)


def or_null(numbers: np.ndarray) -> pl.Series:
    """The numbers, null for those below 0."""
    return pl.Series(numbers).set(pl.Series(numbers < 0), None)


def of_each(function: Callable[..., float], *columns: pl.Series) -> np.ndarray:
    """A function of the values of each row, called once for each combination of them, [rows]."""
    number = numbered(*columns)
    row = np.zeros(int(number.max(initial=-1)) + 1, np.int64)  # one that has the combination
    row[number] = np.arange(len(number))
    values = zip(*(column.gather(row) for column in columns), strict=True)
    return np.array([function(*row_values) for row_values in values])[number]


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


def waits_beyond_chance(gap: Floats, late: Floats, ends: Ints, group: Ints) -> npt.NDArray[np.bool_]:
    """Which gaps end because something else ended, [gaps].

    `gap`: length of each, seconds. `ends`: how many things ended in it. `late`: seconds from the last of these ends to
    the end of the gap. `group`: the same number for the same gap in other steps and on other ranks. If ends were spread
    evenly over a gap, the last one would be this close with probability 1 - (1 - late / gap) ^ ends.

    A single gap proves nothing, but the same gap on all ranks and in all steps can: Fisher's method combines their
    probabilities.
    """
    inside = np.clip(late / np.maximum(gap, np.finfo(float).tiny), 0.0, 1.0)
    chance = np.where(ends > 0, 1.0 - (1.0 - inside) ** ends, 1.0)
    _, number, members = np.unique(group, return_inverse=True, return_counts=True)
    surprise = np.bincount(number, weights=-np.log(np.maximum(chance, _SMALLEST)), minlength=len(members))
    return (_erlang_tail(members, surprise.astype(float)) * _ONE_IN < 1.0)[number] & (ends > 0)


def _erlang_tail(counts: Ints, sums: Floats) -> Floats:
    """The probability that so many exponential variables of mean 1 add up to more than `sums`, [groups].

    e^-x (1 + x + x^2 / 2! + ...), a term for each variable.
    """
    first = np.cumsum(counts) - counts
    power = np.arange(counts.sum()) - np.repeat(first, counts)
    log_factorial = np.cumsum(np.log(np.maximum(np.arange(counts.max(initial=1)), 1)))
    x = np.repeat(np.maximum(sums, np.finfo(float).tiny), counts)
    terms = np.exp(power * np.log(x) - x - log_factorial[power])
    return np.asarray(np.add.reduceat(terms, first))
