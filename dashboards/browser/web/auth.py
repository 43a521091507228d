"""Authentication for a dashboard that listens beyond this machine.

In: the text of `--auth`. Out: a check of each request. Two ways: tokens (tokens.py), or a header that a reverse proxy
at a trusted address sets after it has authenticated the user.
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

HELP = (
    "token (prints a link), token:FILE (a line NAME: TOKEN for each person) or proxy:HEADER@ADDRESS (HEADER names the"
    " user, set by the reverse proxy at ADDRESS: IP addresses or networks, with commas)"
)
NO_PASSWORDS = (
    "the dashboard has no passwords any more: write a line NAME: TOKEN for each person, with a token that"
    " `openssl rand -hex 16` prints, and start it with --auth token:FILE"
)
_LONGEST_NAME = 200


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
    """Parse `--auth`. Raises SelectionError if it is invalid."""
    kind, colon, rest = text.partition(":")
    if kind == "password":
        raise SelectionError(f"--auth {text!r}: {NO_PASSWORDS}")
    if kind == "header":
        raise SelectionError(f"--auth {text!r}: this is called --auth proxy:{rest} now")
    if kind == "token" and bool(colon) == bool(rest):
        from tracekit.dashboards.browser.web.tokens import Tokens

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
