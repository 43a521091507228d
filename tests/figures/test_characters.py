"""Pictures in characters: what each stands for, worked out by hand."""

from __future__ import annotations

import pytest

from tests.reports import report_with
from tracekit.dashboards.words import cost_words, lines_of
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


HOSTILE = "\x1b[2J<b>```\n" + "x" * 5000


@pytest.mark.parametrize(
    "drawn",
    [
        ShareGrid(HOSTILE, HOSTILE[:40], HOSTILE[:40], [HOSTILE], ["0"], [[0.5]], HOSTILE[:40]),
        Series(HOSTILE, HOSTILE[:40], HOSTILE[:40], [0.0], [SeriesLine(HOSTILE, 5, [1.0])], note=HOSTILE[:40]),
        BarTimeline(
            HOSTILE, HOSTILE, [HOSTILE], [LegendEntry(HOSTILE, 0)], [TimelineBar(0, 0, 0.0, 1.0, "")], [HOSTILE[:40]]
        ),
    ],
)
def test_names_from_outside_control_no_terminal_and_fill_no_screen(drawn: Picture) -> None:
    lines = lines_of(drawn, 80)
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 240


def test_columns_beyond_the_width_are_counted() -> None:
    drawn = ShareGrid("loads", "layer", "rank", ["3"], list("abcdef"), [[0.0] * 6], "tokens")
    cells, legend = lines_of(drawn, 16 + 4)
    assert cells == "layer 3         ····"
    assert legend.startswith("ranks in order, the first 4 of 6; more tokens")


def test_more_kinds_of_bars_than_characters_begin_again() -> None:
    bars = [TimelineBar(0, what, float(what), what + 1.0, "") for what in range(12)]
    legend = [LegendEntry(f"kind {what}", 0) for what in range(12)]
    cells, names, _ = lines_of(BarTimeline("many", "since", ["row"], legend, bars, []), 16 + 12)
    assert cells == "row             █▓▒░:-+=*█▓▒"
    assert names.startswith("█ kind 0, ▓ kind 1")
    assert names.endswith("▒ kind 11")


@pytest.mark.parametrize(
    ("costs", "acting_s", "words"),
    [
        ("costs 1.00 s a step", None, "costs 1.00 s a step"),
        ("costs 1.00 s a step", 4.0, "costs 1.00 s a step on average"),
        (
            "costs 1.00 s a step once the others are gone",
            4.0,
            "costs 1.00 s a step on average once the others are gone",
        ),
    ],
)
def test_a_cause_that_comes_and_goes_costs_a_mean(costs: str, acting_s: float | None, words: str) -> None:
    report = report_with(causes=[{"costs": costs, "saved_when_acting_s": acting_s}])
    assert cost_words(report.findings[0]) == words
