"""Samples the state of what a rank runs on into a file, at a low rate.

In: a function that reads the state. Out: JSON lines of host time (ns) and the values read. Each sampler has a thread of
its own, because what it reads can hang, such as the driver of a faulty GPU: too long for a hook or the writer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from .small_file import create, write_all

#: Maximum number of samples: one every 2 s for a day.
SAMPLE_LIMIT = 43_200
#: How long to wait for the thread when the process ends, seconds.
CLOSE_TIMEOUT_S = 0.5


class Sampler(ABC):
    """Samples every `period_s` seconds into the file `path`, which the first sample creates."""

    def __init__(self, path: Path, period_s: float) -> None:
        self._path, self._period_s = path, period_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def reader(self) -> Callable[[], Sequence[int | None]] | None:
        """Prepare, on the thread of the sampler: what reads a sample; None if there is nothing to read."""

    def begin(self) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._run, name=f"tracekit{self._path.suffix}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whatever a kernel, a library or a disk does: no more samples
            read = self.reader()
            if read is None:
                return
            with create(self._path) as file:
                for _ in range(SAMPLE_LIMIT):
                    write_all(file, f"{json.dumps([time.monotonic_ns(), *read()])}\n".encode())
                    if self._over.wait(self._period_s):
                        return
