"""Every page at the widths of a desk, a small screen, a tablet and a phone: nothing is squeezed or cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, ViewportSize

from tests.dashboards.conftest import Serving
from tests.dashboards.tabs import HEIGHT
from tests.dashboards.test_accessibility import JOB, PAGES, WATCHED, whole
from tests.dashboards.watched import write_watched

Visit = Callable[..., Page]

WIDTHS = (1440, 1024, 768, 390)
#: Pages that are in no other test of all pages.
MORE = (f"/pipeline?{JOB}&schedule=gpipe", "/whatif?job=gpu_slow_input")
#: Columns narrower than this do not wrap; below that width of the page, tables are blocks.
LEAST_COLUMN, PHONE = 120, 700
#: A column with a cell of more letters than this is at least so wide, pixels.
SENTENCE, LEAST_SENTENCE = 100, 300
#: Share of the width that the ops of a timeline have, and where their first row begins at the latest, pixels.
TIMELINE_SHARE, FIRST_ROW = 0.7, 400

#: What is wrong with a page: narrow columns with cells that wrap, tables that are wider than their frame, no blocks
#: on a phone, blocks without the heading of their table, text that is cut without dots, a page that scrolls
#: sideways, commands between backticks.
FAULTS = """([least, phone, sentence, leastSentence]) => {
  const faults = [], seen = (one) => one.checkVisibility({ visibilityProperty: true }) && one.getClientRects().length;
  const texts = document.createTreeWalker(document.querySelector("#page"), NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (!seen(text.parentElement) || !text.data.trim()) continue;
    if (/`/.test(text.data)) faults.push(["backtick", text.data]);
    const cell = text.parentElement.closest("td"), lines = document.createRange();
    lines.selectNodeContents(text);
    const squeezed = cell && !cell.closest("[data-stacked]") && cell.getBoundingClientRect().width < least;
    if (squeezed && lines.getClientRects().length > 1) faults.push(["squeezed", text.data]);
    const column = cell && !cell.closest("[data-stacked]") ? cell.getBoundingClientRect().width : Infinity;
    if (text.data.length > sentence && column < leastSentence) faults.push(["narrow sentence", text.data]);
  }
  for (const frame of document.querySelectorAll("#page .stacked")) {
    if (!seen(frame)) continue;
    const name = frame.getAttribute("aria-label") || frame.id;
    if (frame.scrollWidth > frame.clientWidth) faults.push(["wider than its frame", name]);
    const [first, second] = frame.querySelectorAll("thead th");
    if (innerWidth < phone && second && seen(second)) faults.push(["no blocks", name]);
    if (first && first.textContent && !seen(first)) faults.push(["no heading", name]);
  }
  for (const one of document.querySelectorAll("#page *")) {
    const style = getComputedStyle(one), hides = ["hidden", "clip"].includes(style.overflowX);
    const dots = style.textOverflow === "ellipsis" || style.webkitLineClamp !== "none";
    if (!hides || dots || !one.innerText || !seen(one) || one.matches(".unseen, .cells, .cells *")) continue;
    if (one.scrollWidth > one.clientWidth + 1) faults.push(["cut", one.innerText]);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push(["scrolls sideways"]);
  return faults;
}"""
#: The width of the ops of a timeline, and the top of its first row on the page.
OPS = """() => [tracekitTimeline.current().width, document.querySelector("#timeline-canvas").getBoundingClientRect().top
  + window.scrollY + tracekitTimelineDraw.AXIS]"""


@pytest.fixture(scope="module")
def watched_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_watched(tmp_path_factory.mktemp("watched") / "s.store")


def resize(page: Page, width: int) -> None:
    """Until the page has settled at that width."""
    page.set_viewport_size(ViewportSize(width=width, height=HEIGHT))
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_no_page_squeezes_or_cuts_anything_at_any_width(
    visit: Visit, serving: Serving, watched_store: Path, show: Callable[..., Serving]
) -> None:
    faults, page, last = dict[tuple[str, int], Any](), None, ""
    served = show(watched_store)
    addresses = [(path, serving.url) for path in (*PAGES, *MORE)]
    for path, base in [*addresses, *((path, served.url) for path in WATCHED)]:
        page, last = visit(path, base=base, within=page if base == last else None), base
        whole(page, path)
        for width in WIDTHS:
            resize(page, width)
            if found := page.evaluate(FAULTS, [LEAST_COLUMN, PHONE, SENTENCE, LEAST_SENTENCE]):
                faults[path, width] = found
    assert faults == {}


def test_the_ops_of_a_timeline_have_most_of_the_screen(visit: Visit) -> None:
    page = visit(f"/timeline?{JOB}")
    page.wait_for_selector("#timeline-slowest tbody tr")
    for width in (1440, 1024, 768):
        resize(page, width)
        page.wait_for_function("() => tracekitTimeline.current().canvas.clientWidth <= innerWidth")
        ops, first_row = page.evaluate(OPS)
        assert ops >= TIMELINE_SHARE * width
        assert first_row < FIRST_ROW


def test_a_table_becomes_blocks_without_room_and_a_table_again_with_it(visit: Visit) -> None:
    page = visit(f"/compare?{JOB}&with=healthy")
    figures = page.get_by_role("region", name="Figures before and after")
    for width, blocks in ((1440, False), (650, True), (1440, False)):
        resize(page, width)
        assert figures.locator("thead").is_visible() is not blocks
        head = figures.locator("td").nth(1).evaluate("(cell) => getComputedStyle(cell, '::before').content")
        assert (head != "none") is blocks
