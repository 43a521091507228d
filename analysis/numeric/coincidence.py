"""Do ops begin just after other ops end, more often than by chance?

In: unexplained gaps, and how soon before the end of each gap something else ended. Out: which gaps were waits for it. A
single gap proves nothing, but the same gap on all ranks and in all steps can: Fisher's method combines their
probabilities.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Floats, Ints

#: The gaps of a group count as waits if chance explains them in fewer than one in this many jobs.
_ONE_IN = 1000
_SMALLEST = 1e-12


def waits_beyond_chance(gap: Floats, late: Floats, ends: Ints, group: Ints) -> npt.NDArray[np.bool_]:
    """Which gaps end because something else ended, [gaps].

    `gap`: length of each, seconds. `ends`: how many things ended in it. `late`: seconds from the last of these ends to
    the end of the gap. `group`: the same number for the same gap in other steps and on other ranks. If ends were spread
    evenly over a gap, the last one would be this close with probability 1 - (1 - late / gap) ^ ends.
    """
    from scipy.special import gammaincc  # imports in 0.2 s; most jobs do not need it

    inside = np.clip(late / np.maximum(gap, np.finfo(float).tiny), 0.0, 1.0)
    chance = np.where(ends > 0, 1.0 - (1.0 - inside) ** ends, 1.0)
    _, number, members = np.unique(group, return_inverse=True, return_counts=True)
    surprise = np.bincount(number, weights=-np.log(np.maximum(chance, _SMALLEST)), minlength=len(members))
    return np.asarray((gammaincc(members, surprise) * _ONE_IN < 1.0)[number] & (ends > 0))
