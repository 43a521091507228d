"""Access to the dashboard: authentication, host names and the path prefix.

In: options of `tracekit dashboard`. Out: a check of each request, and the prefix of all addresses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import flask
from werkzeug.wrappers import Response

from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.web.auth import Auth, ip_address, refused

HEALTH = "/healthz"
#: Paths that a load balancer or Kubernetes may request without a token; neither reveals a name.
OPEN = (HEALTH, "/readyz")
#: Pages send a few kilobytes; more is an accident or an attack.
MOST_BYTES_ASKED = 4 * 1024 * 1024
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]@:/?#\s]+)(:\d{1,5})?")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_Start = Callable[..., Any]


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
            own = (request.headers.get("Host"), urlsplit(self.url).netloc)
            return origin is not None and (not asking or asking not in own)
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
