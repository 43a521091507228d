"""Results that are not yet in the tables of a study: a file for each trace, written completely or not at all.

In: the rows of a job. Out: the same, read back. The name contains the digest of the content and the version of the
analysis, so that a later run can skip finished work.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import polars as pl

from tracekit.base.contained import Contained
from tracekit.fleet.study_tables import TABLES

#: Where the results are, below the folder of a study.
RESULTS = ".run/results"
_SUFFIX = ".result"
_UNFINISHED = ".unfinished"


def result_name(digest: str, analysis: str) -> str:
    """The name of the result for a content, below the folder of the study."""
    return f"{RESULTS}/{digest}-{analysis}{_SUFFIX}"


def write_result(study: Contained, name: str, rows: Mapping[str, pl.DataFrame]) -> None:
    """Write the rows of a job. Raises OSError, and then leaves nothing behind."""

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for table, frame in rows.items():
                held = io.BytesIO()
                frame.write_ipc(held, compression="zstd")
                archive.writestr(table, held.getvalue())

    study.put_by(name, f"{name}-{os.getpid()}{_UNFINISHED}", write)


def read_result(study: Contained, name: str) -> dict[str, pl.DataFrame] | None:
    """The rows of a job; None if the file is damaged, which also removes it."""
    try:
        with study.reading(name) as file, zipfile.ZipFile(file) as archive:  # checks the CRC of every member
            rows = {table: pl.read_ipc(io.BytesIO(archive.read(table))) for table in archive.namelist()}
    except (zipfile.BadZipFile, pl.exceptions.PolarsError, EOFError):
        rows = {"": pl.DataFrame()}
    if any(table not in TABLES or frame.schema != TABLES[table] for table, frame in rows.items()):
        study.remove(name)
        return None
    return rows


def waiting(study: Contained, analysis: str) -> Iterator[tuple[str, str]]:
    """Digest and name of every result of this analysis, in order. Removes results of others and unfinished files."""
    for name in study.files(RESULTS):
        digest, _, rest = name.partition("-")
        if rest == f"{analysis}{_SUFFIX}":
            yield digest, f"{RESULTS}/{name}"
        else:
            study.remove(f"{RESULTS}/{name}")
