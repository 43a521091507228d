"""Whether ops begin behind the end of others too often for chance.

In: gaps that nothing explains, and how soon before their end something else ended. Out: which gaps were waits for it.
What one gap cannot prove, the same gap on all ranks and in all steps can: Fisher's method joins their probabilities.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Floats, Ints

#: Gaps of a group count as waits where chance makes them end so soon in fewer than one in this many jobs.
_ONE_IN = 1000
_SMALLEST = 1e-12


def waits_beyond_chance(gap: Floats, late: Floats, ends: Ints, group: Ints) -> npt.NDArray[np.bool_]:
    """Which gaps end with the end of something else, [gaps].

    `gap`: length of each, seconds. `ends`: how many things ended in it. `late`: seconds from the last of these to the
    end of the gap. `group`: equal numbers for what is the same gap in other steps and on other ranks. If ends fell
    anywhere in a gap, the last one would be as close with probability 1 - (1 - late / gap) ^ ends.
    """
    from scipy.special import gammaincc  # an import of a fifth of a second, which most jobs do without

    inside = np.clip(late / np.maximum(gap, np.finfo(float).tiny), 0.0, 1.0)
    chance = np.where(ends > 0, 1.0 - (1.0 - inside) ** ends, 1.0)
    _, number, members = np.unique(group, return_inverse=True, return_counts=True)
    surprise = np.bincount(number, weights=-np.log(np.maximum(chance, _SMALLEST)), minlength=len(members))
    return np.asarray((gammaincc(members, surprise) * _ONE_IN < 1.0)[number] & (ends > 0))
