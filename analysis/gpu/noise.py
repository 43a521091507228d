"""Whether a rank is slower than its peers by more than the recording's own noise explains.

In: a replay of a GPU op trace and a rank. Out: what it stands out by. Compared is by how much ranks are behind the pace
of their peers, step by step, at those ops that are on the critical path of this rank: noise elsewhere makes no
recording longer. Three tests, for three ways to stand out:

- *In step after step.* By how much the rank is further behind in a part of a step than ranks usually are, compared
  between steps (paired t test): who is behind in one step and ahead in the next is behind by chance. Of a single step,
  its parts are compared.
- *From all others.* The rank against the others in the same step, as an outlier against all other samples (externally
  studentised residual). One bad step is enough if no other rank has one like it. It takes three ranks.
- *At one place of the step.* In one part of all steps, against all other ranks there (t test of two samples, variance
  of both together). Only that part is proven then. This finds a pause that is small beside the noise of whole steps. It
  takes three ranks, too, and two steps.

Steps, and parts of a step, have variances of their own: Satterthwaite's degrees of freedom join them. What each cause
of lateness covers is tested apart, for the noise of hosts is not that of kernels. Some rank is always the slowest at
something: probabilities count once for each rank and cause (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracekit.analysis.gpu.pace import PaceOfPeers
from tracekit.analysis.numeric.arrays import Floats

#: Each test takes some rank for slow by mistake this often, at most.
LARGEST_CHANCE = 0.05
#: So many parts of all steps together are compared.
_PARTS = 24


def causes_that_stand_out(
    pace: PaceOfPeers, rank: int, causes: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.bool_]]:
    """Those of the causes for which some test says so, as far as it does.

    `causes`: the ops that each of them covers, [ops].
    """
    ranks = pace.graph.ops.mesh.ranks
    at, steps = int(np.searchsorted(ranks, rank)), len(pace.marked_steps)
    parts, largest = -(-_PARTS // steps), LARGEST_CHANCE / (len(ranks) * len(causes))
    found = []
    for chosen in causes:
        behind = pace.behind(rank, chosen, parts)
        if min(_in_step_after_step(behind, at), _from_all_others(behind.sum(axis=2), at)) <= largest:
            found.append(chosen)
        elif (proven := np.flatnonzero(_at_one_place(behind, at) * parts <= largest)).size:
            found.append(chosen & np.isin(pace.part_of_step(parts), proven))
    return found


def stands_out_once(took: Floats, at: int) -> bool:
    """Whether what the rank `at` did once, it did later than all others, seconds, [ranks]."""
    return len(took) * _from_all_others(took[:, None], at) <= LARGEST_CHANCE


def _in_step_after_step(behind: Floats, at: int) -> float:
    """How probable it is that the rank `at` is so far `behind`, [ranks, steps, parts], in so many steps."""
    more = behind[at] - np.median(np.delete(behind, at, axis=0), axis=0)
    more = more if len(more) > 1 else more.T
    return _chance(more.sum(), len(more) * _variances(more), len(more))


def _from_all_others(behind: Floats, at: int) -> float:
    """How probable it is that the rank `at` is so far `behind`, [ranks, steps], all others; 1 for two ranks."""
    others = np.delete(behind, at, axis=0)
    if len(others) < 2:
        return 1.0
    excess = behind[at].sum() - others.sum(axis=1).mean()
    return _chance(excess, (1 + 1 / len(others)) * _variances(others), len(others))


def _at_one_place(behind: Floats, at: int) -> Floats:
    """How probable it is that the rank `at` is so far `behind`, [ranks, steps, parts], in each part; [parts]."""
    from scipy.special import stdtr

    mine, others = behind[at], np.delete(behind, at, axis=0).reshape(-1, behind.shape[2])
    if len(behind) < 3 or len(mine) < 2:
        return np.ones(behind.shape[2])
    freedom = len(mine) + len(others) - 2
    squares = len(mine) * mine.var(axis=0) + len(others) * others.var(axis=0)
    error = np.sqrt(squares / freedom * (1 / len(mine) + 1 / len(others)))
    excess = mine.mean(axis=0) - others.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = stdtr(freedom, -excess / error)
    return np.where(error > 0, chance, np.where(excess > 0, 0.0, 1.0))


def _variances(samples: Floats) -> Floats:
    """Of each column of [samples, columns]."""
    return np.asarray(samples.var(axis=0, ddof=1))


def _chance(excess: float, variances: Floats, samples: int) -> float:
    """The probability of such an excess where there is none; its variance is the sum of `variances` of `samples`."""
    from scipy.special import stdtr  # an import of a fifth of a second, which most jobs do without

    variance = float(variances.sum())
    if not variance > 0:
        return 0.0 if excess > 0 else 1.0
    freedom = variance**2 / float((variances**2).sum()) * (samples - 1)
    return float(stdtr(freedom, -excess / np.sqrt(variance)))
