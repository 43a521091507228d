"""The page Job of a job whose culprit was tested: the sentence, and the culprit's series over its peers' band."""

from __future__ import annotations

from pathlib import Path

from tests.analysis.metrics.fleet import CLOCK, fleet
from tests.analysis.metrics.test_testimony import JOB, LOW_CLOCK, Given
from tests.dashboards.page_text import Pages, sent
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.figures.gpu_pictures import metric_band
from tracekit.dashboards.figures.theme import LIGHT
from tracekit.report.findings import Findings
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
