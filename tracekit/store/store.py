"""The store: many jobs in a folder, each with one window or more, and its only writer.

In: validated traces of any kind and findings of the analysis. Out: the same by job and window, and lists of both.
Readers see a consistent state of the catalogue and never meet a writer. Writers take turns: each works on a copy of
the catalogue, which replaces the catalogue at the end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from tracekit.base.errors import NotAStoreError, NotStoredError, OutputError, StoreError, StoreTakenError
from tracekit.base.paths import adding, object_url, shown
from tracekit.base.stderr import say_once
from tracekit.base.text import encodable, short
from tracekit.costs import PlacedLoss
from tracekit.report.findings import AppliedFix, Findings
from tracekit.report.report import Report
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import (
    OF_JOBS,
    OF_WINDOWS,
    CatalogueCopy,
    catalogue_copy,
    connected,
    is_duckdb_file,
    locked,
)
from tracekit.store.catalogue_rows import Incoming, StoredJob, StoredWindow, WindowPart, WrittenWindow
from tracekit.store.folder import (
    CATALOGUE,
    MARK,
    FileGoneError,
    Folder,
    Remote,
    is_store_folder,
    older_store,
    outdated_line,
)
from tracekit.store.incidents import (
    HANG,
    Incident,
    IncidentChange,
    changed_at,
    followed,
    read_applied,
    read_changes,
    write_applied,
    write_change,
)

if TYPE_CHECKING:
    from tracekit.analysis.hang.hang_report import HangReport
    from tracekit.store.catalogue_rows import AnyTrace
    from tracekit.store.hangs import StoredHang

#: Names the default store.
STORE_VARIABLE = "TRACEKIT_STORE"
#: The largest number of characters in a job's name; two names fit into the address of a page, however they are encoded.
LONGEST_JOB_NAME = 300

_Read = TypeVar("_Read")


def default_store() -> Path:
    """`$TRACEKIT_STORE`, else tracekit.store in the working directory."""
    return Path(os.environ.get(STORE_VARIABLE) or "tracekit.store")


@dataclass(frozen=True, slots=True)
class Store:
    """The store in the folder `path`, or a read-only store at an address in object storage (s3://, gs://, az://).

    Every method raises StoreError if the store cannot be used, NotStoredError if it does not have the job or window.
    """

    path: Path

    # ---- writing

    def add(self, incoming: Sequence[Incoming], *, replace: bool = False) -> None:
        """Add jobs of one window each, all or none. A job of the same name is an error unless `replace`."""
        for name, times in Counter(item.name for item in incoming).items():
            self._check_name(name)
            if times > 1:
                raise StoreError(
                    f"two of the traces have the job name {name!r}; open one, or import one with another --name"
                )
        with self.writing() as writer:
            writer.write([(self._emptied_job(writer, item, replace), 0, item) for item in incoming])

    def append(self, item: Incoming, *, expected: int | None = None) -> int:
        """Add a window to a job, which is created if needed; returns the number of the window.

        The incidents of the job continue with this window. `expected`: the number that the window should get;
        StoreTakenError if another writer has already added that one.
        """
        self._check_name(item.name)
        with self.writing() as writer:
            catalogue = writer.catalogue
            job_id = catalogue.ensured(item.name, item.source)
            number = catalogue.next_window(job_id)
            if number and (kind := catalogue.window(item.name).kind) != item.trace.kind:
                raise StoreError(
                    f"{self.path}: job {short(item.name)!r} has windows of kind {kind}, this one is of kind"
                    f" {item.trace.kind}; choose another --name"
                )
            if expected is not None and number < expected:
                raise StoreError(
                    f"{self.path}: has {number} of the {expected} windows of job {short(item.name)!r} that were stored"
                    " there; restore the original store"
                )
            if expected is not None and number != expected:
                raise StoreTakenError(
                    f"{self.path}: another process is adding windows to job {short(item.name)!r}; stop one of the two,"
                    " or choose another --name"
                )
            writer.write([(job_id, number, item)])
            if isinstance(item.findings, Findings):
                now, before = datetime.now(UTC), catalogue.live.unsettled(item.name)
                costs = catalogue.live.costs(item.name, number).get((item.name, number))
                losses = () if costs is None else costs.losses
                for incident in followed(before, item.name, number, item.findings.report, now, _moved_at(item.trace)):
                    catalogue.live.put_incident(job_id, _with_beginning(incident, losses, item.trace.step_starts))
        return number

    def begin_watch(self, name: str, source: str) -> int:
        """Note that a job is being cut into windows; returns the number of its next window."""
        self._check_name(name)
        with self.writing() as writer:
            job_id = writer.catalogue.ensured(name, source)
            writer.catalogue.live.watch_begins(job_id, datetime.now(UTC))
            return writer.catalogue.next_window(job_id)

    def end_watch(self, name: str, ending: str | None = None) -> None:
        """Note that a job has ended; its open incidents close.

        `ending`: how, as in "ended with exit code 1"; None if unknown.
        """
        with self.writing() as writer:
            if (job_id := writer.catalogue.job_id(name)) is not None:
                writer.catalogue.live.watch_ends(job_id, datetime.now(UTC), ending)

    def add_hang(self, job: str, lines: Sequence[str], report: HangReport) -> None:
        """Store a report on a hang, with its text; the job need not be in the store.

        It opens an incident, which closes with the first window that has a step begun afterwards, or with the job.
        """
        from tracekit.store.hangs import sighting_of_hang, write_hang  # few jobs hang

        with self._folder_to_write() as folder:
            folder.make()
            write_hang(self.path, job, lines, report)
        if not report.hang:
            return
        with self.writing() as writer:
            open_incidents = writer.catalogue.live.incidents(job, only_open=True)
            if not any(incident.cause.kind == HANG for incident in open_incidents):
                incident = Incident(0, job, sighting_of_hang(report), datetime.now(UTC), None, None)
                writer.catalogue.live.put_incident(writer.catalogue.ensured(job, "collect --hang-after"), incident)

    def handle(self, incident: int, change: IncidentChange) -> None:
        """Add a change, such as an acknowledgement, to an incident. Raises NotStoredError if there is no such incident,
        SelectionError for a text that is too long.
        """
        with self.reading() as catalogue:
            if not any(row.incident_id == incident for row in catalogue.live.incidents()):
                raise NotStoredError(f"{self.name}: no incident {incident}; `tracekit store incidents` lists them")
        with self._folder_to_write():
            write_change(self.path, incident, change)

    def handled(self, incident: int) -> tuple[IncidentChange, ...]:
        """The changes that people made to an incident, oldest first; none in object storage."""
        return read_changes(self.path, incident)

    def note_applied(self, fix: AppliedFix) -> None:
        """Note that a fix was applied, and what it gave back."""
        with self._folder_to_write():
            write_applied(self.path, fix)

    def applied(self) -> tuple[AppliedFix, ...]:
        """The fixes that were applied, oldest first; nothing in object storage."""
        return read_applied(self.path)

    def check_new(self, name: str | None) -> None:
        """Raise StoreError if no job `name` could be added: the store cannot be used, or has one; None stands for any
        name.
        """
        if name is not None:
            self._check_name(name)
        with self._folder_to_write() as folder:
            folder.check_writable()
        if self.is_store():  # not the empty folder of a first writer that was killed
            with self.reading() as catalogue:
                if name is not None and catalogue.holds(name):
                    raise StoreError(f"{self.path}: already has a job {short(name)!r}; choose another --name")

    def free_name(self, name: str) -> str:
        """A name for a new job: `name` or, if there is such a job, NAME-2, NAME-3 and so on.

        A job without windows that is not watched, created by a hang, does not block its name.
        """
        self._check_name(name)
        if not self.is_store():
            return name
        names = (_numbered(name, number) if number > 1 else name for number in count(1))
        with self.reading() as catalogue:
            return next(free for free in names if not (catalogue.holds(free) or catalogue.live.is_watched(free)))

    @contextmanager
    def writing(self, *, rebuilding: bool = False, repairing: bool = False) -> Iterator[Writer]:
        """Change the store: all changes take effect at the end, or none if there is an error before.

        `rebuilding`: the files of jobs exist, and a catalogue is to be built from them. `repairing`: reports of other
        versions will be made anew; otherwise the first writer of this version says how many there are, since analysing
        them again would keep others waiting.
        """
        with self._folder_to_write() as folder, changing(folder, rebuilding=rebuilding) as writer:
            yield writer
            renewable = writer.catalogue.outdated() if writer.catalogue.older and not repairing else ()
        if renewable:
            say_once(outdated_line(self.path, len(renewable)))

    def _emptied_job(self, writer: Writer, item: Incoming, replace: bool) -> int:
        """The number of the job to be added, which has no window."""
        catalogue = writer.catalogue
        if catalogue.holds(item.name):
            if not replace:
                raise StoreError(
                    f"{self.path}: already has a job {item.name!r}; replace it with --replace, or choose another --name"
                )
            windows = catalogue.windows(item.name)
            writer.remove(windows[0].job_id, windows)
        return catalogue.ensured(item.name, item.source)

    def _check_name(self, name: str) -> None:
        if encodable(name) != name:
            raise StoreError(f"{self.path}: DuckDB needs names in UTF-8, not {short(name)!r}; choose another --name")
        if len(name) > LONGEST_JOB_NAME:
            raise StoreError(
                f"{self.path}: the name {short(name)!r} has {len(name)} characters, more than {LONGEST_JOB_NAME};"
                " choose another --name"
            )

    def folder(self) -> Folder:
        """The folder that can be written. Raises StoreError for an address in object storage."""
        self._check_encodable()
        if object_url(self.path) is not None:
            raise StoreError(
                f"{self.name}: a store in object storage is read-only; write to a folder, and copy that (docs/store.md)"
            )
        return Folder(self.path)

    @contextmanager
    def _folder_to_write(self) -> Iterator[Folder]:
        """The folder; errors while writing it become StoreErrors."""
        folder = self.folder()
        try:
            yield folder
        except OutputError as error:
            raise StoreError(str(error)) from None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}; check the path") from None

    # ---- reading

    def jobs(self) -> tuple[StoredJob, ...]:
        """All jobs, newest first."""
        with self.reading() as catalogue:
            return catalogue.jobs()

    def job_list(self) -> pl.DataFrame:
        """One row per job with the figures of its newest window (`Catalogue.job_list`)."""
        with self.reading() as catalogue:
            return catalogue.job_list()

    def hangs(self, job: str | None = None) -> tuple[StoredHang, ...]:
        """The reports on hangs, of one job or of all, newest first."""
        return self._backend().hangs(job)

    def history(self, name: str, most: int = 1000) -> pl.DataFrame:
        """The last `most` windows of a job, oldest first (`LiveTables.history`)."""
        with self.reading() as catalogue:
            return catalogue.live.history(name, most)

    def incidents(self, name: str | None = None, *, only_open: bool = False) -> tuple[Incident, ...]:
        """The incidents of one job or of all, newest first."""
        with self.reading() as catalogue:
            return catalogue.live.incidents(name, only_open=only_open)

    def windows(self, name: str) -> tuple[StoredWindow, ...]:
        """The windows of a job, oldest first."""
        with self.reading() as catalogue:
            return catalogue.windows(name)

    def newest(self) -> str:
        """The name of the job whose newest window was added last."""
        jobs = self.jobs()
        if not jobs:
            raise StoreError(f"{self.name}: the store holds no job; add one with `{adding(self.path)}`")
        return jobs[0].name

    def load(self, name: str, window: int | None = None) -> AnyTrace:
        """The trace of a window of the job `name`, by default of the newest."""
        return self._read_ops(name, window, Folder.trace)

    def of_ops(self, name: str, window: int | None, use: Callable[[Path], _Read]) -> _Read:
        """The result of `use` for the Parquet file of a window's ops, which may be a temporary copy."""
        return self._read_ops(name, window, lambda folder, stored: use(folder.ops(stored)))

    def _read_ops(self, name: str, window: int | None, read: Callable[[Folder, StoredWindow], _Read]) -> _Read:
        content = self._read_part(name, window, WindowPart.OPS, read)
        if content is None:
            with self.reading() as catalogue:
                number = catalogue.window(name, window).number
            raise NotStoredError(
                f"{self.name}: the ops of job {short(name)!r}, window {number}, were pruned; its report is still there"
            )
        return content

    def report(self, name: str, window: int | None = None) -> Report | None:
        """The report stored with a window, by default the newest; None if there is none of this version."""
        return self._read_part(name, window, WindowPart.REPORT, Folder.report)

    def reports(self, windows: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Report]:
        """The existing reports of this version on windows of several jobs, by name and number, in one go."""
        backend = self._backend()
        if not windows:
            return {}
        with backend.reading() as catalogue:
            stored = catalogue.windows_of(windows)
        reports = {}
        for window in stored:
            if WindowPart.REPORT in window.files:
                with suppress(FileGoneError), backend.holding(window, WindowPart.REPORT) as folder:
                    if (report := folder.report(window)) is not None:
                        reports[window.job, window.number] = report
        return reports

    def workers(self, name: str, window: int | None = None) -> pl.DataFrame | None:
        """S of each worker in each step of a window, as in `WorkerSlowdowns.rows`; None if there is none."""
        return self._read_part(name, window, WindowPart.WORKERS, Folder.workers)

    def _read_part(
        self, name: str, number: int | None, part: WindowPart, read: Callable[[Folder, StoredWindow], _Read]
    ) -> _Read | None:
        """Read a part of a window, None if it has none. If its file is gone, the catalogue is read again."""
        backend, gone = self._backend(), None
        while True:
            with backend.reading() as catalogue:
                window = catalogue.window(name, number)
            if part not in window.files:
                return None
            try:
                with backend.holding(window, part) as folder:
                    return read(folder, window)
            except FileGoneError:
                if window == gone:
                    raise
                gone = window

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue as it is now."""
        with self._backend().reading() as catalogue:
            yield catalogue

    def state(self) -> str:
        """A tag that changes with the state of the store."""
        if (remote := self._remote()) is not None:
            return remote.state()
        contained = Folder(self.path).contained
        try:
            status = contained.status(CATALOGUE) or self.path.stat()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}; is the store still there?") from None
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}-{changed_at(self.path)}"

    @property
    def name(self) -> str:
        """The path or address for display."""
        return shown(self.path)

    def is_store(self) -> bool:
        """Whether there is a store, or a DuckDB file, which an older tracekit may have made. Raises StoreError."""
        if (remote := self._remote()) is not None:
            return remote.exists()
        return self._exists() and (is_store_folder(self.path) if self.path.is_dir() else is_duckdb_file(self.path))

    def check(self) -> None:
        """Raise StoreError if there is no store, or something else."""
        self._backend()

    def _backend(self) -> Folder | Remote:
        """The reader of the store. Raises StoreError if there is no store."""
        path = self.path
        if (remote := self._remote()) is not None:
            if not remote.exists():
                raise remote.missing()
            return remote
        if not self._exists():
            if os.path.lexists(path):
                raise StoreError(f"{path}: a link that leads nowhere, or back to itself; remove it, or name a store")
            raise StoreError(f"{path}: no such store; make one with `{adding(path)}`")
        if self.is_store():
            if path.is_dir():
                return Folder(path)
            raise older_store(path)
        if not path.is_dir():
            raise NotAStoreError(path, "not a tracekit store; pass a trace file without --store")
        Folder(path).contained.status(MARK)  # names what is in its place
        raise NotAStoreError(path, "a folder, but not a tracekit store; choose another --store")

    def _remote(self) -> Remote | None:
        """The store at an address in object storage; None for a path."""
        url = object_url(self.path)
        return None if url is None else Remote(url)

    def _exists(self) -> bool:
        """Whether anything is at the path. Raises StoreError if that cannot be determined."""
        self._check_encodable()
        try:
            return self.path.exists()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None

    def _check_encodable(self) -> None:
        if encodable(str(self.path)) != str(self.path):
            raise StoreError(f"{self.path}: DuckDB needs a path in UTF-8; choose another --store")


def _with_beginning(incident: Incident, losses: Sequence[PlacedLoss], starts: Mapping[int, float]) -> Incident:
    """A new incident with the first step that it slows down in the window that shows it, whose steps began at `starts`;
    the first of the window if its cause is not among the losses.
    """
    if incident.incident_id:
        return incident
    cause = incident.cause
    loss = next((loss for loss in losses if (loss.cause, loss.ranks) == (cause.kind, cause.ranks)), None)
    if loss is not None:
        return replace(incident, first_step=loss.first_step, since=loss.since)
    step = min(starts, default=None) if cause.first_step is None else cause.first_step
    return incident if step is None else replace(incident, first_step=step, since=starts.get(step))


def _numbered(name: str, number: int) -> str:
    ending = f"-{number}"
    return name[: LONGEST_JOB_NAME - len(ending)] + ending


def _moved_at(trace: AnyTrace) -> datetime | None:
    """When the last step began, if its trace gives the time."""
    starts = getattr(trace, "step_starts", {})
    try:
        return datetime.fromtimestamp(max(starts.values()), UTC) if starts else None
    except (OverflowError, ValueError, OSError):  # a clock that was never set
        return None


@contextmanager
def changing(folder: Folder, *, rebuilding: bool) -> Iterator[Writer]:
    """The one writer of a store, which is made if needed. Raises OutputError, StoreError.

    `rebuilding`: the files of jobs exist, and a catalogue is to be built from them.
    """
    is_new = folder.make()
    with locked(folder.catalogue):
        folder.renew_mark()
        try:
            with catalogue_copy(folder.catalogue) as copy:
                yield from _on_copy(folder, copy, rebuilding=rebuilding)
        finally:
            if is_new:  # and nothing written
                folder.unmake()


def _on_copy(folder: Folder, copy: CatalogueCopy, *, rebuilding: bool) -> Iterator[Writer]:
    """The writer, on a copy of the catalogue that replaces it at the end."""
    if rebuilding:
        folder.forget_unfinished()  # which of those files were complete is no longer known
    else:
        folder.check_no_jobs()
        folder.clear_unfinished()
    if copy.replaces:
        with connected(folder.catalogue, folder.path, read_only=True):  # no other process has it open for writing
            copy.fill()
    try:
        with connected(copy.path, folder.path, read_only=False, copy_of=folder.catalogue) as connection:
            open_catalogue = Catalogue.existing if copy.replaces else Catalogue.new
            writer = Writer(folder, open_catalogue(connection, folder.path))
            connection.begin()
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

    def add_findings(self, window: StoredWindow, item: Incoming) -> None:
        """Add the findings of a window that has only ops. Raises OSError."""
        place = {"job_id": window.job_id, "number": window.number}
        self.folder.note_unfinished([(window.job_id, window.number)])
        files = self.folder.write_findings(window.job_id, window.number, item)
        self.catalogue.delete(OF_WINDOWS, **place)
        ops = {WindowPart.OPS: window.files[WindowPart.OPS]}
        self.catalogue.add_windows([WrittenWindow(window.job_id, window.number, item, ops | files, window.added_at)])

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
