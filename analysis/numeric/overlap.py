"""Which intervals overlap which.

In: intervals. Out: the pairs that overlap, and by how much.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints


def overlaps(
    begin: Floats, end: Floats, start: Floats, stop: Floats, lane: Ints, of_lane: Ints
) -> tuple[Ints, Ints, Floats]:
    """Return each overlap of one interval from `begin` to `end` with one of the others, on the same lane.

    The others do not overlap each other on their lane. Returns the numbers of both, and how long they overlap.
    """
    order = None
    ascending = np.diff(of_lane) > 0
    if not (ascending | ((np.diff(of_lane) == 0) & (np.diff(start) >= 0))).all():
        order = np.lexsort((start, of_lane))
        start, stop, of_lane = start[order], stop[order], of_lane[order]
    first, last = np.zeros(len(begin), np.int64), np.zeros(len(begin), np.int64)
    for one in np.unique(lane):
        here, (low, high) = np.flatnonzero(lane == one), np.searchsorted(of_lane, [one, one + 1])
        first[here] = low + np.searchsorted(stop[low:high], begin[here], side="right")
        last[here] = low + np.searchsorted(start[low:high], end[here], side="left")
    count = np.maximum(last - first, 0)
    number = np.repeat(np.arange(len(begin)), count)
    at = np.arange(len(number)) - np.repeat(np.cumsum(count) - count - first, count)
    shared = np.minimum(stop[at], end[number]) - np.maximum(start[at], begin[number])
    return number, at if order is None else order[at], shared
