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
from tracekit.analysis.bubbles.causes import Factors, inverse
from tracekit.analysis.bubbles.order import BACKWARD, WEIGHT, Order
from tracekit.analysis.bubbles.recorded import RecordedPipeline
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.errors import LayoutError

#: The share of the weight gradients in a whole backward, least and most, if it is not known.
WEIGHT_SHARES = (1 / 3, 1 / 2)
V_SHAPED = "the recorded schedule is V-shaped, which is supported for places only"


class Price(Struct, frozen=True, eq=False):
    """Seconds, sums over lanes: `low_s` and `high_s` of the window. `order`: that of the new schedule. `assumes`: what
    the price rests on, in words.
    """

    low_s: float
    high_s: float
    order: Order
    assumes: list[str]


def price(recorded: RecordedPipeline, factors: Factors, asked: AskedSchedule) -> Price:
    """The window under that schedule. Raises LayoutError if it cannot run in this pipeline."""
    shares = _shares(recorded, asked)
    planned = [_planned(recorded, factors, asked, share) for share in shares]
    windows = [float(one.order.windows(one.durations, one.order.cell, *one.between).sum()) for one in planned]
    order = planned[0].order
    assumes = ["transfers as usual on their link"]
    if order.virtual_stages != recorded.order.virtual_stages:
        assumes.append("layers spread evenly within a stage")
    if None not in shares:
        assumes.append(f"W takes {' to '.join(f'{share:.0%}' for share in shares)} of the whole backward")
    return Price(min(windows), max(windows), order, assumes)


def rescheduled(recorded: RecordedPipeline, factors: Factors, asked: AskedSchedule) -> RecordedPipeline:
    """The pipeline as it would run under that schedule; if the share of the weight gradients is unknown, the least.

    Raises LayoutError if it cannot run in this pipeline.
    """
    planned = _planned(recorded, factors, asked, _shares(recorded, asked)[0])
    order, computes = planned.order, len(planned.order.kind)
    found = order.timeline(planned.durations, order.cell, *planned.between)
    arrived = np.full((computes, recorded.lanes), -np.inf)
    arrived[order.received] = found.end[computes:]
    return RecordedPipeline(
        order=order,
        dp_rank=recorded.dp_rank,
        start=found.start[:computes],
        end=found.end[:computes],
        arrived=arrived,
        gathered=np.full_like(arrived, -np.inf),
        transfer=found.end[computes:] - found.start[computes:],
    )


class _Planned(Struct, frozen=True, eq=False):
    """The order of a schedule and what it takes: `durations`, [rows, lanes], and `between`, transfers and delays."""

    order: Order
    durations: Floats
    between: tuple[Floats, Floats]


def _shares(recorded: RecordedPipeline, asked: AskedSchedule) -> Sequence[float | None]:
    """The shares of the weight gradients in the whole backward to assume; None: as recorded."""
    if not asked.splits_backward or (recorded.kinds > WEIGHT and asked.weight is None):
        return (None,)
    return WEIGHT_SHARES if asked.weight is None else (asked.weight,)


def _planned(recorded: RecordedPipeline, factors: Factors, asked: AskedSchedule, share: float | None) -> _Planned:
    if recorded.order.v_shaped:
        raise LayoutError(V_SHAPED)
    order = asked.order(recorded.order.stages, recorded.order.microbatches)
    durations, delays = _redistributed(recorded, factors, order.virtual_stages)
    transfers = recorded.usual_transfer[order.kind[order.received], order.stage[order.needs[order.received]]]
    if share is not None or not asked.splits_backward:
        durations, delays = _backward_whole(durations, delays)
    if share is not None:
        whole = durations[BACKWARD]
        durations = np.stack([durations[0], whole * (1 - share), whole * share])
        delays = np.stack([*delays, delays[BACKWARD]])
    launch = delays.reshape(-1, recorded.lanes)[order.cell]
    return _Planned(order, durations.reshape(-1, recorded.lanes), (transfers, launch))


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
