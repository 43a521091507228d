"""What recording an event cost the host of a rank, measured on the recording itself.

In: the nested events of a rank. Out: a `RecordingCost`, and what recording had cost each thread by each of its calls.

A profiler takes its timestamps inside its own work, so most of its cost lies between events. Where a program does next
to nothing between two events, as between two operators that one operator calls in turn, the gap is the profiler's. Some
pairs of events do more in between than others; the cheapest pairs show the cost.

Such a gap is not all: arguments are copied for other operators than the cheapest, and the program runs with cold
caches. How much more it is was measured with torch.profiler on jobs without a GPU, with and without shapes and stacks
(`benchmarks recording-cost`), and holds for machines of any speed, because it is a factor.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tracekit.trace.recording_cost import RecordingCost

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: What recording an event costs, by the gap that shows: operators and launches; functions of Python, between which the
#: interpreter works too.
OF_GAP, OF_FUNCTION_GAP = 2.3, 0.6
#: CUPTI makes a launch take twice as long, and times the calls before it (which device, which stream) as those behind
#: it (which error, which device); it does not write them down.
_SHARE_OF_LAUNCH, _SIDES = 0.5, 2
#: The cheapest pairs are those with this share of all pairs; those seen less often than `_FEWEST` do not count, and
#: with fewer than `_FEWEST_PAIRS` nothing is known.
_CHEAPEST, _FEWEST, _FEWEST_PAIRS = 0.1, 5, 20
#: So many pairs, spread over the recording, are enough.
_MOST_PAIRS = 200_000
#: The pace of a host is that of so many pairs.
_IN_STRETCH = 100


class Kind(IntEnum):
    """What is recorded."""

    NOTE = 0
    FUNCTION = 1
    OPERATOR = 2
    CALL = 3
    LAUNCH = 4


def recording_cost(begin: Floats, end: Floats, name: Int32s, kind: npt.NDArray[np.uint8], parent: Int32s, pace: Floats) -> RecordingCost | None:
    """Measure the cost of recording; None if there are too few operators.

    Events, by thread and begin: `begin`, `end`, microseconds; `parent`: the innermost event around each, -1 for none.
    """
    following = np.arange(1, len(begin))
    before = following - 1
    siblings = (parent[following] == parent[before]) & (parent[before] >= 0)

    def gap(between: Kind) -> float:
        pairs = before[siblings & (kind[before] == between) & (kind[following] == between)]
        context = name[parent[pairs]] if between is Kind.FUNCTION else name[pairs]
        return _cheapest((begin[pairs + 1] - end[pairs]) / pace[pairs], context, name[pairs + 1])

    operator = gap(Kind.OPERATOR)
    if np.isnan(operator):
        return None
    last = before[(kind[before] == Kind.LAUNCH) & (parent[before] >= 0) & (begin[following] >= end[parent[before]])]
    last = last[kind[parent[last]] == Kind.OPERATOR]
    behind = float(np.nan_to_num(_cheapest((end[parent[last]] - end[last]) / pace[last], name[parent[last]])))
    leaves = before[(kind[before] == Kind.FUNCTION) & (parent[following] != before)]
    function = np.nan_to_num(gap(Kind.FUNCTION) + _cheapest((end - begin)[leaves] / pace[leaves], name[leaves]))
    launches = np.flatnonzero(kind == Kind.LAUNCH)
    calls_us = (end - begin)[launches] / pace[launches]
    within = _SHARE_OF_LAUNCH * float(np.median(calls_us)) if len(launches) else 0.0
    launch = OF_GAP * (_SIDES * behind + within)
    costs = (OF_GAP * operator, OF_FUNCTION_GAP * function, OF_GAP * np.nan_to_num(gap(Kind.CALL)), launch,
             launch - behind - within, within)  # fmt: skip
    return RecordingCost(*(1e-6 * float(cost) for cost in costs), bool((kind == Kind.FUNCTION).any()))


def recorded_before(
    cost: RecordingCost | None, kind: npt.NDArray[np.uint8], thread: Int32s, pace: Floats
) -> Floats:
    """Return what recording had cost the thread of each event before that, seconds, [events]; 0 if not known."""
    if cost is None or not len(kind):
        return np.zeros(len(kind))
    each = np.array([0.0, cost.function, cost.operator, cost.call, cost.launch])[kind]
    each *= pace
    total = np.cumsum(each) - each
    begins = np.flatnonzero(np.diff(thread, prepend=thread[0] - 1))
    total -= np.repeat(total[begins], np.diff(np.append(begins, len(kind))))
    return np.asarray(total + np.where(kind == Kind.LAUNCH, cost.before_launch * pace, 0.0))


def pace_of_host(begin: Floats, end: Floats, name: Int32s, kind: npt.NDArray[np.uint8], parent: Int32s) -> Floats:
    """How much longer gaps between events are now than usual, [events]: at times, others use the cores or caches."""
    before = np.arange(len(begin) - 1)
    chosen = (parent[1:] == parent[:-1]) & (parent[:-1] >= 0) & (kind[1:] == kind[:-1])
    pairs = before[chosen & ((kind[:-1] == Kind.OPERATOR) | (kind[:-1] == Kind.FUNCTION))]
    if len(pairs) < 2 * _IN_STRETCH:
        return np.ones(len(begin))
    gaps = np.maximum(begin[pairs + 1] - end[pairs], 0.0)
    key = name[pairs].astype(np.int64) * (int(name.max()) + 1) + name[pairs + 1]
    order = np.lexsort((gaps, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    count = np.diff(np.append(first, len(order)))
    usual = np.empty(len(pairs))
    usual[order] = np.repeat(gaps[order][first + count // 2], count)
    slower = np.divide(gaps, usual, out=np.ones(len(pairs)), where=usual > 0)
    stretches = len(pairs) // _IN_STRETCH
    pace = np.median(slower[: stretches * _IN_STRETCH].reshape(stretches, _IN_STRETCH), axis=1)
    stretch = np.minimum(np.searchsorted(pairs, np.arange(len(begin))) // _IN_STRETCH, stretches - 1)
    return np.asarray(pace[stretch])


def _cheapest(gaps: Floats, *contexts: Int32s) -> float:
    """Return the median of the shortest gaps, by context; nan if there are too few."""
    if len(gaps) < _FEWEST_PAIRS:
        return np.nan
    spread = np.linspace(0, len(gaps) - 1, min(len(gaps), _MOST_PAIRS)).astype(np.int64)
    gaps = np.maximum(gaps[spread], 0.0)
    key = contexts[0][spread].astype(np.int64)
    for other in contexts[1:]:
        key = key * (int(other.max()) + 1) + other[spread]
    order = np.lexsort((gaps, key))
    gaps, key = gaps[order], key[order]
    first = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    count = np.diff(np.append(first, len(key)))
    often = count >= min(_FEWEST, int(count.max()))
    first, count = first[often], count[often]
    median = (gaps[first + (count - 1) // 2] + gaps[first + count // 2]) / 2
    cheapest = np.argsort(median, kind="stable")
    enough = int(np.searchsorted(np.cumsum(count[cheapest]), _CHEAPEST * count.sum())) + 1
    chosen = np.concatenate([gaps[first[one] : first[one] + count[one]] for one in cheapest[:enough].tolist()])
    return float(np.median(chosen))
