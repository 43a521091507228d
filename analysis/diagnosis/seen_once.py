"""Losses that were seen once: a stall in one or two steps is no rate.

In: what a cause costs each step. Out: the steps in which it was seen, if they are too few to expect it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.finding import SeenOnce

#: A loss was seen once if more than this share of it lies in one or two steps, beyond what the others lose.
MOST_OF_IT = 0.5
#: In this many steps it was seen at most, if they are fewer than half of all.
MOST_STEPS = 2
#: Another step that loses more than this share of what these lose has it, too.
SHARE_OF_ANOTHER = 0.25


def seen_once(steps: Sequence[int], lost_s: Floats) -> SeenOnce | None:
    """The steps in which most of a loss lies, None if it returns. `lost_s`: of each of `steps`, seconds, [steps]."""
    total_s = float(lost_s.clip(min=0).sum())
    for count in range(1, MOST_STEPS + 1):
        if 2 * count >= len(steps):
            return None
        largest = np.sort(np.argsort(-lost_s, kind="stable")[:count])
        others = np.delete(lost_s, largest)
        others_s = max(float(np.median(others)), 0.0)
        beyond_s = lost_s[largest] - others_s
        alone = others.max() - others_s <= SHARE_OF_ANOTHER * beyond_s.min()
        if alone and beyond_s.sum() > MOST_OF_IT * total_s:
            return SeenOnce(tuple(int(steps[at]) for at in largest), tuple(beyond_s.tolist()), others_s, len(steps))
    return None
