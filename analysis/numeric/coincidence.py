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
