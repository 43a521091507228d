"""Pictures as SVG: names stay text."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tracekit.dashboards.documents.card import sections
from tracekit.report.tables import (
    BarTimeline,
    LegendEntry,
    Picture,
    Series,
    SeriesLine,
    ShareGrid,
    TimelineBar,
    UsualBand,
)

EVIL = "<script>alert(1)</script>\x1b\"'&"
LINES = [SeriesLine(EVIL, 5, [1.0, 2.0])]


@pytest.mark.parametrize(
    "drawn",
    [
        ShareGrid(EVIL, EVIL, EVIL, [EVIL], [EVIL], [[0.5]], EVIL),
        Series(EVIL, EVIL, EVIL, [0.0, 1.0], LINES, usual=UsualBand(EVIL, [0.0, 0.0], [1.0, 1.0]), note=EVIL),
        Series(EVIL, EVIL, EVIL, [0.0, 1.0], LINES, stacked=True, note=EVIL),
        BarTimeline(EVIL, EVIL, [EVIL], [LegendEntry(EVIL, 0)], [TimelineBar(0, 0, 0.0, 1.0, EVIL)], [EVIL]),
    ],
)
def test_names_from_outside_stay_text(drawn: Picture) -> None:
    text = sections([drawn])
    assert "\x1b" not in text
    assert not list(ElementTree.fromstring(f"<main>{text}</main>").iter("script"))  # noqa: S314 - ours
