"""Whether a rank is slower than its peers by more than the noise of the recording explains.

In: a replay of a GPU op trace and a rank. Out: what makes it stand out. The tests compare how far ranks are behind the
pace of their peers, step by step, at the ops on the critical path of this rank: noise elsewhere does not lengthen the
recording. There are three tests, for three ways to stand out:

- *In every step.* How much further behind the rank is in a part of a step than ranks usually are, compared between
  steps (paired t-test): a rank that is behind in one step and ahead in the next is behind by chance. For a single step,
  its parts are compared.
- *Far from all others.* The rank against the others in the same step, as an outlier among all other samples (externally
  studentised residual). One bad step suffices if no other rank has one like it. Needs three ranks.
- *At one place of the step.* One part of all steps, against all other ranks there (two-sample t-test with the combined
  variance). Proves only that part. Finds a pause that is small compared with the noise of whole steps. Needs three
  ranks, too, and two steps.

Steps, and parts of a step, have different variances, which Satterthwaite's degrees of freedom combine. The ops of each
cause are tested separately, because host noise differs from kernel noise. Some rank is always the slowest at something,
so probabilities are multiplied by the number of ranks and causes (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.student import student_tail

if TYPE_CHECKING:
    from tracekit.analysis.gpu.pace import PaceOfPeers

#: Each test names a rank by mistake with at most this probability.
LARGEST_CHANCE = 0.05
#: The number of parts of all steps together that are compared.
_PARTS = 24


def causes_that_stand_out(
    pace: PaceOfPeers, rank: int, causes: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.bool_]]:
    """The causes that a test confirms, each reduced to the ops for which it does.

    `causes`: the ops that each of them covers, [ops].
    """
    ranks = pace.graph.ops.mesh.ranks
    index, steps = int(np.searchsorted(ranks, rank)), len(pace.marked_steps)
    parts, largest = -(-_PARTS // steps), LARGEST_CHANCE / (len(ranks) * len(causes))
    confirmed = []
    for chosen in causes:
        behind = pace.behind(rank, chosen, parts)
        if min(_in_step_after_step(behind, index), _from_all_others(behind.sum(axis=2), index)) <= largest:
            confirmed.append(chosen)
        elif (proven := np.flatnonzero(_at_one_place(behind, index) * parts <= largest)).size:
            confirmed.append(chosen & np.isin(pace.part_of_step(parts), proven))
    return confirmed


def is_behind(behind: Floats, index: int) -> bool:
    """Whether rank `index` is further `behind` than the others, [ranks, samples], by more than chance."""
    repeated = _in_step_after_step(behind[:, :, None], index) if behind.shape[1] > 1 else 1.0
    return len(behind) * min(repeated, _from_all_others(behind, index)) <= LARGEST_CHANCE


def stands_out_once(took: Floats, index: int) -> bool:
    """Whether rank `index` did something that happens once later than all others did, seconds, [ranks]."""
    return len(took) * _from_all_others(took[:, None], index) <= LARGEST_CHANCE


def _in_step_after_step(behind: Floats, index: int) -> float:
    """The probability that rank `index` is this far `behind`, [ranks, steps, parts], in this many steps."""
    more = behind[index] - np.median(np.delete(behind, index, axis=0), axis=0)
    more = more if len(more) > 1 else more.T
    return _chance(more.sum(), len(more) * _variances(more), len(more))


def _from_all_others(behind: Floats, index: int) -> float:
    """The probability that rank `index` is this far `behind`, [ranks, steps], all others; 1 for two ranks."""
    others = np.delete(behind, index, axis=0)
    if len(others) < 2:
        return 1.0
    excess = behind[index].sum() - others.sum(axis=1).mean()
    return _chance(excess, (1 + 1 / len(others)) * _variances(others), len(others))


def _at_one_place(behind: Floats, index: int) -> Floats:
    """The probability that rank `index` is this far `behind`, [ranks, steps, parts], in each part; [parts]."""
    own, others = behind[index], np.delete(behind, index, axis=0).reshape(-1, behind.shape[2])
    if len(behind) < 3 or len(own) < 2:
        return np.ones(behind.shape[2])
    freedom = len(own) + len(others) - 2
    squares = len(own) * own.var(axis=0) + len(others) * others.var(axis=0)
    error = np.sqrt(squares / freedom * (1 / len(own) + 1 / len(others)))
    excess = own.mean(axis=0) - others.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = [student_tail(t, freedom) for t in (excess / error).tolist()]
    return np.where(error > 0, chance, np.where(excess > 0, 0.0, 1.0))


def _variances(samples: Floats) -> Floats:
    """The variance of each column of [samples, columns]."""
    return np.asarray(samples.var(axis=0, ddof=1))


def _chance(excess: float, variances: Floats, samples: int) -> float:
    """The probability of such an excess by chance; its variance is the sum of `variances` of `samples`."""
    variance = float(variances.sum())
    if not variance > 0:
        return 0.0 if excess > 0 else 1.0
    freedom = variance**2 / float((variances**2).sum()) * (samples - 1)
    return student_tail(excess / math.sqrt(variance), freedom)
