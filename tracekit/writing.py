"""How files are written: whole, or not at all.

In: a path and whatever the caller writes. Out: the file, once all of it is there; an OutputError otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import polars as pl

from tracekit.errors import OutputError


class replacing:  # noqa: N801 - reads as a verb: with replacing(path) as temporary
    """Context manager: a temporary path beside `path` that becomes `path` on success and vanishes otherwise.

    A link is followed. What is no file, such as /dev/stdout or a pipe, is never replaced: it is written as it is.
    Raises OutputError where the file cannot be written (directory missing, no permission, disk full).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.target = Path(os.path.realpath(path))

    def __enter__(self) -> Path:
        try:
            if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
                self.temporary = self.path
                return self.path
            handle, name = tempfile.mkstemp(prefix=".tracekit.", dir=self.target.parent)
        except OSError as error:
            raise self.error(error) from None
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.temporary != self.path:
            self._settle(done=error is None)
        if isinstance(error, OSError):
            raise self.error(error) from None
        if isinstance(error, pl.exceptions.PolarsError) and "IO error: " in str(error):
            raise self.error(OSError(str(error).rpartition("IO error: ")[2])) from None

    def _settle(self, *, done: bool) -> None:
        """Let the temporary file take its place, or vanish."""
        try:
            if done:
                mask = os.umask(0)
                os.umask(mask)
                self.temporary.chmod(0o666 & ~mask)
                self.temporary.replace(self.target)
        except OSError as failure:
            raise self.error(failure) from None
        finally:
            self.temporary.unlink(missing_ok=True)

    def error(self, error: OSError) -> OutputError:
        """What is said of `error`."""
        return OutputError(f"{self.path}: cannot be written: {error.strerror or error}; choose another place")


def check_writable(path: Path) -> None:
    """Raise the OutputError that writing `path` would end with, as far as that can be told before; writes nothing."""
    place = replacing(path)
    try:
        if path.is_dir():
            raise OutputError(f"{path}: is a folder; name a file in it")
        if path.exists() and not path.is_file():
            return
        with tempfile.TemporaryFile(dir=place.target.parent):
            return
    except OSError as error:
        raise place.error(error) from None
