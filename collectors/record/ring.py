"""The ring of one rank: records in memory that outlives the process.

In: records of the hooks, from any thread. Out: runs of whole records for the writer, and for the launcher those that a
dead process had not written. The launcher owns the memory (a memfd: no disk that can be full or slow, and no file to
clean up); each rank maps a part of it. A rank that is ended by SIGTERM or SIGKILL therefore loses nothing. No signal
handler is involved.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .wire_format import ENV_RINGS, RECORD

Record = tuple[int, int, int, int, int, int, int, int, int, int]

#: magic, rank, attempt, process id, records the writer has written.
_HEAD = struct.Struct("<8siiqq")
_MAGIC = b"TKRING1\n"
_DRAINED = struct.Struct("<q")
_DRAINED_AT = _HEAD.size - _DRAINED.size
#: Each record ends with its number, from 1. It is written last, so it marks the record as whole.
_NUMBERS = struct.Struct(f"<{RECORD.size - 8}xq")
_FIRST_AT = mmap.PAGESIZE
#: Looked up once: `Ring.add` is on the path of every op.
_pack, _SIZE = RECORD.pack_into, RECORD.size
#: Extra slots: several threads may pass the check for space at the same moment.
_SPARE = 64
#: Placeholder for a record that could not be kept; no category is 0.
_NOTHING: Record = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
#: Maximum number of records taken at once, to release the GIL soon.
_AT_ONCE = 4096
#: Number of rings in a launcher's memory; untouched pages take no space.
PLACES = 128


@dataclass(frozen=True)
class LeftOver:
    """Records that a rank had not written when it ended: whole ones, in order."""

    rank: int
    attempt: int
    process_id: int
    records: bytes


class Ring:
    """A bounded queue of records with many writers and one reader, in `size` bytes of a file or of this process.

    `handle`, `offset`: an open file and the place in it; a handle of -1 is memory of this process alone. `added`,
    `drained`: how many records were taken in and are on disk. `dropped`: records lost because the ring was full or a
    number did not fit its field. Raises OSError or ValueError if there is no such memory.
    """

    def __init__(self, handle: int, offset: int, size: int, capacity: int) -> None:
        self.limit = capacity
        self.dropped = 0
        self.drained = 0
        self._memory = mmap.mmap(handle, size, offset=offset)
        self._slots = capacity + _SPARE
        self._next_number = itertools.count(1).__next__
        self.added = 0

    def add(self, record: Record) -> None:
        """Keep one record, or drop and count it if the ring is full. Never blocks."""
        if self.added - self.drained >= self.limit:
            self.dropped += 1
            return
        number = self._next_number()  # atomic: no two threads get the same
        offset = _FIRST_AT + (number - 1) % self._slots * _SIZE
        try:
            _pack(self._memory, offset, *record, number)
        except struct.error:  # a number too large for its field: readers skip the placeholder
            self.dropped += 1
            _pack(self._memory, offset, *_NOTHING, number)
        self.added = number

    def take(self, most: int) -> bytes:
        """The oldest whole records, at most `most`, as bytes; call `drain` once they are written."""
        first = self.drained % self._slots
        most = min(most, self.added - self.drained, self._slots - first, _AT_ONCE)
        start = _FIRST_AT + first * RECORD.size
        content = bytes(self._memory[start : start + most * RECORD.size])
        # No Python loop: the training thread needs the GIL.
        numbers = list(itertools.chain.from_iterable(_NUMBERS.iter_unpack(content)))
        expected = list(range(self.drained + 1, self.drained + most + 1))
        if numbers == expected:
            return content
        whole = next(at for at, pair in enumerate(zip(numbers, expected)) if pair[0] != pair[1])
        return content[: whole * RECORD.size]

    def drain(self, count: int) -> None:
        """Free the space of the oldest `count` records, which are on disk."""
        self.drained += count
        _DRAINED.pack_into(self._memory, _DRAINED_AT, self.drained)


class RingStore:
    """The rings of all ranks of one launcher. `path`: the file that ranks map."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._handle = os.memfd_create("tracekit-rings")
        os.ftruncate(self._handle, PLACES * ring_bytes(capacity))
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

    def left_over(self) -> Iterator[LeftOver]:
        """Records that ranks which have ended did not write."""
        size, slots = ring_bytes(self._capacity), self._capacity + _SPARE
        for place in range(PLACES):
            magic, rank, attempt, process_id, drained = _HEAD.unpack(os.pread(self._handle, _HEAD.size, place * size))
            if magic != _MAGIC:
                return
            with mmap.mmap(self._handle, size, offset=place * size, access=mmap.ACCESS_READ) as memory:
                content = memory[_FIRST_AT : _FIRST_AT + slots * RECORD.size]
                numbers = ((number, slot) for slot, (number,) in enumerate(_NUMBERS.iter_unpack(content)))
                pending = sorted(one for one in numbers if one[0] > drained)
                starts = (slot * RECORD.size for _, slot in pending)
                records = b"".join(content[start : start + RECORD.size] for start in starts)
            if records:
                yield LeftOver(rank, attempt, process_id, records)

    def close(self) -> None:
        """Free the memory."""
        os.close(self._handle)


def open_ring(rank: int, attempt: int, capacity: int) -> Ring:
    """A ring in the launcher's memory, or in this process if that is not accessible."""
    try:
        return _claim(os.environ[ENV_RINGS], rank, attempt, capacity)
    except (KeyError, OSError, ValueError):  # another container or user, or more than `PLACES` ranks
        return Ring(-1, 0, ring_bytes(capacity), capacity)


def ring_bytes(capacity: int) -> int:
    """Size of a ring for `capacity` records, rounded up to pages, bytes."""
    size = _FIRST_AT + (capacity + _SPARE) * RECORD.size
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _claim(path: str, rank: int, attempt: int, capacity: int) -> Ring:
    """Take the first free place. Raises OSError or ValueError if there is none or `path` is no ring memory."""
    size = ring_bytes(capacity)
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size != PLACES * size:
            raise ValueError(f"{path}: not the memory of this run")
        fcntl.lockf(handle, fcntl.LOCK_EX)  # each rank holds it once, briefly
        for place in range(PLACES):
            if os.pread(handle, len(_MAGIC), place * size) != _MAGIC:
                os.pwrite(handle, _HEAD.pack(_MAGIC, rank, attempt, os.getpid(), 0), place * size)
                return Ring(handle, place * size, size, capacity)
        raise ValueError(f"{path}: all {PLACES} places are taken")
    finally:
        os.close(handle)  # releases the lock; the mapping stays
