"""The bubbles of a pipeline in words: one sentence, and tables.

In: `Bubbles`. Out: what every renderer draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekit.analysis.bubbles.picture import WAITS_FOR, DrawnSchedule
from tracekit.base.text import counted, seconds, three_digits
from tracekit.report.questions import Bubbles, CauseOfIdle, PricedSchedule
from tracekit.report.tables import Table

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


def sentence(bubbles: Bubbles) -> str:
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


def tables(bubbles: Bubbles) -> Iterator[Table]:
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
            tuple(map(_schedule, bubbles.schedules)),
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


def _schedule(row: PricedSchedule) -> tuple[str, ...]:
    if row.low_s is None or row.high_s is None or row.peak_microbatches is None:
        return row.schedule, "refused", "", "", ""
    held = three_digits(max(row.peak_microbatches))
    if row.window_s is None or row.step_time_s is None or row.saved_s is None:
        return row.schedule, f"{seconds(row.low_s)} to {seconds(row.high_s)}", "-", "-", held
    return row.schedule, seconds(row.window_s), seconds(row.step_time_s), seconds(row.saved_s), held
