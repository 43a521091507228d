"""One step of a pipeline as bars, a row for each stage: what it computes, and what it waits for in between.

In: a `JobReplay`, a step and the schedules to draw below it. Out: `DrawnSchedule`s, the recorded one first, and the
timeline of a report that shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.bubbles.bubbles import REASONS, factors_of, gaps_of, plans
from tracekit.analysis.bubbles.schedules import AskedSchedule, RecordedPipeline, recorded_pipelines
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import SelectionError
from tracekit.base.text import seconds
from tracekit.report.tables import TONES, BarTimeline, LegendEntry, TimelineBar

#: What a bar can be: a compute, or a reason to wait.
COMPUTES = ("forward", "backward", "weight gradient")
WHATS = (*COMPUTES, *REASONS)
#: What a stage waits for, by reason.
WAITS_FOR = {"peer": "another stage", "transfer": "a transfer", "collective": "its parameters", "host": "its host"}
#: Each of `WHATS` for a legend.
LEGEND = (*COMPUTES, *(f"waits for {WAITS_FOR[reason]}" for reason in REASONS))
#: More bars make a page slow: the shortest are left out.
MOST_BARS = 6000
_WAITS = {
    "peer": "waits for stage {}",
    "transfer": "waits for the transfer from stage {}",
    "collective": "waits for its parameters",
    "host": "waits for its host, which launches late",
}


class ScheduleBar(Struct, frozen=True):
    """A compute or a part of a gap. `what`: of `WHATS`. Seconds from the first compute of the step on any stage.

    `microbatch`, `chunk`: of a compute, the latter None if stages have one. `waits_for`: the stage that a gap waits
    for.
    """

    stage: int
    what: str
    start_s: float
    end_s: float
    microbatch: int | None = None
    chunk: int | None = None
    waits_for: int | None = None

    @property
    def words(self) -> str:
        """What it is, for people who point at it."""
        took = seconds(self.end_s - self.start_s)
        if self.microbatch is None:
            return f"stage {self.stage} {_WAITS[self.what].format(self.waits_for)}: {took}"
        of = "" if self.chunk is None else f", chunk {self.chunk}"
        return f"stage {self.stage}: {self.what} of microbatch {self.microbatch}{of}: {took}"


class DrawnSchedule(Struct, frozen=True):
    """One schedule. `name`: "recorded", or as asked for. `window_s`: from the first start to the last end of any
    compute. `peak_microbatches`: the most that any stage holds. `left_out`: the number of bars that did not fit.
    """

    name: str
    stages: int
    window_s: float
    peak_microbatches: float
    bars: list[ScheduleBar]
    left_out: int = 0


def timeline_of(title: str, schedules: Sequence[DrawnSchedule], notes: Sequence[str]) -> BarTimeline:
    """The schedules below each other, on one axis of time: a heading with the name of each, and a row a stage."""
    rows, bars = list[str](), list[TimelineBar]()
    for schedule in schedules:
        rows.append(schedule.name)
        bars += [
            TimelineBar(len(rows) + bar.stage, WHATS.index(bar.what), bar.start_s, bar.end_s, bar.words)
            for bar in schedule.bars
        ]
        rows += [f"stage {stage}" for stage in range(schedule.stages)]
    legend = [LegendEntry(name, tone) for name, tone in zip(LEGEND, TONES, strict=True)]
    return BarTimeline(title, "since the first compute", rows, legend, bars, list(notes))


def draw_step(
    replay: JobReplay, step: int, dp_rank: int | None = None, schedules: Sequence[str] = ()
) -> list[DrawnSchedule]:
    """Draw a step of one DP rank, by default the one whose computes take longest, and the same work under schedules.

    Raises SelectionError for a step without all computes of that DP rank and for a schedule that does not exist,
    LayoutError for one that cannot run here.
    """
    asked = [AskedSchedule.parse(text) for text in schedules]
    pipelines, _ = recorded_pipelines(replay.only_steps([step]))
    lanes = [(one, lane) for one in pipelines for lane in range(one.lanes) if dp_rank in (None, one.dp_rank[lane])]
    if not lanes:
        of = "any DP rank" if dp_rank is None else f"DP rank {dp_rank}"
        raise SelectionError(f"step {step} does not have every compute of {of}; choose another")
    recorded, lane = max(lanes, key=lambda candidate: candidate[0].window_s[candidate[1]])
    factors = factors_of(recorded)
    drawn = [
        _picture("recorded", recorded, lane),
        *(_picture(one.text, plans(recorded, factors, one)[0].pipeline(recorded.dp_rank), lane) for one in asked),
    ]
    return [_with_the_longest(one, MOST_BARS // len(drawn)) for one in drawn]


def _with_the_longest(picture: DrawnSchedule, most: int) -> DrawnSchedule:
    if len(picture.bars) <= most:
        return picture
    longest = sorted(picture.bars, key=lambda bar: bar.start_s - bar.end_s)[:most]
    return replace(picture, bars=longest, left_out=len(picture.bars) - most)


def _picture(name: str, drawn: RecordedPipeline, lane: int) -> DrawnSchedule:
    order = drawn.order
    begin = float(drawn.start[:, lane].min())
    return DrawnSchedule(
        name=name,
        stages=order.stages,
        window_s=float(drawn.window_s[lane]),
        peak_microbatches=float(order.peak_microbatches.max()),
        bars=[*_computes(drawn, lane, begin), *_gaps(drawn, lane, begin)],
    )


def _computes(drawn: RecordedPipeline, lane: int, begin: float) -> Iterator[ScheduleBar]:
    order = drawn.order
    chunks = order.virtual_stages > order.stages
    for row, (stage, kind, virtual, microbatch) in enumerate(
        zip(order.stage.tolist(), order.kind.tolist(), order.virtual.tolist(), order.microbatch.tolist(), strict=True)
    ):
        chunk = virtual // order.stages if chunks else None
        times = float(drawn.start[row, lane]) - begin, float(drawn.end[row, lane]) - begin
        yield ScheduleBar(stage, COMPUTES[kind], *times, microbatch, chunk)


def _gaps(drawn: RecordedPipeline, lane: int, begin: float) -> Iterator[ScheduleBar]:
    last = int(drawn.order.stage[drawn.end[:, lane].argmax()])
    finish = float(drawn.end[:, lane].max())
    for stage in range(drawn.order.stages):
        gaps = gaps_of(drawn, stage)
        cuts = gaps.cuts[:, :, lane] - begin
        for reason, compute in np.argwhere(np.diff(cuts, axis=0) > 0).tolist():
            other = int(gaps.waits_for[compute])
            waits_for = None if other < 0 or REASONS[reason] in ("collective", "host") else other
            yield ScheduleBar(
                stage,
                REASONS[reason],
                float(cuts[reason, compute]),
                float(cuts[reason + 1, compute]),
                waits_for=waits_for,
            )
        if finish > gaps.until[lane]:
            yield ScheduleBar(stage, "peer", float(gaps.until[lane]) - begin, finish - begin, waits_for=last)
