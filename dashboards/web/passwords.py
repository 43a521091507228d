"""Password authentication: a login page with sessions for browsers, HTTP basic authentication for programs.

In: a file of `USER:HASH` lines. Out: checks of requests, the pages /login and /logout. The file is read again when it
changes, so a user who is removed from it, or gets another hash, is logged out at the next request.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import urlencode
from zlib import crc32

import flask
from werkzeug.datastructures import Authorization
from werkzeug.security import check_password_hash
from werkzeug.wrappers import Response

from tracekit.base.errors import SelectionError
from tracekit.dashboards.web.attempts import Attempts
from tracekit.dashboards.web.auth import refused
from tracekit.dashboards.web.sessions import LONGEST_S, Sessions

COOKIE = "tracekit_session"
LOGIN, LOGOUT = "/login", "/logout"
#: Longer ones belong to no user and only cost time to hash.
LONGEST_PASSWORD = 1024
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Log in - tracekit</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>
body {{ font-family: system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0; }}
form {{ display: grid; gap: 12px; width: min(320px, 90vw); }}
label {{ display: grid; gap: 4px; }} input, button {{ font: inherit; padding: 8px; }}
</style></head><body><main><form method="post">
<h1>tracekit</h1><p role="alert">{said}</p>
<label>User <input name="user" autocomplete="username" required autofocus></label>
<label>Password <input name="password" type="password" autocomplete="current-password" required></label>
<button>Log in</button></form></main></body></html>
"""


def _given(request: flask.Request) -> Authorization | None:
    """Return the Authorization header; None if it is missing or damaged."""
    try:
        return request.authorization
    except ValueError:  # UnicodeError too
        return None


class Passwords:
    """Admits the users of the file `path`. Raises SelectionError if it cannot be read or parsed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.hashes = read_hashes(path)
        self._path = path
        self._state = _state(path)
        self._lock = threading.Lock()
        self._sessions = Sessions(clock)
        self._attempts = Attempts(clock)

    def refusal(self, request: flask.Request) -> Response | None:
        """Return None for a session or the right password, else a redirect to the login page, or 401 for programs."""
        self._follow_file()
        if request.path == LOGIN:
            return None
        user = self._sessions.user(request.cookies.get(COOKIE, ""), self.hashes)
        if user is None and (given := _given(request)) is not None and given.type == "basic":
            found = self._of_basic(given.username or "", given.password or "")
            if isinstance(found, flask.Response):
                return found
            user = found
        if user is not None:
            flask.g.user, flask.g.can_log_out = user, COOKIE in request.cookies
            return None
        if request.method == "GET" and "text/html" in request.headers.get("Accept", ""):
            wanted = request.full_path if request.query_string else request.path
            return flask.redirect(flask.g.prefix + LOGIN[1:] + "?" + urlencode({"next": wanted}), 303)
        answer = refused(401, "user and password, please")
        if "Sec-Fetch-Mode" not in request.headers:  # the page has its own login; the browser must not open a prompt
            answer.headers["WWW-Authenticate"] = 'Basic realm="tracekit", charset="UTF-8"'
        return answer

    def register(self, server: flask.Flask) -> None:
        """Register the login and logout pages."""
        server.add_url_rule(LOGIN, "login", self._login, methods=["GET", "POST"])
        server.add_url_rule(LOGOUT, "logout", self._logout, methods=["POST"])

    def _login(self) -> Response:
        if flask.request.method == "GET":
            return _login_page("", 200)
        user, password = (flask.request.form.get(name, "") for name in ("user", "password"))
        if wait_s := self._attempts.wait_s(flask.g.client):
            return _too_many(wait_s)
        if not self._matches(user, password):
            return _login_page("This user and password do not fit.", 401)
        answer = flask.redirect(flask.g.prefix + _wanted(flask.request.args.get("next", "")), 303)
        answer.set_cookie(
            COOKIE,
            self._sessions.begin(user, self.hashes[user]),
            max_age=int(LONGEST_S),
            path=flask.g.prefix,
            secure=flask.g.secure,
            httponly=True,
            samesite="Lax",  # else a link in a ticket would require the password again
        )
        return answer

    def _logout(self) -> Response:
        """End the sessions of this user, on every device."""
        self._sessions.end(flask.g.user)
        answer = flask.redirect(flask.g.prefix + LOGIN[1:], 303)
        answer.delete_cookie(COOKIE, path=flask.g.prefix)
        answer.headers["Clear-Site-Data"] = '"cache", "storage"'
        return answer

    def _of_basic(self, user: str, password: str) -> str | flask.Response | None:
        """Return the user, None for a wrong password, or a refusal if too early. Hashes a right password once a
        session.
        """
        secret = hashlib.sha256(f"{user}\0{password}".encode(errors="surrogatepass")).hexdigest()
        if known := self._sessions.user(secret, self.hashes):
            return known
        if wait_s := self._attempts.wait_s(flask.g.client):
            return _too_many(wait_s)
        if not self._matches(user, password):
            return None
        self._sessions.begin(user, self.hashes[user], secret)
        return user

    def _matches(self, user: str, password: str) -> bool:
        """True if the password is the user's. Unknown users cost a hash too, so that the timing reveals nothing."""
        if len(password) > LONGEST_PASSWORD:
            return False
        anybody = list(self.hashes.values())[crc32(user.encode()) % len(self.hashes)]
        return check_password_hash(self.hashes.get(user, anybody), password) and user in self.hashes

    def _follow_file(self) -> None:
        """Reread the file if it has changed; an unreadable one admits no user."""
        with self._lock:
            if (state := _state(self._path)) == self._state:
                return
            try:
                self.hashes = read_hashes(self._path)
            except SelectionError as error:
                self.hashes = {"": _NOBODY}
                flask.current_app.logger.warning("nobody can log in: %s", error)
            self._state = state


#: The hash of an unknown password, so that a try takes as long when no user can log in.
_NOBODY = "scrypt:32768:8:1$nobody$" + "0" * 128


def read_hashes(path: Path) -> dict[str, str]:
    """Read the hash of each user. Raises SelectionError if the file is unreadable or invalid."""
    if path.exists() and not path.is_file():
        raise SelectionError(f"--auth: {path} is not a regular file")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SelectionError(f"--auth: {path} cannot be read: {error}") from None
    hashes = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        user, _, hashed = line.strip().partition(":")
        if not user or not _is_hash(hashed):
            raise SelectionError(
                f"--auth: {path}, line {number}: expected USER:HASH with a hash that"
                " `tracekit dashboard --hash-password` made"
            )
        hashes[user] = hashed
    if not hashes:
        raise SelectionError(f"--auth: {path} names no user; add a line with `tracekit dashboard --hash-password`")
    return hashes


def _is_hash(text: str) -> bool:
    """True if a password can be checked against it; impossible parameters only show when it is tried."""
    if not re.fullmatch(r"(scrypt|pbkdf2):[^$]+\$[^$]+\$[0-9a-f]+", text):
        return False
    try:
        check_password_hash(text, "")
    except (ValueError, TypeError, OverflowError, MemoryError):
        return False
    return True


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return an identity of the file's current state; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _login_page(said: str, status: int) -> flask.Response:
    return flask.Response(_PAGE.format(said=escape(said)), status, mimetype="text/html")


def _too_many(wait_s: int) -> flask.Response:
    answer = refused(429, f"too many passwords were tried: try again in {wait_s} seconds")
    answer.headers["Retry-After"] = str(wait_s)
    return answer


def _wanted(text: str) -> str:
    """Return the page to open after the login, below the prefix: only one of the dashboard. Browsers drop control
    characters and treat a backslash as a slash, so a path that then begins with two slashes names another host.
    """
    return "".join(character for character in text if character.isprintable()).lstrip("/\\")
