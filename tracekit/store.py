"""The DuckDB store: many jobs in one file, and the only writer of it.

In: validated `Trace`s. Out: the same traces by job name, and the list of jobs. A DuckDB file has one writer at a time
and no reader beside it, so a `Store` opens the file for one call and closes it again.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracekit.errors import StoreBusyError, StoreError
from tracekit.model import Layout
from tracekit.text import encodable, short
from tracekit.trace import Trace

if TYPE_CHECKING:
    import duckdb

STORE_VERSION = 1
#: Names the default store; without it the store is tracekit.duckdb in the working directory.
STORE_VARIABLE = "TRACEKIT_STORE"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows of a job without reading its ops."""

    name: str
    source: str
    imported_at: datetime
    layout: Layout
    steps: int
    ops: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A trace on its way into the store.

    `name`: the job's name there. `source`: where the trace came from. `report`: the JSON of its analysis, if there is.
    """

    trace: Trace
    name: str
    source: str
    report: str | None = None


def default_store() -> Path:
    """`$TRACEKIT_STORE`, else tracekit.duckdb in the working directory."""
    return Path(os.environ.get(STORE_VARIABLE) or "tracekit.duckdb")


@dataclass(frozen=True, slots=True)
class Store:
    """The store in the file `path`. Every method raises StoreError where the file cannot be used."""

    path: Path

    def add(self, incoming: Sequence[Incoming], *, replace: bool = False) -> None:
        """Add traces, all or none. A job of the same name is an error unless `replace`."""
        names = [item.name for item in incoming]
        if twice := [name for name in names if names.count(name) > 1]:
            raise StoreError(
                f"two of the traces are of a job named {twice[0]!r}; import one of them with another --name"
            )
        with self._open(write=True) as connection:
            connection.begin()
            for item in incoming:
                self._add(connection, item, replace)
            connection.commit()

    def jobs(self) -> tuple[StoredJob, ...]:
        """All jobs, newest first."""
        with self._open() as connection:
            rows = connection.execute(
                "SELECT name, source, imported_at, dp, pp, tp, cp, ep, vpp, dsp, world_size, steps, ops FROM job"
                " ORDER BY imported_at DESC, job_id DESC"
            ).fetchall()
        return tuple(
            StoredJob(
                name=row[0],
                source=row[1],
                imported_at=row[2].replace(tzinfo=UTC),
                layout=Layout(*row[3:11]),
                steps=row[11],
                ops=row[12],
            )
            for row in rows
        )

    def load(self, name: str) -> Trace:
        """The trace of the job `name`."""
        with self._open() as connection:
            job_id = self._job_id(connection, name)
            layout_sizes, metadata = connection.execute(
                "SELECT [dp, pp, tp, cp, ep, vpp, dsp, world_size], metadata FROM job WHERE job_id = $job",
                {"job": job_id},
            ).fetchall()[0]
            starts = connection.execute(
                "SELECT step, started_at FROM step WHERE job_id = $job AND started_at IS NOT NULL", {"job": job_id}
            ).fetchall()
            ops = connection.sql(
                "SELECT step, rank, dp_rank, pp_rank, kind, seq, microbatch, chunk, start, duration FROM op"
                " WHERE job_id = $job",
                params={"job": job_id},
            ).to_arrow_table()
        return Trace.from_frame(
            pl.DataFrame(ops),
            Layout(*layout_sizes),
            name=name,
            step_starts=dict(starts),
            metadata=json.loads(metadata),
            source=f"{self.path}, job {name!r}",
        )

    def report(self, name: str) -> str | None:
        """The JSON that `whatif` found when the job `name` was imported; None where it was stored without."""
        with self._open() as connection:
            job_id = self._job_id(connection, name)
            rows = connection.execute("SELECT report FROM report WHERE job_id = $job", {"job": job_id}).fetchall()
        return str(rows[0][0]) if rows else None

    def newest(self) -> str:
        """The name of the job imported last."""
        jobs = self.jobs()
        if not jobs:
            raise StoreError(f"{self.path}: the store holds no job; add one with `tracekit import TRACE`")
        return jobs[0].name

    def _add(self, connection: duckdb.DuckDBPyConnection, item: Incoming, replace: bool) -> None:
        trace, sizes = item.trace, item.trace.layout
        old = connection.execute("SELECT job_id FROM job WHERE name = $name", {"name": item.name}).fetchall()
        if old and not replace:
            raise StoreError(
                f"{self.path}: job {item.name!r} is there already; replace it with --replace or choose --name"
            )
        for (job_id,) in old:
            for table in ("DELETE FROM op", "DELETE FROM step", "DELETE FROM report", "DELETE FROM job"):
                connection.execute(f"{table} WHERE job_id = $job", {"job": job_id})
        steps = trace.steps
        job_id = connection.execute(
            "INSERT INTO job (name, source, imported_at, dp, pp, tp, cp, ep, vpp, dsp, world_size, steps, ops,"
            " metadata) VALUES"
            " ($name, $source, $now, $dp, $pp, $tp, $cp, $ep, $vpp, $dsp, $world_size, $steps, $ops, $metadata)"
            " RETURNING job_id",
            {
                "name": item.name,
                "source": item.source,
                "now": datetime.now(UTC).replace(tzinfo=None),
                **sizes.to_dict(),
                "steps": len(steps),
                "ops": trace.ops.height,
                "metadata": json.dumps(dict(trace.metadata)),
            },
        ).fetchall()[0][0]
        connection.register("incoming_ops", trace.ops.to_arrow())
        connection.execute(
            "INSERT INTO op BY NAME SELECT CAST($job AS INTEGER) AS job_id, * FROM incoming_ops",
            {"job": job_id},
        )
        connection.unregister("incoming_ops")
        if item.report is not None:
            connection.execute(
                "INSERT INTO report VALUES ($job, $version, $report)",
                {"job": job_id, "version": version("tracekit"), "report": item.report},
            )
        connection.executemany(
            "INSERT INTO step VALUES ($1, $2, $3)",
            [(job_id, int(step), trace.step_starts.get(int(step))) for step in steps],
        )

    def _job_id(self, connection: duckdb.DuckDBPyConnection, name: str) -> int:
        rows = connection.execute("SELECT job_id FROM job WHERE name = $name", {"name": name}).fetchall()
        if rows:
            return int(rows[0][0])
        names = [row[0] for row in connection.execute("SELECT name FROM job ORDER BY imported_at DESC").fetchall()]
        close = difflib.get_close_matches(name, names, n=1)
        known = (
            f"did you mean {short(close[0])!r}?" if close else f"it holds {', '.join(map(short, names[:8])) or 'none'}"
        )
        raise StoreError(f"{self.path}: no job {name!r}; {known}")

    @contextmanager
    def _open(self, *, write: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection that closes at the end; a new file gets the schema."""
        import duckdb

        if encodable(str(self.path)) != str(self.path):
            raise StoreError(f"{self.path}: DuckDB needs a path in UTF-8; choose another --store")
        try:
            new = not self.path.exists()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None
        if new and not write:
            raise StoreError(f"{self.path}: no such store; make one with `tracekit import TRACE --store {self.path}`")
        if not new:
            self._check_magic()
        try:
            # An absolute path: DuckDB takes ":memory:" and prefixes such as "md:" for other things than a file.
            connection = duckdb.connect(str(self.path.absolute()), read_only=not write)
        except duckdb.Error as error:
            raise self._error(error) from None
        try:
            with connection:
                if new:
                    connection.execute(files("tracekit").joinpath("schema.sql").read_text(encoding="utf-8"))
                self._check_version(connection)
                yield connection
        except BaseException as error:
            if new:  # leave no empty store behind a failed first import
                connection.close()
                self.path.unlink(missing_ok=True)
            if isinstance(error, duckdb.Error):
                raise self._error(error) from None
            raise

    def _check_magic(self) -> None:
        """DuckDB takes other files for other things; a database says so at byte 8."""
        try:
            with self.path.open("rb") as file:
                head = file.read(12)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None
        if head[8:12] != b"DUCK":
            raise StoreError(f"{self.path}: not a DuckDB store; a trace file is given without --store")

    def _check_version(self, connection: duckdb.DuckDBPyConnection) -> None:
        tables = connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
        if ("store_version",) not in tables:
            raise StoreError(f"{self.path}: a DuckDB file, but no tracekit store; choose another --store")
        versions = [row[0] for row in connection.execute("SELECT version FROM store_version").fetchall()]
        if versions != [STORE_VERSION]:
            shown = ", ".join(map(str, versions)) or "none"
            raise StoreError(f"{self.path}: store version {shown}; this tracekit uses {STORE_VERSION}, upgrade it")

    def _error(self, error: Exception) -> StoreError:
        reason = str(error).splitlines()[0]
        if "Could not set lock" in reason:
            return StoreBusyError(
                f"{self.path}: another process has the store open (it takes one writer, or readers only); try again"
                " when it is done"
            )
        return StoreError(f"{self.path}: DuckDB cannot use the store: {reason}")
