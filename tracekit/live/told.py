"""Which incidents a receiver has been told of: in the store, so that a watch which takes over tells the others.

    STORE/told/<receiver>     a line per message that arrived: number of the incident, and opened or closed

In: a store in a folder, and the receiver's address, of which a digest is kept. Out: incidents that it has not heard of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tracekit.s3 import s3_url
from tracekit.store import Incident, Store

FOLDER = "told"


class Told:
    """What the receiver at `url` has been told of the incidents in a store."""

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._file: Path | None = None if s3_url(store.path) is not None else store.path / FOLDER / digest

    def note(self, messages: Iterable[tuple[int, str]]) -> None:
        """These have arrived: number of the incident, and what was said of it. A store that is only read forgets it."""
        if self._file is None:
            return
        with suppress(OSError):  # at worst, it is told again
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(f"{incident} {status}\n" for incident, status in messages))

    def left(self, job: str | None) -> tuple[Sequence[Incident], Sequence[Incident]]:
        """Open incidents it has not heard of, and closed ones whose opening is all it has. Raises StoreError."""
        if not self._store.is_store():
            return (), ()
        told = self._noted()
        incidents = self._store.incidents(job)
        opened = [one for one in incidents if one.closed_at is None and (one.incident_id, "opened") not in told]
        closed = [
            one
            for one in incidents
            if one.closed_at is not None
            and (one.incident_id, "opened") in told
            and (one.incident_id, "closed") not in told
        ]
        return opened[::-1], closed[::-1]

    def _noted(self) -> set[tuple[int, str]]:
        try:
            text = "" if self._file is None else self._file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return set()
        words = [line.split() for line in text.splitlines()]
        return {(int(line[0]), line[1]) for line in words if len(line) == 2 and line[0].isdecimal()}
