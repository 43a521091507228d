"""The DuckDB store: many jobs in one file, and the only writer of it.

In: validated `Trace`s and what the analysis found. Out: the same by job name, and the list of jobs. A DuckDB file that
is being written cannot be read by anybody else, so a writer works on a copy that takes the file's place when it is
complete: readers never meet a writer, and an import that fails leaves the store as it was. Writers take turns.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from tracekit.atomic_write import check_writable
from tracekit.errors import OutputError, StoreBusyError, StoreError
from tracekit.findings import FIGURES, Findings, Unanalysed
from tracekit.model import Layout
from tracekit.store_file import STORE_FILE, is_duckdb, store_copy
from tracekit.text import encodable, short
from tracekit.trace import Trace

if TYPE_CHECKING:
    import duckdb

STORE_VERSION = 2
#: Names the default store; without it the store is tracekit.duckdb in the working directory.
STORE_VARIABLE = "TRACEKIT_STORE"
#: Characters of a job's name; two of them fit into the address of a page, however they are encoded.
LONGEST_JOB_NAME = 300


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

    `name`: the job's name there. `source`: where the trace came from. `findings`: of its analysis, if that was asked.
    """

    trace: Trace
    name: str
    source: str
    findings: Findings | Unanalysed | None = None


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
        for name in names:
            self._check_name(name)
        if twice := [name for name in names if names.count(name) > 1]:
            raise StoreError(
                f"two of the traces are of a job named {twice[0]!r}; import one of them with another --name"
            )
        with self._replacing() as connection:
            connection.begin()
            for item in incoming:
                self._add(connection, item, replace)
            connection.commit()

    def check_new(self, name: str | None) -> None:
        """Raise StoreError where no job `name` could be added: the store cannot be used, or has one; None is any."""
        if name is not None:
            self._check_name(name)
        self._check_encodable()
        try:
            check_writable(self.path, STORE_FILE)
        except OutputError as error:
            raise StoreError(str(error)) from None
        if self._exists():
            with self.reading() as connection:
                query = "SELECT job_id FROM job WHERE name = $name"
                if connection.execute(query, {"name": name}).fetchall():
                    raise StoreError(f"{self.path}: job {short(str(name))!r} is there already; choose another --name")

    def _check_name(self, name: str) -> None:
        if encodable(name) != name:
            raise StoreError(f"{self.path}: DuckDB needs names in UTF-8, not {short(name)!r}; choose another --name")
        if len(name) > LONGEST_JOB_NAME:
            raise StoreError(
                f"{self.path}: the name {short(name)!r} has {len(name)} characters, at most {LONGEST_JOB_NAME} fit;"
                " choose another --name"
            )

    def jobs(self) -> tuple[StoredJob, ...]:
        """All jobs, newest first."""
        with self.reading() as connection:
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
        with self.reading() as connection:
            return self.load_with(connection, name)

    def load_with(self, connection: duckdb.DuckDBPyConnection, name: str) -> Trace:
        """The same, with a connection that `reading` gave."""
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
        with self.reading() as connection:
            job_id = self._job_id(connection, name)
            rows = connection.execute("SELECT report FROM report WHERE job_id = $job", {"job": job_id}).fetchall()
        return rows[0][0] if rows else None

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
            for deletion in (
                "DELETE FROM op",
                "DELETE FROM step",
                "DELETE FROM report",
                "DELETE FROM worker_slowdown",
                "DELETE FROM job",
            ):
                connection.execute(f"{deletion} WHERE job_id = $job", {"job": job_id})
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
        self._add_findings(connection, job_id, item.findings)
        connection.executemany(
            "INSERT INTO step VALUES ($1, $2, $3)",
            [(job_id, int(step), trace.step_starts.get(int(step))) for step in steps],
        )

    def _add_findings(
        self, connection: duckdb.DuckDBPyConnection, job_id: int, findings: Findings | Unanalysed | None
    ) -> None:
        if findings is None:
            return
        found: dict[str, Any] = {"report": None, "problem": None} | dict.fromkeys(FIGURES)
        if isinstance(findings, Unanalysed):
            found["problem"] = findings.problem
        else:
            found |= findings.columns()
            connection.register("incoming_slowdowns", findings.worker_rows().to_arrow())
            connection.execute(
                "INSERT INTO worker_slowdown BY NAME SELECT CAST($job AS INTEGER) AS job_id, * FROM incoming_slowdowns",
                {"job": job_id},
            )
            connection.unregister("incoming_slowdowns")
        connection.execute(
            "INSERT INTO report (job_id, tracekit, problem, report, slowdown, waste, straggling, trustworthy,"
            " recorded_s, original_s, ideal_s, lost_gpu_hours, lost_gpu_hours_per_day, cause_kinds, cause_places)"
            " VALUES ($job_id, $tracekit, $problem, $report, $slowdown, $waste, $straggling, $trustworthy,"
            " $recorded_s, $original_s, $ideal_s, $lost_gpu_hours, $lost_gpu_hours_per_day, $cause_kinds,"
            " $cause_places)",
            {"job_id": job_id, "tracekit": version("tracekit"), **found},
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
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection that reads the store and closes at the end."""
        self.check()
        with self._connected(self.path, read_only=True) as connection:
            self._check_version(connection)
            yield connection

    @contextmanager
    def _replacing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection to a copy that becomes the store at the end, unless an error comes first."""
        self._check_encodable()
        try:
            with store_copy(self.path) as copy:
                if copy.replaces:
                    with self.reading():
                        copy.fill()
                with self._connected(copy.path, read_only=False) as connection:
                    if not copy.replaces:
                        connection.execute(files("tracekit").joinpath("schema.sql").read_text(encoding="utf-8"))
                    yield connection
                    connection.execute("CHECKPOINT")  # closing would keep a failure to itself
                copy.put()
        except OutputError as error:
            raise StoreError(str(error)) from None

    @contextmanager
    def _connected(self, path: Path, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        """The DuckDB file `path`, with DuckDB's errors turned into ours."""
        import duckdb

        try:
            # An absolute path: DuckDB takes ":memory:" and prefixes such as "md:" for other things than a file.
            with duckdb.connect(str(path.absolute()), read_only=read_only) as connection:
                yield connection
        except duckdb.Error as error:
            raise self._error(error) from None

    def _check_encodable(self) -> None:
        if encodable(str(self.path)) != str(self.path):
            raise StoreError(f"{self.path}: DuckDB needs a path in UTF-8; choose another --store")

    def _exists(self) -> bool:
        self._check_encodable()
        try:
            return self.path.exists()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None

    def is_store(self) -> bool:
        """Whether there is a DuckDB database. Raises StoreError where it cannot be read."""
        try:  # without waiting for the writer of a pipe
            with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_duckdb(file)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror or error}; check the path") from None

    def check(self) -> None:
        """Raise StoreError where there is no file, or one that is no DuckDB database."""
        if not self._exists():
            raise StoreError(f"{self.path}: no such store; make one with `tracekit import TRACE --store {self.path}`")
        if not self.is_store():
            raise StoreError(f"{self.path}: not a DuckDB store; a trace file is given without --store")

    def _check_version(self, connection: duckdb.DuckDBPyConnection) -> None:
        tables = connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
        if ("store_version",) not in tables:
            raise StoreError(f"{self.path}: a DuckDB file, but no tracekit store; choose another --store")
        versions = [row[0] for row in connection.execute("SELECT version FROM store_version").fetchall()]
        if versions != [STORE_VERSION]:
            shown = ", ".join(map(str, versions)) or "none"
            raise StoreError(
                f"{self.path}: store version {shown}; this tracekit uses {STORE_VERSION}, import the traces anew or"
                " use the tracekit that wrote it"
            )

    def _error(self, error: Exception) -> StoreError:
        reason = str(error).splitlines()[0]
        if "Could not set lock" in reason:
            return StoreBusyError(
                f"{self.path}: another process has the store open (it takes one writer, or readers only); try again"
                " when it is done"
            )
        return StoreError(f"{self.path}: DuckDB cannot use the store: {reason}")
