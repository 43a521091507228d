"""Dark or light: as the system is, until somebody chooses; and right from the first moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.dashboards.conftest import Serving
from tracekit.dashboards.theme import DARK, LIGHT, Theme

System = Literal["light", "dark"]
ASSETS = Path(__file__).parents[3] / "dashboards" / "browser" / "assets"
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


@contextmanager
def loaded_anew(page: Page) -> Iterator[None]:
    """What is done within loads the document again. `expect_navigation` fails where one reload overtakes another."""
    page.evaluate("document.documentElement.dataset.before = ''")
    yield
    page.wait_for_selector("html:not([data-before]) #page > *")


def test_the_theme_follows_the_system_until_somebody_chooses(on_a_system: Open, serving: Serving) -> None:
    page = on_a_system("light")
    page.goto(f"{serving.url}/no/such/page")
    assert paper(page) == colour(LIGHT.paper)
    with loaded_anew(page):
        page.emulate_media(color_scheme="dark")
    assert paper(page) == colour(DARK.paper)
    with loaded_anew(page):
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


def test_style_sheets_have_the_colours_of_the_theme() -> None:
    """What the style sheets call by a name is the colour of that name in the table; they have no other."""
    sheet = (ASSETS / "tracekit.css").read_text()
    for theme, selector in ((LIGHT, ":root"), (DARK, ".dark")):
        (rule,) = re.findall(rf"^{re.escape(selector)} {{(.*)}}$", sheet, re.MULTILINE)
        own = dict(re.findall(r"--(\w+): (#\w+);", rule))
        assert (own["paper"], own["ink"], own["dimmed"], own["line"]) == (
            theme.paper,
            theme.text,
            theme.dimmed,
            theme.grid,
        )
        assert own["bad"] == theme.bad
    assert f"--chosen: {LIGHT.outline};" in sheet
    assert LIGHT.outline == DARK.outline


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_no_colour_has_two_meanings(theme: Theme) -> None:
    apart = [theme.recorded, theme.ideal, theme.changed, theme.outline, *theme.slow[1:], *theme.kinds]
    assert len({*apart}) == len(apart)
    assert theme.bad in theme.slow
    for kind in theme.kinds:  # muted: no channel is far from the others
        channels = [int(kind[at : at + 2], 16) for at in (1, 3, 5)]
        assert max(channels) - min(channels) < 64
