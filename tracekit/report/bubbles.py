"""The bubbles of a pipeline: where its stages are idle, why, and what other schedules would cost.

In: what `analysis/bubbles/` found. Out: `Bubbles`, plain data for JSON and all renderers. docs/plans.md explains it.

All figures are seconds per lane (one DP rank in one step, all its stages), means over the lanes.
"""

from __future__ import annotations

from typing import Literal

import polars as pl
from msgspec import Struct

from tracekit.report.plain_data import frame_of

PlaceOfIdle = Literal["warm-up", "between", "drain"]
ReasonOfIdle = Literal["peer", "transfer", "collective", "host"]
CauseOfIdle = Literal["transfers", "jitter", "workers", "stages", "dependency", "host"]


class Idle(Struct, frozen=True):
    """Idle time of all stages, their mean, at one place for one reason."""

    place: PlaceOfIdle
    reason: ReasonOfIdle
    idle_s: float


class IdleOfStage(Struct, frozen=True):
    """Idle time of one stage at one place for one reason. `waits_for`: the stage that it waits for, if any."""

    place: PlaceOfIdle
    reason: ReasonOfIdle
    waits_for: int | None
    idle_s: float


class StageBubbles(Struct, frozen=True):
    """One stage. `usable_s`: idle time in gaps that are long enough for other work. `peak_microbatches`: the most
    microbatches whose activations it holds at any time.
    """

    pp_rank: int
    work_s: float
    idle_s: float
    usable_s: float
    peak_microbatches: float
    places: list[IdleOfStage]


class LostTo(Struct, frozen=True):
    """The part of the idle time that is due to one cause."""

    cause: CauseOfIdle
    lost_s: float


class PricedSchedule(Struct, frozen=True):
    """What the pipeline would take under another schedule.

    `schedule`: as asked for. `window_s`, `step_time_s`, `saved_s`: null if only the bounds `low_s` and `high_s` of the
    window are known. `peak_microbatches`: of each stage. `refused`: why there are no figures, null if there are.
    `assumes`: what the price rests on.
    """

    schedule: str
    window_s: float | None
    step_time_s: float | None
    low_s: float | None
    high_s: float | None
    saved_s: float | None
    peak_microbatches: list[float] | None
    refused: str | None
    assumes: str | None


class LeftOut(Struct, frozen=True):
    """A lane that is not part of the figures."""

    step: int
    dp_rank: int


class Bubbles(Struct, frozen=True):
    """The idle time of the stages of a pipeline.

    `window_s`: from the first start to the last end of any compute. `share`: of the window. `causes`: largest first.
    `unknown`: why there are no figures, `causes_unknown`: why there are no causes; null if there are.
    """

    window_s: float | None
    work_s: float | None
    idle_s: float | None
    share: float | None
    places: list[Idle]
    by_stage: list[StageBubbles]
    causes: list[LostTo]
    causes_unknown: str | None
    schedules: list[PricedSchedule]
    unknown: str | None
    left_out: list[LeftOut]


def frames(bubbles: Bubbles) -> dict[str, pl.DataFrame]:
    """Where each stage is idle, why, and what schedules would cost; of each schedule the most microbatches held."""
    rows = {stage.pp_rank: frame_of(stage.places, IdleOfStage) for stage in bubbles.by_stage}
    rows = rows or {0: frame_of([], IdleOfStage)}
    held = [max(row.peak_microbatches) if row.peak_microbatches else None for row in bubbles.schedules]
    return {
        "bubbles_stages": frame_of(bubbles.by_stage, StageBubbles),
        "bubbles_places": pl.concat(
            frame.select(pl.lit(stage, pl.Int64).alias("pp_rank"), pl.all()) for stage, frame in rows.items()
        ),
        "bubbles_causes": frame_of(bubbles.causes, LostTo),
        "bubbles_schedules": frame_of(bubbles.schedules, PricedSchedule).with_columns(
            peak_microbatches=pl.Series(held, dtype=pl.Float64)
        ),
    }
