"""What a hand does on a figure: drag, double click, shift, ctrl and wheel, the legend, and the arrow keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.clicks import address, click_figure, point_at_figure, wait_for_state

Visit = Callable[..., Page]
PATH = "/workers?job=slow-worker"
#: The job has steps 100 to 109, 200 and 201, each at a position of its own.
STEPS = [*range(100, 110), 200, 201]
TIMES, MAP_OF_STEPS = "workers-times", "workers-steps"
#: In what the browser sends after a click on a step.
CHOICE = f'"changedPropIds":["{TIMES}.clickData"]'
#: Holds what waits the quarter of a second in which a second click can follow, until `letGo()`: on a busy machine, two
#: clicks can be further apart.
HOLD = """() => {
  const { setTimeout, clearTimeout } = window, held = new Set();
  window.setTimeout = (work, ms) => (ms === 250 ? held.add(work) && work : setTimeout(work, ms));
  window.clearTimeout = (one) => held.delete(one) || clearTimeout(one);
  window.letGo = () => {
    Object.assign(window, { setTimeout, clearTimeout });
    held.forEach((work) => work());
    return held.size;
  };
}"""


@pytest.fixture
def page(visit: Visit) -> Page:
    opened = visit(PATH)
    opened.wait_for_selector(f"#{MAP_OF_STEPS} svg")
    return opened


def labels(page: Page, figure: str, letter: str) -> list[str]:
    """What stands below the figure (`across`), or beside it (`down`)."""
    return page.locator(f"#{figure} text.{letter}").all_text_contents()


def place(page: Page, figure: str, across: float, down: float) -> tuple[float, float]:
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    area = page.locator(f"#{figure} .area").bounding_box()
    assert area is not None
    return area["x"] + area["width"] * across, area["y"] + area["height"] * down


def drag(page: Page, figure: str, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """From one place to another, as shares of the width and height of the plot."""
    page.mouse.move(*place(page, figure, *begin))
    page.mouse.down()
    page.mouse.move(*place(page, figure, *end), steps=4)
    page.mouse.up()


def zoomed(page: Page) -> None:
    """Steps 103 to 108: the positions 3 to 8 of -0.5 to 11.5."""
    drag(page, TIMES, (3 / 12, 0.2), (9 / 12, 0.7))
    expect(page.locator(f"#{TIMES} text.across").first).to_have_text("103")


def test_a_drag_zooms_all_charts_of_the_steps_along_x_alone(page: Page) -> None:
    heights = labels(page, TIMES, "down")
    assert labels(page, TIMES, "across") == [str(step) for step in STEPS]
    zoomed(page)
    for figure in (TIMES, MAP_OF_STEPS, "workers-history"):
        assert labels(page, figure, "across") == ["103", "104", "105", "106", "107", "108"]
    assert labels(page, TIMES, "down") == heights


def test_a_double_click_shows_the_whole_again_and_chooses_nothing(page: Page) -> None:
    zoomed(page)
    chosen: list[str] = []
    page.on("request", lambda one: chosen.append(one.url) if CHOICE in (one.post_data or "") else None)
    page.evaluate(HOLD)
    page.mouse.dblclick(*place(page, TIMES, 0.5, 0.5))
    assert page.evaluate("letGo()") == 0
    expect(page.locator(f"#{TIMES} text.across").first).to_have_text("100")
    assert labels(page, MAP_OF_STEPS, "across") == [str(step) for step in STEPS]
    assert address(page) == PATH
    click_figure(page, TIMES, 0.5 / 12, 0.5)  # a click alone chooses
    wait_for_state(page, job="slow-worker", step="100")
    assert len(chosen) == 1


def test_shift_moves_what_is_shown_and_keeps_its_length(page: Page) -> None:
    zoomed(page)
    page.keyboard.down("Shift")
    drag(page, TIMES, (0.2, 0.5), (0.2 + 2 / 6, 0.5))
    page.keyboard.up("Shift")
    for figure in (TIMES, MAP_OF_STEPS):
        assert labels(page, figure, "across") == ["101", "102", "103", "104", "105", "106"]


def test_the_wheel_zooms_with_ctrl_and_scrolls_without(page: Page) -> None:
    page.mouse.move(*place(page, TIMES, 0.5, 0.5))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    expect(page.locator(f"#{TIMES} text.across").first).to_have_text("101")  # 80 % of 12 positions: 0.7 to 10.3
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, -100)
    page.wait_for_function("(before) => scrollY < before", arg=before)
    assert labels(page, TIMES, "across")[0] == "101"


def test_a_click_on_the_legend_takes_a_line_away_and_brings_it_back(page: Page) -> None:
    page.locator(f"#{TIMES}").scroll_into_view_if_needed()
    lines, entry = page.locator(f"#{TIMES} path.line"), page.locator(f"#{TIMES} .entry text", has_text="ideal")
    expect(lines).to_have_count(2)
    entry.click()
    expect(lines).to_have_count(1)
    page.locator(f"#{TIMES} .chart-picture").press("2")  # by keyboard: the second entry
    expect(lines).to_have_count(2)


def test_arrow_keys_go_from_point_to_point_and_enter_chooses(page: Page) -> None:
    picture, tip = page.locator(f"#{TIMES} .chart-picture"), page.locator(f"#{TIMES} .chart-tip")
    picture.press("ArrowRight")
    expect(tip).to_contain_text("step 100: recorded 1.112 s")
    picture.press("ArrowRight")
    expect(tip).to_contain_text("step 101: recorded")
    picture.press("Enter")
    wait_for_state(page, job="slow-worker", step="101")
    cells = page.locator(f"#{MAP_OF_STEPS} .chart-picture")
    cells.press("ArrowRight")
    cells.press("ArrowDown")
    expect(page.locator(f"#{MAP_OF_STEPS} .chart-tip")).to_contain_text("step 100, rank 2")


def test_one_line_marks_the_step_on_all_charts_of_steps(page: Page) -> None:
    point_at_figure(page, TIMES, 5.5 / 12, 0.5)  # the middle of position 5
    lefts = []
    for figure in (TIMES, MAP_OF_STEPS):
        area, line = (page.locator(f"#{figure} {one}").bounding_box() for one in (".area", ".chart-cursor"))
        assert area is not None
        assert line is not None
        lefts.append((line["x"] - area["x"]) / area["width"])
    assert lefts == pytest.approx([5.5 / 12] * 2, abs=0.01)
