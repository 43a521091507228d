"""What the recorded pipeline would take under another schedule.

In: a `RecordedPipeline` and an `AskedSchedule`. Out: the `Price`. The work is that of the recording, lane by lane and
microbatch by microbatch; the order, and what waits for what, are made new. If the number of model chunks
changes, the layers of the model are taken as spread evenly over each recorded stage, except for what the first and the
last have beyond the median, which stays at the ends of the model (embedding and loss). A slow worker stays slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.asked import AskedSchedule
from tracekit.analysis.bubbles.causes_of_idle import Factors, inverse
from tracekit.analysis.bubbles.order import BACKWARD, WEIGHT, ComputeOrder
from tracekit.analysis.bubbles.recorded import RecordedPipeline
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.base.errors import LayoutError

#: The share of the weight gradients in a whole backward, least and most, if it is not known.
WEIGHT_SHARES = (1 / 3, 1 / 2)
V_SHAPED = "the recorded schedule is V-shaped, which is supported for places only"


class TimedSchedule(Struct, frozen=True, eq=False):
    """A schedule with what its ops take: `durations`, [rows, lanes], `transfers` and launch `delays`, as in
    `ComputeOrder.windows`. `share`: of the weight gradients in the whole backward, if assumed.
    """

    order: ComputeOrder
    durations: Floats
    transfers: Floats
    delays: Floats
    share: float | None

    @property
    def window_s(self) -> float:
        """From the first start to the last end of any compute, seconds, the sum over lanes."""
        return float(self.order.windows(self.durations, self.order.cell, self.transfers, self.delays).sum())

    def pipeline(self, dp_rank: Int32s) -> RecordedPipeline:
        """What would be recorded. `dp_rank`: of the lanes."""
        order, computes = self.order, len(self.order.kind)
        timeline = order.timeline(self.durations, order.cell, self.transfers, self.delays)
        arrived = np.full((computes, len(dp_rank)), -np.inf)
        arrived[order.received] = timeline.end[computes:]
        return RecordedPipeline(
            order=order,
            dp_rank=dp_rank,
            start=timeline.start[:computes],
            end=timeline.end[:computes],
            arrived=arrived,
            gathered=np.full_like(arrived, -np.inf),
            transfer=timeline.end[computes:] - timeline.start[computes:],
        )


def plans(recorded: RecordedPipeline, factors: Factors, asked: AskedSchedule) -> list[TimedSchedule]:
    """That schedule; if the share of its weight gradients is unknown, with the least and the most of `WEIGHT_SHARES`.

    Raises LayoutError if it cannot run in this pipeline.
    """
    if recorded.order.v_shaped:
        raise LayoutError(V_SHAPED)
    shares: Sequence[float | None] = WEIGHT_SHARES if asked.weight is None else (asked.weight,)
    if not asked.splits_backward or (recorded.kinds > WEIGHT and asked.weight is None):
        shares = (None,)  # as recorded
    order = asked.order(recorded.order.stages, recorded.order.microbatches)
    work, delay = _redistributed(recorded, factors, order.virtual_stages)
    if shares != (None,) or not asked.splits_backward:
        work, delay = _backward_whole(work, delay)
    transfers = recorded.usual_transfer[order.kind[order.received], order.stage[order.needs[order.received]]]
    return [_plan(order, work, delay, transfers, share) for share in shares]


def assumptions(recorded: RecordedPipeline, planned: Sequence[TimedSchedule]) -> list[str]:
    """What the price rests on, in words."""
    assumes = ["transfers as usual on their link"]
    if planned[0].order.virtual_stages != recorded.order.virtual_stages:
        assumes.append("layers spread evenly within a stage")
    if shares := [f"{one.share:.0%}" for one in planned if one.share is not None]:
        assumes.append(f"W takes {' to '.join(shares)} of the whole backward")
    return assumes


def _plan(order: ComputeOrder, work: Floats, delay: Floats, transfers: Floats, share: float | None) -> TimedSchedule:
    if share is not None:
        whole = work[BACKWARD]
        work = np.stack([work[0], whole * (1 - share), whole * share])
        delay = np.stack([*delay, delay[BACKWARD]])
    lanes = work.shape[-1]
    return TimedSchedule(order, work.reshape(-1, lanes), transfers, delay.reshape(-1, lanes)[order.cell], share)


def _backward_whole(work: Floats, delay: Floats) -> tuple[Floats, Floats]:
    """Backwards with their weight gradients, which are one op then."""
    if len(work) <= WEIGHT:
        return work, delay
    return (
        np.stack([work[0], work[BACKWARD] + work[WEIGHT]]),
        np.stack([delay[0], (delay[BACKWARD] + delay[WEIGHT]) / 2]),
    )


def _redistributed(recorded: RecordedPipeline, factors: Factors, virtual_stages: int) -> tuple[Floats, Floats]:
    """Work and launch delays of that many virtual stages, seconds, [kinds, virtual stages, microbatches, lanes]."""
    old, stages = recorded.order.virtual_stages, recorded.order.stages
    work, delay = recorded.duration, recorded.delay
    if old == virtual_stages:
        return work, delay
    share = _overlaps(old, virtual_stages)
    # A worker's factor belongs to the rank: mean over its chunks.
    of_rank = factors.worker.reshape(recorded.kinds, -1, stages, recorded.lanes).mean(axis=1)
    usual = work * inverse(factors.worker)[:, :, None]
    median = np.median(factors.level, axis=1, keepdims=True)
    ends = np.zeros(factors.level.shape)
    for end in (0, -1):
        ends[:, end] = np.maximum(1 - median * inverse(factors.level[:, end : end + 1 or None]), 0)[:, 0]
    spread = np.einsum("nv,kvml->knml", share, usual * (1 - ends[:, :, None]))
    for end in (0, -1):
        spread[:, end] += usual[:, end] * ends[:, end, None]
    again = np.tile(of_rank, (1, virtual_stages // stages, 1))[:, :, None]
    mean_delay: Floats = np.einsum("nv,kvml->knml", share / share.sum(axis=1, keepdims=True), delay)
    return spread * again, mean_delay


def _overlaps(old: int, new: int) -> Floats:
    """The share of each old part of the model that each new one has, [new, old]; parts are equally long."""
    ends = np.arange(1, new + 1)[:, None] * old / new, np.arange(1, old + 1)[None]
    begins = np.arange(new)[:, None] * old / new, np.arange(old)[None]
    return np.asarray(np.maximum(np.minimum(*ends) - np.maximum(*begins), 0.0))
