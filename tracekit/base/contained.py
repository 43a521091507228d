"""Files below a folder that others may have prepared, as with a link out of it or a pipe that nobody writes.

In: a folder, and names below it such as "jobs/1/0.parquet". Out: their content and status, and changes of them. Every
part of a name is opened relative to the folder that has it, and no link is followed, so nothing outside is read,
changed or removed. Only regular files and real folders are opened, renamed or removed; no call waits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tracekit.base.atomic_write import SPECIAL_FILES
from tracekit.base.errors import UnreadableFileError, UnsafeFileError
from tracekit.base.text import printable

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FILE, _A_FOLDER = "file", "folder"
#: No file that is read or appended to as a whole is larger.
MOST_READ_BYTES = 256 << 20
#: How often a line is written again of which the system has written only a part.
_ATTEMPTS = 3
#: What systems of files say that cannot sync the names in a folder.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


@dataclass(frozen=True, slots=True)
class Contained:
    """The folder `root`, which may itself be a link: the user has named it.

    Methods take names below it. They raise OSError, and UnsafeFileError for a link, a pipe, a socket, a device, or a
    file where a folder belongs and the other way round.
    """

    root: Path

    # ---- reading

    def status(self, name: str) -> os.stat_result | None:
        """The status of a regular file; None if there is none."""
        with suppress(FileNotFoundError), self._parent(name) as (folder, last):
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            self._check(status, name, folder)
            return status
        return None

    def folder_status(self, name: str) -> os.stat_result | None:
        """The status of a folder; None if there is none."""
        with suppress(FileNotFoundError), self._descriptor_of(name, _FOLDER) as folder:
            return os.fstat(folder)
        return None

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a regular file."""
        with self._parent(name) as (folder, last):
            try:  # first, since opening a device can do something
                self._check(os.stat(last, dir_fd=folder, follow_symlinks=False), name, folder)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
            try:
                handle = os.open(last, flags | _SAFE, 0o666, dir_fd=folder)
                status = os.fstat(handle)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise self._refusal(name, folder, _FILE) from None
            if not stat.S_ISREG(status.st_mode):  # it has come in between
                os.close(handle)
                raise self._refusal(name, folder, _FILE)
            return handle

    def reading(self, name: str) -> BinaryIO:
        """A file to read."""
        return open(self.open(name), "rb")

    def read(self, name: str) -> bytes:
        """The content of a file. Raises UnreadableFileError if it is larger than MOST_READ_BYTES."""
        with self.reading(name) as file:
            self._check_size(name, os.fstat(file.fileno()))
            return file.read(MOST_READ_BYTES)

    def files(self, name: str) -> list[str]:
        """Names of the regular files right in a folder, sorted; none if it is missing. All else is passed over."""
        return self._names(name, stat.S_ISREG)

    def folders(self, name: str) -> list[str]:
        """Names of the real folders directly in a folder, sorted; none if it is missing. Skips all else."""
        return self._names(name, stat.S_ISDIR)

    def unsafe(self, name: str, *, deep: bool = False) -> Iterator[str]:
        """A line for each thing right in a folder, `deep`: at any depth, that the other methods refuse."""
        try:
            status = self._statuses(name)
        except UnsafeFileError as error:
            yield str(error)
            return
        for entry, entry_status in sorted(status.items()):
            below = f"{name}/{entry}" if name else entry
            if stat.S_ISDIR(entry_status.st_mode):
                if deep:
                    yield from self.unsafe(below, deep=True)
            elif not stat.S_ISREG(entry_status.st_mode):
                with suppress(FileNotFoundError), self._parent(below) as (folder, _):
                    yield str(self._refusal(below, folder, _FILE))

    # ---- writing

    def new(self, name: str) -> BinaryIO:
        """A new file to write. Raises FileExistsError."""
        return open(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    def append(self, name: str, lines: bytes, *, durable: bool = False) -> None:
        """Append lines, each with its end, to a new or existing file in one write, so that lines of two writers do not
        mix; they do not continue a line of which a killed writer has written only a part. `durable`: synced to the
        disk.

        Raises UnsafeFileError if the file has another name, which can be outside the folder. What was written of lines
        in vain stays as a damaged line.
        """
        handle = self.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            status = os.fstat(handle)
            self._check_size(name, status)
            if status.st_nlink > 1:
                raise UnsafeFileError(
                    f"{self.root / name}: has {status.st_nlink} names (hard links), and the file would change under all"
                    " of them; put a copy in its place"
                )
            torn = status.st_size > 0 and os.pread(handle, 1, status.st_size - 1) != b"\n"
            for _ in range(_ATTEMPTS):
                content = b"\n" + lines if torn else lines
                if os.write(handle, content) == len(content):
                    break
                torn = True
            else:
                raise OSError(errno.EIO, "only a part of a line was written", str(self.root / name))
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)

    def put(self, name: str, content: bytes) -> None:
        """Write a complete file in place of the existing one, if there is one, and sync it to the disk. A writer that
        is killed, or fails, leaves the existing one.
        """
        folder, slash, last = name.rpartition("/")
        self.put_by(name, f"{folder}{slash}.{last}.unfinished", lambda file: file.write(content), durable=True)

    def put_by(self, name: str, unfinished: str, write: Callable[[BinaryIO], object], *, durable: bool = False) -> None:
        """The same with what `write` writes; synced only if `durable`. `unfinished`: the name until then, in the same
        folder, for this writer alone.
        """
        self.remove(unfinished)
        try:
            with self.new(unfinished) as file:
                write(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            self.rename(unfinished, name, replacing=True)
        except BaseException:
            with suppress(OSError, UnsafeFileError):
                self.remove(unfinished)
            raise

    def make_folder(self, name: str, *, durable: bool = False) -> bool:
        """Make a folder and those above it, unless they are there; returns whether it was made. `durable`: the names of
        new ones are synced to the disk.
        """
        is_new, parts = False, name.split("/")
        for depth in range(1, len(parts) + 1):
            with self._parent(below := "/".join(parts[:depth])) as (folder, last):
                try:
                    os.mkdir(last, dir_fd=folder)
                    is_new = True
                except FileExistsError:
                    is_new = False
            with self._descriptor_of(below, _FOLDER):  # refuses what is no folder
                pass
            if is_new and durable:
                self.sync_folder("/".join(parts[: depth - 1]))
        return is_new

    def touch_folder(self, name: str) -> None:
        """Give a folder the time of now."""
        with self._descriptor_of(name, _LISTED) as folder:
            os.utime(folder)

    def rename(self, name: str, new: str, *, replacing: bool = False) -> None:
        """Rename a regular file or a folder, `replacing` a regular file, if there is one. Raises FileExistsError."""
        with self._parent(name) as (folder, last), self._parent(new) as (target, new_last):
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                self._check(status, name, folder)
            with suppress(FileNotFoundError):
                self._check(os.stat(new_last, dir_fd=target, follow_symlinks=False), new, target)
                if not replacing:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.root / new))
            os.rename(last, new_last, src_dir_fd=folder, dst_dir_fd=target)

    def remove(self, name: str) -> None:
        """Remove a regular file, unless it is missing."""
        with suppress(FileNotFoundError), self._parent(name) as (folder, last):
            self._check(os.stat(last, dir_fd=folder, follow_symlinks=False), name, folder)
            os.unlink(last, dir_fd=folder)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        with self._parent(name) as (folder, last):
            os.rmdir(last, dir_fd=folder)

    def sync(self, name: str) -> None:
        """Sync the content of a file to the disk."""
        handle = self.open(name)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_folder(self, name: str = "") -> None:
        """Sync the names in a folder to the disk, where the system of files can do so."""
        with self._descriptor_of(name, _LISTED) as folder:
            sync_names(folder)

    @contextmanager
    def path_of(self, name: str) -> Iterator[str]:
        """A path for libraries that open files by themselves and create others next to it, in the folder that has
        `name` now, even if another takes its place. Only the last part can be a link.
        """
        with self._parent(name) as (folder, last):
            yield f"/proc/self/fd/{folder}/{last}"

    # ---- descriptors

    def _names(self, name: str, is_kind: Callable[[int], bool]) -> list[str]:
        return sorted(entry for entry, status in self._statuses(name).items() if is_kind(status.st_mode))

    @contextmanager
    def _descriptor_of(self, name: str, flags: int) -> Iterator[int]:
        """A descriptor of a folder, "" for the root."""
        folder = os.open(self.root, flags)
        try:
            for depth, part in enumerate(parts := name.split("/") if name else [], 1):
                below = self._open_in(folder, part, flags, "/".join(parts[:depth]))
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that has `name`, and the last part of the name."""
        above, _, last = name.rpartition("/")
        if last in ("", ".", ".."):
            raise UnsafeFileError(f"{self.root / name}: not a name in {self.root}")
        try:
            with self._descriptor_of(above, _FOLDER) as folder:
                yield folder, last
        except OSError as error:
            if error.filename is not None:
                error.filename = str(self.root / name)  # it was relative to a descriptor
            raise

    def _open_in(self, folder: int, part: str, flags: int, name: str) -> int:
        """A descriptor of a folder directly inside another."""
        if part in ("", ".", ".."):
            raise UnsafeFileError(f"{self.root / name}: not a name in {self.root}")
        try:
            return os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise self._refusal(name, folder, _A_FOLDER) from None

    def _statuses(self, name: str) -> dict[str, os.stat_result]:
        """The status of each entry of a folder, by name."""
        statuses: dict[str, os.stat_result] = {}
        with suppress(FileNotFoundError), self._descriptor_of(name, _LISTED) as folder, os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed since
                    statuses[entry.name] = entry.stat(follow_symlinks=False)
        return statuses

    def _check(self, status: os.stat_result, name: str, folder: int) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(name, folder, _FILE)

    def _check_size(self, name: str, status: os.stat_result) -> None:
        if status.st_size > MOST_READ_BYTES:
            raise UnreadableFileError(
                f"{self.root / name}: has {status.st_size:,} bytes, more than {MOST_READ_BYTES:,}; move it away"
            )

    def _refusal(self, name: str, folder: int, expected: str) -> UnsafeFileError:
        """The error about the last part of `name`, which is in `folder`, and is not what was expected there."""
        last, path = name.rpartition("/")[2], self.root / name
        mode = os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            target = os.readlink(last, dir_fd=folder)
            return UnsafeFileError(
                printable(f"{path}: is a link to {target}, which is not followed;")
                + " remove it, or put what it leads to in its place"
            )
        plain = "a folder" if stat.S_ISDIR(mode) else "a file"
        kind = SPECIAL_FILES.get(stat.S_IFMT(mode), plain)
        return UnsafeFileError(printable(f"{path}: is {kind} where a {expected} of tracekit belongs; move it away"))


def sync_names(folder: int) -> None:
    """Sync the names in an open folder to the disk. Raises OSError unless its system of files cannot."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


@contextmanager
def opened_through_links(path: Path) -> Iterator[BinaryIO | None]:
    """The regular file at a path that the user has named, perhaps of a link; None for anything else. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        yield file if stat.S_ISREG(os.fstat(handle).st_mode) else None
