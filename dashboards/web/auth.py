"""Authentication for a dashboard that listens beyond this machine.

In: the text of `--auth`. Out: a check of each request. Two ways: a header that a reverse proxy at a trusted address
sets after it has authenticated the user, or a file of users and password hashes (passwords.py; put TLS in front of it).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import flask
from werkzeug.wrappers import Response

from tracekit.base.errors import SelectionError
from tracekit.dashboards.web.attempts import ip_address

HELP = (
    "header:NAME@ADDRESS (NAME holds the user, set by the reverse proxy at ADDRESS, an IP or network)"
    " or password:FILE (a line USER:HASH for each user; `tracekit dashboard --hash-password` makes one)"
)


class Auth(Protocol):
    """Checks requests: None admits one, a response is sent instead of the page."""

    def refusal(self, request: flask.Request) -> Response | None:
        """Return the response that rejects this request; None if it may pass."""

    def register(self, server: flask.Flask) -> None:
        """Register the routes that the authentication needs."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """The proxy at one of `networks` has authenticated the user it names in `header`."""

    header: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network

    def refusal(self, request: flask.Request) -> flask.Response | None:
        """Return 403 unless the request comes from the proxy and names one user."""
        sender = ip_address(request.remote_addr or "")
        if sender is None or sender not in self.network:
            return refused(403, "only the reverse proxy may ask here")
        named = request.headers.get(self.header, "").strip()
        if not named or "," in named:  # a header that is given twice arrives with commas
            return refused(403, f"the reverse proxy named {'several users' if named else 'no user'} in {self.header}")
        flask.g.user = named
        return None

    def register(self, server: flask.Flask) -> None:
        """Do nothing: the proxy handles login and logout."""


def read_auth(text: str) -> Auth:
    """Parse `--auth`. Raises SelectionError if it is invalid."""
    kind, _, rest = text.partition(":")
    if kind == "password" and rest:
        from tracekit.dashboards.web.passwords import Passwords

        return Passwords(Path(rest))
    header, at, address = rest.rpartition("@")
    if kind == "header" and at and re.fullmatch(r"[A-Za-z0-9-]{1,100}", header):
        try:
            return ProxyHeader(header, ipaddress.ip_network(address, strict=False))
        except ValueError:
            raise SelectionError(f"--auth {text!r}: {address!r} is not an IP address or network") from None
    raise SelectionError(f"--auth {text!r}; expected {HELP}")


def refused(status: int, reason: str) -> flask.Response:
    """A one-line answer for a rejected request."""
    return flask.Response(f"{reason}\n", status, mimetype="text/plain")
