"""Who may see the dashboard when it listens beyond this machine.

In: the text of `--auth`. Out: a check of each request. Two ways: a header that a reverse proxy at a trusted address
sets after it has authenticated the user, or a file of users and password hashes (HTTP basic; put TLS in front of it).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import flask
from werkzeug.security import check_password_hash

from tracekit.errors import SelectionError

HELP = (
    "header:NAME@ADDRESS (NAME holds the user, set by the reverse proxy at ADDRESS, an IP or network)"
    " or password:FILE (a line USER:HASH for each user; `tracekit dashboard --hash-password` makes one)"
)


class Auth(Protocol):
    """Decides about a request: None lets it pass, a response is sent instead of the page."""

    def refusal(self, request: flask.Request) -> flask.Response | None:
        """Why this request may not pass."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """The proxy at one of `networks` has authenticated the user it names in `header`."""

    header: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network

    def refusal(self, request: flask.Request) -> flask.Response | None:
        """403 for anybody but the proxy, and for a proxy that names nobody."""
        try:
            sender = ipaddress.ip_address(request.remote_addr or "")
        except ValueError:
            sender = None
        if sender is None or sender not in self.network:
            return _refused(403, "only the reverse proxy may ask here")
        if not request.headers.get(self.header, "").strip():
            return _refused(403, f"the reverse proxy named no user in {self.header}")
        return None


@dataclass(frozen=True, slots=True)
class Passwords:
    """HTTP basic authentication against `hashes` by user. A password that was right is not hashed again."""

    hashes: dict[str, str]
    _right: set[bytes] = field(default_factory=set)

    def refusal(self, request: flask.Request) -> flask.Response | None:
        """401, asking for a password, unless the right one came along."""
        given = request.authorization
        if given is not None and given.type == "basic" and self._matches(given.username or "", given.password or ""):
            return None
        refused = _refused(401, "user and password, please")
        refused.headers["WWW-Authenticate"] = 'Basic realm="tracekit", charset="UTF-8"'
        return refused

    def _matches(self, user: str, password: str) -> bool:
        # The check is slow on purpose (scrypt); each page makes several requests.
        known = hashlib.sha256(f"{user}\0{password}".encode()).digest()
        if any(hmac.compare_digest(known, right) for right in self._right):
            return True
        if user not in self.hashes or not check_password_hash(self.hashes[user], password):
            return False
        self._right.add(known)
        return True


def read_auth(text: str) -> Auth:
    """The authentication that `--auth` names. Raises SelectionError where it cannot be understood."""
    kind, _, rest = text.partition(":")
    if kind == "password" and rest:
        return Passwords(_read_hashes(Path(rest)))
    header, at, address = rest.rpartition("@")
    if kind == "header" and at and re.fullmatch(r"[A-Za-z0-9-]{1,100}", header):
        try:
            return ProxyHeader(header, ipaddress.ip_network(address, strict=False))
        except ValueError:
            raise SelectionError(f"--auth {text!r}: {address!r} is no IP address or network") from None
    raise SelectionError(f"--auth {text!r}; expected {HELP}")


def _read_hashes(path: Path) -> dict[str, str]:
    if path.exists() and not path.is_file():
        raise SelectionError(f"--auth: {path} is no regular file")
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
    """Whether a password can be checked against it; those with impossible parameters show only when it is tried."""
    if not re.fullmatch(r"(scrypt|pbkdf2):[^$]+\$[^$]+\$[0-9a-f]+", text):
        return False
    try:
        check_password_hash(text, "")
    except (ValueError, TypeError, OverflowError, MemoryError):
        return False
    return True


def _refused(status: int, reason: str) -> flask.Response:
    return flask.Response(f"{reason}\n", status, mimetype="text/plain")
