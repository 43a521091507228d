"""What importers share: the content of a file, and checks of the user's options for it.

In: a path and options. Out: bytes, or an error that names the file.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.base.paths import unreadable
from tracekit.trace.model import TimeUnit


def read_whole(path: Path, most: int, fewer: str) -> bytes:
    """The content of a file, unpacked if it is gzipped.

    Raises FormatError if it cannot be read, is damaged, or has more than `most` bytes, with the advice `fewer`.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # before OSError, which BadGzipFile is too
        raise FormatError(f"{path}: its gzip stream is damaged ({error}); copy it again") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > most:
        raise FormatError(f"{path}: unpacks to more than {most >> 20} MiB; {fewer}")
    return content


def refuse_options(path: Path, layout: Path | None, unit: TimeUnit | None, form: str) -> None:
    """Raise FormatError if a `layout` or a `unit` was stated for a format that has both. `form`: its name, in words."""
    if layout is not None:
        raise FormatError(f"{path}: {form} carries its layout; leave out --layout")
    refuse_unit(path, unit, form)


def refuse_unit(path: Path, unit: TimeUnit | None, form: str) -> None:
    """Raise FormatError if a `unit` is given for a format with a fixed one. `form`: the name of the format."""
    if unit is not None:
        raise FormatError(f"{path}: {form} fixes the unit of its times; leave out --unit")
