"""Follows the file that changes, while the job runs, which steps are recorded.

In: the control file, checked several times a second on the writer's thread. Out: a `Schedule` for the session. A file
that cannot be read is reported and ignored.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tracekit.collectors.runtime.wire_format import CONTROL_FILE, Schedule

#: How often the file is checked, seconds.
PERIOD_S = 0.25


class Control:
    """Follows the control file of a run and hands each new schedule to `apply`."""

    def __init__(self, directory: Path, apply: Callable[[Schedule], None]) -> None:
        self._path = directory / CONTROL_FILE
        self._apply = apply
        self._seen: tuple[int, int] | None = None
        self._due = 0.0

    def look(self) -> None:
        """Check for a new schedule; cheap enough to call in a loop."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if seen == self._seen:
                return
            self._seen = seen
            schedule = Schedule.parse(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            sys.stderr.write(f"tracekit: {self._path}: {error}; recording continues as before\n")
            return
        self._apply(schedule)
