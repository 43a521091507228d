"""A job whose culprit was tested: the sentence, and the culprit's series over its peers' band, wherever it is shown."""

from __future__ import annotations

import re
from pathlib import Path

from tests.analysis.metrics.fleet import CLOCK, fleet
from tests.analysis.metrics.test_testimony import JOB, LOW_CLOCK, Given
from tests.dashboards.page_text import Pages, sent
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.figures.gpu_pictures import metric_band
from tracekit.dashboards.documents.card import card
from tracekit.dashboards.documents.page import page
from tracekit.dashboards.documents.svg import metric_band as drawn_band
from tracekit.dashboards.figures.theme import LIGHT
from tracekit.report.findings import Findings
from tracekit.report.metrics import Band
from tracekit.store import Incoming, Store


def test_the_page_draws_the_suspect_over_its_peers_and_marks_the_trace(tmp_path: Path) -> None:
    stored = PipelineJob(JOB).stored(metrics=Given(fleet(1, LOW_CLOCK, hosts=8)))
    assert isinstance(stored, Findings)
    assert stored.report.metrics
    (test,) = stored.report.metrics.tests
    Store(tmp_path / "jobs.store").add([Incoming(JOB, "job", "test", stored)])
    page = Pages(tmp_path / "jobs.store").page("/job", job="job")
    assert f"Metrics: {CLOCK} of NODE-03.cluster.local" in sent(page)
    assert test.sentence in sent(page)
    assert test.band is not None
    drawn = metric_band(test.band, LIGHT)
    assert [line.name for line in drawn.data if line.showlegend is not False] == [
        "its peers, the middle 80 %",
        "the host",
    ]
    assert list(drawn.data[-1].y) == test.band.own
    assert [shape.x0 for shape in drawn.layout.shapes] == [0.0, test.band.to_s - test.band.from_s]


def test_the_html_page_and_the_notebook_draw_it_too() -> None:
    report = PipelineJob(JOB).whatif(metrics=Given(fleet(1, LOW_CLOCK, hosts=8)))
    for shown in (page(report), card(report)):
        assert shown.count('<svg class="metric"') == 1
        assert f"<h2>{CLOCK} of NODE-03.cluster.local</h2>" in shown
    assert '<svg class="metric"' not in page(PipelineJob(JOB).report)


def test_the_band_is_drawn_to_scale_with_gaps_left_out() -> None:
    """4 s are 946 pixels, from 44 on; 100 to 200 MHz from 88 up to 8. The trace begins at 2 s and ends later."""
    band = Band("MHz", [0.0, 2.0, 4.0], [200.0, None, 100.0], [150.0, 150.0, None], [200.0, 200.0, None], 2.0, 9.0)
    drawn = drawn_band(band, "label")
    points = dict(re.findall(r'class="(\w+)" (?:points|d)="([^"]+)"', drawn))
    assert points == {
        "peers": "44.0,8.0 517.0,8.0 517.0,48.0 44.0,48.0",
        "own": "44.0,8.0 990.0,88.0",
        "end": "M517.0,88.0 L517.0,8.0",
    }
    assert drawn_band(Band("MHz", [0.0], [None], [None], [None], 0.0, 1.0), "label") == ""
