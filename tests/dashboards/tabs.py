"""Tabs of one real browser that stay open between tests: loading the dashboard takes longer than going to another page.

A test gets a tab that shows no page, and goes to its page as a link in the dashboard does. Two tabs of one test never
share a profile, so that the second one is "another browser" to whatever the first one did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

#: What takes longer than this, also on a busy machine, is taken for lost.
PATIENCE_MS = 60_000
HEIGHT = 900
#: So many tabs stay open between tests: two of each theme for the samples, and those of another server.
MOST_FREE = 6
#: Where a tab waits for its next test: an address without a page.
NOWHERE, NOWHERE_SHOWS = "/nowhere", "/not-found"
#: As `dcc.Link` does it.
FOLLOW = """(address) => {
    history.pushState({}, "", address);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    window.scrollTo(0, 0);
}"""


@dataclass(eq=False)
class Tab:
    """One page in a profile of its own, for one theme and one server."""

    page: Page
    context: BrowserContext
    theme: str
    base: str
    loaded: bool = False

    def load(self, path: str) -> None:
        """Go there as somebody who was sent the address."""
        self.page.goto(self.base + path)
        self.page.wait_for_selector("#page > *")
        self.loaded = True

    def follow(self, path: str) -> None:
        """Go there as somebody who follows a link in the dashboard."""
        self.leave()
        self.page.evaluate(FOLLOW, path)
        self.page.wait_for_selector(f"#page:not([data-page='{NOWHERE_SHOWS}']) > *")

    def leave(self) -> None:
        """Show no page."""
        self.page.evaluate(FOLLOW, NOWHERE)
        self.page.wait_for_selector(f"#page[data-page='{NOWHERE_SHOWS}']")


@dataclass
class Tabs:
    """All tabs of a browser; `noise` collects what the console says and what is asked of other hosts."""

    browser: Browser
    noise: list[str] = field(default_factory=list)
    _free: list[Tab] = field(default_factory=list)
    _taken: list[Tab] = field(default_factory=list)

    def visit(self, path: str, *, theme: str, width: int, base: str, within: Page | None, anew: bool) -> Page:
        """Show a page of the dashboard at `base`; see the fixture `visit`."""
        if within is not None:
            tab = next(tab for tab in self._taken if tab.page is within)
        else:
            tab = self._take(theme, base) if not anew else self._open(theme, base)
            self._taken.append(tab)
            tab.page.set_viewport_size(ViewportSize(width=width, height=HEIGHT))
        if tab.loaded and not anew:
            tab.follow(path)
        else:
            tab.load(path)
        return tab.page

    def release(self) -> None:
        """Free the tabs of a test; those used last stay open."""
        taken, self._taken = self._taken, []
        for tab in taken:
            tab.page.unroute_all()
            tab.page.mouse.move(0, 0)
            tab.leave()
            self._free.append(tab)
        while len(self._free) > MOST_FREE:
            self._free.pop(0).context.close()

    def _take(self, theme: str, base: str) -> Tab:
        for at, tab in enumerate(self._free):
            if (tab.theme, tab.base) == (theme, base):
                return self._free.pop(at)
        return self._open(theme, base)

    def _open(self, theme: str, base: str) -> Tab:
        context = self.browser.new_context(timezone_id="Asia/Tokyo")
        context.add_cookies([{"name": "theme", "value": theme, "url": base}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.noise.append(f"error on the page: {error}"))
        page.on("request", lambda request: self._asked(request.url, base))
        return Tab(page, context, theme, base)

    def _hear(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.noise.append(f"console {said.type}: {said.text}")

    def _asked(self, url: str, base: str) -> None:
        if not url.startswith((base, "data:", "blob:")):
            self.noise.append(f"request to another host: {url}")
