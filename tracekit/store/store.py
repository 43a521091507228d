"""The store: many jobs in a folder, each with one window or more, and the only writer of it.

In: validated traces of any kind and what the analysis found. Out: the same by job and window, and lists of both.
Readers never meet a writer: what they see is a whole state of the catalogue. Writers take turns.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import polars as pl

from tracekit.errors import NotStoredError, OutputError, StoreError, StoreTakenError
from tracekit.findings import Findings
from tracekit.s3 import s3_url, shown
from tracekit.store.catalogue import KNOWN_VERSIONS, STORE_VERSION, Catalogue
from tracekit.store.catalogue_file import CatalogueCopy, alone, catalogue_copy, is_duckdb
from tracekit.store.connection import check_version, connected
from tracekit.store.folder import FileGoneError, Folder, is_store_folder
from tracekit.store.hangs import StoredHang, sighting_of_hang, write_hang
from tracekit.store.incidents import HANG, Incident
from tracekit.store.remote import Remote
from tracekit.store.single_file import SingleFile
from tracekit.store.window import AnyTrace, Incoming, Part, StoredJob, StoredWindow, trace_kind
from tracekit.text import encodable, short

#: Names the default store; without it the store is DEFAULT_NAME in the working directory.
STORE_VARIABLE = "TRACEKIT_STORE"
DEFAULT_NAME, OLD_DEFAULT_NAME = "tracekit.store", "tracekit.duckdb"
#: Characters of a job's name; two of them fit into the address of a page, however they are encoded.
LONGEST_JOB_NAME = 300

_Read = TypeVar("_Read")


def default_store() -> Path:
    """`$TRACEKIT_STORE`, else tracekit.store in the working directory, or a tracekit.duckdb that an older one left."""
    if named := os.environ.get(STORE_VARIABLE):
        return Path(named)
    new, old = Path(DEFAULT_NAME), Path(OLD_DEFAULT_NAME)
    return old if old.exists() and not new.exists() else new


class Backend(Protocol):
    """How one form of a store is read."""

    def reading(self) -> AbstractContextManager[Catalogue]:
        """The catalogue as it is now."""

    def trace(self, window: StoredWindow) -> AnyTrace:
        """The trace of a window."""

    def report(self, window: StoredWindow) -> str | None:
        """The report on it as JSON; None where there is none."""

    def workers(self, window: StoredWindow) -> pl.DataFrame | None:
        """S of each worker in each step, as `WorkerSlowdowns.rows` has it; None where there is none."""

    def hangs(self, job: str | None) -> tuple[StoredHang, ...]:
        """The reports on hangs, of one job or of all, newest first."""


@dataclass(frozen=True, slots=True)
class Store:
    """The store in the folder `path`; in a file of version 2, or at an s3:// address, which are read only.

    Every method raises StoreError where it cannot be used, NotStoredError where it lacks the job or window.
    """

    path: Path

    # ---- writing

    def add(self, incoming: Sequence[Incoming], *, replace: bool = False) -> None:
        """Add jobs of one window each, all or none. A job of the same name is an error unless `replace`."""
        names = [item.name for item in incoming]
        for name in names:
            self._check_name(name)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise StoreError(
                f"two of the traces are of a job named {twice[0]!r}; import one of them with another --name"
            )
        with self.writing() as writer:
            for item in incoming:
                self._add(writer, item, replace)

    def append(self, item: Incoming, *, expected: int | None = None) -> int:
        """Add a window to a job, which is made where there is none; the number of the window.

        The incidents of the job go on to this window. `expected`: the number that the window is to have;
        StoreTakenError where another writer has added that one.
        """
        self._check_name(item.name)
        with self.writing() as writer:
            catalogue = writer.catalogue
            job_id = catalogue.ensured(item.name, item.source)
            number = catalogue.next_window(job_id)
            if number and (kind := catalogue.window(item.name).kind) != trace_kind(item.trace):
                raise StoreError(
                    f"{self.path}: job {short(item.name)!r} has windows of kind {kind}, this one is of kind"
                    f" {trace_kind(item.trace)}; choose another --name"
                )
            if expected is not None and number != expected:
                raise StoreTakenError(
                    f"{self.path}: another process adds windows to job {short(item.name)!r}; end one of the two, or"
                    " choose another --name"
                )
            writer.write(job_id, number, item)
            verdict = item.findings.verdict() if isinstance(item.findings, Findings) else None
            if verdict is not None:
                catalogue.live.follow(job_id, item.name, number, verdict, datetime.now(UTC), _moved_at(item.trace))
        return number

    def begin_watch(self, name: str, source: str) -> int:
        """Note that a job is being cut into windows; the number of its next one."""
        self._check_name(name)
        with self.writing() as writer:
            job_id = writer.catalogue.ensured(name, source)
            writer.catalogue.live.watch_begins(job_id, datetime.now(UTC))
            return writer.catalogue.next_window(job_id)

    def end_watch(self, name: str) -> None:
        """Note that a job has ended; its open incidents close."""
        with self.writing() as writer:
            if (job_id := writer.catalogue.job_id(name)) is not None:
                writer.catalogue.live.watch_ends(job_id, datetime.now(UTC))

    def add_hang(self, job: str, lines: Sequence[str], report: dict[str, Any]) -> None:
        """Keep a report on a hang of the job, which need not be in the store: its text and its JSON.

        It opens an incident, which closes with the first window that has a step begun afterwards, or with the job.
        """
        self._check_encodable()
        self._refuse_read_only()
        try:
            Folder(self.path).make()
            write_hang(self.path, job, lines, report)
        except OutputError as error:
            raise StoreError(str(error)) from None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}; check the path") from None
        if not report.get("hang"):
            return
        with self.writing() as writer:
            known = writer.catalogue.live.incidents(job, only_open=True)
            if not any(incident.cause.kind == HANG for incident in known):
                incident = Incident(0, job, sighting_of_hang(report), datetime.now(UTC), None, None)
                writer.catalogue.live.put_incident(writer.catalogue.ensured(job, "collect --hang-after"), incident)

    def check_new(self, name: str | None) -> None:
        """Raise StoreError where no job `name` could be added: the store cannot be used, or has one; None is any."""
        if name is not None:
            self._check_name(name)
        self._check_encodable()
        self._refuse_read_only()
        try:
            Folder(self.path).check_writable()
        except OutputError as error:
            raise StoreError(str(error)) from None
        if self._exists():
            with self.reading() as catalogue:
                if name is not None and catalogue.holds(name):
                    raise StoreError(f"{self.path}: job {short(name)!r} is there already; choose another --name")

    def free_name(self, name: str) -> str:
        """The name for a new job: this one, or, where there is such a job, NAME-2, NAME-3 and so on.

        A job that has no window and is not watched, which a hang has brought, is not in the way.
        """
        self._check_name(name)
        if not self._exists():
            return name
        with self.reading() as catalogue:
            return next(
                free
                for number in count(1)
                if not catalogue.in_use(free := name if number == 1 else _numbered(name, number))
            )

    @contextmanager
    def writing(self, *, rebuilding: bool = False) -> Iterator[Writer]:
        """What changes the store: all of it at the end, nothing where an error comes first.

        `rebuilding`: the files of jobs are there, and a catalogue is to be made of them.
        """
        self._check_encodable()
        self._refuse_read_only()
        folder = Folder(self.path)
        try:
            made = folder.make()
            with alone(folder.catalogue):
                try:
                    with catalogue_copy(folder.catalogue) as copy:
                        yield from self._changing(folder, copy, rebuilding=rebuilding)
                finally:
                    if made:  # and nothing written
                        folder.unmake()
        except OutputError as error:
            raise StoreError(str(error)) from None

    def _changing(self, folder: Folder, copy: CatalogueCopy, *, rebuilding: bool) -> Iterator[Writer]:
        """The one writer, on a copy of the catalogue that takes its place at the end."""
        folder.clear_unfinished()
        if copy.replaces:
            with folder.reading():  # nobody else has it open for writing
                copy.fill()
        try:
            with connected(copy.path, self.path, read_only=False) as connection:
                catalogue = Catalogue(connection, self.path)
                if not copy.replaces:
                    if not rebuilding:
                        folder.check_no_jobs()
                    catalogue = Catalogue.new(connection, self.path)
                elif (version := check_version(connection, self.path, *KNOWN_VERSIONS)) < STORE_VERSION:
                    catalogue = Catalogue.upgraded(connection, self.path, version)
                connection.begin()
                writer = Writer(folder, catalogue)
                yield writer
                connection.commit()
                connection.execute("CHECKPOINT")  # closing would keep a failure to itself
            copy.put()
            if not writer.removes:
                folder.forget_unfinished()
        finally:
            with suppress(StoreError, OSError):  # else the next writer does it
                folder.clear_unfinished()

    def _add(self, writer: Writer, item: Incoming, replace: bool) -> None:
        catalogue = writer.catalogue
        old = catalogue.job_id(item.name)
        if old is not None and catalogue.holds(item.name):
            if not replace:
                raise StoreError(
                    f"{self.path}: job {item.name!r} is there already; replace it with --replace or choose --name"
                )
            writer.remove(old, catalogue.windows(item.name))
        writer.write(catalogue.ensured(item.name, item.source), 0, item)

    def _check_name(self, name: str) -> None:
        if encodable(name) != name:
            raise StoreError(f"{self.path}: DuckDB needs names in UTF-8, not {short(name)!r}; choose another --name")
        if len(name) > LONGEST_JOB_NAME:
            raise StoreError(
                f"{self.path}: the name {short(name)!r} has {len(name)} characters, at most {LONGEST_JOB_NAME} fit;"
                " choose another --name"
            )

    def _refuse_read_only(self) -> None:
        """Raise StoreError at an address of S3, or where there is a DuckDB file: this tracekit writes neither."""
        if s3_url(self.path) is not None:
            raise StoreError(
                f"{self.name}: a store in S3 is only read; write into a folder, and copy that there (docs/store.md)"
            )
        with suppress(OSError):
            if not stat.S_ISREG(self.path.lstat().st_mode) or not self._is_duckdb():
                return
            with SingleFile(self.path).reading():
                raise StoreError(
                    f"{self.path}: a store of an older tracekit, in one file, which is only read;"
                    f" `tracekit store migrate {self.path}` makes a folder of it"
                )

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
            raise StoreError(f"{self.name}: the store holds no job; add one with `tracekit import TRACE`")
        return jobs[0].name

    def load(self, name: str, window: int | None = None) -> AnyTrace:
        """The trace of a window of the job `name`, by default of the newest."""
        return self._read(name, window, self._trace)

    def report(self, name: str, window: int | None = None) -> str | None:
        """The JSON that `whatif` found when a window was added, by default the newest; None where it was not asked."""
        return self._read(name, window, lambda backend, found: backend.report(found))

    def reports(self, windows: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """The reports on windows of several jobs, by name and number, in one go; those that are there."""
        backend = self._backend()
        if not windows:
            return {}
        with backend.reading() as catalogue:
            found = catalogue.windows_of(windows)
        reports = {}
        for window in found:
            with suppress(FileGoneError):
                if (report := backend.report(window)) is not None:
                    reports[window.job, window.number] = report
        return reports

    def workers(self, name: str, window: int | None = None) -> pl.DataFrame | None:
        """S of each worker in each step of a window, as `WorkerSlowdowns.rows` has it; None where there is none."""
        return self._read(name, window, lambda backend, found: backend.workers(found))

    def _trace(self, backend: Backend, window: StoredWindow) -> AnyTrace:
        if Part.OPS not in window.files:
            raise NotStoredError(
                f"{self.name}: the ops of job {short(window.job)!r}, window {window.number}, were pruned; its report is"
                " still there"
            )
        return backend.trace(window)

    def _read(self, name: str, number: int | None, read: Callable[[Backend, StoredWindow], _Read]) -> _Read:
        """Read of a window; once more where a file has been removed since the catalogue was read."""
        backend = self._backend()
        with backend.reading() as catalogue:
            window = catalogue.window(name, number)
        try:
            return read(backend, window)
        except FileGoneError:
            with backend.reading() as catalogue:
                again = catalogue.window(name, number)
            if again == window:
                raise
            return read(backend, again)

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue as it is now."""
        with self._backend().reading() as catalogue:
            yield catalogue

    def state(self) -> str:
        """What tells one state of the store from the next."""
        if (remote := self._remote()) is not None:
            return remote.state()
        catalogue = Folder(self.path).catalogue
        try:
            found = (catalogue if catalogue.exists() else self.path).stat()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}; is the store still there?") from None
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    @property
    def name(self) -> str:
        """The path or address, for people."""
        return shown(self.path)

    def check(self) -> None:
        """Raise StoreError where there is no store, or something else."""
        self._backend()

    def _backend(self) -> Backend:
        """What reads this store."""
        if (remote := self._remote()) is not None:
            if not remote.exists():
                raise remote.missing()
            return remote
        if not self._exists():
            raise StoreError(f"{self.path}: no such store; make one with `tracekit import TRACE --store {self.path}`")
        if self.path.is_dir():
            if not is_store_folder(self.path):
                raise StoreError(f"{self.path}: a folder, but no tracekit store; choose another --store")
            return Folder(self.path)
        if not self._is_duckdb():
            raise StoreError(f"{self.path}: not a tracekit store; a trace file is given without --store")
        return SingleFile(self.path)

    def is_store(self) -> bool:
        """Whether there is a store, or a DuckDB file that may be one. Raises StoreError where it cannot be read."""
        if (remote := self._remote()) is not None:
            return remote.exists()
        return self._exists() and (is_store_folder(self.path) if self.path.is_dir() else self._is_duckdb())

    def _remote(self) -> Remote | None:
        url = s3_url(self.path)
        return None if url is None else Remote(url)

    def _check_encodable(self) -> None:
        if encodable(str(self.path)) != str(self.path):
            raise StoreError(f"{self.path}: DuckDB needs a path in UTF-8; choose another --store")

    def _exists(self) -> bool:
        self._check_encodable()
        try:
            return self.path.exists()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None

    def _is_duckdb(self) -> bool:
        try:  # without waiting for the writer of a pipe
            with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_duckdb(file)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None


def _numbered(name: str, number: int) -> str:
    ending = f"-{number}"
    return name[: LONGEST_JOB_NAME - len(ending)] + ending


def _moved_at(trace: AnyTrace) -> datetime | None:
    """When the last step began, where its trace says so."""
    starts = getattr(trace, "step_starts", {})
    try:
        return datetime.fromtimestamp(max(starts.values()), UTC) if starts else None
    except (OverflowError, ValueError, OSError):  # a clock that nobody has set
        return None


@dataclass(slots=True)
class Writer:
    """A store that is being changed: `catalogue` is a copy, and files are beside those that it names.

    `removes`: whether files are to be removed once the copy is the catalogue.
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
        """Remove a window, and its job where it was the last."""
        self.removes = True
        self.folder.note_unfinished([(window.job_id, window.number)])
        self.catalogue.remove_window(window)

    def remove_part(self, window: StoredWindow, part: Part) -> None:
        """Remove one file of a window."""
        self.removes = True
        self.folder.note_unfinished([(window.job_id, window.number)])
        self.catalogue.remove_file(window, part)
