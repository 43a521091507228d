"""Stores reports on hangs while the job hangs. Each opens an incident in the store, which ends with the job.

In: the folders of reports, as they appear. Out: the same reports in a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tracekit.base.errors import TracekitError
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.launch.hang import read_report
from tracekit.store import Store


class KeptHangs:
    """Reports on hangs of the job `name`. `store`: None keeps none."""

    def __init__(self, store: Store | None, name: str) -> None:
        self._store, self._name = store, name
        self._seen = self._kept = 0

    def keep(self, found: Sequence[Path]) -> None:
        """Store the reports of new folders among these. One that cannot be stored remains in its folder."""
        new, self._seen = found[self._seen :], len(found)
        for folder in new if self._store is not None else ():
            report = read_report(folder)
            if report is None or self._store is None:
                continue
            try:
                self._store.add_hang(self._name, report.lines, report.report)
                self._kept += 1
            except TracekitError as error:
                say(f"tracekit: the report on the hang could not be stored: {printable(str(error))}")

    def over(self, ending: str | None) -> None:
        """The job has ended, which closes its incidents. `ending`: how it ended; None if unknown."""
        if self._kept and self._store is not None:
            with suppress(TracekitError):  # the incident stays open, visibly
                self._store.end_watch(self._name, ending)
