"""Pictures in characters: what each stands for, worked out by hand."""

from __future__ import annotations

import pytest

from tracekit.dashboards.words import lines_of
from tracekit.report.tables import (
    BarTimeline,
    LegendEntry,
    Picture,
    Series,
    SeriesLine,
    ShareGrid,
    TimelineBar,
)

GRID = ShareGrid("loads", "layer", "rank", ["3"], ["0", "1", "2", "3", "4"], [[0.0, 0.05, 0.3, 0.5, 1.0]], "tokens")
SERIES = Series("clock", "step", "MHz", [0.0, 1.0, 2.0], [SeriesLine("host", 5, [100.0, None, 800.0])], note="as told")
BARS = [TimelineBar(1, 0, 0.0, 2.0, "a"), TimelineBar(1, 1, 2.0, 3.0, "b"), TimelineBar(2, 1, 3.0, 4.0, "c")]
TIMELINE = BarTimeline(
    "step", "since", ["now", "stage 0", "stage 1"], [LegendEntry("work", 0), LegendEntry("waits", 3)], BARS, ["a note"]
)


@pytest.mark.parametrize(
    ("drawn", "lines"),
    [
        (
            GRID,
            [
                "layer 3         ·░▒▓█",
                "ranks in order; more tokens than the mean: · hardly, ░ 5%, ▒ 20%, ▓ 50%, █ 100%",
            ],
        ),
        (SERIES, ["host            ▁ █ 100 to 800 MHz", "step 0 to 2; as told"]),
        (
            TIMELINE,
            [
                "now",
                "stage 0         ██▓",
                "stage 1            ▓",
                "█ work, ▓ waits",
                "4.00 s in all; a note",
            ],
        ),
    ],
)
def test_every_shape(drawn: Picture, lines: list[str]) -> None:
    width = 16 + 4 if drawn is TIMELINE else 80
    assert lines_of(drawn, width) == lines


def test_of_many_rows_some_are_drawn() -> None:
    bars = [TimelineBar(row, 0, 0.0, 1.0, "") for row in range(600)]
    lines = lines_of(BarTimeline("many", "since", [""] * 600, [LegendEntry("work", 0)], bars, []), 30)
    assert (len(lines), lines[-1]) == (26, "1.00 s in all; 24 of 600 rows")
