"""Other sites in a real browser: what their pages make a visitor's browser send, the dashboard refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from werkzeug.serving import make_server

from tests.dashboards.web.test_tokens import NEW, write
from tests.handmade import POLL_S
from tests.test_store_windows import window
from tracekit.dashboards.browser.web.access import Access, read_auth
from tracekit.dashboards.browser.web.app import make_app
from tracekit.store import Store

BODY = json.dumps({"incident": 1, "owner": "mallory"})
#: What the page of another site tries, each with a promise that ends when the browser has done it. Nothing of it may
#: change the store, also where the browser does not ask beforehand and sends the cookies of the visitor.
TRIES = {
    "JSON": "fetch(url + '/handle', {method: 'POST', body, headers: {'Content-Type': 'application/json'}})",
    "text": "fetch(url + '/handle', {method: 'POST', body, mode: 'no-cors', credentials: 'include'})",
    "stream": "fetch(url + '/handle', {method: 'POST', mode: 'no-cors', body: new Blob([body])})",
    "PUT": "fetch(url + '/handle', {method: 'PUT', body, credentials: 'include'})",
    "callback": "fetch(url + '/_dash-update-component', {method: 'POST', body, mode: 'no-cors'})",
    "log out": "fetch(url + '/logout', {method: 'POST', mode: 'no-cors', credentials: 'include'})",
    "log in": "fetch(url + '/login', {method: 'POST', mode: 'no-cors', body: new URLSearchParams({token: 'x'})})",
    "table": "fetch(url + '/download/jobs.csv', {credentials: 'include'})",
    "unread table": "fetch(url + '/download/jobs.csv', {credentials: 'include', mode: 'no-cors'})",
    "image": "new Promise((_, reject) => Object.assign(new Image(), {src: url + '/state', onerror: reject}))",
    "script": "new Promise((_, reject) => document.body.append("
    "Object.assign(document.createElement('script'), {src: url + '/_dash-dependencies', onerror: reject})))",
}
#: A form needs no script to be allowed anything; its parts make up JSON.
FORM = """<form method="post" enctype="text/plain" action="%s/handle">
<input name='{"incident": 1, "owner": "mallory", "note": "' value='"}'><button>Win a prize</button></form>"""
#: Calls what is tried, and says how it ended.
RUN = "async ([url, body]) => { try { return (await %s).type } catch { return 'failed' } }"


@dataclass
class Victim:
    """A dashboard whose visitor has a session, in one tab, and then visits another site in the same browser."""

    store: Store
    url: str
    page: Page
    answers: list[tuple[str, str, int]] = field(default_factory=list)


def serve(application: Any) -> tuple[Any, int]:
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
    return server, server.server_port


@pytest.fixture(params=["127.0.0.1", "localhost"])
def victim(request: pytest.FixtureRequest, tmp_path: Path, browser: Browser) -> Iterator[Victim]:
    """The other site is on another port of the same address, for which cookies are sent, or has another name."""
    store = Store(tmp_path / "s.store")
    store.append(window(0, analysed=True))
    app = make_app(store.path, Access(read_auth(f"token:{write(tmp_path / 'tokens', f'ann: {NEW}')}"))).server
    answers: list[tuple[str, str, int]] = []

    def noted(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        def begin(status: str, *arguments: Any) -> Any:
            answers.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], int(status[:3])))
            return start(status, *arguments)

        return app(environ, begin)

    def site(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/html")])
        return [f"<body>{FORM % environ['QUERY_STRING']}".encode()]

    (dashboard, port), (attacker, other) = serve(noted), serve(site)
    url = f"http://127.0.0.1:{port}"
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/incidents?token={NEW}")
    page.wait_for_selector("#page > *")
    assert page.url == f"{url}/incidents"
    page.goto(f"http://{request.param}:{other}/?{url}")
    answers.clear()
    yield Victim(store, url, page, answers)
    context.close()
    for server in (dashboard, attacker):
        server.shutdown()
        server.server_close()


def test_no_request_of_a_page_of_another_site_changes_or_reads_anything(victim: Victim) -> None:
    for name, tried in TRIES.items():
        victim.answers.clear()
        ended = victim.page.evaluate(RUN % tried, [victim.url, BODY])
        assert ended in ("failed", "opaque"), name
        assert victim.answers, f"{name}: asked"
        assert {status for *_, status in victim.answers} <= {403, 405}, name
    for kind in ("text/plain", "application/json"):
        with victim.page.expect_request(f"{victim.url}/handle"):
            victim.page.evaluate(
                "([url, body, type]) => navigator.sendBeacon(url + '/handle', new Blob([body], {type}))",
                [victim.url, BODY, kind],
            )
    with victim.page.expect_navigation():
        victim.page.click("button")
    assert victim.page.inner_text("body").strip() == "another site asked for this"
    assert ("POST", "/handle", 403) in victim.answers
    assert {status for *_, status in victim.answers} <= {403, 405}
    assert victim.store.handled(1) == ()


def test_a_link_of_another_site_opens_a_page_and_the_page_may_write(victim: Victim) -> None:
    """What is refused above is no accident: the same session, from a page of the dashboard, is let in."""
    victim.page.evaluate("(url) => { location.href = url }", f"{victim.url}/incidents")
    victim.page.wait_for_selector("#page > *")
    sent = "fetch('/handle', {method: 'POST', body, headers: {'Content-Type': 'application/json'}})"
    status = victim.page.evaluate(f"async ([body]) => (await {sent}).status", [BODY])
    assert status == 204
    assert [(change.by, change.owner) for change in victim.store.handled(1)] == [("ann", "mallory")]
