"""What recording an event cost the host of a rank, measured on the recording itself.

In: the nested events of a rank. Out: a `ProfilerCost`, and what recording had cost its thread before each event.

A profiler takes its timestamps inside its own work, so most of its cost lies between events. Where a program does next
to nothing between two events, as between two operators that one operator calls in turn, the gap is the profiler's. Some
pairs of events do more in between than others; the cheapest pairs show the cost.

Such a gap is not all: arguments are copied for other operators than the cheapest, and the program runs with cold
caches. How much more it is was measured on jobs without a GPU (benchmarks/RESULTS.md), and scatters; that launches cost
more by the same factor is an assumption.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.trace.profiler_cost import ProfilerCost

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
#: The pace of a host is that of so many pairs; it is known from so many stretches on, and no faster than this.
_IN_STRETCH, _FEWEST_STRETCHES, _FASTEST = 100, 2, 0.2


class EventKind(IntEnum):
    """What is recorded."""

    NOTE = 0
    FUNCTION = 1
    OPERATOR = 2
    CALL = 3
    LAUNCH = 4


class Nested(NamedTuple):
    """The host events of a rank, by thread and begin: `begin`, `end`, microseconds; `name`: its number; `kind`;
    `parent`: the innermost event around each, -1 for none; [events].
    """

    thread: Int32s
    begin: Floats
    end: Floats
    name: Int32s
    kind: npt.NDArray[np.uint8]
    parent: Int32s

    @property
    def siblings(self) -> Ints:
        """The events that have no other inside and are followed by another of their kind and parent, by position."""
        parent, kind = self.parent, self.kind
        return np.flatnonzero((parent[1:] == parent[:-1]) & (parent[:-1] >= 0) & (kind[1:] == kind[:-1]))

    def gap(self, before: Ints) -> Floats:
        """How long after each of these events the next one begins, microseconds."""
        return np.maximum(self.begin[before + 1] - self.end[before], 0.0)


def profiler_cost(events: Nested, pace: Floats) -> ProfilerCost | None:
    """Measure the cost of recording at the usual pace; None if there are too few operators. `pace`: `pace_of_host`."""
    kind, name, parent, length = events.kind, events.name, events.parent, events.end - events.begin
    siblings = events.siblings

    def gap_between(what: EventKind) -> float:
        before = siblings[kind[siblings] == what]
        context = name[parent[before]] if what is EventKind.FUNCTION else name[before]
        return _cheapest(events.gap(before) / pace[before], context, name[before + 1])

    operator = gap_between(EventKind.OPERATOR)
    if np.isnan(operator):
        return None
    launches = np.flatnonzero(kind == EventKind.LAUNCH)
    last = launches[launches < len(kind) - 1]
    last = last[(parent[last] >= 0) & (events.begin[last + 1] >= events.end[parent[last]])]
    last = last[kind[parent[last]] == EventKind.OPERATOR]
    behind = _or_0(_cheapest((events.end[parent[last]] - events.end[last]) / pace[last], name[parent[last]]))
    leaves = np.flatnonzero((kind[:-1] == EventKind.FUNCTION) & (parent[1:] != np.arange(len(parent) - 1)))
    function = _or_0(gap_between(EventKind.FUNCTION) + _cheapest(length[leaves] / pace[leaves], name[leaves]))
    within = _SHARE_OF_LAUNCH * float(np.median(length[launches] / pace[launches])) if len(launches) else 0.0
    launch = OF_GAP * (_SIDES * behind + within)
    return ProfilerCost(
        operator=1e-6 * OF_GAP * operator,
        function=1e-6 * OF_FUNCTION_GAP * function,
        call=1e-6 * OF_GAP * _or_0(gap_between(EventKind.CALL)),
        launch=1e-6 * launch,
        before_launch=1e-6 * (launch - behind - within),
        in_launch=1e-6 * within,
        stacks=bool((kind == EventKind.FUNCTION).any()),
    )


def recorded_before(events: Nested, cost: ProfilerCost | None, pace: Floats) -> Floats:
    """Return what recording had cost the thread of each event before that, seconds, [events]; 0 if not known."""
    kind, thread = events.kind, events.thread
    if cost is None or not len(kind):
        return np.zeros(len(kind))
    each = np.array([0.0, cost.function, cost.operator, cost.call, cost.launch])[kind] * pace
    total = np.cumsum(each) - each
    begins = np.flatnonzero(np.diff(thread, prepend=thread[0] - 1))
    total -= np.repeat(total[begins], np.diff(np.append(begins, len(kind))))
    return np.asarray(total + np.where(kind == EventKind.LAUNCH, cost.before_launch * pace, 0.0))


def pace_of_host(events: Nested) -> Floats:
    """How much longer gaps between events are now than usual, [events]: at times, others use the cores or caches.

    Times in whole microseconds do not show it.
    """
    before, name = events.siblings, events.name
    before = before[(events.kind[before] == EventKind.OPERATOR) | (events.kind[before] == EventKind.FUNCTION)]
    stretches = len(before) // _IN_STRETCH
    if stretches < _FEWEST_STRETCHES or not (events.begin % 1).any():
        return np.ones(len(name))
    gaps, key = events.gap(before), name[before].astype(np.int64) * (int(name.max()) + 1) + name[before + 1]
    order = np.lexsort((gaps, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    count = np.diff(np.append(first, len(order)))
    usual = np.empty(len(before))
    usual[order] = np.repeat(gaps[order][first + count // 2], count)
    slower = np.divide(gaps, usual, out=np.ones(len(before)), where=usual > 0)
    pace = np.median(slower[: stretches * _IN_STRETCH].reshape(stretches, _IN_STRETCH), axis=1)
    stretch = np.minimum(np.searchsorted(before, np.arange(len(name))) // _IN_STRETCH, stretches - 1)
    return np.asarray(np.maximum(pace, _FASTEST)[stretch])


def _or_0(value: float) -> float:
    return 0.0 if np.isnan(value) else float(value)


def _cheapest(gaps: Floats, *contexts: Int32s) -> float:
    """Return the usual length of the shortest gaps, by context; nan if there are too few."""
    if len(gaps) < _FEWEST_PAIRS:
        return np.nan
    spread = np.linspace(0, len(gaps) - 1, min(len(gaps), _MOST_PAIRS)).astype(np.int64)
    gaps = gaps[spread]
    key = contexts[0][spread].astype(np.int64)
    for other in contexts[1:]:
        key = key * (int(other.max()) + 1) + other[spread]
    order = np.lexsort((gaps, key))
    gaps, key = gaps[order], key[order]
    first = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    count = np.diff(np.append(first, len(key)))
    rounded = not (gaps % 1).any()  # times in whole microseconds: only the mean of many tells
    often = count >= min(_FEWEST_PAIRS if rounded else _FEWEST, int(count.max()))
    first, count = first[often], count[often]
    typical = (gaps[first + (count - 1) // 2] + gaps[first + count // 2]) / 2
    if rounded:
        total = np.append(0.0, np.cumsum(gaps))
        typical = (total[first + count] - total[first]) / count
    cheapest = np.argsort(typical, kind="stable")
    enough = int(np.searchsorted(np.cumsum(count[cheapest]), _CHEAPEST * count.sum())) + 1
    chosen = np.concatenate([gaps[first[one] : first[one] + count[one]] for one in cheapest[:enough].tolist()])
    return float(chosen.mean() if rounded else np.median(chosen))
