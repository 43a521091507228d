"""Rows of a catalogue: as structs, as frames, and which of them are possible. Writers of tracekit add no others, but a
file can come from anywhere, and one impossible row must not hide all others.

Nothing here leads to DuckDB as started: polars keeps functions of this module until the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import polars as pl
from polars import col

from tracekit.base.text import short
from tracekit.report.conclusions import CauseInWords
from tracekit.report.findings import Findings, Unanalysed
from tracekit.trace.model import LARGEST_SIZE, Layout, TraceKind

if TYPE_CHECKING:
    import duckdb

    from tracekit.trace.canonical import Trace
    from tracekit.trace.op import OpTrace

    AnyTrace = Trace | OpTrace

_MOST = 1e15
#: Moments that Python can show in every time zone.
_MOMENTS = datetime(1970, 1, 1), datetime(9999, 1, 1)
_GRID = ("pp", "tp", "cp", "ep", "vpp", "dsp")
#: Tables whose rows are checked.
TABLES = ("windows", "findings", "culprits", "files", "incidents", "watches")
#: State of the file of a catalogue -> the result of `_all_impossible`, for the last few files.
_FOUND: dict[tuple[int, ...], Mapping[str, list[Impossible]]] = {}
_MOST_FOUND = 100


class WindowPart(StrEnum):
    """The parts of a window, each a file: its ops, the report on them, the slowdown of each worker in each step."""

    OPS = "ops"
    REPORT = "report"
    WORKERS = "workers"


#: The GPUs of a job, of a row of `windows`: an analysed one has its GPU-hours unless the report does not know them.
GPUS = "CASE WHEN recorded_s IS NULL OR lost_gpu_hours IS NOT NULL THEN world_size END"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The size of a file, and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows about a job without reading its ops; `steps` and `ops` are totals of all its windows.

    `layout`: None for op traces. `ranks`: GPUs of the layout, or ranks of an op trace. `gpus`: of the job, None
    if its report does not know them. `gives_back`: GPU-hours a day that the first fix saves, None if the job was not
    analysed, or no day follows from what was recorded. `trusted`: False if its report is not to be trusted.
    """

    name: str
    source: str
    imported_at: datetime
    layout: Layout | None
    ranks: int
    gpus: int | None
    steps: int
    ops: int
    windows: int
    kind: TraceKind
    gives_back: float | None
    trusted: bool


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """One window of a job, as in the catalogue.

    `slowdown`: S, None if it was not analysed. `problem`: why it could not be. `files`: its parts; without
    `WindowPart.OPS`, its ops were pruned.
    """

    job: str
    job_id: int
    number: int
    kind: TraceKind
    added_at: datetime
    first_step: int
    last_step: int
    ops: int
    slowdown: float | None
    problem: str | None
    files: Mapping[WindowPart, StoredFile]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A trace to be added to the store.

    `name`: the job's name there. `source`: where the trace came from. `findings`: of its analysis, if requested.
    """

    trace: AnyTrace
    name: str
    source: str
    findings: Findings | Unanalysed | None = None


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """A window whose `files` have been written, and which the catalogue does not name yet."""

    job_id: int
    number: int
    item: Incoming
    files: Mapping[WindowPart, StoredFile]
    added_at: datetime

    @property
    def key(self) -> dict[str, int]:
        """The key columns of its rows in the catalogue."""
        return {"job_id": self.job_id, "number": self.number}


def frame(query: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    """The rows of a query, through Arrow's interface alone: polars looks for more in a relation, and DuckDB then keeps
    types until the end.
    """
    return pl.DataFrame(SimpleNamespace(__arrow_c_stream__=query.__arrow_c_stream__))


def _is_size(name: str) -> pl.Expr:
    return col(name).is_between(1, LARGEST_SIZE)


def _is_finite(name: str, least: float = -_MOST, most: float = _MOST) -> pl.Expr:
    """Neither NaN nor a number whose sums overflow."""
    return col(name).is_null() | (col(name).is_not_nan() & col(name).is_between(least, most))


def _is_found(name: str) -> pl.Expr:
    """Null together with S: where the window was not analysed."""
    return col(name).is_null() == col("slowdown").is_null()


def _is_count(name: str, most: int = int(_MOST)) -> pl.Expr:
    return col(name).is_between(0, most)


def _is_moment(name: str) -> pl.Expr:
    return col(name).is_null() | col(name).is_between(*_MOMENTS)


def _is_text(name: str, holds: Callable[[str], bool]) -> pl.Expr:
    return col(name).map_elements(holds, return_dtype=pl.Boolean)


def _is_metadata(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def stored_account(text: str) -> CauseInWords | None:
    """The cause of an incident from its JSON; None if it is none."""
    try:
        return msgspec.json.decode(text, type=CauseInWords)
    except (msgspec.MsgspecError, RecursionError):
        return None


@cache
def _possible() -> Mapping[str, Mapping[str, pl.Expr]]:
    """Table -> column -> an expression that holds in every possible row. Sizes are those that `Layout` allows.

    Made on first use: this starts polars' threads, which a process that forks must not have.
    """
    causes = col("cause_kinds").list.len()
    model_ranks = col("dp").cast(float) * col("pp") * col("tp") * col("cp")
    return {
        "windows": {
            "number": _is_count("number"),
            "kind": (col("kind") == "ops") | ((col("kind") == "pipeline") & col("dp").is_not_null()),
            "added_at": _is_moment("added_at"),
            "dp": col("dp").is_null() | _is_size("dp"),
            **{
                size: pl.when(col("dp").is_null()).then(col(size).is_null()).otherwise(_is_size(size)) for size in _GRID
            },
            "world_size": _is_size("world_size")
            & (
                col("dp").is_null()
                | (
                    (col("world_size") % model_ranks == 0)
                    & (col("dp").cast(float) * col("dsp") * col("pp") <= LARGEST_SIZE)
                )
            ),
            "steps": col("steps") >= 1,
            "last_step": col("last_step") >= col("first_step"),
            "started_at": _is_finite("started_at"),
            "ended_at": _is_finite("ended_at"),
            "ops": _is_count("ops"),
            "metadata": _is_text("metadata", _is_metadata),
            "slowdown": _is_finite("slowdown", least=1e-15),
            "waste": _is_finite("waste", most=1.0) & _is_found("waste"),
            **{time: _is_finite(time, least=0.0) for time in ("recorded_s", "original_s", "ideal_s")},
            # Null where the GPUs of ops are not known; of a day, also where no day follows from the steps.
            "lost_gpu_hours": _is_finite("lost_gpu_hours")
            & (_is_found("lost_gpu_hours") | (col("lost_gpu_hours").is_null() & col("dp").is_null())),
            "lost_gpu_hours_per_day": _is_finite("lost_gpu_hours_per_day"),
            **{figure: _is_found(figure) for figure in ("straggling", "trustworthy", "cause_kinds")},
            "cause_places": causes.eq_missing(col("cause_places").list.len()),
            "cause_hosts": col("cause_hosts").is_null() | (col("cause_hosts").list.len() == causes),
        },
        "findings": {
            "number": _is_count("number"),
            "share": _is_finite("share"),
            "confidence": _is_finite("confidence", least=0.0, most=1.0),
            "saved_gpu_hours_per_day": _is_finite("saved_gpu_hours_per_day"),
            "ranks_missing": _is_count("ranks_missing"),
            "dropped_records": _is_count("dropped_records"),
        },
        "culprits": {
            "number": _is_count("number"),
            "cost_s": _is_finite("cost_s"),
            "share": _is_finite("share"),
            "confidence": _is_finite("confidence", least=0.0, most=1.0),
        },
        "files": {
            "number": _is_count("number"),
            "part": col("part").is_in(["ops", "report", "workers"]),
            "bytes": _is_count("bytes"),
            "crc32": _is_count("crc32", 2**32 - 1),
        },
        "incidents": {
            "cause": _is_text("cause", lambda text: stored_account(text) is not None),
            "opened_at": _is_moment("opened_at"),
            "closed_at": _is_moment("closed_at"),
            "clear": _is_count("clear"),
        },
        "watches": {"began_at": _is_moment("began_at"), "ended_at": _is_moment("ended_at")},
    }


@dataclass(frozen=True, slots=True)
class Impossible:
    """An impossible row: its `rowid` in `key`, whose it is, and a line about it."""

    key: int
    job_id: int
    number: int | None
    line: str


def without_impossible(connection: duckdb.DuckDBPyConnection) -> tuple[str, ...]:
    """Hide the impossible rows of a catalogue that is open for reading; returns a line for each."""
    path: tuple[str] = connection.execute("SELECT current_setting('search_path')").fetchall()[0]
    database = path[0].split(",")[1].partition(".")[0]
    impossible_rows = _all_impossible(connection, database)
    for table, bad in impossible_rows.items():
        keys = ", ".join(str(row.key) for row in bad)
        source = f"{database}.main.{table}"
        connection.execute(f"CREATE TEMP VIEW {table} AS SELECT * FROM {source} WHERE rowid NOT IN ({keys})")  # noqa: S608 - numbers
    return tuple(row.line for bad in impossible_rows.values() for row in bad)


def _all_impossible(connection: duckdb.DuckDBPyConnection, database: str) -> Mapping[str, list[Impossible]]:
    """Table -> its impossible rows, if any. The search takes most of the time of opening, so a file is checked again
    only once it has changed.
    """
    # Not above: DuckDB, as started there, has to end before this module does.
    from tracekit.store.catalogue_file import state

    catalogue_state = state(database)
    rows = _FOUND.get(catalogue_state)
    if rows is None:
        rows = {table: bad for table in TABLES if (bad := impossible(connection, table))}
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[catalogue_state] = rows
    return rows


def impossible(connection: duckdb.DuckDBPyConnection, table: str) -> list[Impossible]:
    """The impossible rows of one of `TABLES`."""
    rows = frame(connection.sql(f"SELECT rowid AS key, * FROM {table}"))  # noqa: S608
    if rows.is_empty():
        return []
    names = dict(connection.execute("SELECT job_id, name FROM jobs").fetchall())
    conditions = {"job_id": col("job_id").is_in(list(names)), **_possible()[table]}
    checks = [condition.fill_null(False).alias(column) for column, condition in conditions.items()]
    bad = rows.filter(~pl.all_horizontal(checks))
    if bad.is_empty():
        return []
    keys = bad.select(*(["key", "job_id", "number"] if "number" in bad.columns else ["key", "job_id"]))
    rows_of_table = []
    for (row, job_id, *numbers), holds in zip(keys.iter_rows(), bad.select(checks).iter_rows(named=True), strict=True):
        number = next(iter(numbers), None)
        column = next(column for column in holds if not holds[column])
        # As DuckDB writes it: not every moment there is one in Python.
        text = connection.execute(f"SELECT {column}::VARCHAR FROM {table} WHERE rowid = {row}").fetchall()[0][0]  # noqa: S608
        title = short(names.get(job_id, "no job")) + ("" if number is None else f", window {number}")
        rows_of_table.append(Impossible(row, job_id, number, f"{title}: {table}.{column} is {short(str(text))}"))
    return rows_of_table
