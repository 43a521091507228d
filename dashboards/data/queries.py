"""What the dashboard reads: the only SQL of the dashboard, all of it read-only and bound.

In: the path of a store. Out: frames, reports and traces of its jobs. Results were computed when a job was imported, so
a page costs a lookup. A store that was replaced is noticed at the next call; until then what was read stays valid.
"""

from __future__ import annotations

import difflib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from tracekit.analysis.attribution.compare import WorkerSteps
from tracekit.dashboards.data.spans import StepOps, step_ops
from tracekit.dashboards.data.worker_map import WorkerMap
from tracekit.errors import NotStoredError, StoreError, TracekitError
from tracekit.job import Job
from tracekit.store import Store
from tracekit.text import short

if TYPE_CHECKING:
    import duckdb

    from tracekit.analysis.replay.engine import JobReplay

#: Results kept in memory, and traces: these are large.
RESULTS_KEPT, JOBS_KEPT = 64, 2
#: Tables and steps taken apart that are kept in memory.
TABLES_KEPT, STEPS_KEPT = 16, 3
#: Reads ahead of a page at the same time.
AHEAD_AT_ONCE = 8

_Result = TypeVar("_Result")
_Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """One job as the store has it: `report` as docs/report-schema.md says; None, with `problem`, where there is none.

    `started_at`, `ended_at`: seconds since the epoch of its first and last step; None where unknown.
    """

    name: str
    source: str
    imported_at: float
    started_at: float | None
    ended_at: float | None
    metadata: dict[str, Any]
    report: dict[str, Any] | None
    problem: str | None

    def table(self, name: str) -> pl.DataFrame:
        """A table of the report, such as `by_worker`."""
        return pl.DataFrame([] if self.report is None else self.report[name], infer_schema_length=None)


class Results:
    """The results in one store.

    Every method raises StoreError where the store cannot be read, NotStoredError where it lacks the job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = Store(path)
        self._reading = threading.Lock()
        self._keeping = threading.Lock()
        self._building = threading.Lock()
        self._expanding = threading.Lock()
        self._under_way: dict[tuple[Any, ...], threading.Lock] = {}
        self._ahead = threading.Semaphore(AHEAD_AT_ONCE)
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._jobs: OrderedDict[tuple[Any, ...], Job] = OrderedDict()
        self._tables: OrderedDict[tuple[Any, ...], pl.DataFrame] = OrderedDict()
        self._steps: OrderedDict[tuple[Any, ...], StepOps] = OrderedDict()

    def jobs(self) -> pl.DataFrame:
        """One row per job, the costliest first: its sizes, its figures (null where not analysed), its causes."""
        return self._once(("jobs",), RESULTS_KEPT, self._kept, self._read_jobs)

    def stored(self, name: str) -> Stored:
        """One job with its report."""
        return self._once(("stored", name), RESULTS_KEPT, self._kept, lambda: self._read_stored(name))

    def worker_steps(self, name: str) -> WorkerSteps:
        """Exact S of each worker in each step."""
        return self._once(("workers", name), RESULTS_KEPT, self._kept, lambda: self._read_worker_steps(name))

    def worker_map(self, name: str) -> WorkerMap:
        """Exact S_w of each worker, over all steps and in each, with rank and host."""
        return self._once(("map", name), RESULTS_KEPT, self._kept, lambda: self._build_worker_map(name))

    def step_starts(self, name: str) -> dict[int, float | None]:
        """Step number -> when it started, seconds since the epoch; None where unknown."""
        return self._once(("starts", name), RESULTS_KEPT, self._kept, lambda: self._read_step_starts(name))

    def job(self, name: str) -> Job:
        """The job with its trace, ready to be replayed; the last few stay in memory."""
        return self._once(("job", name), JOBS_KEPT, self._jobs, lambda: self._read_job(name))

    def table(self, name: str, table: str) -> pl.DataFrame:
        """A table of the report of the job; those of large jobs take a while to build, so they are kept."""
        return self._once((table, name), TABLES_KEPT, self._tables, lambda: self.stored(name).table(table))

    def step(self, name: str, step: int) -> StepOps:
        """The ops of one step, recorded and replayed; the last few stay in memory.

        Raises SelectionError for a step that the job lacks.
        """
        return self._once(("step", name, step), STEPS_KEPT, self._steps, lambda: self._take_apart(name, step))

    def replay(self, name: str) -> JobReplay:
        """The graph of the job and what each op costs; it stays in memory with the job."""
        job = self.job(name)
        with self._building:
            return job.replay

    def ahead(self, *reads: Callable[[], object]) -> list[threading.Thread]:
        """Begin to read what a page is about to ask for, each in the background, while the browser loads the page.

        What goes wrong is said to whoever asks for it; here it ends the thread. Nothing begins where much is under way.
        """
        threads = []
        for read in reads:
            if not self._ahead.acquire(blocking=False):
                break
            threads.append(threading.Thread(target=self._read_ahead, args=(read,), daemon=True))
            threads[-1].start()
        return threads

    def _read_ahead(self, read: Callable[[], object]) -> None:
        try:
            read()
        except TracekitError:
            logging.getLogger(__name__).info("what a page is about to ask for could not be read", exc_info=True)
        finally:
            self._ahead.release()

    def newest(self) -> str:
        """The job imported last."""
        jobs = self.jobs()
        if jobs.is_empty():
            raise NotStoredError(f"{self.path}: the store holds no job; add one with `tracekit import TRACE`")
        return str(jobs.sort("imported_at", "job_id", descending=True)["name"][0])

    def _take_apart(self, name: str, step: int) -> StepOps:
        replay = self.replay(name)
        with self._expanding:  # one at a time: each takes the memory of all of its step
            return step_ops(replay.only_steps([step]))

    def _read_jobs(self) -> pl.DataFrame:
        with self._connection() as connection:
            rows = connection.sql(
                "SELECT job.job_id, name, source, epoch(imported_at) AS imported_at, dp, pp, tp, cp, vpp, world_size,"
                " steps, ops, slowdown, waste, straggling, trustworthy, recorded_s, original_s, ideal_s,"
                " lost_gpu_hours, lost_gpu_hours_per_day, cause_kinds, cause_places, problem,"
                " report.job_id IS NOT NULL AS analysed, started_at, ended_at"
                " FROM job LEFT JOIN report USING (job_id) LEFT JOIN"
                " (SELECT job_id, min(started_at) AS started_at, max(started_at) AS ended_at FROM step GROUP BY job_id)"
                " AS times USING (job_id) ORDER BY lost_gpu_hours_per_day DESC NULLS LAST, name"
            ).to_arrow_table()
        return pl.DataFrame(rows)

    def _read_stored(self, name: str) -> Stored:
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT job.name, job.source, epoch(job.imported_at), min(step.started_at), max(step.started_at),"
                " job.metadata, any_value(report.report), any_value(report.problem) FROM job"
                " LEFT JOIN report USING (job_id) LEFT JOIN step USING (job_id) WHERE job.name = $name GROUP BY ALL",
                {"name": name},
            ).fetchall()
        if not rows:
            raise self._missing(name)
        stored, source, imported_at, started_at, ended_at, metadata, report, problem = rows[0]
        return Stored(
            name=stored,
            source=source,
            imported_at=imported_at,
            started_at=started_at,
            ended_at=ended_at,
            metadata=json.loads(metadata),
            report=None if report is None else json.loads(report),
            problem=problem,
        )

    def _read_worker_steps(self, name: str) -> WorkerSteps:
        with self._connection() as connection:
            rows = connection.sql(
                "SELECT step, dp_ranks, slowdown FROM worker_slowdown JOIN job USING (job_id) WHERE name = $name"
                " ORDER BY step",
                params={"name": name},
            ).to_arrow_table()
        if not rows.num_rows:
            raise NotStoredError(f"the job {name!r} was stored without an analysis")
        frame = pl.DataFrame(rows)
        dp_ranks = frame["dp_ranks"][0].to_numpy()
        return WorkerSteps(
            frame["step"].to_numpy().astype(np.int64),
            dp_ranks.astype(np.int64),
            frame["slowdown"].explode().to_numpy().reshape(frame.height, len(dp_ranks), -1),
        )

    def _build_worker_map(self, name: str) -> WorkerMap:
        stored, found = self.stored(name), self.worker_steps(name)
        if stored.report is None:
            raise NotStoredError(f"the job {name!r} was stored without an analysis")
        rows, dropped = stored.report["by_worker"], stored.report["coverage"]["dropped"]
        return WorkerMap.build(
            pl.DataFrame({key: [row[key] for row in rows] for key in rows[0]}, strict=False),  # 10 x as fast by column
            found.steps,
            found.dp_ranks,
            found.slowdown,
            [(one["step"], one["dp_rank"]) for one in dropped],
        )

    def _read_step_starts(self, name: str) -> dict[int, float | None]:
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT step, started_at FROM step JOIN job USING (job_id) WHERE name = $name", {"name": name}
            ).fetchall()
        return dict(rows)

    def _read_job(self, name: str) -> Job:
        with self._connection() as connection:
            known = connection.execute("SELECT 1 FROM job WHERE name = $name", {"name": name}).fetchall()
            if known:
                return Job(self._store.load_with(connection, name))
        raise self._missing(name)

    def _missing(self, name: str) -> NotStoredError:
        """That there is no such job, and which one may be meant."""
        close = difflib.get_close_matches(name, self.jobs()["name"].to_list(), n=1)
        hint = f"did you mean {short(close[0])!r}?" if close else "the page Fleet lists those that there are"
        return NotStoredError(f"no job named {name!r} in this store; {hint}")

    @contextmanager
    def _connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection that sees this store and nothing else.

        One at a time: DuckDB shares one instance per path within a process, so a connection opened while another is
        still open would see the file as it was before it was replaced.
        """
        with self._reading, self._store.reading() as connection:
            for setting in (
                "SET enable_external_access = false",
                "SET memory_limit = '4GB'",
                "SET lock_configuration = true",
            ):
                connection.execute(setting)
            yield connection

    def _once(
        self, key: tuple[Any, ...], most: int, kept: OrderedDict[tuple[Any, ...], _Result], read: Callable[[], _Result]
    ) -> _Result:
        """What `read` gives, read again only when the store has changed or it was pushed out by others.

        Whoever asks for what is being read waits for it: reading it twice takes twice the memory and twice as long.
        """
        identity = self._identity()
        key = (identity, *key)
        with self._keeping:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
            reading = self._under_way.setdefault(key, threading.Lock())
        with reading:
            with self._keeping:
                if key in kept:
                    return kept[key]
            try:
                result = read()
            finally:
                with self._keeping:
                    self._under_way.pop(key, None)
            with self._keeping:
                for old in [old for old in kept if old[0] != identity]:
                    del kept[old]
                kept[key] = result
                while len(kept) > most:
                    kept.popitem(last=False)
        return result

    def _identity(self) -> _Identity:
        """What tells one state of the store from the next."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}; is the store still there?") from None
        return found.st_ino, found.st_mtime_ns, found.st_size
