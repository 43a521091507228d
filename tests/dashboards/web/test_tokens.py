"""Tokens: who is admitted, for how long, and that a token is neither guessed nor passed on."""

from __future__ import annotations

import os
import re
import secrets
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient
from itsdangerous import URLSafeTimedSerializer
from itsdangerous.timed import TimestampSigner

from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.web.access import (
    COOKIE,
    LINK_HOLDER,
    SESSION_LENGTH,
    Access,
    Auth,
    Tokens,
    read_access,
    read_auth,
)
from tracekit.dashboards.browser.web.app import make_app

ANN, BOB, NEW = "o3yXn0mQ9vR5sT1uW7zA4c", "0f1e2d3c4b5a69788796a5b4c3d2e1f1", "Zk8_q-Lr2Vb6Nd0Xw4Ej1g"
HTML = {"Accept": "text/html"}


@dataclass
class Site:
    """A dashboard with a file of tokens."""

    file: Path
    store: Path
    client: FlaskClient

    def again(self, prefix: str = "/", *, secure: bool = False) -> FlaskClient:
        """A browser without cookies, and a server that was started anew."""
        return client_of(self.store, Tokens(self.file), prefix, secure=secure)


def client_of(store: Path, auth: Auth, prefix: str = "/", *, secure: bool = False) -> FlaskClient:
    return make_app(store, Access(auth, prefix=prefix, secure=secure)).server.test_client()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def sees(client: FlaskClient, **headers: str) -> int:
    return client.get("/download/jobs.csv", headers=headers).status_code


def bearer(token: str) -> str:
    return f"Bearer {token}"


@pytest.fixture
def site(tmp_path: Path, sample_store: Path) -> Site:
    file = write(tmp_path / "tokens", f"# on call\nann: {ANN}\n\nbob@example.com:{BOB}\n")
    return Site(file, sample_store, client_of(sample_store, Tokens(file)))


class TestLinks:
    def test_a_link_opens_its_page_and_leaves_no_token_in_the_address(self, site: Site) -> None:
        answer = site.client.get(f"/job?job=slow-worker&token={ANN}&x=%C3%BC%26", headers=HTML)
        assert (answer.status_code, answer.location) == (303, "/job?job=slow-worker&x=%C3%BC%26")
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        cookie = answer.headers["Set-Cookie"]
        assert all(word in cookie for word in (f"{COOKIE}=", "HttpOnly", "SameSite=Lax", "Path=/;"))
        assert ANN not in str(answer.headers)
        assert site.client.get(answer.location, headers=HTML).status_code == 200

    @pytest.mark.parametrize(
        "path", ["//evil.example/x", "/\\evil.example", "/\t/evil.example", "\\\\evil.example", "/\r\nX-Evil: yes"]
    )
    def test_a_link_leads_nowhere_else(self, path: str, site: Site) -> None:
        answer = site.client.get("/", query_string={"token": ANN}, environ_overrides={"PATH_INFO": path})
        assert answer.status_code == 303
        assert re.match(r"/(?![/\\])", answer.location)
        assert "X-Evil" not in answer.headers

    def test_without_a_token_a_browser_gets_a_form_that_leads_to_the_page(self, site: Site) -> None:
        page = site.client.get('/job?job="><script>', headers=HTML)
        assert page.status_code == 401
        assert "<script>" not in page.text
        (wanted,) = re.findall(r'name="next" value="([^"]*)"', page.text)
        assert site.client.post("/login", data={"token": NEW, "next": wanted}).status_code == 401
        answer = site.client.post("/login", data={"token": BOB, "next": wanted})
        assert (answer.status_code, answer.location) == (303, "/job?job=%22%3E%3Cscript%3E")
        assert sees(site.client) == 200

    @pytest.mark.parametrize(
        "wanted",
        [
            "https://evil.example/x", "//evil.example/x", "\\\\evil.example", "/\\evil.example", "javascript:alert(1)",
            "//[evil", "https://[", "//[::1]:x/", "/\t/evil.example", "\\\n/evil.example", "/\r\nX-Evil: yes",
            "\x00//evil.example",
        ],
    )  # fmt: skip
    def test_the_form_leads_nowhere_else(self, wanted: str, site: Site) -> None:
        answer = site.client.post("/login", data={"token": ANN, "next": wanted})
        assert answer.status_code == 303
        assert re.match(r"/(?![/\\])", answer.location)

    def test_a_wrong_token_shows_the_form_without_it_and_takes_no_session_away(self, site: Site) -> None:
        page = site.client.get(f"/job?token={NEW}&job=a", headers=HTML)
        assert (page.status_code, NEW in page.text) == (401, False)
        site.client.get(f"/?token={ANN}")
        assert site.client.get(f"/job?token={NEW}&job=a", headers=HTML).location == "/job?job=a"
        assert sees(site.client) == 200

    def test_over_tls_a_session_stays_on_tls_and_below_the_prefix(self, site: Site) -> None:
        answer = site.again("/tracekit/", secure=True).get(f"/tracekit/job?token={ANN}")
        assert answer.location == "/tracekit/job"
        assert all(word in answer.headers["Set-Cookie"] for word in ("Secure", "Path=/tracekit/"))
        assert "max-age=31536000" in answer.headers["Strict-Transport-Security"]

    def test_a_start_without_a_file_has_a_token_of_128_bits_that_nobody_had(self, sample_store: Path) -> None:
        tokens = [Tokens().token or "" for _ in range(100)]
        assert len(set(tokens)) == 100
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", token) for token in tokens)
        auth = Tokens()
        client = client_of(sample_store, auth)
        client.get(f"/?token={auth.token}")
        assert sees(client) == 200
        assert sees(client_of(sample_store, Tokens()), Authorization=bearer(auth.token or "")) == 401

    def test_the_log_shows_no_token(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tracekit.dashboards.browser.web.serving.safe_csv", lambda _: 1 / 0)
        monkeypatch.setattr("tracekit.dashboards.browser.web.access._without_token", lambda _: 1 / 0)
        headers = {"Authorization": bearer(ANN)}
        assert site.client.get("/download/jobs.csv", headers=headers).status_code == 500
        assert site.client.get(f"/?token={ANN}").status_code == 500
        assert caplog.text.count("ZeroDivisionError") >= 2
        assert ANN not in caplog.text


class TestSessions:
    def test_who_is_removed_or_has_a_new_token_is_out_at_once_and_nobody_else(self, site: Site) -> None:
        ann, bob = site.client, site.client.application.test_client()
        ann.get(f"/?token={ANN}")
        bob.get(f"/?token={BOB}")
        write(site.file, f"ann: {NEW}\nbob@example.com: {BOB}\n")
        assert (sees(ann), sees(bob)) == (401, 200)
        assert sees(ann, Authorization=bearer(ANN)) == 401
        assert sees(ann, Authorization=bearer(NEW)) == 200
        write(site.file, f"ann: {NEW}\n")
        assert sees(bob) == 401

    @pytest.mark.parametrize("damage", ["gone", "open to others", "invalid"])
    def test_a_file_that_cannot_be_used_any_more_admits_nobody(self, damage: str, site: Site) -> None:
        site.client.get(f"/?token={ANN}")
        if damage == "gone":
            site.file.unlink()
        else:
            write(site.file, f"ann: {ANN}\n" if damage == "open to others" else "ann: x\n", 0o644)
        assert sees(site.client) == sees(site.client, Authorization=bearer(ANN)) == 401
        write(site.file, f"ann: {ANN}\n")
        assert sees(site.client) == 200

    def test_a_session_ends_after_twelve_hours(self, site: Site) -> None:
        site.client.get(f"/?token={ANN}")
        session = site.client.get_cookie(COOKIE)
        assert session is not None
        later = int(datetime.now(UTC).timestamp() + SESSION_LENGTH.total_seconds())
        for seconds, status in ((-60, 200), (60, 401)):
            client = site.client.application.test_client()
            client.set_cookie(COOKIE, session.value)
            with patch.object(TimestampSigner, "get_timestamp", lambda _, now=later + seconds: now):
                assert sees(client) == status
        assert session.expires is not None
        assert abs(session.expires - datetime.now(UTC) - SESSION_LENGTH) < timedelta(minutes=10)

    def test_links_and_sessions_work_after_a_restart_with_the_same_file(self, site: Site) -> None:
        site.client.get(f"/?token={ANN}")
        session = site.client.get_cookie(COOKIE)
        assert session is not None
        client = site.again()
        client.set_cookie(COOKIE, session.value)
        assert sees(client) == 200
        assert site.again().get(f"/?token={BOB}").status_code == 303

    def test_logging_out_ends_the_session_of_this_browser(self, site: Site) -> None:
        site.client.get(f"/?token={ANN}")
        answer = site.client.post("/logout")
        assert (answer.status_code, answer.location) == (303, "/")
        assert "storage" in answer.headers["Clear-Site-Data"]
        assert sees(site.client) == 401

    def test_no_session_is_forged(self, site: Site) -> None:
        """With keys that could be guessed, for users who are known, and with parts of a session of one's own."""
        site.client.get(f"/?token={ANN}")
        session = site.client.get_cookie(COOKIE)
        assert session is not None
        application = site.client.application
        signer = application.session_interface.get_signing_serializer(application)  # type: ignore[attr-defined]
        own = signer.loads(session.value)
        forged = [
            signer.dumps(content)
            for content in ({}, {"user": ""}, {**own, "user": "bob@example.com"}, {**own, "token": ""})
        ]
        options = {"salt": "cookie-session", "serializer": signer.serializer, "signer_kwargs": signer.signer_kwargs}
        for key in ("", "dev", "secret", COOKIE, own["token"], bytes.fromhex(own["token"]), ANN):
            forged.append(URLSafeTimedSerializer(key, **options).dumps(own))
        payload, stamp, signature = session.value.rsplit(".", 2)
        forged += [payload, f"{payload}..", f"{payload}.{stamp}.{signature[:-4]}AAAA", "\x00", "." * 4000]
        for cookie in forged:
            client = application.test_client()
            client.set_cookie(COOKIE, cookie)
            assert sees(client) == 401, cookie
        client = application.test_client()
        client.set_cookie(COOKIE, signer.dumps(own))
        assert sees(client) == 200, "the forgeries are of the right kind"


class TestPrograms:
    def test_a_program_sends_its_token_in_a_header(self, site: Site) -> None:
        basic = [f"Basic {b64encode(given).decode()}" for given in (f"ann:{ANN}".encode(), bytes([255, 58, 255]))]
        wrong = [bearer(token) for token in (NEW, ANN[:-1], ANN + "x", "", "\xff", quote("ü"))]
        for given in (*basic, *wrong, "", "Bearer", f"Token {ANN}", "Basic \xff\xff"):
            answer = site.client.get("/metrics", headers={"Authorization": given})
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        answer = site.client.get("/metrics", headers={"Authorization": bearer(ANN)})
        assert answer.status_code == 200
        assert "Set-Cookie" not in answer.headers

    def test_every_token_is_compared_with_every_entry_in_constant_time(self, site: Site) -> None:
        with patch(
            "tracekit.dashboards.browser.web.access.hmac.compare_digest", wraps=secrets.compare_digest
        ) as compared:
            for token in (ANN, BOB, NEW, "", "x" * 10_000):
                sees(site.client.application.test_client(), Authorization=bearer(token))
                own, given = zip(*(call.args for call in compared.call_args_list), strict=True)
                assert (len(set(own)), len(set(given)), len(own)) == (2, 1, 2)
                assert {len(one) for one in (*own, *given)} == {32}
                compared.reset_mock()

    def test_only_health_checks_are_open(self, site: Site) -> None:
        addresses = (
            "/", "/job", "/metrics", "/state", "/_dash-layout", "/_dash-dependencies", "/assets/tracekit.css", "/login",
            "/download/jobs.csv", "/search?q=a", "/timeline/layout?job=healthy", "/api/x", "/nothing",
        )  # fmt: skip
        assert {site.client.get(address).status_code for address in addresses} == {401}
        posted = ("/_dash-update-component", "/handle", "/logout", "/login")
        assert {site.client.post(address, json={}).status_code for address in posted} == {401}
        assert [site.client.get(address).status_code for address in ("/healthz", "/readyz")] == [200, 200]


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("ann", "line 1: expected NAME: TOKEN"),
            (f": {ANN}", "line 1: expected NAME: TOKEN"),
            (f"a\tb: {ANN}", "line 1: expected NAME: TOKEN"),
            (f"{'a' * 101}: {ANN}", "line 1: expected NAME: TOKEN"),
            ("ann:", "the token of ann can be guessed"),
            (f"ann: {ANN[:21]}", "the token of ann can be guessed"),
            (f"ann: {BOB[:31]}", "the token of ann can be guessed; expected 128 random bits"),
            ("ann: 12345678901234567890123456789012", "can be guessed"),
            (f"ann: {'a' * 40}", "can be guessed"),
            ("ann: changeme-changeme-changeme-", "can be guessed"),
            (f"ann: {ANN[:-1]}ü", "can be guessed"),
            (f"ann: {ANN} x", "can be guessed"),
            (f"ann: {ANN}\nann: {NEW}", "line 2: ann has a token already"),
            (f"ann: {ANN}\nbob: {ANN}", "line 2: bob has the token of somebody else"),
            ("# nobody\n\n", "names nobody"),
            ("ann:scrypt:32768:8:1$salt$00", "no passwords any more: write a line NAME: TOKEN"),
            ("ann:pbkdf2:sha256:1$salt$00", "no passwords any more: write a line NAME: TOKEN"),
        ],
    )
    def test_a_file_that_lets_somebody_guess_or_errs_is_refused(self, text: str, reason: str, tmp_path: Path) -> None:
        with pytest.raises(SelectionError, match=reason) as raised:
            read_auth(f"token:{write(tmp_path / 'tokens', text)}")
        assert ANN not in str(raised.value)

    def test_any_random_token_of_128_bits_is_accepted(self, tmp_path: Path) -> None:
        tokens = [make(16) for make in (secrets.token_hex, secrets.token_urlsafe) for _ in range(200)]
        write(tmp_path / "tokens", "".join(f"user {number}: {token}\n" for number, token in enumerate(tokens)))
        assert isinstance(read_auth(f"token:{tmp_path / 'tokens'}"), Tokens)

    @pytest.mark.parametrize(("mode", "refused"), [(0o600, False), (0o440, False), (0o644, True), (0o660, True)])
    def test_what_others_can_read_or_change_is_refused(self, mode: int, refused: bool, tmp_path: Path) -> None:
        file = write(tmp_path / "tokens", f"\ufeffann: {ANN}\r\n", mode)
        if not refused:
            read_auth(f"token:{file}")
        else:
            with pytest.raises(SelectionError, match=f"other users can read or change .*: chmod 600 {file}"):
                read_auth(f"token:{file}")

    def test_only_a_regular_file_holds_tokens(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path, reason in (
            (tmp_path / "pipe", "is not a regular file"),
            (tmp_path, "Is a directory"),
            (tmp_path / "no", "No such file"),
        ):
            with pytest.raises(SelectionError, match=reason):
                read_auth(f"token:{path}")

    def test_the_text_of_auth_is_read_or_refused(self) -> None:
        for text in ("", "token:", "tokens", "everybody", "proxy:", "proxy:X@", "proxy:X User@1.2.3.4", "proxy:X@a.b",
                     "proxy:@::1", "proxy:X@::1,", "proxy:X@::1,example.com"):  # fmt: skip
            with pytest.raises(SelectionError, match=r"expected token|is not an IP address"):
                read_auth(text)
        with pytest.raises(SelectionError, match="no passwords any more: write a line NAME: TOKEN for each person"):
            read_auth("password:users")
        with pytest.raises(SelectionError, match=r"called --auth proxy:X-User@10\.0\.0\.1 now"):
            read_auth("header:X-User@10.0.0.1")


def test_a_link_holder_acts_as_one(sample_store: Path) -> None:
    auth = Tokens()
    client = client_of(sample_store, auth)
    client.get(f"/?token={auth.token}")
    page = client.get("/_dash-layout").text
    assert f"End the session of {LINK_HOLDER}" in page
    assert (
        "Log out"
        not in make_app(sample_store, read_access(None, [], None)).server.test_client().get("/_dash-layout").text
    )
