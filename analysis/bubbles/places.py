"""Where the stages of a pipeline are idle, and what they wait for, on recorded times.

In: a `RecordedPipeline`. Out: `Places`, sums over its lanes. Every gap before a compute is cut at the end of what the
compute needs from another stage (before that, the stage waits for its `peer`) and at the end of the receive (until
then, for the `transfer`); the rest is the `host`'s. If a gathering of parameters ended last, it is a `collective`.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.recorded import RecordedPipeline
from tracekit.analysis.numeric.arrays import Floats, Ints
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


class Gaps(Struct, frozen=True, eq=False):
    """The gap before each compute of a stage, in all lanes. `cuts`: where it begins, where each of `REASONS` ends, [5,
    computes, lanes]. `waits_for`: the stage whose result the compute needs, -1: none, [computes]. `work_s`: time in
    which nothing else computes, `overlap_s`: time in which the compute before runs, too, [computes, lanes]. `until`:
    when the last compute ends, [lanes].
    """

    cuts: Floats
    waits_for: Ints
    work_s: Floats
    overlap_s: Floats
    until: Floats


def gaps_of(recorded: RecordedPipeline, stage: int) -> Gaps:
    """Cut every gap of one stage."""
    order, start, end = recorded.order, recorded.start, recorded.end
    rows = np.flatnonzero(order.stage == stage)
    own = slice(int(rows[0]), int(rows[-1]) + 1)
    until = np.maximum.accumulate(end[own], axis=0)
    free = np.concatenate([start.min(axis=0)[None], until[:-1]])  # from when on the stage has nothing else to do
    low, high = np.minimum(free, start[own]), start[own]
    needs = order.needs[own]
    needed = np.where(needs[:, None] >= 0, end[needs], -np.inf)
    arrived = np.maximum(recorded.arrived[own], needed)
    gathered = recorded.gathered[own] > arrived
    cuts = np.stack([low, *(np.clip(one, low, high) for one in (needed, arrived, recorded.gathered[own])), high])
    cuts[1:3] = np.where(gathered, low, cuts[1:3])
    cuts[3] = np.where(gathered, cuts[3], cuts[2])
    return Gaps(
        cuts=cuts,
        waits_for=np.where(needs >= 0, order.stage[needs], -1),
        work_s=np.maximum(end[own] - np.maximum(high, free), 0),
        overlap_s=free - low,
        until=until[-1],
    )


def find_places(recorded: RecordedPipeline) -> Places:
    """Name every idle interval of every stage."""
    order, stages = recorded.order, recorded.order.stages
    begin, finish = recorded.start.min(axis=0), recorded.end.max(axis=0)
    last_stage = order.stage[recorded.end.argmax(axis=0)]
    work, usable = np.zeros(stages), np.zeros(stages)
    idle = np.zeros((stages, len(PLACES), len(REASONS), stages + 1))
    overlap = 0.0
    for stage in range(stages):
        gaps = gaps_of(recorded, stage)
        overlap = max(overlap, float(gaps.overlap_s.sum(axis=0).max()))
        work[stage] = gaps.work_s.sum()
        cuts, waits_for = gaps.cuts, gaps.waits_for + 1
        place = np.minimum(np.arange(len(waits_for)), 1)
        nobody = np.zeros_like(waits_for)
        for reason, waits in enumerate((waits_for, waits_for, nobody, nobody)):
            np.add.at(idle[stage, :, reason], (place, waits), (cuts[reason + 1] - cuts[reason]).sum(axis=1))
        drain, idle_s = finish - gaps.until, cuts[-1] - cuts[0]
        np.add.at(idle[stage, PLACES.index("drain"), REASONS.index("peer")], last_stage + 1, drain)
        usable[stage] = idle_s[idle_s > USABLE_S].sum() + drain[drain > USABLE_S].sum()
    return Places(float((finish - begin).sum()), work, usable, idle, overlap)
