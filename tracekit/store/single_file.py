"""Stores of version 2: one DuckDB file for everything. They can be read, but are no longer written.

In: such a file. Out: the same catalogue as of a folder, by views over its tables, and traces and findings from rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracekit.base.errors import StoreError
from tracekit.store.catalogue import OLDEST_VERSION, Catalogue
from tracekit.store.connection import check_version, connected
from tracekit.store.hangs import StoredHang
from tracekit.store.window import StoredWindow
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

if TYPE_CHECKING:
    import duckdb

SINGLE_FILE_VERSION = 2
#: Its tables in the form of schema.sql: each job has one window.
_VIEWS = """
CREATE TEMP VIEW jobs AS SELECT job_id, name, source FROM job;
CREATE TEMP VIEW found_windows AS
SELECT job_id, 0 AS number, 'pipeline' AS kind, imported_at AS added_at, dp, pp, tp, cp, ep, vpp, dsp, world_size,
       steps, coalesce(first_step, 0) AS first_step, coalesce(last_step, 0) AS last_step, started_at, ended_at, ops,
       metadata, tracekit, problem, slowdown, waste, straggling, trustworthy, recorded_s, original_s, ideal_s,
       lost_gpu_hours, lost_gpu_hours_per_day, cause_kinds, cause_places,
       NULL::VARCHAR[] AS cause_hosts
FROM job LEFT JOIN report USING (job_id)
LEFT JOIN (SELECT job_id, min(step) AS first_step, max(step) AS last_step, min(started_at) AS started_at,
                  max(started_at) AS ended_at
           FROM step GROUP BY job_id) AS times USING (job_id);
CREATE TEMP VIEW files AS
SELECT job_id, 0 AS number, 'ops' AS part, 0 AS bytes, 0 AS crc32 FROM job
UNION ALL SELECT job_id, 0, 'report', 0, 0 FROM report WHERE report IS NOT NULL
UNION ALL SELECT DISTINCT job_id, 0, 'workers', 0, 0 FROM worker_slowdown;
"""


@dataclass(frozen=True, slots=True)
class SingleFile:
    """The store of version 2 in the file `path`."""

    path: Path

    @contextmanager
    def _connected(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with connected(self.path, self.path, read_only=True) as connection:
            check_version(connection, self.path, SINGLE_FILE_VERSION)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue."""
        with self._connected() as connection:
            connection.execute(_VIEWS)
            yield Catalogue.read_only(connection, self.path, OLDEST_VERSION, views=["windows"])

    def hangs(self, _: str | None) -> tuple[StoredHang, ...]:
        """Empty: such a store keeps no reports on hangs."""
        return ()

    def trace(self, window: StoredWindow) -> Trace:
        """The trace of a job."""
        with self._connected() as connection:
            job = {"job": window.job_id}
            rows = connection.execute(
                "SELECT [dp, pp, tp, cp, ep, vpp, dsp, world_size], metadata FROM job WHERE job_id = $job", job
            ).fetchall()
            if not rows:
                raise StoreError(f"{self.path}: job {window.job!r} has just been removed; try again")
            starts = connection.execute(
                "SELECT step, started_at FROM step WHERE job_id = $job AND started_at IS NOT NULL", job
            ).fetchall()
            ops = connection.sql(
                "SELECT step, rank, dp_rank, pp_rank, kind, seq, microbatch, chunk, start, duration FROM op"
                " WHERE job_id = $job",
                params=job,
            ).to_arrow_table()
        sizes, metadata = rows[0]
        return Trace.from_frame(
            pl.DataFrame(ops),
            Layout(*sizes),
            name=window.job,
            step_starts=dict(starts),
            metadata=json.loads(metadata),
            source=f"{self.path}, job {window.job!r}",
        )

    def report(self, window: StoredWindow) -> str | None:
        """The report as JSON; None if there is none."""
        with self._connected() as connection:
            rows = connection.execute(
                "SELECT report FROM report WHERE job_id = $job", {"job": window.job_id}
            ).fetchall()
        return rows[0][0] if rows else None

    def workers(self, window: StoredWindow) -> pl.DataFrame | None:
        """S of each worker in each step, as in `WorkerSlowdowns.rows`; None if there is none."""
        with self._connected() as connection:
            rows = connection.sql(
                "SELECT step, started_at, dp_ranks, slowdown FROM worker_slowdown LEFT JOIN step USING (job_id, step)"
                " WHERE job_id = $job ORDER BY step",
                params={"job": window.job_id},
            ).to_arrow_table()
        return pl.DataFrame(rows) if rows.num_rows else None
