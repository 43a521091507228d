"""Follows the file that changes, while the job runs, which steps are recorded.

In: the control file, checked several times a second on the writer's thread. Out: a `Schedule` for the session.
Whatever else is in its place is reported by one rank, and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .inject._tracekit_recorder import warn
from .small_file import FollowedFile, read_small
from .wire_format import CONTROL_FILE, RecordingSchedule


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
        self._file = FollowedFile(directory / CONTROL_FILE)
        self._apply, self._first_to_say = apply, first_to_say

    def look(self) -> None:
        """Check for a new schedule; cheap enough to call in a loop."""
        changed_ns = self._file.new_version()
        if changed_ns is None:
            return
        try:
            schedule = RecordingSchedule.parse(read_small(self._file.path))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if self._first_to_say(f"control-{changed_ns}"):
                warn(f"{self._file.path}: {why}; recording continues as before")
            return
        self._apply(schedule)
