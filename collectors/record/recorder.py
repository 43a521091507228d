"""The recorder of one rank: a bounded ring that a writer thread empties into segments.

In: tuples in the order of `RECORD`, without its number, and facts. Out: sealed segments and a facts file. `add` never
blocks and never raises: a full ring drops records and counts them, and a disk error stops the recorder with one
warning. Records that a killed process had not written are still in the ring, which outlives it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from .inject._tracekit_recorder import warn
from .ring import Record, open_ring
from .small_file import create, write_all
from .wire_format import (
    FACTS_SUFFIX,
    HEADER,
    MAGIC,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
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
    """Writes the records of one rank. `add` keeps one. `off`: why it stopped, if it has. `bounded`: whether its size on
    disk is limited.

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
            self._tell_drops()
            if self._in_segment >= self._per_segment:
                self._seal()
        self._write_facts()

    def _tell_drops(self) -> None:
        """Report the number of lost records while the job runs; the summary repeats it at the end."""
        if self.dropped != self._dropped_told:
            self._dropped_told = self.dropped
            self._facts.append(json.dumps({"kind": "dropped", "value": self.dropped}))

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
