"""Recognise traces of torch.profiler, and exports of Nsight Systems, by their first bytes.

In: a path. Out: whether it is or contains such a trace. Imports almost nothing, because every input passes here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tracekit.base.searches import files_below

SUFFIXES = (".json", ".json.gz", ".sqlite")
#: First bytes of a SQLite file, such as an export of Nsight Systems.
SQLITE = b"SQLite format 3\0"
_SNIFFED_BYTES = 1 << 16
#: A bare list of events, Chrome's array format, is of torch.profiler by the categories of its events.
_LIST = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|kernel|cuda_runtime|cuda_driver|gpu_mem\w+|user_annotation|python_function|Operator|Kernel'
    rb'|Runtime|Mem\w+)"'
)
_MARKS = (b'"traceEvents"', b'"distributedInfo"', b'"deviceProperties"', b'"baseTimeNanoseconds"')


def looks_like_kineto(path: Path) -> bool:
    """True if a file, or one in a folder, looks like a Chrome trace or an export of Nsight Systems.

    False if it cannot be read.
    """
    try:
        return bool(traces_in(path)) if path.is_dir() else _is_trace(path)
    except OSError:
        return False


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder and below it, by name: 2.json before 10.json."""
    return sorted(filter(_is_trace, _named_as_traces(folder)), key=_by_number)


def empty_in(folder: Path) -> list[Path]:
    """Return the empty files in a folder and below it that are named as traces are."""
    empty = (path for path in _named_as_traces(folder) if path.is_file() and not path.stat().st_size)
    return sorted(empty, key=_by_number)


def _named_as_traces(folder: Path) -> Iterator[Path]:
    return (path for path in files_below(folder) if path.name.endswith(SUFFIXES))


def _by_number(path: Path) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]


def _is_trace(path: Path) -> bool:
    try:
        head = first_bytes(path)
    except OSError:
        return False
    if head.startswith(SQLITE):
        return _is_export(path)
    is_list = head.lstrip().startswith(b"[") and b'"ph"' in head and _LIST.search(head) is not None
    if not is_list and not any(mark in head for mark in _MARKS):
        return False
    from tracekit.trace.chrome import MARK  # imports polars, which reading processes avoid

    return MARK.encode() not in head


def is_sqlite(path: Path) -> bool:
    """Whether a file is a SQLite file; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def _is_export(path: Path) -> bool:
    """Whether a SQLite file has tables of Nsight Systems; True if it is damaged, so that reading reports why."""
    import sqlite3  # most files are no SQLite

    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
            return any(name == "StringIds" or name.startswith("CUPTI_") for (name,) in tables)
    except sqlite3.Error:
        return True


def first_bytes(path: Path, most: int = _SNIFFED_BYTES) -> bytes:
    """At most so many first bytes of a file, unpacked; none if it is damaged there."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        head = file.read(most)
    if head[:2] != b"\x1f\x8b":
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, most)
    except zlib.error:
        return b""
