"""Tokens that open the dashboard: in a link, as Jupyter does it, in the Authorization header, or pasted into a form.

In: a file of `NAME: TOKEN` lines, or nothing for one random token. Out: checks of requests, and signed sessions that
hold a name. The file is read again when it changes: whoever is removed from it, or gets another token, is out at the
next request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping
from datetime import timedelta
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

import flask
from flask import session
from werkzeug.wrappers import Response

from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.web.auth import NO_PASSWORDS, refused

LOGIN, LOGOUT = "/login", "/logout"
COOKIE = "tracekit_session"
#: Who acts with a link that several people can have.
LINK_HOLDER = "link holder"
SESSION_LENGTH = timedelta(hours=12)
#: Least length for 128 random bits, by the alphabet of a token: digits, hexadecimal digits, base64url.
_LENGTHS = (("[0-9]", 39), ("[0-9A-Fa-f]", 32), ("[0-9A-Za-z_-]", 22))
#: Different characters of a token: fewer are not random.
_LEAST_DIFFERENT = 6
_LONGEST_NAME = 100
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Token needed - tracekit</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>
body {{ font-family: system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0; }}
form {{ display: grid; gap: 12px; width: min(360px, 90vw); line-height: 1.4; }} h1, p {{ margin: 0; }}
label {{ display: grid; gap: 4px; }} input, button {{ font: inherit; padding: 8px; min-width: 0; }}
</style></head><body><main><form method="post" action="{login}">
<h1>tracekit</h1><p role="alert">{reason}</p>
<input type="hidden" name="next" value="{wanted}">
<label>Token <input name="token" type="password" autocomplete="current-password" required autofocus></label>
<button>Open</button></form></main></body></html>
"""
_NEEDED = "This dashboard opens with a link that ends in a token. Ask whoever runs it for yours, or paste the token."
_WRONG = "This token is not valid, or not any more. Ask whoever runs the dashboard for yours."


class Tokens:
    """Admits whoever has a token of the file; without one, of the random `token`. Raises SelectionError."""

    def __init__(self, path: Path | None = None) -> None:
        self.token = secrets.token_urlsafe(16) if path is None else None
        self._path, self._lock, self._state = path, threading.Lock(), _state(path)
        tokens = {LINK_HOLDER: self.token} if self.token else read_tokens(path or Path())
        self._digests = _digests(tokens)
        # The same after a restart. Who knows it still lacks the digests of other people's tokens for their sessions.
        self._key = hashlib.sha256("\n".join(["session key", *sorted(tokens.values())]).encode()).digest()

    def register(self, server: flask.Flask) -> None:
        """Register login and logout, and let Flask sign sessions."""
        server.secret_key = self._key
        server.config.update(
            SESSION_COOKIE_NAME=COOKIE,
            SESSION_COOKIE_SAMESITE="Lax",  # else a link in a ticket would need the token again
            PERMANENT_SESSION_LIFETIME=SESSION_LENGTH,
            SESSION_REFRESH_EACH_REQUEST=False,
        )
        server.add_url_rule(LOGIN, "login", self._login, methods=["POST"])
        server.add_url_rule(LOGOUT, "logout", _logout, methods=["POST"])

    def refusal(self, request: flask.Request) -> Response | None:
        """Return None for a session or a right token; after one in a link, a redirect to the address without it."""
        self._follow_file()
        if (request.path, request.method) == (LOGIN, "POST"):
            return None
        linked = request.args.get("token") if request.method == "GET" else None
        if linked is not None and (user := self._user_of(linked)):
            self._begin(user)
        flask.g.user = self._user_of_session() or self._user_of(_bearer(request))
        flask.g.can_log_out = "user" in session
        if flask.g.user is None:
            return _ask(request, _NEEDED if linked is None else _WRONG)
        return None if linked is None else flask.redirect(_below_prefix(_without_token(request)), 303)

    def _login(self) -> Response:
        user = self._user_of(flask.request.form.get("token", ""))
        wanted = flask.request.form.get("next", "")
        if user is None:
            return _page(_WRONG, wanted)
        self._begin(user)
        return flask.redirect(_below_prefix(wanted), 303)

    def _begin(self, user: str) -> None:
        session.permanent = True
        session["user"], session["token"] = user, self._digests[user].hex()

    def _user_of_session(self) -> str | None:
        """Return the user of a session that began with the token that is the user's now."""
        user: str = session.get("user", "")
        digest = self._digests.get(user, b"").hex()
        return user if digest and hmac.compare_digest(digest, session["token"]) else None

    def _user_of(self, token: str) -> str | None:
        """Return the user with that token. The time it takes does not depend on the token."""
        given = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        users = [user for user, digest in self._digests.items() if hmac.compare_digest(digest, given)]
        return users[0] if users else None

    def _follow_file(self) -> None:
        """Read the file again if it has changed; one that cannot be read admits nobody."""
        if self._path is None:
            return
        with self._lock:
            if (state := _state(self._path)) == self._state:
                return
            try:
                self._digests = _digests(read_tokens(self._path))
            except SelectionError as error:
                self._digests = {}
                flask.current_app.logger.warning("nobody is admitted: %s", error)
            self._state = state


def read_tokens(path: Path) -> dict[str, str]:
    """Return the token of each name. Raises SelectionError if the file is unreadable, open to others, or invalid."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8-sig") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SelectionError(f"--auth: {path} is not a regular file")
            if mode & 0o027:
                raise SelectionError(f"--auth: other users can read or change the tokens in {path}: chmod 600 {path}")
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SelectionError(f"--auth: {path} cannot be read: {error}") from None
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if re.search(r":\s*(scrypt|pbkdf2):", line):
            raise SelectionError(f"--auth: {path}, line {number}: {NO_PASSWORDS}")
        name, _, token = (part.strip() for part in line.rpartition(":"))
        if fault := _fault(name, token, tokens):
            raise SelectionError(f"--auth: {path}, line {number}: {fault}")
        tokens[name] = token
    if not tokens:
        raise SelectionError(f"--auth: {path} names nobody; expected lines NAME: TOKEN")
    return tokens


def _fault(name: str, token: str, others: Mapping[str, str]) -> str:
    """Return what is wrong with a line, without its token; "" if nothing is."""
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        return "expected NAME: TOKEN"
    if name in others:
        return f"{name} has a token already"
    if token in others.values():
        return f"{name} has the token of somebody else"
    least = next((length for alphabet, length in _LENGTHS if re.fullmatch(f"{alphabet}+", token)), len(token) + 1)
    repeats = token in (token + token)[1:-1]
    if len(token) < least or len(set(token)) < _LEAST_DIFFERENT or repeats:
        return f"the token of {name} can be guessed; expected 128 random bits, as `openssl rand -hex 16` prints them"
    return ""


def _digests(tokens: Mapping[str, str]) -> dict[str, bytes]:
    return {name: hashlib.sha256(token.encode()).digest() for name, token in tokens.items()}


def _state(path: Path | None) -> tuple[int, ...] | None:
    """Return an identity of the file's current state; None if it is gone."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return status and (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def _bearer(request: flask.Request) -> str:
    """Return the token of the Authorization header; "" if it is missing or damaged."""
    try:
        given = request.authorization
    except ValueError:  # UnicodeError too
        return ""
    return given.token or "" if given is not None and given.type == "bearer" else ""


def _ask(request: flask.Request, reason: str) -> flask.Response:
    """Return 401: a page for browsers, a line for programs."""
    if request.method == "GET" and "text/html" in request.headers.get("Accept", ""):
        return _page(reason, _without_token(request))
    answer = refused(401, "a token, please: Authorization: Bearer TOKEN")
    answer.headers["WWW-Authenticate"] = 'Bearer realm="tracekit"'
    return answer


def _page(reason: str, wanted: str) -> flask.Response:
    login = flask.g.prefix + LOGIN[1:]
    return flask.Response(
        _PAGE.format(login=escape(login), reason=reason, wanted=escape(wanted)), 401, mimetype="text/html"
    )


def _logout() -> Response:
    """End the session of this browser."""
    session.clear()
    answer = flask.redirect(flask.g.prefix, 303)
    answer.headers["Clear-Site-Data"] = '"cache", "storage"'
    return answer


def _without_token(request: flask.Request) -> str:
    """Return the path and parameters that were asked for, without the token."""
    others = urlencode([(name, value) for name, value in request.args.items(multi=True) if name != "token"])
    return quote(request.path) + (f"?{others}" if others else "")


def _below_prefix(address: str) -> str:
    """Return an address of the dashboard, whatever is given.

    Browsers drop control characters and take a backslash for a slash; two slashes would then name another host.
    """
    path = "".join(character for character in address if character.isprintable()).lstrip("/\\")
    return f"{flask.g.prefix}{path}"
