"""Steps that were not recorded are a gap in every picture of steps: terminal, document, comparison."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest

from tests.handmade import slow_trace
from tests.sides import side
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.ui.figures import step_series
from tracekit.dashboards.documents.card import step_bars
from tracekit.dashboards.terminal.tables import sparkline, steps_line
from tracekit.dashboards.theme import LIGHT
from tracekit.report.report import Report

STEPS = np.array([10, 11, 500, 501], np.int32)


@cache
def report_of(*steps: int) -> Report:
    return PipelineJob(slow_trace(steps)).report


def test_a_line_of_bars_has_a_space_where_steps_were_not_recorded() -> None:
    times = np.array([1.0, 2.0, 1.0, 2.0])
    assert sparkline(times, 8) == "▁█▁█"
    assert sparkline(times, 8, STEPS) == "▁█ ▁█"
    assert sparkline(times, 8, np.arange(4, dtype=np.int32)) == "▁█▁█"
    assert steps_line(report_of(10, 11, 500, 501)).plain.startswith("Steps    ▁▁ ▁▁ ")


def test_spaces_count_towards_the_width() -> None:
    """Four bars and a space are five characters; of two steps each, two bars and a space are three."""
    times = np.array([1.0, 2.0, 1.0, 1.0])
    assert sparkline(times, 5, STEPS) == "▁█ ▁▁"
    assert sparkline(times, 4, STEPS) == "█ ▁"


@pytest.mark.parametrize(
    ("steps", "places", "noted"),
    [((10, 11, 500, 501), [0, 8, 24, 32], True), ((10, 11, 12, 13), [0, 8, 16, 24], False)],
)
def test_a_document_leaves_the_room_of_a_bar(steps: tuple[int, ...], places: list[int], *, noted: bool) -> None:
    bars = step_bars(report_of(*steps))
    assert [int(place) for place in re.findall(r' x="(\d+)"', bars)] == places
    assert f'viewBox="0 0 {places[-1] + 8} ' in bars
    assert ("were not recorded" in bars) is noted


@pytest.mark.parametrize(
    ("split", "across"), [(True, [10, 11, 255.5, 500, 501]), (False, [0, 1, 1.5, 2, 3])], ids=["split", "jobs"]
)
def test_the_line_of_a_comparison_breaks(across: list[float], *, split: bool) -> None:
    before = side([1.0, 2.0, 3.0, 4.0], steps=STEPS)
    recorded = step_series(before, before, LIGHT, split=split).data[0]
    assert recorded.x.tolist() == across
    assert recorded.y.tolist() == pytest.approx([1, 2, math.nan, 3, 4], nan_ok=True)
    assert [step for step, *_ in recorded.customdata if step] == STEPS.tolist()
