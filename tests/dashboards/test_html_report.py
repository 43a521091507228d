"""`whatif --html` in a real browser: one file, no request, names as text, anchors that lead to rank and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.analysis.rl.logs import lines, write
from tests.documents.evil import EVIL, SAMPLES, write_evil
from tests.handmade import run
from tracekit.base.text import printable, short
from tracekit.sources.load import load

LARGEST_BYTES = 2_000_000


def made(job: Path, folder: Path, *options: str) -> Path:
    """The page on a job."""
    ran = run("whatif", job, "--html", folder / "report.html", *options)
    assert ran.code == 0, ran.err
    return folder / "report.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(SAMPLES / "slow_worker.parquet", tmp_path_factory.mktemp("html"))


@pytest.fixture
def show(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a file; it must ask for nothing else, and say nothing on the console."""
    contexts, noise = [], []

    def open_file(path: Path, anchor: str = "", *, width: int = 1280, theme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("dialog", lambda dialog: noise.append(dialog.message))
        page.on("request", lambda request: None if request.url.startswith(path.as_uri()) else noise.append(request.url))
        page.goto(path.as_uri() + anchor)
        expect(page.locator("#timeline-controls button").first).to_be_visible()
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert noise == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_the_answer_and_does_not_scroll_sideways(
    report: Path, show: Callable[..., Page], width: int, theme: str
) -> None:
    page = show(report, width=width, theme=theme)
    answer = load(SAMPLES / "slow_worker.parquet").whatif().answer
    assert page.locator(".headline").inner_text() == f"STRAGGLER {answer.headline}"
    assert answer.action in page.locator(".card dd").all_inner_texts()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg.map rect").count() == 16
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (theme == "light")


def test_an_anchor_picks_rank_and_step(report: Path, show: Callable[..., Page]) -> None:
    page = show(report, "#rank=9&step=100")
    expect(page.locator("#timeline-controls button[aria-pressed=true]")).to_contain_text("step 100")
    expect(page.locator("svg.map rect.picked title")).to_contain_text(
        "rank 9 on host-0001, dp 1, stage 2: alone costs "
    )
    expect(page.locator("svg.steps rect.picked")).to_have_attribute("data-step", "100")
    page.locator("#timeline-controls button").nth(0).click()
    assert page.evaluate("location.hash") == "#rank=9&step=105"


def test_an_anchor_to_what_is_not_there_says_so(report: Path, show: Callable[..., Page]) -> None:
    page = show(report, "#rank=99&step=7")
    expect(page.locator("#timeline-note")).to_have_text(
        "step 7 is not in this file, which holds the slowest: 105, 104, 100; rank 99 has no row below"
    )


def test_pointing_at_an_op_says_what_it_is(report: Path, show: Callable[..., Page]) -> None:
    page = show(report, "#rank=9&step=105")
    box = page.locator("#timeline-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 330, box["y"] + 18 + 6 * 32 + 5)  # the row of rank 9
    expect(page.locator("#timeline-op")).to_contain_text("rank 9 (dp 1, stage 2), recorded: ")


def test_names_stay_text_and_redacting_leaves_none(tmp_path: Path, show: Callable[..., Page]) -> None:
    evil = write_evil(tmp_path)
    page = show(made(evil, tmp_path))
    assert page.locator("h1").inner_text() == short(EVIL)
    assert page.locator("img").count() == 0
    redacted = made(evil, tmp_path, "--redact").read_text()
    assert "alert" not in redacted
    assert printable(EVIL) not in redacted
    assert "host-2" in redacted


def test_a_page_folds_tables_that_most_readers_skip_and_has_no_heading_without_content(tmp_path: Path) -> None:
    text = made(SAMPLES / "gpu_slow_input", tmp_path).read_text()
    shown, folded = text.split("<details><summary>All tables</summary>")
    assert [title in shown for title in ("<h2>Ranks</h2>", "<h2>Causes</h2>", "<h2>Critical path</h2>")] == [1, 1, 0]
    report = load(SAMPLES / "gpu_slow_input").whatif()
    assert all(f"<h2>{table.title}</h2>" in folded for table in report.sections)
    assert '<td data-head="rank">2</td><td class="figure" data-head="sole delay">5.9 ms</td>' in shown
    even = write(tmp_path / "rl.jsonl", lines(6, reward_s=0.125, sync_s=0.125))
    assert load(even).report.findings == []
    assert "<h2>Causes</h2>" not in made(even, tmp_path).read_text()


@pytest.mark.slow
def test_a_large_job_stays_small(tmp_path: Path) -> None:
    job = tmp_path / "large.parquet"
    ran = run("synth", "--dp", "48", "--pp", "8", "--steps", "6", "--microbatches", "24", "--out", job)
    assert ran.code == 0, ran.err
    assert made(job, tmp_path).stat().st_size <= LARGEST_BYTES
