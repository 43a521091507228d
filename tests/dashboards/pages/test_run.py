"""The pages of a job of several windows speak of its run; the newest window is "now"."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bill.test_run_verdict import LOST_S, SLOW_RANK, windows
from tests.bill.test_stored import stored
from tests.dashboards.page_text import Pages
from tests.handmade import HEALTHY_STEP_S, SLOW_STEP_S, run
from tracekit.store import Store

#: Of 25 steps, 10 are slow; the newest 10 are healthy.
SHARE = 10 * LOST_S / (15 * HEALTHY_STEP_S + 10 * SLOW_STEP_S)
SENTENCE = f"ank {SLOW_RANK} cost {SHARE:.1%} of the run, steps 6 to 15, from 22:14:16 to 22:16:51 UTC; it is over"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return stored(tmp_path_factory.mktemp("run"), windows(False, True, True, False, False))


@pytest.fixture(scope="module")
def pages(store: Store) -> Pages:
    return Pages(store.path)


def test_every_surface_has_one_first_sentence(store: Store, pages: Pages) -> None:
    page, said = pages.text("/job", job="job"), " ".join(run("whatif", "--store", store.path).out.split())
    (row,) = pages.job_rows()
    assert f"R{SENTENCE}." in page
    assert f"STRAGGLER: r{SENTENCE}" in said
    assert f"r{SENTENCE}" in row["headline"]


def test_the_list_of_jobs_has_what_the_run_lost(pages: Pages) -> None:
    (row,) = pages.job_rows()
    assert (row["share"], row["lost_gpu_hours_per_day"]) == (pytest.approx(SHARE), pytest.approx(SHARE * 24 * 4))
    assert (row["verdict"], row["culprit"], row["straggling"]) == ("straggler", f"rank {SLOW_RANK}", True)


def test_the_page_of_a_job_tells_the_run_before_its_newest_window(pages: Pages) -> None:
    page = pages.text("/job", job="job")
    assert f"straggler, {SHARE:.1%} of the run lost" in page.splitlines()[1]
    assert page.index("of the run, steps 6 to 15") < page.index("Now: No straggler")
    assert "Nothing to do in this window." in page
    assert "Do: should it come back: " in page


def test_the_page_of_one_window_lists_causes_of_other_windows(pages: Pages) -> None:
    healthy, slow = (pages.text("/job", job="job", window=window) for window in ("4", "1"))
    assert "of the run lost" not in healthy
    assert f"2 other windows name rank {SLOW_RANK}, steps 6 to 15" in healthy
    assert f"1 other window names rank {SLOW_RANK}, steps 6 to 15" in slow


def test_an_open_incident_leads_the_page_with_what_to_do_and_one_since(tmp_path: Path) -> None:
    store = stored(tmp_path, windows(False, True))
    page = Pages(store.path).text("/job", job="job")
    since = "step 6, 2023-11-14 22:14:16 UTC"
    assert page.index("Open incident") < page.index("of the run, steps 6 to 10")
    assert since in page
    assert since in Pages(store.path).text("/incidents")
    assert since in run("store", "incidents", "--store", store.path).out
