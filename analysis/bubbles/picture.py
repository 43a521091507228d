"""The bubbles of a pipeline as people see them: one step as bars, a row for each stage, a sentence, and tables.

In: a `JobReplay`, a step and the schedules to draw below it; `Bubbles`. Out: `DrawnSchedule`s, the recorded one first,
and what every renderer draws: the timeline of a report that shows them, and words.
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
from tracekit.base.text import counted, seconds, three_digits
from tracekit.report.questions import Bubbles, CauseOfIdle, PricedSchedule
from tracekit.report.tables import TONES, BarTimeline, LegendEntry, Table, TimelineBar

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
_BECAUSE: dict[CauseOfIdle, str] = {
    "dependency": "the schedule makes stages wait for each other",
    "stages": "stages have unequal work",
    "workers": "workers are slower than their peers",
    "jitter": "computes of one kind vary",
    "transfers": "transfers take time",
    "host": "computes are launched late",
}
#: The sentence names at most this many causes, each at least this share of the idle time.
_MOST_CAUSES, _SMALLEST_SHARE = 2, 0.01


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
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        return f"stage {self.stage}: {self.what} of microbatch {self.microbatch}{chunk}: {took}"


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
    lanes = [(pipeline, lane) for pipeline in pipelines for lane in range(pipeline.lanes)]
    lanes = [(pipeline, lane) for pipeline, lane in lanes if dp_rank in (None, pipeline.dp_rank[lane])]
    if not lanes:
        place = "any DP rank" if dp_rank is None else f"DP rank {dp_rank}"
        raise SelectionError(f"step {step} does not have every compute of {place}; choose another")
    recorded, lane = max(lanes, key=lambda candidate: candidate[0].window_s[candidate[1]])
    factors = factors_of(recorded)
    drawn = [
        _picture("recorded", recorded, lane),
        *(_picture(row.text, plans(recorded, factors, row)[0].pipeline(recorded.dp_rank), lane) for row in asked),
    ]
    return [_with_the_longest(schedule, MOST_BARS // len(drawn)) for schedule in drawn]


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


def bubbles_sentence(bubbles: Bubbles) -> str:
    """How long the stages are idle, and why most of all."""
    if bubbles.window_s is None or bubbles.idle_s is None or bubbles.share is None:
        return f"unknown: {bubbles.unknown}"
    window = f"the {seconds(bubbles.window_s)} from the first to the last compute of a step"
    parts = [f"a stage is idle for {seconds(bubbles.idle_s)} of {window} ({bubbles.share:.0%})"]
    largest = [row for row in bubbles.causes if row.lost_s > _SMALLEST_SHARE * bubbles.idle_s][:_MOST_CAUSES]
    parts += [
        f"{seconds(row.lost_s)}{'' if number else ' of it'} because {_BECAUSE[row.cause]}"
        for number, row in enumerate(largest)
    ]
    parts += [] if bubbles.causes_unknown is None else [f"causes unknown: {bubbles.causes_unknown}"]
    lanes = len(bubbles.left_out)
    left_out = f"; left out: {counted(lanes, 'incomplete lane')} (step and DP rank)" if lanes else ""
    return ", ".join(parts) + left_out


def bubbles_tables(bubbles: Bubbles) -> Iterator[Table]:
    """Idle time by place and reason, by cause, and the prices of schedules."""
    window = bubbles.window_s or 0.0
    reasons = list(dict.fromkeys(row.reason for row in bubbles.places))
    by_place: dict[str, dict[str, float]] = {}
    for row in bubbles.places:
        by_place.setdefault(row.place, {})[row.reason] = row.idle_s
    if by_place:
        yield Table(
            "Where a stage is idle, and what it waits for",
            ("Idle, waiting for", *(WAITS_FOR[reason] for reason in reasons)),
            tuple(
                (place, *(seconds(idle[reason]) if reason in idle else "-" for reason in reasons))
                for place, idle in by_place.items()
            ),
        )
    if bubbles.causes:
        yield Table(
            "Why stages are idle",
            ("Idle because", "a step", "of the window"),
            tuple(
                (_BECAUSE[row.cause], seconds(row.lost_s), f"{row.lost_s / window if window else 0:z.1%}")
                for row in bubbles.causes
            ),
        )
    if bubbles.schedules:
        yield Table(
            "Other schedules",
            ("Schedule", "window", "step", "saves", "held"),
            tuple(map(_schedule_row, bubbles.schedules)),
            "\n".join(_notes(bubbles.schedules)),
        )


def summary(schedules: Sequence[DrawnSchedule]) -> list[str]:
    """What each schedule takes and holds, next to the recorded one."""
    recorded, *others = schedules
    held = three_digits(recorded.peak_microbatches)
    lines = [f"recorded: {seconds(recorded.window_s)}, at most {held} microbatches held"]
    for other in others:
        change = recorded.window_s - other.window_s
        words = f"{seconds(abs(change))} {'less' if change >= 0 else 'more'}"
        held = three_digits(other.peak_microbatches)
        lines.append(f"{other.name}: {seconds(other.window_s)}, {words}, at most {held} microbatches held")
    if left_out := sum(other.left_out for other in schedules):
        lines.append(f"the {left_out:,} shortest computes and bubbles are not drawn")
    return lines


def _notes(schedules: Sequence[PricedSchedule]) -> Iterator[str]:
    """What the table of schedules needs to be understood."""
    yield "held: the most microbatches on any stage"
    rests_on: dict[str, list[str]] = {}
    for row in schedules:
        for words in row.assumes.split("; ") if row.assumes else ():
            rests_on.setdefault(words, []).append(row.schedule)
    priced = sum(row.refused is None for row in schedules)
    for words, names in rests_on.items():
        yield f"assumed: {words}" + (f" ({', '.join(names)})" if len(names) < priced else "")
    if bounds := [row.schedule for row in schedules if row.low_s is not None and row.window_s is None]:
        yield f"a range and no step: the weight gradients were not recorded; {bounds[0]},weight=0.4 states their share"
    yield from (f"{row.schedule} refused: {row.refused}" for row in schedules if row.refused is not None)


def _schedule_row(row: PricedSchedule) -> tuple[str, ...]:
    if row.low_s is None or row.high_s is None or row.peak_microbatches is None:
        return row.schedule, "refused", "", "", ""
    held = three_digits(max(row.peak_microbatches))
    if row.window_s is None or row.step_time_s is None or row.saved_s is None:
        return row.schedule, f"{seconds(row.low_s)} to {seconds(row.high_s)}", "-", "-", held
    return row.schedule, seconds(row.window_s), seconds(row.step_time_s), seconds(row.saved_s), held
