"""Logging in: sessions that end, tries that are counted, and nothing that tells who exists."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from flask.testing import FlaskClient
from werkzeug.security import generate_password_hash

from tracekit.dashboards.web import passwords
from tracekit.dashboards.web.access import Access
from tracekit.dashboards.web.app import make_app
from tracekit.dashboards.web.attempts import MOST_FROM_ONE, MOST_IN_ALL, WINDOW_S, Attempts
from tracekit.dashboards.web.passwords import COOKIE, Passwords
from tracekit.dashboards.web.sessions import IDLE_S, LONGEST_S

#: A hash that costs next to nothing: what is tested is who is let in, not how dear a hash is.
CHEAP = "pbkdf2:sha256:1"
HTML = {"Accept": "text/html"}


@dataclass
class Clock:
    """A clock that stands until it is moved."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Site:
    """A dashboard with users, its clock, and the file of users."""

    client: FlaskClient
    clock: Clock
    users: Path
    store: Path
    auth: Passwords

    def login(self, user: str, password: str, **asked: str) -> int:
        """The status of a try to log in."""
        form = {"user": user, "password": password}
        return self.client.post("/login", data=form, query_string=asked).status_code

    def sees(self) -> bool:
        """Whether the list of jobs is shown."""
        return self.client.get("/download/jobs.csv").status_code == 200


def line(user: str, password: str) -> str:
    return f"{user}:{generate_password_hash(password, CHEAP)}\n"


@pytest.fixture
def site(tmp_path: Path, sample_store: Path) -> Site:
    users, clock = tmp_path / "users", Clock()
    users.write_text(line("ann", "right") + line("bob", "also right"))
    auth = Passwords(users, clock)
    return Site(make_app(sample_store, Access(auth)).server.test_client(), clock, users, sample_store, auth)


def test_a_browser_is_led_to_the_login_and_back_to_where_it_wanted(site: Site) -> None:
    led = site.client.get("/job?job=slow-worker", headers=HTML)
    assert led.status_code == 303
    assert led.location == "/login?next=%2Fjob%3Fjob%3Dslow-worker"
    page = site.client.get(led.location)
    assert page.status_code == 200
    assert 'type="password"' in page.text
    back = site.client.post(led.location, data={"user": "ann", "password": "right"})
    assert (back.status_code, back.location) == (303, "/job?job=slow-worker")
    cookie = back.headers["Set-Cookie"]
    assert all(word in cookie for word in (f"{COOKIE}=", "HttpOnly", "SameSite=Lax", "Path=/"))
    assert site.client.get("/job?job=slow-worker", headers=HTML).status_code == 200


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/x", "//evil.example/x", "\\\\evil.example", "/\\evil.example", "javascript:alert(1)",
        "//[evil", "https://[", "//[::1]:x/", "/\t/evil.example", "\\\n/evil.example", "/\r\nX-Evil: yes",
        "\x00//evil.example",
    ],
)  # fmt: skip
def test_a_login_leads_nowhere_else(site: Site, wanted: str) -> None:
    back = site.client.post("/login", data={"user": "ann", "password": "right"}, query_string={"next": wanted})
    assert back.status_code == 303
    assert back.location.startswith("/")
    assert not back.location.startswith(("//", "/\\"))


def test_a_cookie_over_tls_stays_on_tls_and_below_the_prefix(site: Site) -> None:
    access = Access(site.auth, prefix="/tracekit/", secure=True, proxied=True)
    client = make_app(site.store, access).server.test_client()
    answer = client.post("/tracekit/login", data={"user": "ann", "password": "right"})
    assert answer.location == "/tracekit/"
    assert "Secure" in answer.headers["Set-Cookie"]
    assert "Path=/tracekit/" in answer.headers["Set-Cookie"]
    assert "max-age=31536000" in answer.headers["Strict-Transport-Security"]


def test_a_wrong_password_and_an_unknown_user_look_alike_and_both_are_hashed(site: Site) -> None:
    with patch.object(passwords, "check_password_hash", wraps=passwords.check_password_hash) as hashed:
        answers = [
            site.client.post("/login", data={"user": user, "password": "wrong"}) for user in ("ann", "nobody", "")
        ]
    assert [answer.status_code for answer in answers] == [401] * 3
    assert len({answer.text for answer in answers}) == 1
    assert hashed.call_count == 3
    assert not site.sees()


def test_a_session_ends_after_a_rest_and_after_a_day_of_work(site: Site) -> None:
    site.login("ann", "right")
    site.clock.now_s += IDLE_S - 1
    assert site.sees()
    site.clock.now_s += IDLE_S
    assert not site.sees()
    site.login("ann", "right")
    for _ in range(int(LONGEST_S // (IDLE_S / 2)) - 1):
        site.clock.now_s += IDLE_S / 2
        assert site.sees()
    site.clock.now_s += IDLE_S / 2
    assert not site.sees()


def test_logging_out_ends_the_sessions_of_the_user_on_every_device(site: Site) -> None:
    other = site.client.application.test_client()
    for client in (site.client, other):
        client.post("/login", data={"user": "ann", "password": "right"})
    third = site.client.application.test_client()
    third.post("/login", data={"user": "bob", "password": "also right"})
    answer = site.client.post("/logout")
    assert answer.status_code == 303
    assert "storage" in answer.headers["Clear-Site-Data"]
    assert [client.get("/download/jobs.csv").status_code for client in (site.client, other, third)] == [401, 401, 200]


def test_a_name_that_is_no_text_is_a_wrong_one(site: Site) -> None:
    basic = {"Authorization": f"Basic {b64encode(bytes([255, 255, 58, 255])).decode()}"}
    assert site.client.get("/metrics", headers=basic).status_code == 401
    assert site.client.get("/metrics", headers={"Authorization": "Basic \xff\xff"}).status_code == 401


def test_who_is_removed_from_the_file_or_has_a_new_password_is_out_at_once(site: Site) -> None:
    site.login("ann", "right")
    basic = {"Authorization": f"Basic {b64encode(b'bob:also right').decode()}"}
    other = site.client.application.test_client()
    assert other.get("/download/jobs.csv", headers=basic).status_code == 200
    site.users.write_text(line("ann", "a new one"))
    assert not site.sees()
    assert other.get("/download/jobs.csv", headers=basic).status_code == 401
    assert site.login("ann", "right") == 401
    assert site.login("ann", "a new one") == 303
    site.users.unlink()
    assert not site.sees()
    assert site.login("ann", "a new one") == 401


def test_a_right_password_of_a_program_is_hashed_once_and_not_forever(site: Site) -> None:
    basic = {"Authorization": f"Basic {b64encode(b'ann:right').decode()}"}
    with patch.object(passwords, "check_password_hash", wraps=passwords.check_password_hash) as hashed:
        for _ in range(3):
            assert site.client.get("/metrics", headers=basic).status_code == 200
        assert hashed.call_count == 1
        site.clock.now_s += LONGEST_S
        assert site.client.get("/metrics", headers=basic).status_code == 200
        assert hashed.call_count == 2


def test_a_page_that_is_open_is_not_asked_by_the_browser_itself(site: Site) -> None:
    asked = site.client.get("/_dash-layout", headers={"Sec-Fetch-Mode": "cors"})
    assert asked.status_code == 401
    assert "WWW-Authenticate" not in asked.headers


def test_one_address_cannot_try_without_end_and_nothing_is_hashed_meanwhile(site: Site) -> None:
    assert [site.login("ann", "wrong") for _ in range(MOST_FROM_ONE)] == [401] * MOST_FROM_ONE
    with patch.object(passwords, "check_password_hash") as hashed:
        refused = site.client.post("/login", data={"user": "ann", "password": "right"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, str(int(WINDOW_S)))
    assert not hashed.called
    site.clock.now_s += WINDOW_S
    assert site.login("ann", "right") == 303


def test_many_addresses_together_are_limited_too() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    assert [attempts.wait_s(f"10.0.{at}.1") for at in range(MOST_IN_ALL)] == [0] * MOST_IN_ALL
    clock.now_s += 20
    assert attempts.wait_s("10.1.0.1") == WINDOW_S - 20
    clock.now_s += WINDOW_S - 20
    assert attempts.wait_s("10.1.0.1") == 0


def test_the_addresses_of_one_ipv6_network_are_one() -> None:
    attempts = Attempts(Clock())
    waits = [attempts.wait_s(f"2001:db8::{at:x}") for at in range(MOST_FROM_ONE + 1)]
    assert waits == [0] * MOST_FROM_ONE + [WINDOW_S]
    assert attempts.wait_s("2001:db8:0:1::1") == 0


def test_a_proxy_in_front_names_the_client_and_what_the_client_claims_does_not_count(site: Site) -> None:
    client = make_app(site.store, Access(site.auth, proxied=True)).server.test_client()

    def tried(forwarded: str) -> int:
        form = {"user": "ann", "password": "wrong"}
        return client.post("/login", data=form, headers={"X-Forwarded-For": forwarded}).status_code

    assert [tried(f"10.9.9.{at}, 192.0.2.7") for at in range(MOST_FROM_ONE + 1)] == [401] * MOST_FROM_ONE + [429]
    assert tried("192.0.2.7, 192.0.2.8") == 401


def test_a_password_of_any_length_costs_no_more_than_one(site: Site) -> None:
    with patch.object(passwords, "check_password_hash") as hashed:
        assert site.login("ann", "x" * 100_000) == 401
    assert not hashed.called
