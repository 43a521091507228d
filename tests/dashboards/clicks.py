"""Clicks into figures, as a person makes them: the mouse comes, the figure answers, then the click."""

from __future__ import annotations

import contextlib
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as NoAnswer

#: The mouse comes again so often where a figure does not answer.
MOST_MOVES = 30


def point_at_figure(page: Page, figure: str, across: float, down: float) -> tuple[float, float]:
    """Move the mouse to these shares of the width and height of the plot, until the figure answers; where that is."""
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    tip = page.locator(f"#{figure} .chart-tip")
    for _ in range(MOST_MOVES):  # a figure that is drawn anew, or moves as the page settles, forgets where the mouse is
        area = page.locator(f"#{figure} .area").bounding_box()
        assert area is not None
        at = area["x"] + area["width"] * across, area["y"] + area["height"] * down
        page.mouse.move(at[0] - 1, at[1])
        page.mouse.move(*at)
        with contextlib.suppress(NoAnswer):
            tip.wait_for(timeout=1_000)
            break
    return at


def click_figure(page: Page, figure: str, across: float, down: float) -> None:
    """Click at these shares of the width and height of the plot."""
    page.mouse.click(*point_at_figure(page, figure, across, down))


def unfold(page: Page, which: str = "details") -> None:
    """Open what is folded, and what is folded in it, until the browser has drawn all of it."""
    page.wait_for_function(
        """(which) => {
            const folded = [...document.querySelectorAll(which)];
            folded.forEach((one) => { one.open = true; });
            return folded.every((one) => one.children.length > 1);
        }""",
        arg=which,
    )


def address(page: Page) -> str:
    """Path and query of the page, as the browser has them: Playwright learns of changes later."""
    return str(page.evaluate("() => location.pathname + location.search"))


def state(page: Page) -> dict[str, str]:
    """What the address says of the page."""
    return {name: values[0] for name, values in parse_qs(urlsplit(address(page)).query).items()}


def wait_for_state(page: Page, **wanted: str) -> None:
    """Until the address has this state and no other."""
    for name, value in wanted.items():
        page.wait_for_function(
            "([name, value]) => new URL(location.href).searchParams.get(name) === value", arg=[name, value]
        )
    page.wait_for_function("(count) => [...new URL(location.href).searchParams].length === count", arg=len(wanted))
    assert state(page) == wanted
