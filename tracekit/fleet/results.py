"""Results that are not yet in the tables of a study: a file for each trace, written completely or not at all.

In: the rows of a job. Out: the same, read back. The name contains the digest of the content and the version of the
analysis, so that a later run can skip finished work.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl

from tracekit.fleet.tables import TABLES

_SUFFIX = ".result"
_UNFINISHED = ".unfinished"


def result_path(folder: Path, digest: str, analysis: str) -> Path:
    """The path of the result for a content."""
    return folder / f"{digest}-{analysis}{_SUFFIX}"


def write_result(path: Path, rows: Mapping[str, pl.DataFrame]) -> None:
    """Write the rows of a job. Raises OSError, and then leaves nothing behind."""
    temporary = path.with_name(f"{path.name}-{os.getpid()}{_UNFINISHED}")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for table, frame in rows.items():
                held = io.BytesIO()
                frame.write_ipc(held, compression="zstd")
                archive.writestr(table, held.getvalue())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_result(path: Path) -> dict[str, pl.DataFrame] | None:
    """The rows of a job; None if the file is damaged, which also removes it."""
    try:
        with zipfile.ZipFile(path) as archive:  # checks the CRC of every member
            rows = {table: pl.read_ipc(io.BytesIO(archive.read(table))) for table in archive.namelist()}
    except (zipfile.BadZipFile, pl.exceptions.PolarsError, EOFError):
        rows = {"": pl.DataFrame()}
    if any(table not in TABLES or frame.schema != TABLES[table] for table, frame in rows.items()):
        path.unlink(missing_ok=True)
        return None
    return rows


def waiting(folder: Path, analysis: str) -> Iterator[tuple[str, Path]]:
    """Digest and path of every result of this analysis, in order. Removes results of others and unfinished files."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        digest, _, rest = path.name.partition("-")
        if rest == f"{analysis}{_SUFFIX}":
            yield digest, path
        else:
            path.unlink(missing_ok=True)
