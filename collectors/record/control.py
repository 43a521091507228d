"""Follows the file that changes, while the job runs, which steps are recorded.

In: the control file, checked several times a second on the writer's thread. Out: a `Schedule` for the session.
Whatever else is in its place is reported by one rank, and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .inject._tracekit_recorder import warn
from .small_file import read_small
from .wire_format import CONTROL_FILE, RecordingSchedule

#: How often the file is checked, seconds.
PERIOD_S = 0.25


class Control:
    """Follows the control file of a run and hands each new schedule to `apply`.

    `first_to_say`: returns True if this rank is the first to report something.
    """

    def __init__(
        self,
        directory: Path,
        apply: Callable[[RecordingSchedule], None],
        first_to_say: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._path = directory / CONTROL_FILE
        self._apply, self._first_to_say = apply, first_to_say
        self._seen: tuple[int, int] | None = None
        self._due = 0.0

    def look(self) -> None:
        """Check for a new schedule; cheap enough to call in a loop."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        try:
            status = self._path.lstat()
        except OSError:  # there is none, or its folder is out of reach for a moment
            return
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            schedule = RecordingSchedule.parse(read_small(self._path))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if self._first_to_say(f"control-{status.st_mtime_ns}"):
                warn(f"{self._path}: {why}; recording continues as before")
            return
        self._apply(schedule)
