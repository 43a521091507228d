"""What a file is if it is not a trace, and which command to use for it.

In: a path that no importer recognises. Out: one sentence, None if nothing is known about the file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracekit.errors import FormatError, StoreError
from tracekit.text import printable

#: How many bytes of a file, and how many files of a folder, to look at.
_LOOKED_AT, _MOST_FILES = 65_536, 16
#: Words near the beginning of flight-recorder dumps, pickled or as JSON.
_DUMP_WORDS = (b"pg_config", b"entries")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """If reading `path` fails because it is not a trace, report what it is instead. Raises FormatError."""
    try:
        yield
    except FormatError:
        words = what_it_is(path)
        if words is None:
            raise
        raise FormatError(f"{path}: {words}") from None


def what_it_is(path: Path) -> str | None:
    """What the file or folder is, and the command to type."""
    named = shlex.quote(printable(str(path)))
    try:
        if _is_store(path):
            return f"a store, not a trace; name it with --store: `tracekit whatif --store {named}`"
        if path.is_dir():
            files = [file for _, file in zip(range(_MOST_FILES), sorted(path.iterdir()), strict=False)]
            if any(_is_dump(file) for file in files if file.is_file()):
                return f"flight-recorder dumps of a hang, not a trace; type `tracekit hang {named}`"
            return None
        if not path.is_file():
            return None
        return _own(path, named) or _foreign(path, named)
    except OSError:
        return None


def _is_store(path: Path) -> bool:
    from tracekit.store import Store

    try:
        return Store(path).is_store()
    except StoreError:
        return False


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LOOKED_AT)


def _is_dump(path: Path) -> bool:
    beginning = _beginning(path)
    return beginning[:1] in {b"\x80", b"{"} and all(word in beginning for word in _DUMP_WORDS)


def _own(path: Path, named: str) -> str | None:
    """Files that tracekit wrote."""
    from tracekit.documents.markdown import MARKDOWN_FILE
    from tracekit.documents.page import PAGE_FILE
    from tracekit.report_tables import TABLE_FILE

    for kind, hint in (
        (PAGE_FILE, f"open it in a browser: `xdg-open {named}`"),
        (MARKDOWN_FILE, "it is text to read"),
        (TABLE_FILE, "read it with polars or pandas"),
    ):
        with path.open("rb") as file:
            if kind.recognises(file):
                return f"{kind.name}, not a trace; {hint}, or name the trace that it was made of"
    if _beginning(path).lstrip().startswith(b'{"report_version"'):
        return "a report of `tracekit whatif --json`, not a trace; name the trace that it was made of"
    return None


def _foreign(path: Path, named: str) -> str | None:
    """Files that belong to another command, or to none."""
    if _is_dump(path):
        return f"a flight-recorder dump, not a trace; type `tracekit hang` with its folder, {path.parent}"
    match path.suffix:
        case ".py" | ".sh":
            run = f"python {named}" if path.suffix == ".py" else f"sh {named}"
            return f"a script, not a trace; record what it does: `tracekit collect -- {run}`"
        case ".yaml" | ".yml":
            return f"a layout, not a trace; give it with its trace: `tracekit whatif TRACE --layout {named}`"
        case ".parquet" | ".json" | ".gz":  # a damaged or unknown trace; the reader has reported more
            return None
    beginning = _beginning(path)
    if beginning and b"\0" not in beginning:
        return "a text file, not a trace; `tracekit import --format` lists the formats that tracekit reads"
    return None
