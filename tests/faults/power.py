"""What a power failure may take: bytes and names that nobody has synced, but something on the disk relies on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

#: The name of this fault, which no single operation meets.
POWER = "power failure"
#: How the name of an unfinished copy of a catalogue begins.
COPY = ".tracekit.store-"


def unsynced(lines: Iterable[str], store: Path) -> Iterator[str]:
    """Files and names that a power failure can take although something on the disk relies on them.

    `lines`: as the library logs them. What the next writer removes may come back or go: notes, locks, copies.
    """
    catalogue = store / "catalog.duckdb"
    aside = (str(store / "unfinished"), str(store / ".catalog.duckdb.lock"), str(store / COPY))
    dirty: dict[str, str] = {}
    for name, path, other in (line.split("\t") for line in lines):
        place = other or path
        if name in ("write", "truncate") and not path.startswith(aside):
            dirty[path] = "its bytes"
        elif name in ("create", "mkdir", "rename", "link") and not place.startswith(aside):
            if other and path in dirty:
                del dirty[path]
                dirty[place] = "its bytes"
            if place == str(catalogue):
                yield from (f"{lost}: {what}, when the catalogue is replaced" for lost, what in dirty.items())
            dirty[str(Path(place).parent)] = f"the name of {place}"
        elif name in ("unlink", "sync"):
            dirty.pop(path, None)
    yield from (f"{lost}: {what}, at the end" for lost, what in dirty.items())
