"""What people do about incidents: the only request that writes to the store.

In: JSON that says who takes an incident, for how long its messages are muted, and a note. Out: a change in the store,
by a known user: whoever has authenticated or, without --auth, whoever runs the dashboard and asks from this machine.
"""

from __future__ import annotations

import ipaddress
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import flask
import msgspec

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.ui.context import results
from tracekit.dashboards.browser.web.auth import refused
from tracekit.store import Store
from tracekit.store.handling import IncidentChange, current_user

HANDLE = "/handle"
#: What the headers begin with that proxies add.
_OF_PROXIES = ("x-forwarded", "x-real-ip", "forwarded", "via")
#: The state of a connection in /proc/net/tcp that has ended; its user is no longer known.
_TIME_WAIT = "06"


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """`mute_h`: hours; 0 ends the muting, None leaves it."""

    incident: int
    owner: str = ""
    note: str = ""
    mute_h: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None


def handle() -> flask.Response:
    """Add a change to an incident. Raises SelectionError, StoreError."""
    request, store = flask.request, Store(results().path)
    # A proxy on this machine asks for somebody whom only --auth can name.
    forwarded = flask.g.proxied or any(name.startswith(_OF_PROXIES) for name in request.headers.keys(lower=True))
    user = flask.g.get("user") or (current_user() if not forwarded and _is_own(request.environ) else None)
    if user is None:
        instead = command("store", "handle", "INCIDENT", "--owner", "NAME", "--store", store.path)
        return refused(403, f"this dashboard does not know its users: start it with --auth, or type `{instead}`")
    if request.mimetype != "application/json":  # which no other site can send
        return refused(415, "expected JSON")
    try:
        asked = msgspec.json.decode(request.get_data(), type=_Asked)
    except msgspec.DecodeError as error:
        raise SelectionError(f"this is no change of an incident: {error}") from None
    now = time.time()
    until = None if asked.mute_h is None else now + 3600.0 * asked.mute_h
    store.handle(
        asked.incident, IncidentChange(now, user, asked.owner.strip() or None, until, asked.note.strip() or None)
    )
    return flask.Response(status=204)


def _is_own(connection: Mapping[str, Any], tables: Path = Path("/proc/net")) -> bool:
    """Whether the other end of a connection is a process on this machine of the user who runs this one."""
    try:
        address, port = ipaddress.ip_address(connection["REMOTE_ADDR"]), int(connection["REMOTE_PORT"])
        table = (tables / ("tcp6" if address.version == 6 else "tcp")).read_text(encoding="ascii")
    except (KeyError, ValueError, OSError):
        return False
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    client = f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
    rows = map(str.split, table.splitlines())
    # An address and port can have several connections, of different users.
    users = {int(row[7]) for row in rows if row[1] == client and row[3] != _TIME_WAIT}
    return users == {os.getuid()}
