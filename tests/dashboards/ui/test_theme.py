"""Dark or light: as the system is, until somebody chooses; and right from the first moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.dashboards.conftest import Serving
from tracekit.show.figures.theme import DARK, LIGHT

System = Literal["light", "dark"]
Open = Callable[[System], Page]
PAPER = "getComputedStyle(document.querySelector('.top')).backgroundColor"
BODY = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture
def on_a_system(browser: Browser) -> Iterator[Open]:
    """A page, not yet opened, of a new browser on a light or dark system."""
    contexts = []

    def make(system: System) -> Page:
        contexts.append(browser.new_context(color_scheme=system))
        return contexts[-1].new_page()

    yield make
    for context in contexts:
        context.close()


def colour(paper: str) -> str:
    """As a browser says it."""
    return f"rgb({', '.join(str(int(paper[at : at + 2], 16)) for at in (1, 3, 5))})"


def shown(page: Page) -> tuple[str, str]:
    """The paper of the page, and that of its figures, which the server colours."""
    page.wait_for_selector("#workers-map svg")
    return page.evaluate(PAPER), page.evaluate("document.querySelector('#workers-map').figure.layout.font.color")


def paper(page: Page) -> str:
    """The paper of a page without figures, which takes a tenth of the time to load."""
    page.wait_for_selector("#page[data-page='/not-found'] > *")
    return str(page.evaluate(PAPER))


def test_the_theme_follows_the_system_until_somebody_chooses(on_a_system: Open, serving: Serving) -> None:
    page = on_a_system("light")
    page.goto(f"{serving.url}/no/such/page")
    assert paper(page) == colour(LIGHT.paper)
    with page.expect_navigation():
        page.emulate_media(color_scheme="dark")
    assert paper(page) == colour(DARK.paper)
    with page.expect_navigation():
        page.click("#theme")
    page.emulate_media(color_scheme="light")
    page.emulate_media(color_scheme="dark")
    assert paper(page) == colour(LIGHT.paper)
    again = page.context.new_page()
    again.goto(f"{serving.url}/workers?job=slow-worker")
    assert shown(again) == (colour(LIGHT.paper), LIGHT.text)


def test_figures_have_the_theme_of_the_system(on_a_system: Open, serving: Serving) -> None:
    page = on_a_system("dark")
    page.goto(f"{serving.url}/workers?job=slow-worker")
    assert shown(page) == (colour(DARK.paper), DARK.text)


@pytest.mark.parametrize("path", ["/job?job=slow-worker", "/no/such/page"])
def test_no_other_theme_flashes_before_the_page_is_there(on_a_system: Open, serving: Serving, path: str) -> None:
    page, held = on_a_system("dark"), list[Route]()

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/_dash-layout", hold)
    with page.expect_request("**/_dash-layout"):
        page.goto(serving.url + path)
    assert page.evaluate(BODY) == colour("#111315")
    held[0].continue_()
    page.wait_for_selector("#page > *")
    assert page.evaluate(BODY) == colour("#111315")
    assert page.evaluate(PAPER) == colour(DARK.paper)
