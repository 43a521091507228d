"""Access to the dashboard: authentication, tokens, host names and the path prefix."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

import flask
from flask import session
from werkzeug.wrappers import Response

from tracekit.base.errors import SelectionError

HEALTH = "/healthz"
#: Paths that a load balancer or Kubernetes may request without a token; neither reveals a name.
OPEN = (HEALTH, "/readyz")
#: Pages send a few kilobytes; more is an accident or an attack.
MOST_BYTES_ASKED = 4 * 1024 * 1024
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]@:/?#\s]+)(:\d{1,5})?")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_Start = Callable[..., Any]

HELP = (
    "token (prints a link), token:FILE (a line NAME: TOKEN for each person) or proxy:HEADER@ADDRESS (HEADER names the"
    " user, set by the reverse proxy at ADDRESS: IP addresses or networks, with commas)"
)
NO_PASSWORDS = (
    "the dashboard has no passwords any more: write a line NAME: TOKEN for each person, with a token that"
    " `openssl rand -hex 16` prints, and start it with --auth token:FILE"
)
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Access:
    """`auth`: None admits everybody. `hosts`: accepted host names; numeric addresses are always accepted.

    `prefix`: the path under which browsers see the dashboard, with slashes around it. `proxied`: a reverse proxy stands
    in front. `secure`: browsers use TLS. `url`: `--public-url`, "" without it.
    """

    auth: Auth | None = None
    hosts: tuple[str, ...] = ()
    prefix: str = "/"
    proxied: bool = False
    secure: bool = False
    url: str = ""

    def refusal(self, request: flask.Request) -> Response | None:
        """Return the response that rejects this request, or leads it elsewhere; None if it may pass."""
        if self._is_foreign(request):
            return refused(403, "another site asked for this")
        if not self._is_ours(request.headers.get("Host", "")):
            return refused(421, "this host name is not one of the dashboard's: allow it with --allowed-host")
        if self.auth is None or request.path in OPEN:
            return None
        return self.auth.refusal(request)

    def _is_foreign(self, request: flask.Request) -> bool:
        """True if a page of another site makes its visitor's browser send this, other than by a link.

        No script can change these headers, and programs send none. Sec-Fetch-Site also is there without Origin, but
        over plain HTTP only for this machine; Origin is with every POST.
        """
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        if site is None:
            asking = (origin or "").partition("://")[2]  # "" of the origin "null"
            own_hosts = (request.headers.get("Host"), urlsplit(self.url).netloc)
            return origin is not None and (not asking or asking not in own_hosts)
        is_link = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        return site not in ("same-origin", "none") and not is_link

    def _is_ours(self, host: str) -> bool:
        """True if a Host header names this server.

        A foreign site whose name resolves to this machine (DNS rebinding) can only send that name. So names must be in
        `hosts`; numeric addresses, which involve no resolver, need not.
        """
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].strip("[]").rstrip(".").lower()
        return name == "localhost" or name in self.hosts or ip_address(name) is not None


def read_access(auth: Auth | None, hosts: Iterable[str], public_url: str | None) -> Access:
    """Parse --auth, --allowed-host and --public-url. Raises SelectionError if one is invalid."""
    names = []
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise SelectionError(
                f"--allowed-host {host!r:.100}: expected a host name without a port, as in tracekit.example.com"
            )
        names.append(host.lower())
    if public_url is None:
        return Access(auth, tuple(names))
    try:
        parts = urlsplit(public_url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not _PATH.fullmatch(path):
        raise SelectionError(
            f"--public-url {public_url!r:.100}: expected an address such as https://example.com/tracekit/"
        )
    return Access(auth, (*names, host), f"{path}/", proxied=True, secure=parts.scheme == "https", url=public_url)


class WithoutPrefix:
    """WSGI middleware that strips the prefix from a path, for proxies that leave it there."""

    def __init__(self, application: _Start, prefix: str) -> None:
        self._application = application
        self.prefix = prefix

    def __call__(self, environment: dict[str, Any], start: _Start) -> Any:
        """Return the answer of the application."""
        path = environment["PATH_INFO"]
        if self.prefix != "/" and path.startswith(self.prefix):
            environment = {**environment, "PATH_INFO": "/" + path.removeprefix(self.prefix)}
        return self._application(environment, start)


class Auth(Protocol):
    """Checks requests: None admits one, a response is sent instead of the page."""

    def refusal(self, request: flask.Request) -> Response | None:
        """Return the response that rejects this request; None if it may pass."""

    def register(self, server: flask.Flask) -> None:
        """Register the routes that the authentication needs."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """The proxy at an address in one of `networks` has authenticated the user it names in `header`."""

    header: str
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]

    def refusal(self, request: flask.Request) -> flask.Response | None:
        """Return 403 unless the request comes from the proxy and names one user."""
        sender = ip_address(request.remote_addr or "")
        if sender is None or not any(sender in network for network in self.networks):
            return refused(403, "only the reverse proxy may ask here")
        user = request.headers.get(self.header, "").strip(" \t")
        if not user or len(user) > _LONGEST_NAME or not user.isprintable():
            return refused(403, f"the reverse proxy named no user in {self.header}")
        if "," in user:  # a header that is given twice arrives with commas
            return refused(403, f"the reverse proxy named several users in {self.header}")
        flask.g.user = user
        return None

    def register(self, server: flask.Flask) -> None:
        """Do nothing: the proxy handles login and logout."""


def read_auth(text: str) -> Auth:
    """Parse `--auth`. Raises SelectionError if it is invalid.

    Two ways: tokens, or a header that a reverse proxy at a trusted address sets after it has authenticated the user.
    """
    kind, colon, rest = text.partition(":")
    if kind == "password":
        raise SelectionError(f"--auth {text!r}: {NO_PASSWORDS}")
    if kind == "header":
        raise SelectionError(f"--auth {text!r}: this is called --auth proxy:{rest} now")
    if kind == "token" and bool(colon) == bool(rest):
        return Tokens(Path(rest) if rest else None)
    header, separator, addresses = rest.rpartition("@")
    if kind == "proxy" and separator and re.fullmatch(r"[A-Za-z0-9-]{1,100}", header):
        return ProxyHeader(header, tuple(_network(address.strip(), text) for address in addresses.split(",")))
    raise SelectionError(f"--auth {text!r}; expected {HELP}")


def _network(address: str, text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(address, strict=False)
    except ValueError:
        raise SelectionError(f"--auth {text!r}: {address!r} is not an IP address or network") from None


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address, of IPv4 also where a socket of IPv6 shows it; None for anything else."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return address if address.version == 4 else address.ipv4_mapped or address


def refused(status: int, reason: str) -> flask.Response:
    """A one-line answer for a rejected request."""
    return flask.Response(f"{reason}\n", status, mimetype="text/plain")


LOGIN, LOGOUT = "/login", "/logout"
COOKIE = "tracekit_session"
#: Who acts with a link that several people can have.
LINK_HOLDER = "link holder"
SESSION_LENGTH = timedelta(hours=12)
#: Least length for 128 random bits, by the alphabet of a token: digits, hexadecimal digits, base64url.
_LENGTHS = (("[0-9]", 39), ("[0-9A-Fa-f]", 32), ("[0-9A-Za-z_-]", 22))
#: Different characters of a token: fewer are not random.
_LEAST_DIFFERENT = 6
_LONGEST_LABEL = 100
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
    """Admits whoever has a token of the file; without one, of the random `token`. Raises SelectionError.

    The file is read again when it changes: whoever is removed from it, or gets another token, is out at the next
    request.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.token = secrets.token_urlsafe(16) if path is None else None
        self._path, self._lock, self._file_state = path, threading.Lock(), _file_state(path)
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
            return _ask_to_log_in(request, _NEEDED if linked is None else _WRONG)
        return None if linked is None else flask.redirect(_below_prefix(_without_token(request)), 303)

    def _login(self) -> Response:
        user = self._user_of(flask.request.form.get("token", ""))
        wanted = flask.request.form.get("next", "")
        if user is None:
            return _login_page(_WRONG, wanted)
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
        """Read the file again if it has changed; an unreadable file admits nobody."""
        if self._path is None:
            return
        with self._lock:
            if (state := _file_state(self._path)) == self._file_state:
                return
            try:
                self._digests = _digests(read_tokens(self._path))
            except SelectionError as error:
                self._digests = {}
                flask.current_app.logger.warning("nobody is admitted: %s", error)
            self._file_state = state


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
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_LABEL:
        return "expected NAME: TOKEN"
    if name in others:
        return f"{name} has a token already"
    if token in others.values():
        return f"{name} has the token of somebody else"
    minimum = next((length for alphabet, length in _LENGTHS if re.fullmatch(f"{alphabet}+", token)), len(token) + 1)
    repeats = token in (token + token)[1:-1]
    if len(token) < minimum or len(set(token)) < _LEAST_DIFFERENT or repeats:
        return f"the token of {name} can be guessed; expected 128 random bits, as `openssl rand -hex 16` prints them"
    return ""


def _digests(tokens: Mapping[str, str]) -> dict[str, bytes]:
    return {name: hashlib.sha256(token.encode()).digest() for name, token in tokens.items()}


def _file_state(path: Path | None) -> tuple[int, ...] | None:
    """An identity of the file's current state; None if it was removed."""
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


def _ask_to_log_in(request: flask.Request, reason: str) -> flask.Response:
    """Return 401: a page for browsers, a line for programs."""
    if request.method == "GET" and "text/html" in request.headers.get("Accept", ""):
        return _login_page(reason, _without_token(request))
    answer = refused(401, "a token, please: Authorization: Bearer TOKEN")
    answer.headers["WWW-Authenticate"] = 'Bearer realm="tracekit"'
    return answer


def _login_page(reason: str, wanted: str) -> flask.Response:
    login = flask.g.prefix + LOGIN[1:]
    return flask.Response(
        _PAGE.format(login=escape(login), reason=reason, wanted=escape(wanted)), 401, mimetype="text/html"
    )


def _logout() -> Response:
    session.clear()
    answer = flask.redirect(flask.g.prefix, 303)
    answer.headers["Clear-Site-Data"] = '"cache", "storage"'
    return answer


def _without_token(request: flask.Request) -> str:
    others = urlencode([(name, value) for name, value in request.args.items(multi=True) if name != "token"])
    return quote(request.path) + (f"?{others}" if others else "")


def _below_prefix(address: str) -> str:
    """Return an address of the dashboard, whatever is given.

    Browsers drop control characters and take a backslash for a slash; two slashes would then name another host.
    """
    path = "".join(character for character in address if character.isprintable()).lstrip("/\\")
    return f"{flask.g.prefix}{path}"
