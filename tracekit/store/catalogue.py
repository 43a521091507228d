"""The catalogue: what the store knows about jobs and windows without opening their files, and the only SQL of the
store.

In: a connection to a DuckDB file that has the tables of `schema.sql`. Out: lists; and rows for a window that was
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from tracekit import __version__
from tracekit.base.errors import NotStoredError, StoreError
from tracekit.base.paths import command
from tracekit.base.stderr import say_once
from tracekit.base.text import listed, nearest, short
from tracekit.report.findings import FIGURES, Findings
from tracekit.store.catalogue_file import OF_WINDOWS, check_version, insert
from tracekit.store.catalogue_rows import (
    GPUS,
    TABLES,
    Incoming,
    StoredFile,
    StoredJob,
    StoredWindow,
    WindowPart,
    WrittenWindow,
    frame,
    impossible,
    without_impossible,
)
from tracekit.store.live_tables import LiveTables
from tracekit.trace.facts import gpu_uuids, step_values
from tracekit.trace.model import Layout, TraceKind

if TYPE_CHECKING:
    import duckdb

STORE_VERSION = 7
#: The version that migrates: it lacks the tables of version_7.sql.
OLDER_VERSION = 6
SIZES = ("dp", "pp", "tp", "cp", "ep", "vpp", "dsp", "world_size")
#: Impossible rows to name on stderr.
MOST_NAMED = 20
#: Longer values of the free metadata are only in the trace.
LONGEST_FACT = 1000

_JOB_LIST = f"""
SELECT jobs.job_id, jobs.name, jobs.source, counted.windows, counted.all_steps, counted.all_ops,
       epoch(newest.added_at) AS imported_at, epoch(watches.ended_at) AS watched_until_s,
       newest.problem IS NOT NULL OR newest.slowdown IS NOT NULL OR newest.tracekit IS NOT NULL AS analysed,
       CASE WHEN priced.number IS NULL THEN newest.lost_gpu_hours_per_day
            WHEN newest.lost_gpu_hours_per_day IS NOT NULL THEN coalesce(priced.saved_gpu_hours_per_day, 0)
            END AS gives_back,
       priced.verdict, priced.headline, priced.share, {GPUS} AS gpus,
       newest.* EXCLUDE (job_id, added_at)
FROM jobs
JOIN (SELECT job_id, max(number) AS number, count(*) AS windows, sum(steps)::BIGINT AS all_steps,
             sum(ops)::BIGINT AS all_ops
      FROM windows GROUP BY job_id) AS counted USING (job_id)
JOIN windows AS newest ON newest.job_id = jobs.job_id AND newest.number = coalesce($number, counted.number)
LEFT JOIN watches ON watches.job_id = jobs.job_id
LEFT JOIN findings AS priced ON priced.job_id = newest.job_id AND priced.number = newest.number
WHERE $name IS NULL OR jobs.name = $name
ORDER BY newest.trustworthy IS NOT FALSE DESC, gives_back DESC NULLS LAST,
         newest.lost_gpu_hours_per_day DESC NULLS LAST, jobs.name
"""  # noqa: S608 - our own expression
_WINDOWS = """
SELECT jobs.name, windows.job_id, windows.number, windows.kind, windows.added_at, windows.first_step,
       windows.last_step, windows.ops, windows.slowdown, windows.problem
FROM windows JOIN jobs USING (job_id)
WHERE {which}
ORDER BY windows.added_at, windows.job_id, windows.number
"""
_FILES = """
SELECT files.job_id, files.number, files.part, files.bytes, files.crc32
FROM files JOIN jobs USING (job_id)
WHERE {which}
"""
#: Which windows `_WINDOWS` and `_FILES` are about: both conditions in one take DuckDB a quarter longer to plan.
_NAMED = "($name IS NULL OR name = $name) AND ($number IS NULL OR number = $number)"
_LISTED = "(name, number) IN (SELECT unnest($names::VARCHAR[]), unnest($numbers::INTEGER[]))"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """An open catalogue of the store at `path`, which appears in errors."""

    connection: duckdb.DuckDBPyConnection
    path: Path | str
    #: A line for each row that is impossible, and therefore left out.
    left_out: tuple[str, ...] = ()
    #: Whether it was of an older version when it was opened.
    older: bool = False

    @classmethod
    def new(cls, connection: duckdb.DuckDBPyConnection, path: Path | str) -> Catalogue:
        """The catalogue of an empty store, in an empty DuckDB file."""
        connection.execute(_sql("schema.sql"))
        connection.execute(_sql("version_7.sql"))
        insert(connection, "store_version", {"version": STORE_VERSION})
        return cls(connection, path)

    @classmethod
    def existing(cls, connection: duckdb.DuckDBPyConnection, path: Path | str, *, read_only: bool = False) -> Catalogue:
        """The catalogue in a DuckDB file; a reader sees no impossible rows. Raises StoreError for another version.

        A version that migrates does so here: for good on a writer's copy, in temporary tables for a reader. The costs
        of windows that were stored before are unknown until a repair analyses them again (`outdated`).
        """
        older = check_version(connection, path, STORE_VERSION, OLDER_VERSION) == OLDER_VERSION
        if not read_only:
            if older:
                connection.execute(_sql("version_7.sql"))
                connection.execute("UPDATE store_version SET version = $version", {"version": STORE_VERSION})
            return cls(connection, path, older=older)
        if older:
            connection.execute(_sql("version_7.sql").replace("CREATE TABLE", "CREATE TEMP TABLE"))
        left_out = without_impossible(connection)
        for line in left_out[:MOST_NAMED]:
            say_once(f"{path}: left out, since it is impossible: {line}")
        if (more := len(left_out) - MOST_NAMED) > 0:
            say_once(f"{path}: left out {more} more impossible rows")
        return cls(connection, path, left_out, older)

    def job_list(self) -> pl.DataFrame:
        """One row per job: name, source, and the columns of `windows` for its newest window.

        `gives_back`: GPU-hours a day that the first fix saves, what is lost where the store has no price; most first,
        and jobs whose reports are not to be trusted last.
        `verdict`, `headline`, `share`: of its findings, null where it has none. `gpus`: of the job, null if the report
        does not know them.
        `windows`, `all_steps`, `all_ops`: totals of all its windows. `imported_at`: seconds since the epoch;
        `watched_until_s`: when it ended, null while it is watched and if it never was.
        """
        return self._job_list()

    def job_row(self, name: str, number: int) -> dict[str, Any]:
        """The row of `job_list` as it was when window `number` of the job was its newest, except for the totals.

        Raises NotStoredError if there is none.
        """
        self.window(name, number)
        return self._job_list(name, number).row(0, named=True)

    def _job_list(self, name: str | None = None, number: int | None = None) -> pl.DataFrame:
        return frame(self.connection.sql(_JOB_LIST, params={"name": name, "number": number}))

    def jobs(self) -> tuple[StoredJob, ...]:
        """All jobs, the one with the newest window first."""
        rows = self.job_list().sort("imported_at", "job_id", descending=True)
        return tuple(
            StoredJob(
                name=row["name"],
                source=row["source"],
                imported_at=datetime.fromtimestamp(row["imported_at"], UTC),
                layout=None if row["dp"] is None else Layout(*(row[size] for size in SIZES)),
                ranks=row["world_size"],
                gpus=row["gpus"],
                steps=row["all_steps"],
                ops=row["all_ops"],
                windows=row["windows"],
                kind=TraceKind(row["kind"]),
                gives_back=row["gives_back"],
                trusted=row["trustworthy"] is not False,
            )
            for row in rows.iter_rows(named=True)
        )

    def windows(self, name: str | None = None) -> tuple[StoredWindow, ...]:
        """The windows of a job, or of all jobs, oldest first. Raises NotStoredError if there is no such job."""
        windows = self._windows(_NAMED, name=name, number=None)
        if name is not None and not windows:
            raise self.missing(name)
        return windows

    def outdated(self) -> tuple[StoredWindow, ...]:
        """The windows that an older version has analysed, whose costs are unknown, and whose ops are there."""
        costs, both = self.live.costs(), {WindowPart.OPS, WindowPart.REPORT}
        return tuple(
            each for each in self.windows() if both <= each.files.keys() and (each.job, each.number) not in costs
        )

    def window(self, name: str, number: int | None = None) -> StoredWindow:
        """One window of a job, by default the newest. Raises NotStoredError if there is none."""
        first, last = self.connection.execute(
            "SELECT min(number), max(number) FROM windows JOIN jobs USING (job_id) WHERE name = $name", {"name": name}
        ).fetchall()[0]
        if last is None:
            raise self.missing(name)
        windows = self._windows(_NAMED, name=name, number=last if number is None else number)
        if not windows:
            raise NotStoredError(f"{self.path}: job {short(name)!r} has no window {number}; it has {first} to {last}")
        return windows[0]

    def windows_of(self, wanted: Sequence[tuple[str, int]]) -> tuple[StoredWindow, ...]:
        """Windows of several jobs, by name and number; leaves out missing ones."""
        names, numbers = map(list, zip(*wanted, strict=True))
        return self._windows(_LISTED, names=names, numbers=numbers)

    def _windows(self, which: str, **wanted: object) -> tuple[StoredWindow, ...]:
        """The windows of a condition, with the values it names. Raises StoreError for impossible rows if writing."""
        files = self.connection.execute(_FILES.format(which=which), wanted).fetchall()
        rows = self.connection.execute(_WINDOWS.format(which=which), wanted).fetchall()
        parts: dict[tuple[int, int], dict[WindowPart, StoredFile]] = {}
        try:
            for job_id, number, part, size, crc32 in files:
                parts.setdefault((job_id, number), {})[WindowPart(part)] = StoredFile(size, crc32)
            return tuple(
                StoredWindow(
                    name, job_id, number, TraceKind(kind), added_at.replace(tzinfo=UTC), first, last, ops, slowdown,
                    problem, parts.get((job_id, number), {}),
                )
                for name, job_id, number, kind, added_at, first, last, ops, slowdown, problem in rows
            )  # fmt: skip
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self.path}: {error}; run `{command('store', 'repair', '--store', self.path)}`"
            ) from None

    def job_id(self, name: str) -> int | None:
        """The number of a job; None if there is no such job."""
        rows = self.connection.execute("SELECT job_id FROM jobs WHERE name = $name", {"name": name}).fetchall()
        return int(rows[0][0]) if rows else None

    def missing(self, name: str) -> NotStoredError:
        """The error for a job that is not there, or has no window yet."""
        rows = self.connection.execute("SELECT name FROM jobs ORDER BY job_id DESC").fetchall()
        names = [row[0] for row in rows]
        if name in names:
            return NotStoredError(f"{self.path}: no window of job {name!r} yet")
        close = nearest(name, names)
        hint = f"the store holds {listed(names, 8) or 'none'}" if close is None else f"did you mean {short(close)!r}?"
        return NotStoredError(f"{self.path}: no job {name!r}; {hint}")

    def holds(self, name: str) -> bool:
        """Whether a job has a window. A job that hangs at once, or has just begun, has none."""
        number = self.job_id(name)
        return number is not None and self.next_window(number) > 0

    def ensured(self, name: str, source: str) -> int:
        """The number of a job, which is created if needed."""
        if (number := self.job_id(name)) is not None:
            return number
        query = "INSERT INTO jobs (name, source) VALUES ($name, $source) RETURNING job_id"
        return int(self.connection.execute(query, {"name": name, "source": source}).fetchall()[0][0])

    @property
    def live(self) -> LiveTables:
        """The tables for alerts, metrics and the history of a job."""
        return LiveTables(self.connection)

    def ensure_job(self, job_id: int, name: str, source: str) -> None:
        """Add a job with this number, unless it exists; later jobs get higher numbers."""
        if self.connection.execute("SELECT 1 FROM jobs WHERE job_id = $job", {"job": job_id}).fetchall():
            return
        insert(self.connection, "jobs", {"job_id": job_id, "name": name, "source": source})
        while int(self.connection.execute("SELECT nextval('job_id')").fetchall()[0][0]) < job_id:
            pass

    def next_window(self, job_id: int) -> int:
        """The number of the window to be added next."""
        query = "SELECT coalesce(max(number) + 1, 0) FROM windows WHERE job_id = $job"
        return int(self.connection.execute(query, {"job": job_id}).fetchall()[0][0])

    def add_windows(self, windows: Sequence[WrittenWindow]) -> None:
        """Add windows whose files have been written."""
        facts = (
            window.key | {"added_at": window.added_at} | _facts(window.item) | _verdict(window.item)
            for window in windows
        )
        insert(self.connection, "windows", *facts)
        files = [(window.key, part, file) for window in windows for part, file in window.files.items()]
        insert(self.connection, "files", *(key | {"part": part} | asdict(file) for key, part, file in files))
        analysed = [(window, window.item.findings) for window in windows if isinstance(window.item.findings, Findings)]
        self._add_hosts([(window.job_id, host) for window, findings in analysed for host in findings.hosts()])
        for window, _ in analysed:
            self._add_gpus(window.job_id, window.item.trace.metadata)
        self.live.add_findings(windows)

    def remove_impossible(self) -> Iterator[tuple[str, str]]:
        """Remove the rows that are impossible, with all that the catalogue has of such a window; their tables, and a
        line for each.
        """
        for table in TABLES:
            for row in impossible(self.connection, table):
                self.connection.execute(f"DELETE FROM {table} WHERE rowid = $key", {"key": row.key})  # noqa: S608
                if table == "windows":
                    self.delete(OF_WINDOWS, job_id=row.job_id, number=row.number)
                yield table, row.line

    def mark_unanalysed(self, window: StoredWindow, problem: str) -> None:
        """Forget the findings of a window, and store the reason."""
        self.delete(["findings", "culprits", "costs"], job_id=window.job_id, number=window.number)
        figures = ", ".join(f"{column} = NULL" for column in FIGURES)
        self.connection.execute(
            f"UPDATE windows SET problem = $problem, {figures} WHERE job_id = $job AND number = $number",  # noqa: S608
            {"job": window.job_id, "number": window.number, "problem": problem},
        )

    def delete(self, tables: Iterable[str], **which: object) -> None:
        """Delete the rows that have these values from all of the tables."""
        condition = " AND ".join(f"{column} = ${column}" for column in which)
        for table in tables:
            self.connection.execute(f"DELETE FROM {table} WHERE {condition}", which)  # noqa: S608 - our own names

    def _add_hosts(self, named: Sequence[tuple[int, str]]) -> None:
        jobs, hosts = [job_id for job_id, _ in named], [host for _, host in named]
        self.connection.execute(
            "INSERT INTO hosts SELECT DISTINCT job_id, host"
            " FROM (SELECT unnest($jobs::INTEGER[]) AS job_id, unnest($hosts::VARCHAR[]) AS host)"
            " WHERE (job_id, host) NOT IN (SELECT job_id, host FROM hosts WHERE job_id BETWEEN $first AND $last)",
            {"jobs": jobs, "hosts": hosts, "first": min(jobs, default=0), "last": max(jobs, default=0)},
        )

    def _add_gpus(self, job_id: int, metadata: Mapping[str, Any]) -> None:
        hosts = hosts if isinstance(hosts := metadata.get("hosts"), dict) else {}
        named = {rank: host for rank, host in hosts.items() if isinstance(host, str)}
        host_of_gpu = {uuid: named.get(rank) for rank, uuid in gpu_uuids(metadata).items()}
        if not host_of_gpu:
            return
        self.connection.execute(
            "INSERT INTO gpus SELECT $job, gpu, host"
            " FROM (SELECT unnest($gpus::VARCHAR[]) AS gpu, unnest($hosts::VARCHAR[]) AS host)"
            " WHERE gpu NOT IN (SELECT gpu FROM gpus WHERE job_id = $job)",
            {"job": job_id, "gpus": list(host_of_gpu), "hosts": list(host_of_gpu.values())},
        )


def _sql(name: str) -> str:
    return files("tracekit.store").joinpath(name).read_text(encoding="utf-8")


def _verdict(item: Incoming) -> dict[str, Any]:
    """The columns of `windows` with findings; empty if the window was not analysed."""
    if item.findings is None:
        return {}
    findings = item.findings
    figures = findings.figures() if isinstance(findings, Findings) else {"problem": findings.problem}
    return {"tracekit": __version__} | figures


def _facts(item: Incoming) -> dict[str, Any]:
    """The columns of `windows` that describe a trace."""
    trace = item.trace
    steps, starts = trace.steps, [float(start) for start in trace.step_starts.values()]
    metadata = {name: value for name, value in trace.metadata.items() if _is_short(value)}
    if loss := step_values(trace.metadata).get("loss"):
        metadata["loss"] = loss[max(loss)]
    if isinstance(item.findings, Findings) and (tokens := item.findings.tokens_per_step) is not None:
        metadata["tokens_per_step"] = tokens
    return {
        "kind": trace.kind,
        **trace.sizes,
        "steps": len(steps),
        "first_step": int(steps[0]),
        "last_step": int(steps[-1]),
        "started_at": min(starts, default=None),
        "ended_at": max(starts, default=None),
        "ops": trace.ops.height,
        "metadata": json.dumps(metadata),
    }


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST_FACT)
