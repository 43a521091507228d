"""Reports on hangs in the store, while the job hangs: each opens an incident there, which ends with the job.

In: the folders of reports, as they come. Out: the same in a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tracekit.collectors.launch.hang import read_report
from tracekit.errors import TracekitError
from tracekit.stderr import say
from tracekit.store import Store
from tracekit.text import printable


class KeptHangs:
    """Reports on hangs of the job `name`. `store`: None keeps none."""

    def __init__(self, store: Store | None, name: str) -> None:
        self._store, self._name = store, name
        self._seen = self._kept = 0

    def keep(self, found: Sequence[Path]) -> None:
        """Keep the reports in those of these folders that are new; one that cannot be is in its folder all the same."""
        new, self._seen = found[self._seen :], len(found)
        for folder in new if self._store is not None else ():
            report = read_report(folder)
            if report is None or self._store is None:
                continue
            try:
                self._store.add_hang(self._name, report.lines, report.report)
                self._kept += 1
            except TracekitError as error:
                say(f"tracekit: the report is not in the store: {printable(str(error))}")

    def over(self, ending: str | None) -> None:
        """The job has ended, and with it what was reported of it. `ending`: how; None if nobody says."""
        if self._kept and self._store is not None:
            with suppress(TracekitError):  # the incident stays open, which can be seen
                self._store.end_watch(self._name, ending)
