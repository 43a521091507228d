"""Incidents already sent to a receiver, kept in the store so that the next watch sends only the others.

    STORE/told/<receiver>     `after N`: only incidents after N are sent; then, for each message that arrived,
                              the number of the incident, and opened or closed

In: a store in a folder, and the receiver's address; its digest names the file. Out: incidents not yet sent to it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tracekit.base.contained import Contained
from tracekit.base.errors import UnsafeFileError
from tracekit.base.object_storage import object_url
from tracekit.store import Incident, Store
from tracekit.store.folder import TOLD

_LINE = re.compile(rb"after (?P<after>[0-9]{1,18})|(?P<incident>[0-9]{1,18}) (?P<status>opened|closed)")


class DeliveryLog:
    """Incidents of a store already sent to the receiver at `url`."""

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._unwritten = ""  # the store may not be there yet
        self._folder = Contained(store.path) if object_url(store.path) is None else None
        self._name = f"{TOLD}/{digest}"

    def note(self, messages: Iterable[tuple[int, str]]) -> None:
        """Record delivered messages: number of the incident, and "opened" or "closed". A read-only store keeps none."""
        self._add(f"{incident} {status}\n" for incident, status in messages)

    def left(self, job: str | None) -> tuple[Sequence[Incident], Sequence[Incident]]:
        """Return the open and the closed incidents not yet sent as such. Raises StoreError.

        Incidents that had closed before the receiver was first used are not sent.
        """
        last, after = self._noted()
        incidents = self._store.incidents(job) if self._store.is_store() else ()
        if after is None:
            after = max((one.incident_id for one in incidents), default=0)
            self._add([f"after {after}\n"])
        opened = [one for one in incidents if one.closed_at is None and last.get(one.incident_id) != "opened"]
        closed = [
            one
            for one in incidents
            if one.closed_at is not None
            and (one.incident_id > after or one.incident_id in last)
            and last.get(one.incident_id) != "closed"
        ]
        return opened[::-1], closed[::-1]

    def _add(self, lines: Iterable[str]) -> None:
        self._unwritten += "".join(lines)
        if self._folder is None or not self._unwritten:
            return
        with suppress(OSError, UnsafeFileError):  # at worst, an incident is reported twice
            self._folder.make_folder(TOLD)
            self._folder.append(self._name, self._unwritten.encode())
            self._unwritten = ""

    def _noted(self) -> tuple[dict[int, str], int | None]:
        """How each incident was last sent, and the last one before the first delivery, None for a new receiver.

        Other lines, and one that a killed writer has left unfinished, are passed over.
        """
        last, after = dict[int, str](), None
        try:
            content = b"" if self._folder is None else self._folder.read(self._name)
        except OSError:
            return last, after
        for match in filter(None, map(_LINE.fullmatch, content.split(b"\n")[:-1])):
            if match["status"] is None:
                after = int(match["after"])
            else:
                last[int(match["incident"])] = match["status"].decode()
        return last, after
