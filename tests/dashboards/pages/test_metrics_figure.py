"""A job whose culprit was tested: the sentence, and the culprit's series over its peers' band, wherever it is shown."""

from __future__ import annotations

import re
from pathlib import Path

from tests.analysis.metrics.fleet import CLOCK, fleet
from tests.analysis.metrics.test_testimony import JOB, LOW_CLOCK, Given
from tests.dashboards.page_text import Pages, sent
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.documents.card import card
from tracekit.dashboards.documents.card import picture as drawn_svg
from tracekit.dashboards.documents.markdown import markdown
from tracekit.dashboards.documents.page import page
from tracekit.dashboards.figures.charts import picture
from tracekit.dashboards.theme import LIGHT
from tracekit.report.findings import Findings
from tracekit.report.tables import Series, SeriesLine, UsualBand
from tracekit.store import Incoming, Store


def test_the_page_draws_the_suspect_over_its_peers_and_marks_the_trace(tmp_path: Path) -> None:
    stored = PipelineJob(JOB).stored(metrics=Given(fleet(1, LOW_CLOCK, hosts=8)))
    assert isinstance(stored, Findings)
    assert stored.report.metrics
    (test,), (series,) = stored.report.metrics.tests, stored.report.pictures
    Store(tmp_path / "jobs.store").add([Incoming(JOB, "job", "test", stored)])
    page = Pages(tmp_path / "jobs.store").page("/job", job="job")
    assert f"{CLOCK} of NODE-03.cluster.local" in sent(page)
    assert test.sentence in sent(page)
    assert test.band is not None
    drawn = picture(series, LIGHT)
    assert [line.name for line in drawn.data if line.showlegend is not False] == [
        "its peers, the middle 80 %",
        "the host",
    ]
    assert list(drawn.data[-1].y) == test.band.own
    assert [shape.x0 for shape in drawn.layout.shapes] == [0.0, test.band.to_s - test.band.from_s]


def test_every_document_draws_it_too() -> None:
    report = PipelineJob(JOB).whatif(metrics=Given(fleet(1, LOW_CLOCK, hosts=8)))
    for shown in (page(report), card(report)):
        assert shown.count('<svg class="series"') == 1
        assert f"<h2>{CLOCK} of NODE-03.cluster.local</h2>" in shown
    assert "of NODE-03.cluster.local\n\n```text\nthe host" in markdown(report)
    assert '<svg class="series"' not in page(PipelineJob(JOB).report)


def test_the_band_is_drawn_to_scale_with_gaps_left_out() -> None:
    """4 s are 946 pixels, from 44 on; 100 to 200 MHz from 88 up to 8. The trace begins at 2 s and ends later."""
    line = SeriesLine("host", 5, [200.0, None, 100.0])
    usual = UsualBand("peers", [150.0, 150.0, None], [200.0, 200.0, None])
    drawn = drawn_svg(Series("clock", "seconds", "MHz", [0.0, 2.0, 4.0], [line], usual=usual, marks=[2.0, 9.0]))
    points = dict(re.findall(r'class="([\w ]+)" (?:points|d)="([^"]+)"', drawn))
    assert points == {
        "peers": "44.0,8.0 517.0,8.0 517.0,48.0 44.0,48.0",
        "line what5": "44.0,8.0 990.0,88.0",
        "end": "M517.0,88.0 L517.0,8.0",
    }
    assert drawn_svg(Series("clock", "seconds", "MHz", [0.0], [SeriesLine("host", 5, [None])])) == ""
