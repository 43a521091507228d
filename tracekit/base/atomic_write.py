"""Write files completely or not at all, and never overwrite anything that tracekit did not write.

In: a path, the kind of file that belongs there, and whatever the caller writes. Out: the complete file, or an
OutputError. A file is put only in a free place or in the place of a file of the same kind that tracekit wrote: pipes,
sockets, devices, folders, links and foreign files stay as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tracekit.base.errors import OutputError

#: Prefix of the names of temporary files; a digest of the host follows. Each is locked (flock) while its writer lives.
TEMPORARY_PREFIX = ".tracekit.new-"
#: Some shared file systems hide the locks of other hosts: a file older than this, seconds, has no living writer there.
ABANDONED_S = 86_400.0
#: What a file is that is no regular file, folder or link, by its type.
SPECIAL_FILES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class Kind:
    """A kind of file that tracekit writes.

    `name`: with its article, such as "a trace that tracekit wrote". `recognises`: whether an open file is of this kind.
    """

    name: str
    recognises: Callable[[BinaryIO], bool]


def starting_with(beginning: bytes) -> Callable[[BinaryIO], bool]:
    """Recognises files by their first bytes."""
    return lambda file: file.read(len(beginning)) == beginning


def parquet_with(key: str, says: Callable[[str], bool] = bool) -> Callable[[BinaryIO], bool]:
    """Recognises Parquet files by a key in their metadata, and by what `says` accepts as its value."""

    def recognises(file: BinaryIO) -> bool:
        import polars as pl  # reads only the footer

        try:
            value = pl.read_parquet_metadata(file).get(key)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, MemoryError):  # a damaged file
            return False
        return value is not None and says(value)

    return recognises


class OutputPlace:
    """A path to write, and the kind of file that may be replaced there."""

    def __init__(self, path: str | os.PathLike[str], kind: Kind) -> None:
        self.path = Path(path)
        self.kind = kind

    def check(self) -> os.stat_result | None:
        """The status of the file there, None if there is none. Raises OutputError unless it is a regular file of this
        kind.
        """
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.error(error) from None
        if stat.S_ISREG(status.st_mode):
            return self._checked_file()
        raise OutputError(f"{self.path}: {self._describe_special(status)}")

    def put(self, temporary: Path) -> None:
        """Move the complete file `temporary`, which is in the same folder, into place, after checking the place again.

        The new file inherits the permissions and, if allowed, the owner of the file it replaces.
        """
        try:
            status = self.check()
            if status is None:
                mask = os.umask(0)
                os.umask(mask)
                temporary.chmod(0o666 & ~mask)
                if _linked(temporary, self.path):
                    temporary.unlink()
                    return
                status = self.check()  # another writer was faster, or the file system has no hard links
            if status is not None:
                with contextlib.suppress(OSError):
                    os.chown(temporary, status.st_uid, status.st_gid)
                temporary.chmod(stat.S_IMODE(status.st_mode) & 0o777)
            temporary.replace(self.path)
        except OSError as error:
            raise self.error(error) from None

    def error(self, error: OSError) -> OutputError:
        """The OutputError for `error`."""
        return OutputError(f"{self.path}: cannot be written: {error.strerror or error}; choose another place")

    def _checked_file(self) -> os.stat_result:
        # Neither follows a link nor waits for a pipe that has replaced the file since.
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:
                status = os.fstat(handle)
                is_ours = stat.S_ISREG(status.st_mode) and self.kind.recognises(file)
        except OSError as error:
            raise self.error(error) from None
        if not is_ours:
            raise OutputError(
                f"{self.path}: not {self.kind.name}, so it is not replaced; choose another place, or move it away"
            )
        return status

    def _describe_special(self, status: os.stat_result) -> str:
        """Why the existing thing is not replaced, and what to do."""
        description = ""
        if stat.S_ISLNK(status.st_mode):
            description = f"is a link to {self.path.readlink()}"
            with contextlib.suppress(OSError):
                status = self.path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "is a folder; name a file in it"
        if (special := SPECIAL_FILES.get(stat.S_IFMT(status.st_mode))) is not None:
            return f"is {special}; tracekit writes only to regular files, choose another place"
        return f"{description}, which is not followed; name the file itself"


class replacing:  # noqa: N801 - reads as a verb: with replacing(path, kind) as temporary
    """Context manager: a temporary file next to `path` that becomes `path` on success and is removed otherwise.

    Write into that file; another file in its place would lose its lock. Also removes files that killed writers left in
    the folder. Raises OutputError if something else is in the way, or the file cannot be written (directory missing, no
    permission, disk full).
    """

    def __init__(self, path: str | os.PathLike[str], kind: Kind) -> None:
        self.place = OutputPlace(path, kind)

    def __enter__(self) -> Path:
        self.place.check()
        folder = self.place.path.parent
        self.temporary = folder  # until its name is known
        try:
            remove_left_over(folder)
            while True:
                self.temporary = folder / f"{_prefix()}{secrets.token_hex(4)}"
                if (lock := _locked(self.temporary)) is not None:
                    self._lock = lock
                    break
        except BaseException as error:
            # Ctrl-C can arrive between the creation of the file and the `with` that would remove it.
            if self.temporary != folder:
                with contextlib.suppress(OSError):
                    self.temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self.place.error(error) from None
            raise
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self.place.put(self.temporary)
        finally:
            self.temporary.unlink(missing_ok=True)
            self._lock.close()
        if isinstance(error, OSError):
            raise self.place.error(error) from None
        # polars has its own error for a full disk; polars is not imported here because the recorder does not need it.
        if type(error).__module__.startswith("polars.") and "IO error: " in str(error):
            raise self.place.error(OSError(str(error).rpartition("IO error: ")[2])) from None


def write_text(path: Path, text: str, kind: Kind) -> None:
    """Write a small text file. Raises OutputError."""
    with replacing(path, kind) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable(path: Path, kind: Kind) -> None:
    """Raise the OutputError that writing `path` would raise, as far as it can be predicted; writes nothing."""
    place = OutputPlace(path, kind)
    place.check()
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise place.error(error) from None


def remove_left_over(folder: Path) -> None:
    """Remove this user's temporary files whose writers were killed; a living writer holds a lock on its file."""
    local_prefix = _prefix()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # a folder may be writable but not readable
        for entry in entries:
            if not entry.name.startswith(TEMPORARY_PREFIX) or not _is_own_file(entry):
                continue
            if entry.name.startswith(local_prefix) or time.time() - entry.stat().st_mtime > ABANDONED_S:
                _remove_unless_locked(Path(entry.path))


def _is_own_file(entry: os.DirEntry[str]) -> bool:
    """Whether this is a regular file of the current user."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # removed since
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _prefix() -> str:
    host = hashlib.blake2b(os.fsencode(os.uname().nodename), digest_size=4).hexdigest()
    return f"{TEMPORARY_PREFIX}{host}-"


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError):  # locked, gone, or on a file system without locks: it stays
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _locked(path: Path) -> BinaryIO | None:
    """A new file, open and locked; None if another writer removed it between creation and locking."""
    file = open(path, "xb+", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115 - the caller closes
    with contextlib.suppress(OSError):  # on a file system without locks, nobody can lock the file to remove it either
        fcntl.flock(file, fcntl.LOCK_EX)
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


def _linked(temporary: Path, path: Path) -> bool:
    """Give the file a second name, unless that is taken; False if it is, or if links cannot be made."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError:
        return False
    return True
