"""How far the clock of each rank is ahead, from collectives that end for all members at the same moment.

In: `Matches`. Out: `ClockOffsets`. A rank's offset is the median of how much later it saw its collectives end than the
median member did. If ranks share no group with all others, offsets and true ends are fitted in turn until they agree:
least absolute error, coordinate by coordinate. Rooted collectives (broadcast) end when the root is done and give no
information.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.numeric.arrays import Floats, Ints

#: Profilers record nothing finer than this, seconds.
_AGREED_S = 1e-9
_ROUNDS = 100
#: Ratio of the standard error of a median to the median absolute deviation, before dividing by sqrt(n).
_ERROR_OF_MEDIAN = 1.4826 * 1.2533


@dataclass(frozen=True, slots=True, eq=False)
class ClockOffsets:
    """Seconds, [ranks]: `ahead`, how far a rank's clock is ahead of the common time; `uncertainty`, one standard error.

    `collectives`: the number of collectives behind each rank's offset; 0 if there were none and its clock is trusted.
    """

    ranks: tuple[int, ...]
    ahead: Floats
    uncertainty: Floats
    collectives: Ints

    def of(self, rank: np.ndarray) -> Floats:
        """How far the clock of each of these ranks is ahead, seconds."""
        return np.asarray(self.ahead[np.searchsorted(self.ranks, rank)])


def measure_offsets(matches: Matches, ranks: tuple[int, ...]) -> ClockOffsets:
    """The offsets of all ranks."""
    telling = matches.synchronising[matches.instance]
    rank = np.searchsorted(ranks, matches.rank[telling])
    _, instance = np.unique(matches.instance[telling], return_inverse=True)
    end, count = matches.end[telling], len(ranks)
    ahead, true_end = np.zeros(count), np.zeros(0)
    for _ in range(_ROUNDS if len(end) else 0):
        true_end = _medians(end - ahead[rank], instance, int(instance.max()) + 1)
        before, ahead = ahead, _medians(end - true_end[instance], rank, count)
        if np.abs(ahead - before).max() <= _AGREED_S:
            break
    collectives = np.bincount(rank, minlength=count)
    residual = np.abs(end - true_end[instance] - ahead[rank]) if len(end) else end
    spread = _medians(residual, rank, count)
    uncertainty = np.where(collectives > 0, _ERROR_OF_MEDIAN * spread / np.sqrt(np.maximum(collectives, 1)), np.nan)
    return ClockOffsets(tuple(ranks), ahead, uncertainty, collectives)


def _medians(values: Floats, group: Ints, groups: int) -> Floats:
    """The median of the values of each group, 0 for an empty one, [groups]."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=groups)
    first = np.cumsum(counts) - counts
    medians = np.zeros(groups)
    filled = counts > 0
    low, high = first[filled] + (counts[filled] - 1) // 2, first[filled] + counts[filled] // 2
    ordered = values[order]
    medians[filled] = (ordered[low] + ordered[high]) / 2
    return medians
