"""The bubbles of a job: places, causes and prices, of all its lanes.

In: a `JobReplay` and the schedules to price. Out: `Bubbles`, the data of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from tracekit.analysis.bubbles.asked import AskedSchedule
from tracekit.analysis.bubbles.causes_of_idle import SWITCHES, Factors, factors_of, find_causes
from tracekit.analysis.bubbles.places import PLACES, REASONS, Places, find_places
from tracekit.analysis.bubbles.price import V_SHAPED, assumptions, plans
from tracekit.analysis.bubbles.recorded import RecordedPipeline, recorded_pipelines
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import LayoutError
from tracekit.report.bubbles import (
    Bubbles,
    CauseOfIdle,
    Idle,
    IdleOfStage,
    LeftOut,
    LostTo,
    PricedSchedule,
    StageBubbles,
)

#: Computes of a stage that overlap by more than this share of the window do not follow each other.
MOST_OVERLAP = 1e-3


def find_bubbles(replay: JobReplay, schedules: Sequence[str] = ()) -> Bubbles:
    """Find where the stages of a pipeline are idle, why, and what these schedules would cost.

    Raises SelectionError for a schedule that does not exist.
    """
    asked = [AskedSchedule.parse(text) for text in schedules]
    recorded, incomplete = recorded_pipelines(replay)
    steps = product(replay.left_out_steps, replay.graph.dp_ranks)  # in which a DP rank is missing
    left_out = [LeftOut(*lane) for lane in sorted({*replay.graph.dropped_lanes, *steps, *incomplete})]
    lanes = sum(each.lanes for each in recorded)
    if not lanes:
        return _unknown("no step has all computes of every microbatch on all stages", left_out)
    places = [find_places(each) for each in recorded]
    window = sum(each.window_s for each in places) / lanes
    if max(each.overlap_s for each in places) > MOST_OVERLAP * window:
        return _unknown("computes of one stage overlap, so that its idle time is not defined", left_out)
    work, idle = (_mean([getattr(each, name) for each in places], lanes) for name in ("work_s", "idle_s"))
    idle_s = float(idle.sum()) / len(work)
    v_shaped = any(each.order.v_shaped for each in recorded)
    factors = [factors_of(each) for each in recorded]
    outside = float(replay.recorded_step_times().mean()) - window
    return Bubbles(
        window_s=window,
        work_s=float(work.mean()),
        idle_s=idle_s,
        share=idle_s / window if window else 0.0,
        places=[
            Idle(place, reason, float(idle[:, at, why].sum()) / len(work))
            for at, place in enumerate(PLACES)
            for why, reason in enumerate(REASONS)
            if idle[:, at, why].any()
        ],
        by_stage=_stages(recorded, places, idle, lanes),
        causes=[] if v_shaped else _causes(recorded, factors, idle_s),
        causes_unknown=V_SHAPED if v_shaped else None,
        schedules=[_priced(recorded, factors, each, window, outside) for each in asked],
        unknown=None,
        left_out=left_out,
    )


def _unknown(why: str, left_out: list[LeftOut]) -> Bubbles:
    return Bubbles(None, None, None, None, [], [], [], why, [], why, left_out)


def _mean(of_groups: Sequence[Floats], lanes: int) -> Floats:
    """The mean over all lanes of what is a sum over the lanes of each group."""
    total: Floats = np.sum(of_groups, axis=0) / lanes
    return total


def _stages(
    recorded: Sequence[RecordedPipeline], places: Sequence[Places], idle: Floats, lanes: int
) -> list[StageBubbles]:
    work, usable = (_mean([getattr(each, name) for each in places], lanes) for name in ("work_s", "usable_s"))
    peaks = _mean([each.order.peak_microbatches * each.lanes for each in recorded], lanes)
    return [
        StageBubbles(
            pp_rank=stage,
            work_s=float(work[stage]),
            idle_s=float(idle[stage].sum()),
            usable_s=float(usable[stage]),
            peak_microbatches=float(peaks[stage]),
            places=[
                IdleOfStage(
                    PLACES[at], REASONS[why], int(other) - 1 if other else None, float(idle[stage, at, why, other])
                )
                for at, why, other in np.argwhere(idle[stage] > 0)
            ],
        )
        for stage in range(len(work))
    ]


def _causes(recorded: Sequence[RecordedPipeline], factors: Sequence[Factors], idle_s: float) -> list[LostTo]:
    lanes = sum(each.lanes for each in recorded)
    by_pipeline = [find_causes(each, apart) for each, apart in zip(recorded, factors, strict=True)]
    lost: dict[CauseOfIdle, float] = {
        switch: sum(of[switch] * each.lanes for of, each in zip(by_pipeline, recorded, strict=True)) / lanes
        for switch in SWITCHES
    }
    lost["host"] = idle_s - sum(lost.values())
    return [LostTo(cause, lost[cause]) for cause in sorted(lost, key=lambda cause: -lost[cause])]


def _priced(
    recorded: Sequence[RecordedPipeline],
    factors: Sequence[Factors],
    asked: AskedSchedule,
    window: float,
    outside: float,
) -> PricedSchedule:
    """One row. `outside`: seconds of a step outside the window."""
    try:
        planned = [plans(each, apart, asked) for each, apart in zip(recorded, factors, strict=True)]
    except LayoutError as error:
        return PricedSchedule(asked.text, None, None, None, None, None, None, str(error), None)
    lanes = [each.lanes for each in recorded]
    windows_s = [[plan.window_s for plan in of_lanes] for of_lanes in planned]
    low, high = (sum(map(bound, windows_s)) / sum(lanes) for bound in (min, max))
    held = [of_lanes[0].order.peak_microbatches * count for of_lanes, count in zip(planned, lanes, strict=True)]
    assumed = (assumptions(each, of_lanes) for each, of_lanes in zip(recorded, planned, strict=True))
    exact_s = low if low == high else None
    return PricedSchedule(
        schedule=asked.text,
        window_s=exact_s,
        step_time_s=None if exact_s is None else exact_s + outside,
        low_s=low,
        high_s=high,
        saved_s=None if exact_s is None else window - exact_s,
        peak_microbatches=_mean(held, sum(lanes)).tolist(),
        refused=None,
        assumes="; ".join(dict.fromkeys(text for words in assumed for text in words)),
    )
