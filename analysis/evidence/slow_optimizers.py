"""Slow machines by their optimizers, which do not depend on the lengths of sequences.

In: factors of computes, and of optimizers over those of their peers. Out: which worker of four is slow, which members
have long sequences, and how slow machines are whose computes lengths hide.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.evidence.significance import Episodes, episodes_of, most_telling, needed_nats
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import median, nan_mean, safe


class OptimizerThresholds(Struct, frozen=True):
    """When an optimizer is as slow as computes. `causes`: the benchmark of 582 simulated jobs."""

    #: A slow worker's optimizer, and each kind of its computes, exceeds the usual one by this share of the excess of
    #: its computes. Benchmark `causes`.
    share: float = 0.6
    #: Computes are as slow as the optimizers if they are slower by this share of that. Definition: nearer to that than
    #: to none.
    nearer: float = 0.5


OPTIMIZERS = OptimizerThresholds()


def slow_in_square(grid: Floats, optimizer: Floats, smallest: float) -> Floats:
    """With two stages on two DP ranks, how much slower the worker computes that its optimizer shows to be slow, 1
    elsewhere, [kinds, stages, steps, dp_ranks].

    A slow worker looks like the diagonally opposite one, except for the cost of their microbatches. Stages compared
    with each other show by how much one of the two is slow, whatever these cost; the optimizers show which one.
    """
    logs = np.log(np.where(grid > 0, grid, np.nan))
    of_stages = median(logs[:, 0] - logs[:, 1], (1, 2))
    slow = np.ones((len(grid), *optimizer.shape))
    for sign, diagonal in ((1, ((0, 0), (1, 1))), (-1, ((0, 1), (1, 0)))):
        beyond = sign * (of_stages[..., 0] - of_stages[..., 1])
        steps = beyond.min(axis=0) > np.log1p(smallest)
        if not steps.any():
            continue
        least = 1 + OPTIMIZERS.share * np.expm1(np.median(beyond[:, steps]))
        cells = [cell for cell in diagonal if np.median(optimizer[cell[0], steps, cell[1]]) > least]
        if len(cells) == 1:
            ((stage, dp_index),) = cells
            slow[:, stage, steps, dp_index] = np.exp(beyond[:, steps])
    return slow


def of_long_data(episodes: Episodes, over_peers: Floats, optimizer: Floats | None) -> Bools:
    """Members that have long sequences in their slow steps: all kinds of computes take longer, the optimizer does not,
    [members].

    `over_peers`: logs of slowness, [..., steps, dp_ranks]; `optimizer`: over that of peers, [steps, dp_ranks]. Without
    one, only steps that come and go are such chance: as much data since or until a step looks like a slower machine.
    """
    steps = episodes.slow.shape[1]
    slow = np.where(episodes.slow.T, 1.0, np.nan)
    by_kind = nan_mean(over_peers.reshape(-1, *slow.shape) * slow, (1,))
    of_data = by_kind.min(axis=0) > OPTIMIZERS.share * by_kind.max(axis=0)
    if optimizer is None:
        return np.asarray(of_data & ~episodes.slow.all(axis=1) & (episodes.since == 0) & (episodes.until == steps))
    slowness = median(optimizer * slow, (0,))
    return np.asarray(of_data & (slowness - 1 < OPTIMIZERS.share * np.expm1(episodes.level)))


def told_by_optimizers(
    episodes: Episodes, over_peers: Floats, optimizer: Floats | None, of_data: Bools, smallest: float
) -> tuple[Episodes, Floats]:
    """The episodes without those of long sequences, `of_data`, unless they last throughout, which is no chance; and the
    logs of slowness over peers. For members whose computes are as slow as their optimizers, as far as lengths let one
    see that, both are those of the optimizers.

    Shapes as in `of_long_data`.
    """
    by_chance = of_data & ~episodes.slow.all(axis=1)
    episodes = structs.replace(episodes, nats=np.where(by_chance, 0.0, episodes.nats))
    if optimizer is None or optimizer.shape[1] < 2:
        return episodes, over_peers
    level, members = np.log(safe(optimizer)), optimizer.shape[1]
    others = episodes_of(level.T, members).nats < needed_nats(members)
    if others.all() or not others.any():
        return episodes, over_peers
    level = level - level[:, others].mean()  # a slow half is not slow beside the mean of all
    alone = episodes_of(level.T, members)
    slow = alone.significant(smallest) & ~episodes.significant(smallest)
    where = (alone.slow & slow[:, None]).T
    if not where.any():
        return episodes, over_peers
    beyond_others = np.nanmean(over_peers[..., where]) - np.nanmean(over_peers[..., others])
    if beyond_others < OPTIMIZERS.nearer * level[where].mean():
        return episodes, over_peers
    alone = structs.replace(alone, nats=np.where(slow, alone.nats, 0.0))
    return most_telling([episodes, alone]), np.where(where, level, over_peers)
