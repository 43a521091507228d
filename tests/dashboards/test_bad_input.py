"""What is gone, empty or oddly named: each page says so, and offers the way on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import Serving
from tests.dashboards.watched import analysed, trace, write_watched
from tests.handmade import slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import short
from tracekit.store import Incoming, Store

Visit = Callable[..., Page]
Show = Callable[..., Serving]
OF_JOBS = ("/job", "/workers", "/pipeline", "/whatif", "/timeline", "/compare", "/hang")
OF_ALL = ("/", "/incidents", "/hosts")
#: Markup, quotes, a mark that turns text to the left, and as many characters as a name can have.
ODD_NAMES = ("<b>\"quoted\" & 'so'</b> \u202eesrever \u05e9\u05dc\u05d5\u05dd", "long" * 75)


def remove(store: Path, job: str) -> None:
    with Store(store).writing() as writer:
        writer.remove(writer.catalogue.job_id(job), writer.catalogue.windows(job))


def test_a_job_deleted_while_its_page_is_open_is_said_there_with_the_way_to_the_others(
    tmp_path: Path, show: Show, visit: Visit
) -> None:
    store = write_watched(tmp_path / "s.store")
    base = show(store).url
    page = visit("/job?job=live", base=base)
    expect(page.locator("h1")).to_have_text("live")
    remove(store, "live")
    expect(page.locator(".problem")).to_contain_text("no job named 'live' in this store")  # without being asked
    for path in OF_JOBS[1:]:
        visit(f"{path}?job=live", base=base, within=page)
        expect(page.locator(".problem").first).to_contain_text("no job named 'live'")
    page.click(".problem a")
    expect(page.locator("#jobs a.job")).to_have_text(["over"])


def test_a_window_that_is_gone_leads_to_the_newest_one(tmp_path: Path, show: Show, visit: Visit) -> None:
    store = write_watched(tmp_path / "s.store")
    page = visit("/job?job=live&window=7", base=show(store).url)
    expect(page.locator(".problem")).to_contain_text("has no window 7; it has 0 to 1")
    page.click(".problem a")
    expect(page.locator(".window-way b")).to_contain_text("Window 1 of 0 to 1")


def test_a_filter_that_matches_nothing_says_so(tmp_path: Path, show: Show, visit: Visit) -> None:
    base = show(write_watched(tmp_path / "s.store")).url
    page = visit("/hosts", base=base)
    page.fill("#hosts-q", "no <such>")
    page.press("#hosts-q", "Enter")
    expect(page.locator("#page")).to_contain_text("No host or GPU has 'no <such>' in its name.")
    page.click("text=All hosts")
    expect(page.locator("#page td b").first).to_have_text("node-d")
    visit("/", base=base, within=page)
    page.fill("#jobs-q", "no such job")
    page.press("#jobs-q", "Enter")
    expect(page.locator("#page")).to_contain_text("No job fits.")
    page.click("text=All jobs")
    expect(page.locator("#jobs a.job")).to_have_text(["live", "over"])
    page.fill("#jobs-q", "OVER")
    page.press("#jobs-q", "Enter")
    expect(page.locator("#jobs a.job")).to_have_text(["over"])


@pytest.fixture
def odd_names(tmp_path: Path, show: Show) -> Serving:
    """Jobs, hosts and causes under odd names, each slow in two windows."""
    store = Store(tmp_path / "s.store")
    for name in ODD_NAMES:
        hosts = {str(rank): f"{name[:40]}{rank}" for rank in range(4)}
        for _ in range(2):
            store.append(analysed(replace(trace(slow=True, name=name), metadata={"hosts": hosts})))
    return show(store.path)


def test_odd_names_are_text_and_fit_on_a_phone(visit: Visit, odd_names: Serving) -> None:
    page = visit("/", base=odd_names.url, width=390)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    wide = []
    addresses = [*OF_ALL, *(f"{path}?{urlencode({'job': name})}" for name in ODD_NAMES for path in OF_JOBS)]
    for address in addresses:
        visit(address, base=odd_names.url, within=page)
        expect(page.locator("#page h1").first).to_be_visible()
        assert page.locator("#page script, #page img, #page b b").count() == 0
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(address)
    assert wide == []
    visit(f"/job?{urlencode({'job': ODD_NAMES[1]})}", base=odd_names.url, within=page)
    assert page.inner_text("h1") == short(ODD_NAMES[1])


def test_an_empty_store_says_on_every_page_how_to_fill_it(tmp_path: Path, show: Show, visit: Visit) -> None:
    store = Store(tmp_path / "s.store")
    item = Incoming(slow_trace(), "only", "x", PipelineJob(slow_trace()).stored())
    store.add([item])
    remove(store.path, "only")
    page, base = None, show(store.path).url
    for path in (*OF_ALL, *OF_JOBS):
        page = visit(path, base=base, within=page)
        way_on = {"/hang": "tracekit collect --hang-after", "/hosts": "No job in this store", "/incidents": "No cause"}
        assert way_on.get(path, "tracekit import") in page.inner_text("#page"), path
    assert page is not None
    visit("/job?job=only", base=base, within=page)
    expect(page.locator(".problem")).to_contain_text("no job named 'only'")
