"""Save the slots of this host's rings before they are reused, from outside the training processes.

In: the ring files of a run directory, while their processes write. Out: a file of slots next to each. A lane that is
faster than the launcher loses its oldest slots; the reader counts them.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tracekit.base.errors import FormatError
from tracekit.collectors.nccl.ring_reader import open_ring
from tracekit.collectors.record.nccl_wire_format import LOG_SUFFIX, RING_SUFFIX
from tracekit.collectors.record.small_file import create


@dataclass(slots=True)
class Drain:
    """Follows the rings below a run directory that processes of `host` write."""

    directory: Path
    host: str = field(default_factory=socket.gethostname)
    _saved: dict[tuple[Path, int], int] = field(default_factory=dict)

    def update(self) -> int:
        """Save the slots that are new since the last call; return their number. A ring that is not ready waits."""
        saved = 0
        for path in self.directory.glob(f"attempt-*/nccl-{self.host}-*{RING_SUFFIX}"):
            try:
                if path.lstat().st_uid == os.geteuid():  # other users could truncate the mapped file
                    saved += self._update(path)
            except (FormatError, OSError):  # not laid out yet, or gone: the reader reports it
                continue
        return saved

    def _update(self, path: Path) -> int:
        ring = open_ring(path)
        fresh = []
        for number in map(int, np.flatnonzero(ring.header["lane"]["written"])):
            slots = ring.lane(number, self._saved.get((path, number), 0))
            if len(slots):
                fresh.append((number, slots))
        if fresh:
            _append(path.with_suffix(LOG_SUFFIX), b"".join(slots.tobytes() for _, slots in fresh))
        for number, slots in fresh:
            self._saved[path, number] = int(slots["sequence"][-1])
        return sum(len(slots) for _, slots in fresh)


def _append(path: Path, content: bytes) -> None:
    """Write all of it or nothing: half a slot would shift those after it. Raises OSError."""
    whole = False
    with create(path, append=True) as log:
        size = log.tell()
        try:
            whole = log.write(content) == len(content)
        finally:
            if not whole:
                log.truncate(size)
    if not whole:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
