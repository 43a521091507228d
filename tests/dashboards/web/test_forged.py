"""Headers that clients forge: they are nobody else, come from nowhere else, and write nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.web.conftest import Turns
from tests.dashboards.web.test_tokens import ANN, BOB, write
from tests.test_store_windows import window
from tracekit.dashboards.browser.web.access import Access, ProxyHeader, ip_address, read_access, read_auth
from tracekit.dashboards.browser.web.app import make_app
from tracekit.store import Store

ServeTurns = Callable[[Any], Turns]
#: What proxies add, each saying that 10.0.0.1 asks, for ann, by a name of its own.
FORWARDED = (
    "X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.1, 10.0.0.1", "X-Real-IP: 10.0.0.1", "Via: 1.1 10.0.0.1",
    "Forwarded: for=10.0.0.1;host=evil.example", "X-Forwarded-Host: evil.example", "X-Forwarded-User: ann",
    "X-Forwarded-Email: ann@example.com", "X-Forwarded-Proto: https", "X-Forwarded-Prefix: /evil",
)  # fmt: skip


def asked(turns: Turns, *lines: str, host: str = "Host: localhost", path: str = "/metrics", body: str = "") -> str:
    """The status of a request with those lines in its head, and the head of the answer."""
    method = f"POST {path}" if body else f"GET {path}"
    length = (f"Content-Length: {len(body)}",) if body else ()
    head = "\r\n".join([f"{method} HTTP/1.1", *filter(None, [host]), *lines, *length, "", ""])
    client = turns.client((head + body).encode("latin-1"))
    return turns.answer(client).decode()


def status(turns: Turns, *lines: str, **more: str) -> int:
    return int(asked(turns, *lines, **more).split()[1])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["X-User: ann"], 200),
        (["x-user:ann"], 200),
        ([], 403),
        (["X-User:"], 403),
        (["X-User:  \t "], 403),
        (["X-User: ann", "X-User: bob"], 403),
        (["X-User: ann", "x-USER: ann"], 403),
        (["X-User:", "X-User: ann"], 403),
        (["X-User: ann,bob"], 403),
        (["X-User: ann\tb"], 403),
        (["X-User: ann\x85"], 403),
        ([f"X-User: {'a' * 201}"], 403),
        (["X_User: ann"], 403),
        (["X-User : ann"], 400),
        (["X-User: ann\x00"], 400),
        (["X-User: ann\nX-Other: b"], 400),
        ([" X-User: ann"], 421),
        (["X-Other: a\r\n X-User: ann"], 403),
        (["Cookie: X-User=ann"], 403),
    ],
)
def test_the_proxys_header_names_one_user_once(
    lines: list[str], expected: int, sample_store: Path, serve_turns: ServeTurns
) -> None:
    turns = serve_turns(make_app(sample_store, Access(read_auth("proxy:X-User@10.0.0.7, 127.0.0.0/8"))).server)
    assert status(turns, *lines) == expected


@pytest.mark.parametrize("line", FORWARDED)
def test_no_header_makes_a_sender_the_proxy(line: str, sample_store: Path, serve_turns: ServeTurns) -> None:
    access = read_access(read_auth("proxy:X-Forwarded-User@10.0.0.1"), [], "https://localhost/")
    turns = serve_turns(make_app(sample_store, access).server)
    assert status(turns, line, "X-Forwarded-User: ann") == 403


@pytest.mark.parametrize("line", [*FORWARDED, "Remote-User: ann", "Authorization: Bearer ann", "X-Token: ann"])
def test_no_header_is_a_token(line: str, sample_store: Path, tmp_path: Path, serve_turns: ServeTurns) -> None:
    auth = read_auth(f"token:{write(tmp_path / 'tokens', f'ann: {ANN}')}")
    turns = serve_turns(make_app(sample_store, Access(auth)).server)
    assert status(turns, line) == 401
    assert status(turns, f"Authorization: Bearer {BOB}", f"Authorization: Bearer {ANN}") == 401
    assert status(turns, line.replace("Authorization", "X"), f"Authorization: Bearer {ANN}") == 200


def test_addresses_are_compared_as_such(sample_store: Path) -> None:
    """A socket of IPv6 shows clients of IPv4 with a prefix."""
    assert str(ip_address("::ffff:10.0.0.5")) == "10.0.0.5"
    auth = read_auth("proxy:X-User@10.0.0.5,2001:db8::/32")
    assert isinstance(auth, ProxyHeader)
    client = make_app(sample_store, Access(auth)).server.test_client()
    for address, expected in (("10.0.0.5", 200), ("::ffff:10.0.0.5", 200), ("2001:db8::1", 200), ("2001:db9::1", 403),
                              ("::ffff:10.0.0.6", 403), ("10.0.0.50", 403), ("localhost", 403), ("", 403)):  # fmt: skip
        answer = client.get("/metrics", headers={"X-User": "ann"}, environ_overrides={"REMOTE_ADDR": address})
        assert answer.status_code == expected, address


def test_one_known_name_is_asked_and_no_other_is_shown(tmp_path: Path, serve_turns: ServeTurns) -> None:
    store = Store(tmp_path / "s")
    store.append(window(0, analysed=True))
    turns = serve_turns(make_app(store.path).server)
    for host in (
        "", "Host: evil.example", "Host: localhost\r\nHost: evil.example", "Host: evil.example\r\nHost: localhost",
        "Host: localhost, evil.example", "Host: localhost evil.example", "Host: localhost#evil.example",
    ):  # fmt: skip
        assert status(turns, "X-Forwarded-Host: localhost", host=host) in (400, 421), host
    for line in FORWARDED:
        client = turns.client(f"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
        answer = turns.answer(client, whole=True)
        assert b"page=" in answer
        assert b"evil" not in answer


def test_who_comes_through_a_proxy_is_not_the_user_who_runs_it(tmp_path: Path, serve_turns: ServeTurns) -> None:
    """The other end of all these connections is a process of this user, as a proxy on this machine can be."""
    store = Store(tmp_path / "s")
    store.append(window(0, analysed=True))
    turns = serve_turns(make_app(store.path).server)
    body, kind = json.dumps({"incident": 1, "owner": "ann"}), "Content-Type: application/json"
    for line in FORWARDED:
        assert status(turns, line, kind, path="/handle", body=body) == 403, line
    for line in (
        "Origin: null", "Origin: http://evil.example", "Origin: http://localhost:1", "Sec-Fetch-Site: same-site",
        "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: x", "Sec-Fetch-Site: same-origin, cross-site",
    ):  # fmt: skip
        assert status(turns, line, kind, path="/handle", body=body) == 403, line
    assert store.handled(1) == ()
    for line in ("X: y", "Origin: http://localhost", "Sec-Fetch-Site: same-origin"):
        assert status(turns, line, kind, path="/handle", body=body) == 204, line
    assert len(store.handled(1)) == 3
