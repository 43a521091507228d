"""Recognise traces of torch.profiler, and exports of Nsight Systems, by their first bytes.

In: a look at a path. Out: whether it is such a trace; the traces in a folder. Imports almost nothing, because the
processes that read single files import it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tracekit.base.look import Look
from tracekit.base.searches import files_below
from tracekit.trace.model import TIMELINE_MARK

SUFFIXES = (".json", ".json.gz", ".sqlite")
#: First bytes of a SQLite file, such as an export of Nsight Systems.
SQLITE = b"SQLite format 3\0"
#: A bare list of events, Chrome's array format, is of torch.profiler by the categories of its events.
_LIST = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|kernel|cuda_runtime|cuda_driver|gpu_mem\w+|user_annotation|python_function|Operator|Kernel'
    rb'|Runtime|Mem\w+)"'
)
_MARKS = (b'"traceEvents"', b'"distributedInfo"', b'"deviceProperties"', b'"baseTimeNanoseconds"')


def is_gpu_trace(look: Look) -> bool:
    """Whether a file is a trace of torch.profiler or an export of Nsight Systems."""
    return is_profile(look) or is_export(look)


def is_profile(look: Look) -> bool:
    """Whether a file is a Chrome trace of torch.profiler, not one that tracekit exported."""
    head = look.text
    is_list = head.lstrip().startswith(b"[") and b'"ph"' in head and _LIST.search(head) is not None
    return (is_list or any(mark in head for mark in _MARKS)) and TIMELINE_MARK.encode() not in head


def is_export(look: Look) -> bool:
    """Whether a SQLite file has tables of Nsight Systems; True if it is damaged, so that reading reports why."""
    if not look.head.startswith(SQLITE):
        return False
    import sqlite3  # most files are no SQLite

    try:
        with closing(sqlite3.connect(f"{look.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
            return any(name == "StringIds" or name.startswith("CUPTI_") for (name,) in tables)
    except sqlite3.Error:
        return True


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder and below it, by name: 2.json before 10.json."""
    return sorted((path for path in _named_as_traces(folder) if is_gpu_trace(Look(path))), key=_by_number)


def empty_in(folder: Path) -> list[Path]:
    """Return the empty files in a folder and below it that are named as traces are."""
    empty = (path for path in _named_as_traces(folder) if path.is_file() and not path.stat().st_size)
    return sorted(empty, key=_by_number)


def _named_as_traces(folder: Path) -> Iterator[Path]:
    return (path for path in files_below(folder) if path.name.endswith(SUFFIXES))


def _by_number(path: Path) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]
