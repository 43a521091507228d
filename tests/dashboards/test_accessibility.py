"""What everybody can use: WCAG AA by axe on every page in both themes, the keyboard, a phone, and few bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.dashboards.clicks import unfold
from tests.dashboards.conftest import Serving
from tests.dashboards.tabs import FOLLOW
from tests.dashboards.watched import write_watched

Visit = Callable[..., Page]

JOB = "job=slow-worker"
PAGES = ("/", *(f"/{page}?{JOB}" for page in ("job", "time", "workers", "whatif", "timeline", "hang")))
PAGES = (*PAGES, "/?verdict=stalls", f"/workers?{JOB}&dp_rank=0-1&stage=1-2")
PAGES = (*PAGES, f"/compare?{JOB}&with=healthy", *(f"/{page}?job=gpu_slow_input" for page in ("job", "timeline")))
#: Pages about what goes on in a store of watched jobs.
WATCHED = ("/", "/incidents", "/hosts", "/hosts?q=node-d", "/job?job=live")
#: What tells that a page is whole, where its first part is not all of it.
WHOLE = {
    "/": "#jobs tbody tr",
    "/timeline": "#timeline-slowest tbody tr",
    "/whatif": "#whatif-own",
    "/compare": "#compare-with",
}
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
#: All rules of WCAG AA, and those among them that look at colours: the themes differ in nothing else.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
COLOUR_RULES = ["color-contrast", "link-in-text-block"]
RUN = """(runOnly) => axe.run(document, {runOnly, resultTypes: ["violations"]})
    .then((found) => found.violations.map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200))]))"""
PHONE, DESK = ViewportSize(width=390, height=900), ViewportSize(width=1280, height=900)
#: Bytes over the wire and requests of the first page of a visit, whichever it is, and bytes of any page after it.
MOST_BYTES, MOST_REQUESTS, MOST_LATER_BYTES = 360_000, 44, 150_000


def whole(page: Page, path: str) -> None:
    """Until all of the page is there."""
    if selector := WHOLE.get(path.partition("?")[0]):
        page.wait_for_selector(selector)


@pytest.fixture
def every_page(watched: Serving, serving: Serving) -> list[tuple[str, str]]:
    """Address and server of each page."""
    return [*((path, serving.url) for path in PAGES), *((path, watched.url) for path in WATCHED)]


@pytest.fixture(scope="module")
def watched_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_watched(tmp_path_factory.mktemp("watched") / "s.store")


@pytest.fixture
def watched(watched_store: Path, show: Callable[..., Serving]) -> Serving:
    """The dashboard over watched jobs."""
    return show(watched_store)


def pages_in(visit: Visit, theme: str, width: int, every_page: list[tuple[str, str]]) -> Iterator[tuple[str, Page]]:
    """Each page, all of it and axe there."""
    page, last = None, ""
    for path, base in every_page:
        page, last = visit(path, theme=theme, width=width, base=base, within=page if base == last else None), base
        whole(page, path)
        unfold(page, "details:not(.share)")
        if page.evaluate("() => !window.axe"):
            page.evaluate(AXE)
        yield path, page


def test_light_pages_keep_to_wcag_aa_and_do_not_scroll_sideways_on_a_phone(
    visit: Visit, every_page: list[tuple[str, str]]
) -> None:
    found, wide = dict[str, Any](), dict[str, int]()
    for path, page in pages_in(visit, "light", PHONE["width"], every_page):
        if (width := page.evaluate("() => document.documentElement.scrollWidth")) > PHONE["width"]:
            wide[path] = width
        page.set_viewport_size(DESK)
        if violations := page.evaluate(RUN, RULES):
            found[path] = violations
        page.set_viewport_size(PHONE)
    assert found == {}
    assert wide == {}


def test_dark_pages_have_colours_that_keep_to_wcag_aa(visit: Visit, every_page: list[tuple[str, str]]) -> None:
    found = dict[str, Any]()
    for path, page in pages_in(visit, "dark", DESK["width"], every_page):
        if violations := page.evaluate(RUN, COLOUR_RULES):
            found[path] = violations
    assert found == {}


def test_incidents_and_hosts_can_be_read_on_a_phone_without_moving_them(visit: Visit, watched: Serving) -> None:
    page = None
    for path in ("/incidents", "/hosts"):
        page = visit(path, width=390, base=watched.url, within=page)
        table = page.locator(".stacked").first
        assert table.evaluate("(frame) => frame.scrollWidth <= frame.clientWidth")
        head = page.locator(".stacked td").nth(1).evaluate("(cell) => getComputedStyle(cell, '::before').content")
        assert head != "none"


class Wire:
    """Bytes of each request of a page, as they came over the wire."""

    def __init__(self, page: Page) -> None:
        self.sizes = dict[str, int]()
        watching = page.context.new_cdp_session(page)
        watching.send("Network.enable")
        watching.on("Network.loadingFinished", self._finished)

    def _finished(self, one: dict[str, Any]) -> None:
        self.sizes[one["requestId"]] = int(one["encodedDataLength"])

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def scrolled_through(page: Page, path: str) -> None:
    """Until nothing more is loaded, wherever on the page somebody looks."""
    page.wait_for_selector("#page > *")
    if selector := WHOLE.get(path.partition("?")[0]):
        page.wait_for_selector(selector)
    page.keyboard.press("End")
    page.wait_for_load_state("networkidle")


@pytest.fixture(scope="module")
def uncached(browser: Browser) -> Iterator[Page]:
    """A page of a browser that keeps nothing: whatever it shows comes over the wire, as in a fresh profile."""
    context = browser.new_context()
    page = context.new_page()
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    network.send("Network.setCacheDisabled", {"cacheDisabled": True})
    yield page
    context.close()


def test_first_and_later_pages_cost_few_bytes_and_requests(uncached: Page, serving: Serving) -> None:
    """What every visit begins with, and then what each page adds; what several pages load counts for the first."""
    page = uncached
    wire = Wire(page)
    page.goto(serving.url + "/nowhere")
    page.wait_for_selector("#page[data-page='/not-found'] > *")
    page.wait_for_load_state("networkidle")
    begun, requests = wire.bytes, len(wire.sizes)
    assert begun > 100_000
    costly = {}
    for path in PAGES:
        before = wire.bytes, len(wire.sizes)
        page.evaluate(FOLLOW, path)
        page.wait_for_selector("#page:not([data-page='/not-found']) > *")
        scrolled_through(page, path)
        added = wire.bytes - before[0]
        first = begun + added, requests + len(wire.sizes) - before[1]
        # One request more: that for the page that is not there.
        if not 500 < added <= MOST_LATER_BYTES or first[0] > MOST_BYTES or first[1] > MOST_REQUESTS + 1:
            costly[path] = (added, *first)
        page.evaluate(FOLLOW, "/nowhere")
        page.wait_for_selector("#page[data-page='/not-found'] > *")
        page.wait_for_load_state("networkidle")
    assert costly == {}


def test_a_page_costs_no_more_where_a_visit_begins_with_it(uncached: Page, serving: Serving) -> None:
    uncached.goto("about:blank")
    wire = Wire(uncached)
    uncached.goto(serving.url + PAGES[0])
    scrolled_through(uncached, PAGES[0])
    assert 100_000 < wire.bytes <= MOST_BYTES
    assert len(wire.sizes) <= MOST_REQUESTS


class TestKeys:
    @pytest.mark.every_push
    def test_slash_finds_jobs_ranks_workers_and_hosts(self, visit: Visit) -> None:
        page = visit(f"/job?{JOB}")
        found = page.locator("#found a bdi")
        page.keyboard.press("/")
        for text, wanted in {
            "rank 9": "rank 9 on host-0001 (dp 1, stage 2)",
            "3,0": "rank 3 on host-0000 (dp 3, stage 0)",
        }.items():
            page.fill("#finder input", text)
            expect(found.first).to_have_text(wanted)
        page.fill("#finder input", "host-0001")
        expect(found).to_have_text(["host-0001"])
        page.fill("#finder input", "no such thing")
        expect(page.locator("#finder [role=status]")).to_have_text("Nothing has this name.")
        page.fill("#finder input", "SEQUENCE")
        expect(found).to_have_text(["sequence-lengths"])
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("sequence-lengths")
        assert page.locator("dialog").count() == 0

    def test_the_question_mark_tells_the_keys_and_text_fields_keep_it(self, visit: Visit) -> None:
        page = visit(f"/whatif?{JOB}")
        page.click("text=Ask your own question")
        page.keyboard.press("?")
        assert "find a job" in page.inner_text("#help")
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_have_count(0)
        page.focus("#whatif-select")
        page.keyboard.type("/?")
        assert page.input_value("#whatif-select") == "/?"
        assert page.locator("dialog").count() == 0

    def test_w_a_s_d_move_the_timeline_from_anywhere_on_the_page(self, visit: Visit) -> None:
        page = visit(f"/timeline?{JOB}")
        page.wait_for_selector("#timeline-slowest tbody tr")
        bounds = "['from', 'to'].filter((key) => new URL(location.href).searchParams.has(key)).length"
        page.keyboard.press("w")
        page.wait_for_function(f"() => {bounds} === 2")
        zoomed = page.evaluate("() => new URL(location.href).searchParams.get('from')")
        page.keyboard.press("d")
        page.wait_for_function("(before) => new URL(location.href).searchParams.get('from') !== before", arg=zoomed)
        page.keyboard.press("a")
        page.keyboard.press("s")
        page.keyboard.press("Home")
        page.wait_for_function(f"() => {bounds} === 0")


@pytest.mark.every_push
def test_a_word_explains_itself_to_mouse_and_keyboard_until_escape(visit: Visit) -> None:
    page = visit(f"/job?{JOB}")
    word = page.locator(".term").first
    for reach in (word.hover, word.focus):
        reach()
        expect(page.locator("[role=tooltip]")).to_contain_text("replay")
        assert word.get_attribute("aria-describedby") == "tip"
        page.keyboard.press("Escape")
        expect(page.locator("[role=tooltip]")).to_have_count(0)
        page.mouse.move(0, 0)
