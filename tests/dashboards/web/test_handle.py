"""Who can do something about an incident from a browser, and what is refused."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.dashboards.conftest import Serving
from tests.test_store_windows import window
from tracekit.dashboards.browser.web.access import Access, read_access, read_auth
from tracekit.dashboards.browser.web.app import make_app
from tracekit.dashboards.browser.web.serving import _is_own
from tracekit.store import Store
from tracekit.store.incidents import current_user

CHANGE = {"incident": 1, "owner": " ann ", "note": "", "mute_h": 4}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "s.store")
    store.append(window(0, analysed=True))
    return store


def test_the_user_who_runs_the_dashboard_acknowledges_from_the_same_machine(
    store: Store, serve: Callable[..., Serving]
) -> None:
    before, data, kind = store.state(), json.dumps(CHANGE).encode(), {"Content-Type": "application/json"}
    url = f"{serve(store.path).url}/handle"
    with urllib.request.urlopen(urllib.request.Request(url, data, kind)) as answer:
        assert answer.status == 204
    proxied = f"{serve(store.path, read_access(None, [], 'http://127.0.0.1/')).url}/handle"
    for address, more in ((url, {"X-Forwarded-For": "10.0.0.7"}), (proxied, {})):
        with pytest.raises(HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(address, data, {**kind, **more}))
    (change,) = store.handled(1)
    assert (change.by, change.owner, change.note) == (current_user(), "ann", None)
    assert change.muted_until == change.changed_at + 4 * 3600
    assert store.state() != before  # open pages notice


def test_a_connection_is_judged_by_the_user_of_its_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 and ::1, port 0x1F40 = 8000; two users can have the same address and port to different servers."""
    monkeypatch.setattr("tracekit.dashboards.browser.web.serving._CONNECTIONS", tmp_path)
    other = os.getuid() + 1
    heads = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"

    def table(name: str, *rows: tuple[str, str, int]) -> None:
        lines = [f"0: {local} 0100007F:1F72 {state} 0:0 0:0 0 {uid} 0" for local, state, uid in rows]
        (tmp_path / name).write_text("\n".join([heads, *lines]))

    def own(address: str, port: Any = "8000") -> bool:
        return _is_own({"REMOTE_ADDR": address, "REMOTE_PORT": port})

    table("tcp", ("0100007F:1F40", "01", os.getuid()), ("0100007F:1F40", "06", 0), ("0200007F:1F40", "01", other))
    table("tcp6", ("00000000000000000000000001000000:1F40", "01", os.getuid()))
    assert (own("127.0.0.1"), own("127.0.0.1", 8000), own("::1")) == (True, True, True)
    assert (own("127.0.0.2"), own("127.0.0.1", "8001"), own("127.0.0.1", "x"), own("")) == (False,) * 4
    table("tcp", ("0100007F:1F40", "01", os.getuid()), ("0100007F:1F40", "01", other))
    assert not own("127.0.0.1")
    assert not _is_own({})


def test_a_user_whom_a_proxy_names_acknowledges_in_that_name(store: Store) -> None:
    client = make_app(store.path, Access(read_auth("proxy:X-User@127.0.0.1"))).server.test_client()
    assert client.post("/handle", json=CHANGE, headers={"X-User": "bob"}).status_code == 204
    assert client.post("/handle", json=CHANGE).status_code == 403
    forged = {"X-User": "bob", "Sec-Fetch-Site": "cross-site"}
    assert client.post("/handle", json=CHANGE, headers=forged).status_code == 403
    assert [one.by for one in store.handled(1)] == ["bob"]


def test_what_cannot_be_stored_is_a_line(store: Store) -> None:
    nobody = make_app(store.path).server.test_client().post("/handle", json=CHANGE)
    assert (nobody.status_code, "tracekit store handle INCIDENT" in nobody.text) == (403, True)
    client = make_app(store.path, Access(read_auth("proxy:X-User@127.0.0.1"))).server.test_client()
    for body, status, said in (
        ({"data": json.dumps(CHANGE), "content_type": "text/plain"}, 415, "expected JSON"),
        ({"json": {**CHANGE, "incident": 2}}, 404, "no incident 2"),
        ({"json": {**CHANGE, "incident": "1; DROP"}}, 400, "is no change of an incident: Expected `int`"),
        ({"json": {**CHANGE, "incident": 10**30}}, 404, "no incident 1000000"),
        ({"json": {**CHANGE, "mute_h": -1}}, 400, "Expected `int` >= 0"),
        ({"json": {**CHANGE, "note": "x" * 1001}}, 400, "at most 1,000 characters"),
        ({"json": {**CHANGE, "admin": True}}, 400, "unknown field"),
        ({"data": b"\xff{", "content_type": "application/json"}, 400, "is no change of an incident"),
    ):
        answer = client.post("/handle", headers={"X-User": "bob"}, **body)
        assert (answer.status_code, answer.text.count("\n")) == (status, 1)
        assert said in answer.text
    assert store.handled(1) == ()
