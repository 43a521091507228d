"""Where the stages of a pipeline are idle, and what they wait for, on recorded times.

In: a `RecordedPipeline`. Out: `Places`, sums over its lanes. Every gap before a compute is cut at the end of what the
compute needs from another stage (before that, the stage waits for its `peer`) and at the end of the receive (until
then, for the `transfer`); the rest is the `host`'s. If a gathering of parameters ended last, it is a `collective`.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.recorded import RecordedPipeline
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.bubbles import PlaceOfIdle, ReasonOfIdle

PLACES: tuple[PlaceOfIdle, ...] = ("warm-up", "between", "drain")
REASONS: tuple[ReasonOfIdle, ...] = ("peer", "transfer", "collective", "host")
#: A gap of this many seconds can hold other work.
USABLE_S = 50e-6


class Places(Struct, frozen=True, eq=False):
    """Seconds, sums over lanes. `window_s`: from the first start to the last end of any compute. `work_s`, `usable_s`:
    [stages]. `idle_s`: [stages, places, reasons, 1 + stages], the last by what is waited for: no stage, or which.
    `overlap_s`: the most that computes of one stage overlap in one lane.
    """

    window_s: float
    work_s: Floats
    usable_s: Floats
    idle_s: Floats
    overlap_s: float


def find_places(recorded: RecordedPipeline) -> Places:
    """Name every idle interval of every stage."""
    order, stages = recorded.order, recorded.order.stages
    start, end = recorded.start, recorded.end
    begin, finish = start.min(axis=0), end.max(axis=0)
    last_stage = order.stage[end.argmax(axis=0)]
    work, usable = np.zeros(stages), np.zeros(stages)
    idle = np.zeros((stages, len(PLACES), len(REASONS), stages + 1))
    overlap = 0.0
    for stage in range(stages):
        rows = np.flatnonzero(order.stage == stage)
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        until = np.maximum.accumulate(end[here], axis=0)
        free = np.concatenate([begin[None], until[:-1]])  # from when on the stage has nothing else to do
        low, high = np.minimum(free, start[here]), start[here]
        overlap = max(overlap, float((free - low).sum(axis=0).max()))
        work[stage] = np.maximum(end[here] - np.maximum(start[here], free), 0).sum()
        needs = order.needs[here]
        needed = np.where(needs[:, None] >= 0, end[needs], -np.inf)
        arrived = np.maximum(recorded.arrived[here], needed)
        gathered = recorded.gathered[here] > arrived
        cuts = [low, *(np.clip(one, low, high) for one in (needed, arrived, recorded.gathered[here])), high]
        cuts[1], cuts[2] = (np.where(gathered, low, cut) for cut in cuts[1:3])
        cuts[3] = np.where(gathered, cuts[3], cuts[2])
        waits_for = np.where(needs >= 0, order.stage[needs] + 1, 0)
        place = np.minimum(np.arange(len(rows)), 1)
        nobody = np.zeros_like(waits_for)
        for reason, waits in enumerate((waits_for, waits_for, nobody, nobody)):
            np.add.at(idle[stage, :, reason], (place, waits), (cuts[reason + 1] - cuts[reason]).sum(axis=1))
        drain, gaps = finish - until[-1], high - low
        np.add.at(idle[stage, PLACES.index("drain"), REASONS.index("peer")], last_stage + 1, drain)
        usable[stage] = gaps[gaps > USABLE_S].sum() + drain[drain > USABLE_S].sum()
    return Places(float((finish - begin).sum()), work, usable, idle, overlap)
