"""Deal microbatches over DP ranks so that every DP rank has the same work.

In: the cost of each microbatch of a step. Out: which DP rank runs which microbatch. Every DP rank keeps its number of
microbatches. No deal can give the busiest DP rank less than the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heapreplace

import numpy as np

from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import microbatch_cost
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Place

#: Stop improving the deal of a step after this many swaps.
SWAPS = 200
#: A swap must reduce the load of the busiest DP rank by at least this share.
SMALLEST_GAIN = 1e-4


def deal_step(cost: Floats) -> Ints:
    """Deal the microbatches of one step, the longest first, each to the DP rank with the least load that has room.

    `cost`: [microbatches, dp_ranks], relative or in seconds. Returns positions in `cost.ravel()`, of the same shape: DP
    rank d runs those in column d, in this order.
    """
    flat = cost.ravel()
    each, dealt = flat.tolist(), [[0] * cost.shape[1] for _ in range(len(cost))]
    least = [(0.0, dp_rank, 0) for dp_rank in range(cost.shape[1])]  # load and number of microbatches so far
    for item in np.argsort(-flat, kind="stable").tolist():
        load, dp_rank, count = least[0]
        dealt[count][dp_rank] = item
        if count + 1 < len(dealt):
            heapreplace(least, (load + each[item], dp_rank, count + 1))
        else:
            heappop(least)
    return np.array(dealt, np.int64).reshape(cost.shape)


def best_deal_of_step(cost: Floats, dealt: Ints) -> Ints:
    """As `dealt` by `deal_step`; then microbatches change places with those of the busiest DP rank while that helps."""
    flat, dealt = cost.ravel(), dealt.copy()
    load = flat[dealt].sum(axis=0)
    for _ in range(SWAPS):
        if not _swap(flat, dealt, load):
            break
    return dealt


def _swap(flat: Floats, dealt: Ints, load: Floats) -> bool:
    """Make the swap that helps the busiest DP rank most; return False if no swap helps.

    Changes the arrays of `best_deal_of_step` in place.
    """
    busiest = int(load.argmax())
    partners = np.argsort(load, kind="stable")[:8]
    partners = partners[partners != busiest]
    if not len(partners):
        return False
    costs = flat[dealt[:, busiest]]
    # The load that each swap moves from the busiest DP rank to each partner, [mine, partners, theirs].
    moved = costs[:, None, None] - flat[dealt[:, partners]].T[None]
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
    """The cost of the microbatch at each place after the deal, [microbatches, steps, dp_ranks]."""
    microbatches, steps, dp_ranks = cost.shape
    by_step = cost.transpose(1, 0, 2).reshape(steps, microbatches * dp_ranks)
    new = np.take_along_axis(by_step, deal.transpose(1, 0, 2).reshape(steps, -1), axis=1)
    return new.reshape(steps, microbatches, dp_ranks).transpose(1, 0, 2)


def balance_plans(job: PipelineSubject, causes: Sequence[Cause]) -> Iterator[Plan]:
    """Microbatches dealt anew over the DP ranks of each step, for those of `causes` that make them uneven."""
    profile = job.profile
    if not causes or profile is None:
        return
    cost = microbatch_cost(job)
    load, deal = cost.sum(axis=0), deal_job(cost)
    better = [best_deal_of_step(cost[:, step], deal[:, step]) for step in range(cost.shape[1])]
    dealt, best = dealt_cost(cost, deal), dealt_cost(cost, np.stack(better, axis=1))
    elastic = profile.elasticity[:, :, :, None, None, None]
    change = Scale(job.table, (1 + elastic * (dealt - 1)) / safe(1 + elastic * (cost - 1)))
    cause = max(causes, key=lambda finding: finding.saved_s)
    gone = [one.change for one in causes if one.change is not None]
    bound_s = float(job.step_times(gone).mean())
    offset = job.attribution.recorded_s - job.unchanged_s
    yield Plan(
        "balance-sequences",
        "Deal microbatches over DP ranks by cost in the sampler: by the sum of squared sequence lengths, not by count",
        Place(),
        change,
        details={
            "busiest_over_mean_now": float((load.max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_then": float((dealt.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "busiest_over_mean_best": float((best.sum(axis=0).max(axis=1) / safe(load.mean(axis=1))).mean()),
            "bound_step_s": bound_s + offset,
            "assumes": "same cost on any DP rank; the longest first, each to the DP rank with the least work",
        },
        cause=cause,
    )
