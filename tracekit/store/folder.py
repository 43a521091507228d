"""Where the files of a store are, and how they get there whole: a folder, or a copy of one in object storage.

    STORE/tracekit-store                  says that this folder is a store
    STORE/catalog.duckdb                  what lists need, and which files there are (schema.sql)
    STORE/jobs/<job>/<window>.parquet     the trace, as `tracekit whatif` reads it
    STORE/jobs/<job>/<window>.report.json, .workers.parquet   what its analysis found
    STORE/left-out/<time>/<job>/...       files that no window named, which a repair has moved there
    STORE/unfinished                      files that a writer at work adds or removes
    STORE/hangs/                          reports on hangs (incidents.py)
    STORE/handled/                        what people do about incidents, and fixes they applied (incidents.py)
    STORE/watch-errors.log                tracebacks of errors that a watch has survived (live/run.py)
    STORE/told/<receiver>                 which incidents a receiver has been told of (live/receivers.py)

Files are written before the catalogue names them and removed after it does so no longer; numbers are never used
twice. So a reader of any state of the catalogue finds every file that it names, unless that was removed meanwhile.
All files are reached through `Contained`: a link, a pipe or the like in the place of one is refused by name.

Of a store at an address such as s3://bucket/store, this process keeps the catalogue as a file as long as it is
current; files of windows exist only while they are read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import polars as pl

from tracekit.base import paths
from tracekit.base.atomic_write import OutputPlace, check_writable
from tracekit.base.contained import Contained
from tracekit.base.errors import FormatError, OutputError, StoreError, UnreadableFileError, UnsafeFileError
from tracekit.base.paths import command, shown
from tracekit.base.text import counted, short
from tracekit.report.findings import Findings
from tracekit.report.report import Report, decoded
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import IMPORT_AGAIN, STORE_FILE, connected, lock_of, writing
from tracekit.store.catalogue_rows import Incoming, StoredFile, StoredWindow, WindowPart
from tracekit.store.incidents import HANDLED, HANGS
from tracekit.trace.canonical import read_columns, read_parquet
from tracekit.trace.model import TraceKind

if TYPE_CHECKING:
    from tracekit.store.catalogue_rows import AnyTrace
    from tracekit.store.hangs import StoredHang

MARK, CATALOGUE, UNFINISHED, JOBS, LEFT_OUT = "tracekit-store", "catalog.duckdb", "unfinished", "jobs", "left-out"
#: Files of `tracekit.live`: incidents that each receiver has been told of, and tracebacks.
DELIVERIES, WATCH_ERRORS = "told", "watch-errors.log"
_SUFFIX = {WindowPart.OPS: ".parquet", WindowPart.REPORT: ".report.json", WindowPart.WORKERS: ".workers.parquet"}
_MARK_TEXT = b"This folder is a store of tracekit; `tracekit store list FOLDER` lists its jobs.\n"
#: Marks that older versions wrote, which are as good.
_OLDER_MARKS = (b"This folder is a store of tracekit; `tracekit info --store FOLDER` lists its jobs.\n",)
_CHUNK = 1 << 20
#: A line of the note of unfinished windows: job and number.
_NOTED = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})")

#: What writes each file of a window.
_Parts = dict[WindowPart, Callable[[BinaryIO], object]]
#: Assume that the catalogue is unchanged for this long, seconds: a page reads it several times.
LOOKED_AT_EVERY_S = 1.0
#: How long to retry fetching a catalogue that is being replaced, seconds.
_FETCHING_S = 60.0


class FileGoneError(StoreError):
    """A file that the catalogue named is missing: it may have been removed since."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The store in the folder `path`."""

    path: Path

    @property
    def catalogue(self) -> Path:
        """The DuckDB file."""
        return self.path / CATALOGUE

    @property
    def contained(self) -> Contained:
        """The reader and writer of the files."""
        return Contained(self.path)

    @property
    def _repair(self) -> str:
        return command("store", "repair", "--store", self.path)

    def _damage_error(self, problem: str) -> StoreError:
        return StoreError(f"{problem}; `{self._repair}` drops what is damaged")

    def file(self, job_id: int, number: int, part: WindowPart) -> Path:
        """The path of a part of a window."""
        return self.path / name_of(job_id, number, part)

    def has_catalogue(self) -> bool:
        """Whether there is a catalogue. Raises UnsafeFileError."""
        return self.contained.status(CATALOGUE) is not None

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue as it is now."""
        self.check_no_jobs()
        if self.has_catalogue():
            with open_catalogue(self.catalogue, self.path) as catalogue:
                yield catalogue
            return
        with writing(":memory:") as connection:  # the first writer has not finished
            yield Catalogue.new(connection, self.path)

    def check_no_jobs(self) -> None:
        """Raise StoreError if a store without a catalogue has files of jobs that no writer is adding."""
        if self.has_catalogue():
            return
        files = set(self.files_of_jobs()) - self.noted_files()
        if files and not self.has_catalogue():  # the first writer may have finished since
            raise StoreError(
                f"{self.path}: its {CATALOGUE} is missing; rebuild it from the traces with `{self._repair}`"
            )

    def holding(self, _: StoredWindow, __: WindowPart) -> AbstractContextManager[Folder]:
        """The folder that has this part of a window meanwhile."""
        return nullcontext(self)

    def ops(self, window: StoredWindow) -> Path:
        """The Parquet file of a window's ops. Raises FileGoneError, StoreError if its size is not as recorded."""
        return self._checked(window, WindowPart.OPS)

    def trace(self, window: StoredWindow) -> AnyTrace:
        """The trace of a window. Raises FileGoneError, StoreError if it is damaged."""
        path = self.ops(window)
        try:
            if window.kind is TraceKind.OPS:
                from tracekit.trace.op import read_op_trace  # most windows are of pipelines

                return read_op_trace(path)
            return read_parquet(path)
        except FormatError as error:
            self._checked(window, WindowPart.OPS)  # it may have been removed just now
            raise self._damage_error(str(error)) from None

    def report(self, window: StoredWindow) -> Report | None:
        """The report of a window that has one; None if another version of tracekit wrote it: as it was written, and
        yet not to be read.
        """
        path = self._checked(window, WindowPart.REPORT)
        content = self.read(name_of(window.job_id, window.number, WindowPart.REPORT))
        if zlib.crc32(content) != window.files[WindowPart.REPORT].crc32:
            raise self._damage_error(f"{path}: has changed since it was written")
        try:
            return decoded(content, str(path))
        except FormatError:
            return None

    def hangs(self, job: str | None) -> tuple[StoredHang, ...]:
        """The reports on hangs, newest first."""
        from tracekit.store.hangs import read_hangs  # few jobs hang

        return read_hangs(self.path, job)

    def workers(self, window: StoredWindow) -> pl.DataFrame:
        """S of each worker in each step of a window that has it, as in `WorkerSlowdowns.rows`."""
        path = self._checked(window, WindowPart.WORKERS)
        try:
            return read_columns(path)
        except FormatError as error:
            raise self._damage_error(str(error)) from None

    def _checked(self, window: StoredWindow, part: WindowPart) -> Path:
        """The path of a file that exists with its recorded size."""
        path, name = self.file(window.job_id, window.number, part), name_of(window.job_id, window.number, part)
        with self._readable(name):
            status = self.contained.status(name)
        if status is None:
            raise FileGoneError(f"{path}: is missing; drop it from the store with `{self._repair}`")
        if status.st_size != window.files[part].bytes:
            raise self._damage_error(f"{path}: has {status.st_size:,} bytes; expected {window.files[part].bytes:,}")
        return path

    def damage(self, window: StoredWindow, part: WindowPart) -> str | None:
        """What is wrong with a file, None if it is as it was written; reads all of it. Raises UnsafeFileError,
        UnreadableFileError: something else is in its place, which must not be removed.
        """
        try:
            path = self._checked(window, part)
            checksum = self.checksum(name_of(window.job_id, window.number, part))
        except (UnsafeFileError, UnreadableFileError):
            raise
        except FileNotFoundError:
            return f"{self.file(window.job_id, window.number, part)}: is missing"
        except StoreError as error:
            return str(error)
        return None if checksum == window.files[part] else f"{path}: has changed since it was written"

    def checksum(self, name: str) -> StoredFile:
        """Size and CRC-32 of a file. Raises FileNotFoundError, UnsafeFileError, UnreadableFileError."""
        size = crc32 = 0
        with self._readable(name), self.contained.reading(name) as file:
            while chunk := file.read(_CHUNK):
                size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
        return StoredFile(size, crc32)

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError, UnsafeFileError, UnreadableFileError."""
        with self._readable(name):
            return self.contained.read(name)

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Turn errors of reading into UnreadableFileError; FileNotFoundError stays."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnreadableFileError(
                f"{self.path / name}: cannot be read: {error.strerror or error}; check the path"
            ) from None

    def files_of_jobs(self) -> list[str]:
        """Everything in the folders of jobs, by name, but for what `unsafe` names."""
        contained = self.contained
        folders = [f"{JOBS}/{job}" for job in contained.folders(JOBS)]
        return [
            f"{folder}/{name}" for folder in folders for name in [*contained.files(folder), *contained.folders(folder)]
        ]

    def unsafe(self) -> Iterator[str]:
        """A line for each link, pipe and the like where a file or folder of a store belongs."""
        for name in (MARK, CATALOGUE, f"{CATALOGUE}.wal", lock_of(self.catalogue), UNFINISHED, WATCH_ERRORS):
            try:
                self.contained.status(name)
            except UnsafeFileError as error:
                yield str(error)
        for name in (JOBS, LEFT_OUT, HANDLED, HANGS, DELIVERIES):
            yield from self.contained.unsafe(name, deep=name == JOBS)

    # ---- writing

    def make(self) -> bool:
        """Make the folder a store, unless it is one; returns whether it had to be made.

        Until it has its mark, it is an empty folder, which another first writer marks. Raises OutputError if something
        else is there.
        """
        if self.check_place():
            return False
        parent, is_new = Contained(self.path.parent), False
        try:
            if not self.path.exists():
                is_new = parent.make_folder(self.path.name)
            with self.contained.new(MARK) as mark:
                mark.write(_MARK_TEXT)
                mark.flush()
                os.fsync(mark.fileno())
            parent.sync_folder()
        except FileExistsError:  # others were faster
            return self.make()
        except OSError as error:
            with suppress(OSError):
                parent.remove_folder(self.path.name)
            raise OutputPlace(self.path, STORE_FILE).error(error) from None
        return is_new

    def unmake(self) -> None:
        """Remove a store into which nothing was written."""
        if not self.has_catalogue():
            with suppress(OSError):
                for name in (UNFINISHED, lock_of(self.catalogue), MARK):
                    self.contained.remove(name)
                with suppress(FileNotFoundError):
                    self.contained.remove_folder(JOBS)
                Contained(self.path.parent).remove_folder(self.path.name)

    def check_place(self) -> bool:
        """Whether there is a store; False for nothing or an empty folder. Raises OutputError for anything else."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutputPlace(self.path, STORE_FILE).error(error) from None
        if stat.S_ISLNK(status.st_mode):
            raise OutputError(
                f"{self.path}: is a link to {self.path.readlink()}, which is not followed; name the folder itself"
            )
        if not stat.S_ISDIR(status.st_mode):
            OutputPlace(self.path, STORE_FILE).check()
            raise older_store(self.path)
        if is_store_folder(self.path):
            return True
        with suppress(OSError):
            if not any(self.path.iterdir()):
                return False
        if is_store_folder(self.path):  # another first writer has marked it meanwhile
            return True
        self.contained.status(MARK)  # names what is in its place
        raise OutputError(f"{self.path}: is a folder, but not a tracekit store; choose another place")

    def check_writable(self) -> None:
        """Raise the OutputError that writing would raise, as far as it can be predicted; writes nothing."""
        self.check_place()
        check_writable(self.catalogue if self.path.exists() else self.path, STORE_FILE)

    def write_window(self, job_id: int, number: int, item: Incoming) -> dict[WindowPart, StoredFile]:
        """Write the files of a window; they are on disk when this returns. Raises OSError."""
        trace = item.trace if item.trace.name == item.name else replace(item.trace, name=item.name)
        return self._write(job_id, number, {WindowPart.OPS: trace.write_to, **_parts_of_findings(item)})

    def write_findings(self, job_id: int, number: int, item: Incoming) -> dict[WindowPart, StoredFile]:
        """Write the files of a window but for its ops. Raises OSError."""
        return self._write(job_id, number, _parts_of_findings(item))

    def _write(self, job_id: int, number: int, parts: _Parts) -> dict[WindowPart, StoredFile]:
        folder = f"{JOBS}/{job_id}"
        self.contained.make_folder(folder, durable=True)
        written = {part: self._written(name_of(job_id, number, part), write) for part, write in parts.items()}
        self.contained.sync_folder(folder)
        return written

    def _written(self, name: str, write: Callable[[BinaryIO], object]) -> StoredFile:
        try:
            with self.contained.new(name) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        except pl.exceptions.PolarsError as error:  # an error of the disk, reported by polars
            raise OSError(errno.EIO, short(str(error).splitlines()[0])) from None
        return self.checksum(name)

    def check_free(self, job_id: int, number: int) -> None:
        """Raise StoreError if a window that is to be written has a file already, which no window names."""
        for part in WindowPart:
            if self.contained.status(name := name_of(job_id, number, part)) is not None:
                raise StoreError(
                    f"{self.path / name}: is in the way of a new window, and no window names it; move it with"
                    f" `{self._repair}`"
                )

    def note_unfinished(self, windows: Iterable[tuple[int, int]]) -> None:
        """Note windows, by job and number, whose files are about to be written or removed."""
        self.contained.append(UNFINISHED, "".join(f"{job_id} {number}\n" for job_id, number in windows).encode())

    def forget_unfinished(self) -> None:
        """Forget the note: the catalogue names all noted files."""
        self.contained.remove(UNFINISHED)

    def _lines_of_note(self) -> list[bytes]:
        """The lines of the note; the last one may be incomplete, and is left out."""
        try:
            return self.contained.read(UNFINISHED).split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def noted_files(self) -> set[str]:
        """The names of all files that noted windows can have. Lines that note no window are left out."""
        noted = [match.groups() for line in self._lines_of_note() if (match := _NOTED.fullmatch(line))]
        return {name_of(int(job_id), int(number), part) for job_id, number in noted for part in WindowPart}

    def damaged_note(self) -> str | None:
        """A line about what notes no window in the note; None if nothing does. The next writer drops it."""
        damaged = [line for line in self._lines_of_note() if line and not _NOTED.fullmatch(line)]
        if not damaged:
            return None
        return (
            f"{self.path / UNFINISHED}: {short(repr(damaged[0]))} notes no window; the next writer, such as"
            f" `{self._repair}`, drops it"
        )

    def damaged_mark(self) -> str | None:
        """A line about a mark that is not as it was written; None if it is, or the first writer is still at work. The
        next writer renews it. Raises UnsafeFileError.
        """
        if not self.has_catalogue() or self._has_mark():
            return None
        return f"{self.path / MARK}: is not as it was written; the next writer, such as `{self._repair}`, renews it"

    def renew_mark(self) -> None:
        """Write the mark anew unless it is as it was written: it was damaged, or a first writer killed."""
        if not self._has_mark():
            self.contained.put(MARK, _MARK_TEXT)

    def _has_mark(self) -> bool:
        try:
            return self.contained.read(MARK) in (_MARK_TEXT, *_OLDER_MARKS)
        except FileNotFoundError:
            return False

    def clear_unfinished(self) -> None:
        """Remove files of the noted windows that the catalogue does not name, and the note."""
        if self.contained.status(UNFINISHED) is None:
            return
        if noted := self.noted_files():
            with self.reading() as catalogue:
                noted -= self.named_files(catalogue).keys()
        for name in noted:
            with suppress(UnsafeFileError):  # a link in its place is not the work of a writer
                self.contained.remove(name)
                with suppress(OSError):  # other files are there, or none
                    self.contained.remove_folder(name.rpartition("/")[0])
        self.forget_unfinished()

    def named_files(self, catalogue: Catalogue) -> dict[str, StoredFile]:
        """All files that a catalogue names."""
        return {
            name_of(window.job_id, window.number, part): file
            for window in catalogue.windows()
            for part, file in window.files.items()
        }


def _parts_of_findings(item: Incoming) -> _Parts:
    if not isinstance(item.findings, Findings):
        return {}
    report, workers = item.findings.report.to_json().encode(), item.findings.workers
    parts: _Parts = {WindowPart.REPORT: lambda file: file.write(report)}
    if workers is not None:
        rows = workers.rows(item.trace.step_starts)
        parts[WindowPart.WORKERS] = lambda file: rows.write_parquet(file, compression="zstd")
    return parts


def name_of(job_id: int, number: int, part: WindowPart) -> str:
    """The name of a part of a window, below the folder of the store."""
    return f"{JOBS}/{job_id}/{number}{_SUFFIX[part]}"


@contextmanager
def open_catalogue(path: Path, store: Path | str) -> Iterator[Catalogue]:
    """The catalogue in the file `path`, for reading; errors name `store`."""
    with connected(path, store, read_only=True) as connection:
        yield Catalogue.existing(connection, store, read_only=True)


def outdated_line(store: Path, windows: int) -> str:
    """The line about reports of another version on so many windows that have ops."""
    repair = command("store", "repair", "--store", store)
    return (
        f"{shown(store)}: reports on {counted(windows, 'window')} are of another version of tracekit; `{repair}` makes"
        " them anew"
    )


def older_store(path: Path) -> StoreError:
    """The error for a DuckDB file in the place of a store."""
    return StoreError(
        f"{path}: a file of DuckDB, and a store is a folder; if an older tracekit wrote it, {IMPORT_AGAIN}"
    )


def is_store_folder(path: Path) -> bool:
    """Whether a folder is marked as a store."""
    try:
        return Contained(path).status(MARK) is not None
    except (OSError, UnsafeFileError):
        return False


@dataclass(frozen=True, slots=True)
class Remote:
    """The store at the address `url`."""

    url: str

    def exists(self) -> bool:
        """Whether there is a store. Raises StoreError if that cannot be determined."""
        try:
            with _errors(self.url):
                paths.tag(f"{self.url}/{MARK}")
        except FileNotFoundError:
            return False
        return True

    def missing(self) -> StoreError:
        """The error for a missing store; names the bucket if that is what is missing."""
        bucket, _, key = self.url.partition("://")[2].partition("/")
        with suppress(OSError):  # keys without permission to ask
            if not paths.has_bucket(self.url):
                check = f"check the address and {paths.variables(self.url)}"
                return StoreError(f"{self.url}: no such bucket, {bucket!r}; {check}")
        return StoreError(f"{self.url}: no tracekit store at {key!r} in bucket {bucket!r}; choose another --store")

    def state(self) -> str:
        """A tag that changes with the state of the store."""
        return _copy(self.url).renewed()

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue as it is now."""
        copy = _copy(self.url)
        copy.renewed()
        with open_catalogue(copy.path, self.url) as catalogue:
            yield catalogue

    def hangs(self, job: str | None) -> tuple[StoredHang, ...]:
        """The reports on hangs, newest first."""
        from tracekit.store.hangs import read_hangs  # few jobs hang

        with tempfile.TemporaryDirectory(prefix="tracekit-store-") as name, _errors(self.url):
            Path(name, HANGS).mkdir()
            for number, url in enumerate(sorted(paths.objects_below(f"{self.url}/{HANGS}"))):
                paths.fetch(url, Path(name, HANGS, f"{number:09}.json"))  # a key can end in any name
            return read_hangs(Path(name), job)

    @contextmanager
    def holding(self, window: StoredWindow, part: WindowPart) -> Iterator[Folder]:
        """A folder that has this part of a window meanwhile."""
        with tempfile.TemporaryDirectory(prefix="tracekit-store-") as name:
            folder = Folder(Path(name))
            path = folder.file(window.job_id, window.number, part)
            url = f"{self.url}/{path.relative_to(name)}"
            path.parent.mkdir(parents=True)
            try:
                with _errors(url):
                    paths.fetch(url, path)
            except FileNotFoundError:
                raise FileGoneError(f"{url}: is missing; copy windows before the catalogue that names them") from None
            try:
                yield folder
            except StoreError as error:
                raise StoreError(f"{url}: damaged, or copied only in part; copy it again") from error


class _Copy:
    """A copy of the catalogue of the store at `url` in the file `path`."""

    def __init__(self, url: str) -> None:
        self._url, self._tag, self._looked_at = url, "", float("-inf")
        self._folder = tempfile.TemporaryDirectory(prefix="tracekit-store-")
        self._renewing = threading.Lock()
        self.path = Path(self._folder.name) / CATALOGUE

    def renewed(self) -> str:
        """Fetch the catalogue if it has changed; returns its tag."""
        with self._renewing:
            if time.monotonic() - self._looked_at >= LOOKED_AT_EVERY_S:
                try:
                    with _errors(self._url):
                        self._tag = self._fetch()
                except FileNotFoundError:
                    raise StoreError(f"{self._url}: not a tracekit store; choose another --store") from None
                self._looked_at = time.monotonic()
            return self._tag

    def _fetch(self) -> str:
        """Raises OSError."""
        url, new = f"{self._url}/{CATALOGUE}", self.path.with_suffix(".new")
        deadline = time.monotonic() + _FETCHING_S
        tag = paths.tag(url)
        while tag != self._tag:
            paths.fetch(url, new)  # takes several requests
            if (after := paths.tag(url)) == tag:
                new.replace(self.path)
                return tag
            if time.monotonic() > deadline:
                raise OSError(f"for {_FETCHING_S:.0f} s, the catalogue was replaced during every attempt to read it")
            tag = after
        return tag


#: One copy per store and process.
_copy = lru_cache(maxsize=8)(_Copy)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Convert errors of the storage to StoreError; FileNotFoundError stays."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: cannot be read: {paths.said(url, error)}") from None
