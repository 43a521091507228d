"""The timeline's file for Perfetto: what is in it, and what the page says until it comes."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.dashboards.conftest import Serving
from tests.dashboards.pages.test_timeline import painted
from tests.handmade import run

Visit = Callable[..., Page]


@pytest.mark.every_push
def test_the_perfetto_file_is_what_the_export_writes(visit: Visit, serving: Serving, tmp_path: Path) -> None:
    page = visit("/timeline?job=slow-worker&step=102")
    painted(page)
    with page.expect_download() as download:
        page.get_by_text("Open in Perfetto").click()
    assert download.value.suggested_filename == "slow-worker-step-102.json.gz"
    file = tmp_path / "timeline.json.gz"
    ran = run("store", "export", "--store", serving.store, "--job", "slow-worker", "--steps", "102", "--out", file)
    assert ran.code == 0, ran.err
    assert gzip.decompress(Path(download.value.path()).read_bytes()) == gzip.decompress(file.read_bytes())


def test_the_page_says_that_the_perfetto_file_is_being_written_until_it_comes(visit: Visit) -> None:
    page, held = visit("/timeline?job=slow-worker&step=102"), list[Route]()

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/timeline/export.json.gz*", hold)
    painted(page)
    said, button = page.locator("#timeline-export-said"), page.locator("#timeline-perfetto")
    button.click()
    expect(said).to_have_text(re.compile(r"^Writing the file for Perfetto ... \d+ s$"))
    expect(button).to_have_attribute("aria-busy", "true")
    button.click()
    with page.expect_download() as download:
        held[0].continue_()
    assert download.value.suggested_filename == "slow-worker-step-102.json.gz"
    expect(said).to_be_empty()
    expect(button).not_to_have_attribute("aria-busy", "true")
    assert len(held) == 1  # what is under way is not asked for twice


def test_a_perfetto_file_that_cannot_be_written_is_said_on_the_page(visit: Visit, browser_noise: list[str]) -> None:
    page = visit("/timeline?job=slow-worker&step=102")
    painted(page)
    page.evaluate("document.getElementById('timeline-perfetto').href = '/timeline/export.json.gz?job=gone'")
    page.click("#timeline-perfetto")
    said = page.locator("#timeline-export-said")
    expect(said).to_have_text(re.compile("^No file for Perfetto: no job named 'gone' in this store"))
    browser_noise.clear()  # the browser's own line about the 404
    page.route("**/timeline/export.json.gz*", lambda route: route.abort())
    page.click("#timeline-perfetto")
    expect(said).to_have_text("No file for Perfetto: The server does not answer; try again.")
    browser_noise.clear()
