"""Microbatches dealt over DP ranks so that all have the same work.

In: the cost of each microbatch of a step. Out: which DP rank runs which, each as many as before. The bound is the
mean: no deal can give the busiest DP rank less.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints

#: Swaps tried per step before the deal is good enough.
SWAPS = 200
#: A swap must bring the busiest DP rank down by this share of its load.
SMALLEST_GAIN = 1e-4


def deal_step(cost: Floats) -> Ints:
    """Deal the microbatches of one step.

    `cost`: [microbatches, dp_ranks], relative or seconds. Returns positions in `cost.ravel()`, same shape: DP rank d
    runs those in column d. Longest first, round by round, each round's longest to the least loaded; then swaps between
    the busiest DP rank and others while they help.
    """
    flat = cost.ravel()
    order = np.argsort(-flat, kind="stable").reshape(cost.shape)
    load = np.zeros(cost.shape[1])
    dealt = np.empty(cost.shape, np.int64)
    for turn, items in enumerate(order):
        least_first = np.argsort(load, kind="stable")
        dealt[turn, least_first] = items
        load[least_first] += flat[items]
    for _ in range(SWAPS):
        if not _swap(flat, dealt, load):
            break
    return dealt


def _swap(flat: Floats, dealt: Ints, load: Floats) -> bool:
    """Swap one microbatch of the busiest DP rank where it helps most; False where none does.

    Works on `deal_step`'s own arrays.
    """
    busiest = int(load.argmax())
    partners = np.argsort(load, kind="stable")[:8]
    partners = partners[partners != busiest]
    if not len(partners):
        return False
    mine = flat[dealt[:, busiest]]
    # What moves from the busiest to each partner by each swap, [mine, partners, theirs].
    moved = mine[:, None, None] - flat[dealt[:, partners]].T[None]
    gap = (load[busiest] - load[partners])[None, :, None]
    higher = np.maximum(load[busiest] - moved, load[partners][None, :, None] + moved)
    higher = np.where((moved > 0) & (moved < gap), higher, np.inf)
    best = np.unravel_index(int(higher.argmin()), higher.shape)
    if not higher[best] < load[busiest] * (1 - SMALLEST_GAIN):
        return False
    mine_at, partner_at, theirs_at = (int(at) for at in best)
    partner = int(partners[partner_at])
    amount = moved[best]
    dealt[mine_at, busiest], dealt[theirs_at, partner] = dealt[theirs_at, partner], dealt[mine_at, busiest]
    load[busiest] -= amount
    load[partner] += amount
    return True


def deal_job(cost: Floats) -> Ints:
    """Deal every step: `cost` [microbatches, steps, dp_ranks] to positions in each step's [microbatches x dp_ranks]."""
    return np.stack([deal_step(cost[:, step]) for step in range(cost.shape[1])], axis=1)


def dealt_cost(cost: Floats, deal: Ints) -> Floats:
    """The cost at each place after the deal, [microbatches, steps, dp_ranks]."""
    microbatches, steps, dp_ranks = cost.shape
    by_step = cost.transpose(1, 0, 2).reshape(steps, microbatches * dp_ranks)
    new = np.take_along_axis(by_step, deal.transpose(1, 0, 2).reshape(steps, -1), axis=1)
    return new.reshape(steps, microbatches, dp_ranks).transpose(1, 0, 2)
