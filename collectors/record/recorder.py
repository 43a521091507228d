"""The recorder of one rank: a bounded ring, in memory that outlives the process, that a writer thread empties into
segments.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .inject._tracekit_recorder import warn
from .small_file import create, write_all
from .wire_format import (
    ENV_RINGS,
    FACTS_SUFFIX,
    HEADER,
    MAGIC,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
    LeftOver,
    RuntimeOptions,
    rank_stem,
    segment_stem,
)

#: How often the writer empties the ring, seconds.
FLUSH_INTERVAL_S = 0.1
#: Number of segments per rank if their size on disk is limited: a new one replaces the oldest.
RING_SEGMENTS = 8
#: How long to wait for the writer when the process ends, seconds.
CLOSE_TIMEOUT_S = 5.0


class Recorder:
    """Writes the records of one rank. `add` keeps one, and never blocks or raises: a full ring drops and counts. `off`:
    why it stopped, if it has. `bounded`: whether its size on disk is limited.

    `between`: called on the writer's thread several times a second; one that raises is dropped.
    """

    def __init__(self, directory: Path, rank: int, attempt: int, options: RuntimeOptions) -> None:
        self.written = 0
        self.off: str | None = None
        self._rank, self._attempt = rank, attempt
        self._directory = directory
        self._per_segment = options.records_per_segment
        self.bounded = options.keep_bytes > 0
        if self.bounded:
            self._per_segment = max(1, (options.keep_bytes // RING_SEGMENTS - HEADER.size) // RECORD.size)
        self._sealed: deque[Path] = deque()
        self.between: list[Callable[[], None]] = []
        self.ring = open_ring(rank, attempt, options.ring_capacity)
        self.add: Callable[[Record], None] = self.ring.add
        self._facts: deque[str] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._summary: dict[str, Any] = {}
        self._segment: BinaryIO | None = None
        self._segment_path = directory
        self._segments = 0
        self._in_segment = 0
        self._dropped_told = 0
        self._facts_file: BinaryIO | None = None
        self._writer = threading.Thread(target=self._run, name="tracekit-writer", daemon=True)

    def file(self, suffix: str) -> Path:
        """The path of a file of the rank."""
        return self._directory / f"{rank_stem(self._rank)}{suffix}"

    def start(self) -> None:
        """Start the writer thread."""
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Records lost to a full ring."""
        return self.ring.dropped

    def fact(self, kind: str, value: Any) -> None:
        """Write one fact (JSON data)."""
        self._facts.append(json.dumps({"kind": kind, "value": value}))
        self._wake.set()

    def close(self, summary: dict[str, Any]) -> None:
        """Write all remaining records, seal the segment, then write `summary` and the number of records written.

        Waits at most `CLOSE_TIMEOUT_S` for the writer.
        """
        self._summary = summary
        self._closing = True
        self._wake.set()
        self._writer.join(CLOSE_TIMEOUT_S)

    def first_of_all_ranks(self, what: str) -> bool:
        """True if this rank is the first to call this, so that messages which concern all ranks are printed once."""
        try:
            os.close(os.open(self._directory / f"{what}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:  # the folder is not writable: every rank prints its own message
            return True
        return True

    def abandon(self) -> None:
        """Stop recording in a forked child: the writer thread and the files belong to the parent."""
        self.off = "forked"
        self.ring.limit = 0
        self._facts.clear()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(FLUSH_INTERVAL_S)
                self._wake.clear()
                self._drain()
                self._do_between()
            self._drain()
            self._seal()
            # Last: a summary says that everything before it is there.
            self._facts.append(json.dumps({"kind": "summary", "value": {**self._summary, "written": self.written}}))
            self._write_facts()
        except Exception as error:
            self._switch_off(error)
        finally:
            for file in (self._segment, self._facts_file):
                if file is not None:
                    file.close()

    def _do_between(self) -> None:
        for look in list(self.between):
            try:
                look()
            except Exception as error:
                self.between.remove(look)
                warn(f"rank {self._rank}: {type(error).__name__}: {error!s:.200}; recording continues as before")

    def _drain(self) -> None:
        while batch := self.ring.take(self._per_segment - self._in_segment):
            count = len(batch) // RECORD.size
            self._write_facts()  # before the records that refer to them
            write_all(self._open_segment(), batch)
            self.ring.drain(count)
            self._in_segment += count
            self.written += count
            if self.dropped != self._dropped_told:  # while the job runs; the summary repeats it at the end
                self._dropped_told = self.dropped
                self._facts.append(json.dumps({"kind": "dropped", "value": self.dropped}))
            if self._in_segment >= self._per_segment:
                self._seal()
        self._write_facts()

    def _write_facts(self) -> None:
        if not self._facts:
            return
        if self._facts_file is None:
            self._facts_file = create(self.file(FACTS_SUFFIX))
        lines = []
        while self._facts:
            lines.append(self._facts.popleft())
        write_all(self._facts_file, ("\n".join(lines) + "\n").encode())

    def _open_segment(self) -> BinaryIO:
        if self._segment is None:
            if len(self._sealed) == RING_SEGMENTS:
                self._sealed.popleft().unlink(missing_ok=True)
            self._segment_path = self._directory / f"{segment_stem(self._rank, self._segments)}{OPEN_SUFFIX}"
            self._segment = create(self._segment_path)
            self._segment.write(HEADER.pack(MAGIC, VERSION, RECORD.size, self._rank, self._attempt, os.getpid()))
        return self._segment

    def _seal(self) -> None:
        """Flush the open segment to disk and give it its final name."""
        if self._segment is None:
            return
        os.fsync(self._segment.fileno())
        self._segment.close()
        sealed = self._segment_path.rename(self._segment_path.with_suffix(SEALED_SUFFIX))
        if self.bounded:
            self._sealed.append(sealed)
        self._segment = None
        self._segments += 1
        self._in_segment = 0

    def _switch_off(self, error: Exception) -> None:
        self.off = f"{type(error).__name__}: {error!s:.200}"
        self.ring.limit = 0
        warn(
            f"rank {self._rank} stopped recording, training continues ({self.off});"
            " check space and permissions of the --segments folder"
        )


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


class Ring:
    """A bounded queue of records with many writers and one reader, in `size` bytes of a file or of this process.

    The launcher owns the memory (a memfd: no disk that can be full, no file to clean up), so that a rank which is
    killed loses nothing.

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
        whole = next(index for index, pair in enumerate(zip(numbers, expected)) if pair[0] != pair[1])
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
                pending = sorted(number for number in numbers if number[0] > drained)
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
