"""How a store changes: on a copy of its catalogue, which replaces the catalogue at the end.

In: a folder and what to write or remove. Out: the files of windows, and a catalogue that names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from tracekit.base.errors import StoreError
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import CatalogueCopy, catalogue_copy, locked
from tracekit.store.connection import OF_JOBS, OF_WINDOWS, connected
from tracekit.store.folder import Folder
from tracekit.store.window import Incoming, StoredWindow, WindowPart, WrittenWindow, known_starts


@contextmanager
def changing(folder: Folder, *, rebuilding: bool) -> Iterator[Writer]:
    """The one writer of a store, which is made if needed. Raises OutputError, StoreError.

    `rebuilding`: the files of jobs exist, and a catalogue is to be built from them.
    """
    is_new = folder.make()
    with locked(folder.catalogue):
        try:
            with catalogue_copy(folder.catalogue) as copy:
                yield from _on_copy(folder, copy, rebuilding=rebuilding)
        finally:
            if is_new:  # and nothing written
                folder.unmake()


def _on_copy(folder: Folder, copy: CatalogueCopy, *, rebuilding: bool) -> Iterator[Writer]:
    """The writer, on a copy of the catalogue that replaces it at the end."""
    if rebuilding:
        folder.forget_unfinished()  # nobody knows any more which of those files were whole
    else:
        folder.check_no_jobs()
        folder.clear_unfinished()
    if copy.replaces:
        with connected(folder.catalogue, folder.path, read_only=True):  # nobody else has it open for writing
            copy.fill()
    try:
        with connected(copy.path, folder.path, read_only=False) as connection:
            open_catalogue = Catalogue.existing if copy.replaces else Catalogue.new
            writer = Writer(folder, open_catalogue(connection, folder.path))
            connection.begin()
            if writer.catalogue.older:
                writer.fill_costs()
            yield writer
            connection.commit()
            connection.execute("CHECKPOINT")  # closing would hide a failure
        copy.put()
        if not writer.removes:
            folder.forget_unfinished()
    finally:
        with suppress(StoreError, OSError):  # otherwise the next writer does it
            folder.clear_unfinished()


@dataclass(slots=True)
class Writer:
    """A store that is being changed: `catalogue` is a copy, and new files lie next to those that the catalogue names.

    `removes`: whether files will be removed once the copy is the catalogue.
    """

    folder: Folder
    catalogue: Catalogue
    removes: bool = False

    def write(self, windows: Sequence[tuple[int, int, Incoming]]) -> None:
        """Write the files of windows, given with their jobs and numbers, and name them. Raises OSError."""
        written = []
        for job_id, number, item in windows:
            self.folder.check_free(job_id, number)  # a note of what others have written would be its end
            self.folder.note_unfinished([(job_id, number)])
            files = self.folder.write_window(job_id, number, item)
            written.append(WrittenWindow(job_id, number, item, files, datetime.now(UTC)))
        self.catalogue.add_windows(written)

    def replace_findings(self, window: StoredWindow, item: Incoming) -> None:
        """Replace the findings of a window; its ops stay. Raises OSError."""
        place = {"job_id": window.job_id, "number": window.number}
        self.folder.note_unfinished([(window.job_id, window.number)])
        files = self.folder.replace_findings(window.job_id, window.number, item)
        self.catalogue.delete(OF_WINDOWS, **place)
        ops = {WindowPart.OPS: window.files[WindowPart.OPS]}
        self.catalogue.add_windows([WrittenWindow(window.job_id, window.number, item, ops | files, window.added_at)])

    def fill_costs(self) -> None:
        """Store the costs of the windows that an older version has written: those that their reports show."""
        catalogue = self.catalogue
        rows = catalogue.live.all_windows().iter_rows(named=True)
        starts = {(row["job"], row["number"]): known_starts(row) for row in rows}
        for window in catalogue.windows():
            if WindowPart.REPORT not in window.files:
                continue
            with suppress(StoreError):  # a damaged report has no costs; `store check` names it
                report = self.folder.report(window)
                if report is not None:
                    catalogue.live.add_costs(window.job_id, window.number, report, starts[window.job, window.number])

    def remove(self, job_id: int, windows: Sequence[StoredWindow]) -> None:
        """Remove a job with all its windows."""
        self._note_removal(windows)
        self.catalogue.delete(OF_JOBS, job_id=job_id)

    def remove_window(self, window: StoredWindow) -> None:
        """Remove a window, and its job if it was the last one."""
        self._note_removal([window])
        self.catalogue.delete(OF_WINDOWS, job_id=window.job_id, number=window.number)
        if self.catalogue.next_window(window.job_id) == 0:
            self.catalogue.delete(OF_JOBS, job_id=window.job_id)

    def remove_part(self, window: StoredWindow, part: WindowPart) -> None:
        """Remove one file of a window."""
        self._note_removal([window])
        self.catalogue.delete(["files"], job_id=window.job_id, number=window.number, part=part)

    def _note_removal(self, windows: Sequence[StoredWindow]) -> None:
        self.removes = True
        self.folder.note_unfinished((window.job_id, window.number) for window in windows)
