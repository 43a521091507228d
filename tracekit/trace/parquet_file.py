"""Parquet files that hold a trace: their header, columns and numbers of rows.

In: the path of any file. Out: what it holds, or one FormatError that says what is wrong and what to do. Who reads a few
columns, or only a footer, need not validate a trace.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tracekit.base.errors import FormatError

#: Key of tracekit's JSON in the key-value metadata of a Parquet file.
METADATA_KEY = "tracekit"
#: Beyond the first values, a file with more of them per byte than this contains no real ops: each op has two times of
#: its own. A row counts as at least the usual number of columns.
USUAL_COLUMNS, MOST_COLUMNS, MOST_VALUES_PER_BYTE, FEWEST_VALUES = 32, 10_000, 64, 32_000_000
#: Read files with more rows than this one column at a time.
MOST_ROWS_AT_ONCE = 250_000


def read_header(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON that tracekit keeps inside a Parquet file, None if there is none. Raises FormatError for other files."""
    text = _parquet(path, pl.read_parquet_metadata).get(METADATA_KEY)
    if text is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: its tracekit metadata is not a JSON object; write the trace again")
    return header


def read_columns(path: str | os.PathLike[str]) -> pl.DataFrame:
    """All columns of a Parquet file. Raises FormatError if it is empty, truncated or something else."""
    ops: pl.DataFrame = _parquet(path, lambda file: _columns_of(path, pl.scan_parquet(file)))
    return ops


def _columns_of(path: str | os.PathLike[str], file: pl.LazyFrame) -> pl.DataFrame:
    """See `read_columns`. `file` keeps the footer, which takes seconds to read if a file has 10^5 row groups."""
    names, rows = file.collect_schema().names(), int(file.select(pl.len()).collect().item())
    if len(names) > USUAL_COLUMNS or rows > MOST_ROWS_AT_ONCE:
        check_size(path, rows, len(names))
    if rows <= MOST_ROWS_AT_ONCE:
        return file.collect().rechunk()
    # Two columns at a time: joining the chunks of all columns at once would hold a large trace twice.
    pairs = (file.select(names[first : first + 2]).collect().rechunk() for first in range(0, len(names), 2))
    return pl.concat(pairs, how="horizontal")


def read_steps(path: str | os.PathLike[str], steps: Sequence[int]) -> pl.DataFrame:
    """All columns of these steps. Raises FormatError as `read_columns` does."""
    step = pl.col("step")
    wanted = step.is_between(min(steps), max(steps)) & step.is_in(list(steps))  # statistics of row groups know ranges
    ops: pl.DataFrame = _parquet(path, lambda file: pl.scan_parquet(file).filter(wanted).collect())
    return ops.rechunk()


def columns_of_file(path: str | os.PathLike[str]) -> list[str]:
    """The names of the columns of a Parquet file. Raises FormatError as `read_columns` does."""
    return list(_parquet(path, pl.read_parquet_schema))


def rows_of_file(path: str | os.PathLike[str]) -> int:
    """The number of rows of a Parquet file, as its footer says. Raises FormatError as `read_columns` does."""
    return int(_parquet(path, lambda file: pl.scan_parquet(file).select(pl.len()).collect().item()))


def rows_of_steps(path: str | os.PathLike[str]) -> dict[int, int]:
    """The number of rows of each step of a Parquet file, ascending. Raises FormatError as `read_columns` does."""
    by_step = _parquet(path, lambda file: pl.scan_parquet(file).group_by("step").len().collect(engine="streaming"))
    return dict(by_step.sort("step").iter_rows())


def check_size(path: str | os.PathLike[str], rows: int, columns: int) -> None:
    """Raise FormatError if the file claims more values than its bytes can hold, or more columns than any trace has."""
    size = Path(path).stat().st_size
    values = rows * max(columns, USUAL_COLUMNS)
    if columns > MOST_COLUMNS or values > max(MOST_VALUES_PER_BYTE * size, FEWEST_VALUES):
        raise FormatError(
            f"{path}: {rows} rows of {columns} columns in {size} bytes, too few for the times of real ops; expected at"
            f" most {MOST_COLUMNS} columns: record it again, or keep the columns of a trace"
        )


def _parquet(path: str | os.PathLike[str], read: Any) -> Any:
    try:
        status = Path(path).stat()
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode):
            raise FormatError(f"{path}: a pipe or device; Parquet can only be read from a file, save it as one first")
        if status.st_size == 0:
            raise FormatError(f"{path}: the file is empty; expected a Parquet trace")
        # A file object: polars expands glob characters and rejects non-UTF-8 bytes in a path.
        with open(path, "rb") as file:
            return read(file)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # damage inside makes polars panic
        reason = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: not a readable Parquet file ({reason}); it may be truncated, record or copy it again"
        ) from None
