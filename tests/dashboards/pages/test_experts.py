"""The page of a job with uneven experts: their loads as a heat map, and what equal ones save."""

from __future__ import annotations

from pathlib import Path

from tests.analysis.experts.test_pipeline import EVEN, HOT, trace
from tests.dashboards.page_text import Pages, sent
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store


def test_uneven_loads_are_drawn_and_even_ones_are_not(tmp_path: Path) -> None:
    """Layer 1 has 800, 700, 1,800 and 700 tokens, so rank 2 has 1.8 times the mean."""
    store = Store(tmp_path / "jobs.store")
    jobs = {"uneven": trace(HOT), "even": trace(EVEN)}
    store.add([Incoming(one, name, "job.parquet", PipelineJob(one).stored()) for name, one in jobs.items()])
    pages = Pages(store.path)
    uneven, even = (sent(pages.page("/job", job=name)) for name in jobs)
    assert "Loads of experts" in uneven
    assert "times the mean tokens" in uneven
    assert "balanced" in uneven
    assert "Loads of experts" not in even
