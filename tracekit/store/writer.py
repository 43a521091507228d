"""How a store changes: on a copy of its catalogue, which replaces the catalogue at the end.

In: a folder and what to write or remove. Out: the files of windows, and a catalogue that names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tracekit.base.errors import StoreError
from tracekit.store.catalogue import KNOWN_VERSIONS, STORE_VERSION, Catalogue
from tracekit.store.catalogue_file import CatalogueCopy
from tracekit.store.connection import check_version, connected
from tracekit.store.folder import Folder
from tracekit.store.window import Incoming, Part, StoredWindow


def changing(folder: Folder, path: Path, copy: CatalogueCopy, *, rebuilding: bool) -> Iterator[Writer]:
    """The one writer, on a copy of the catalogue that replaces it at the end."""
    folder.clear_unfinished()
    if copy.replaces:
        with folder.reading():  # nobody else has it open for writing
            copy.fill()
    try:
        with connected(copy.path, path, read_only=False) as connection:
            catalogue = Catalogue(connection, path)
            if not copy.replaces:
                if not rebuilding:
                    folder.check_no_jobs()
                catalogue = Catalogue.new(connection, path)
            elif (version := check_version(connection, path, *KNOWN_VERSIONS)) < STORE_VERSION:
                catalogue = Catalogue.upgraded(connection, path, version)
            connection.begin()
            writer = Writer(folder, catalogue)
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

    def write(self, job_id: int, number: int, item: Incoming, added_at: datetime | None = None) -> None:
        """Write the files of a window and name them. `added_at`: by default now. Raises OSError."""
        self.folder.note_unfinished([(job_id, number)])
        files = self.folder.write_window(job_id, number, item)
        self.catalogue.add_window(job_id, number, item, files, added_at or datetime.now(UTC))

    def remove(self, job_id: int, windows: Sequence[StoredWindow]) -> None:
        """Remove a job with all its windows."""
        self.removes = True
        self.folder.note_unfinished((job_id, window.number) for window in windows)
        self.catalogue.remove_job(job_id)

    def remove_window(self, window: StoredWindow) -> None:
        """Remove a window, and its job if it was the last one."""
        self.removes = True
        self.folder.note_unfinished([(window.job_id, window.number)])
        self.catalogue.remove_window(window)

    def remove_part(self, window: StoredWindow, part: Part) -> None:
        """Remove one file of a window."""
        self.removes = True
        self.folder.note_unfinished([(window.job_id, window.number)])
        self.catalogue.remove_file(window, part)
