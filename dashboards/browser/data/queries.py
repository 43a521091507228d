"""Cached reads of a store and of the study next to it, for the dashboard."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec
import polars as pl
from msgspec import UNSET, structs

from tracekit.base.errors import NotStoredError, StoreError, TracekitError
from tracekit.base.paths import adding
from tracekit.base.text import nearest, short
from tracekit.bill.account import account_of, advised, run_of
from tracekit.dashboards.browser.data.stored_kinds import KINDS, StoredKind
from tracekit.dashboards.figures.lanes import lane_ops
from tracekit.dashboards.figures.spans import StepOps, step_ops
from tracekit.dashboards.figures.worker_map import WorkerMap
from tracekit.fleet.figures import CURVE, FleetFigures, counted_jobs, figures_of, quantiles
from tracekit.fleet.recurring_culprits import FALSE_DISCOVERY_RATE, recurring_culprits
from tracekit.fleet.study import Study
from tracekit.report.conclusions import RunVerdict
from tracekit.report.findings import WorkerSlowdowns
from tracekit.report.report import Report
from tracekit.sources.registry import job_of
from tracekit.store import Store
from tracekit.store.live_tables import LiveTables

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job
    from tracekit.analysis.job.pipeline import PipelineJob
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.store.catalogue import Catalogue
    from tracekit.trace.canonical import Trace
    from tracekit.trace.op import OpTrace

#: Results and traces kept in memory; traces are large.
RESULTS_KEPT, JOBS_KEPT = 64, 2
#: Verdicts of runs kept: the list of jobs shows all of them.
RUNS_KEPT = 1000
#: States of the list of jobs kept: a page being built may still need the previous one.
LISTS_KEPT = 2
#: Tables and decomposed steps kept in memory.
TABLES_KEPT, STEPS_KEPT = 16, 3
#: Most concurrent prefetches.
AHEAD_AT_ONCE = 8

#: Why a job is not on a page.
_WITHOUT = "was stored without an analysis"
OTHER_VERSION = "It was analysed by another version of tracekit."
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored job. `report`: None if there is none, and `problem` has the reason.

    `started_at`, `ended_at`: seconds since the epoch of its first and last step; None where unknown. `kind`: the pages
    and words for it.
    """

    name: str
    job_id: int
    window: int
    windows: int
    source: str
    imported_at: float
    started_at: float | None
    ended_at: float | None
    metadata: dict[str, Any]
    kind: StoredKind
    report: Report | None
    problem: str | None

    @property
    def lacking(self) -> str | None:
        """Why pages about pipelines cannot show the job, as the end of a sentence; None if they can."""
        return _WITHOUT if self.report is None else self.kind.no_workers

    def table(self, name: str) -> pl.DataFrame:
        """A table of the report, such as `by_worker`. Raises NotStoredError if the report has no such table."""
        if (rows := self._rows(name)) is None:
            raise NotStoredError(f"the job {self.name!r:.100} has no table {name}")
        return pl.DataFrame(msgspec.to_builtins(rows), infer_schema_length=None, strict=False)

    def has_table(self, name: str) -> bool:
        """Whether the report has a table of that name."""
        return self._rows(name) is not None

    def has_rows(self, name: str) -> bool:
        """Whether the report has a table of that name with rows."""
        return bool(self._rows(name))

    def _rows(self, name: str) -> list[msgspec.Struct] | None:
        rows = getattr(self.report, "findings" if name == "causes" else name, None)
        return rows if isinstance(rows, list) else None


def _cached_live(
    read: Callable[Concatenate[LiveTables, _Arguments], _Result],
) -> Callable[Concatenate[Results, _Arguments], _Result]:
    """A method that reads the live tables, cached until the store changes."""

    @wraps(read)
    def ask(results: Results, /, *args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        key = (read.__name__, args, *keywords.items())
        return results.of_store(key, lambda catalogue: read(catalogue.live, *args, **keywords))

    return ask


class Results:
    """The results in one `store`.

    Every method raises StoreError where the store cannot be read, NotStoredError where it lacks the job.

    Results are computed when a window is added, so a page costs a lookup. A change of the store is noticed at the next
    call; cached data of a window stays valid, because a window never changes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path)
        self._building = threading.Lock()
        self._expanding = threading.Lock()
        self._ahead = threading.Semaphore(AHEAD_AT_ONCE)
        self._pinned: list[pl.DataFrame] | None = None
        self._chosen: tuple[str, int] | None = None
        self._range: tuple[str, float, float] | None = None
        self._lists, self._of_catalogue = ResultCache(LISTS_KEPT), ResultCache(TABLES_KEPT)
        self._results, self._tables = ResultCache(RESULTS_KEPT), ResultCache(TABLES_KEPT)
        self._jobs, self._steps = ResultCache(JOBS_KEPT), ResultCache(STEPS_KEPT)
        self._runs = ResultCache(RUNS_KEPT)

    def pinned(self) -> Results:
        """A copy pinned to one state of the store, taken at the first read, so that a page does not mix two windows."""
        return self._copy_with(_pinned=[])

    def of_window(self, name: str, number: int) -> Results:
        """A copy that reads window `number` of the job `name` instead of its newest."""
        return self._copy_with(_chosen=(name, number), _range=None)

    def in_range(self, name: str, newest: int, since: float, until: float) -> Results:
        """A copy that judges the part of the run of the job `name` between two times, seconds since the epoch, and else
        reads window `newest` of it.
        """
        return self._copy_with(_chosen=(name, newest), _range=(name, since, until))

    def _copy_with(self, **fields: Any) -> Results:
        """A copy that shares caches, with these fields replaced."""
        changed = copy(self)
        vars(changed).update(fields)
        return changed

    history = _cached_live(LiveTables.history)
    live_jobs = _cached_live(LiveTables.live_jobs)
    incidents = _cached_live(LiveTables.incidents)
    count_incidents = _cached_live(LiveTables.count_incidents)
    trends = _cached_live(LiveTables.trends)
    spans = _cached_live(LiveTables.spans)
    losses = _cached_live(LiveTables.losses)
    host_history = _cached_live(LiveTables.host_history)
    gpu_history = _cached_live(LiveTables.gpu_history)
    on_host = _cached_live(LiveTables.on_host)

    def hung_ranks(self, job: str) -> int | None:
        """The ranks of a job that hangs, also before it has a trace; None where no report says it."""
        return next((hang.report.world_size for hang in self.store.hangs(job)), None)

    def left_out(self) -> tuple[str, ...]:
        """A line for each row of the catalogue that is impossible (`Catalogue.left_out`)."""
        return self.of_store(("left out",), lambda catalogue: catalogue.left_out)

    def state(self) -> str:
        """Return the state of the store as text; it differs after every change."""
        return self.store.state()

    def of_store(self, key: tuple[Any, ...], read: Callable[[Catalogue], _Result]) -> _Result:
        """Return the result of `read` on the current catalogue; run once per state of the store."""

        def ask() -> _Result:
            with self.store.reading() as catalogue:
                return read(catalogue)

        return self._of_catalogue.get((self.store.state(), *key), ask)

    def jobs(self) -> pl.DataFrame:
        """One row per job, the costliest first: sizes, figures (null if not analysed) and causes."""
        if self._pinned is not None:
            self._pinned = self._pinned or [self._jobs_now()]
            return self._pinned[0]
        return self._jobs_now()

    def _jobs_now(self) -> pl.DataFrame:
        return self._lists.get((self.store.state(),), self.store.job_list)

    def stored(self, name: str) -> Stored:
        """One job with its report; with the verdict of its run or the chosen range of it, if it has several windows and
        none is chosen.
        """
        stored = self._cached_of_job(name, ("stored",), self._results, self._read_stored)
        is_of_window = self._chosen is not None and self._chosen[0] == name and self._range is None
        if stored.report is None or stored.windows < 2 or is_of_window:
            return stored
        run = self.run(name)
        return stored if run is None else replace(stored, report=structs.replace(stored.report, run=run))

    def run(self, name: str) -> RunVerdict | None:
        """The verdict of all windows of a job, or of those in the chosen range, with advice; None if the stored data is
        damaged.
        """
        row = next(self.jobs().filter(pl.col("name") == name).iter_rows(named=True))
        run, key = self._run(row), (*_newest(row), self._range, "advised")
        return None if run is None else self._runs.get(key, lambda: advised(self.store, name, run))

    def runs(self) -> dict[str, RunVerdict]:
        """The verdicts of all jobs with several windows, by name."""
        several = self.jobs().filter(pl.col("windows") > 1)
        runs = {row["name"]: self._run(row) for row in several.iter_rows(named=True)}
        return {name: run for name, run in runs.items() if run is not None}

    def _run(self, row: dict[str, Any]) -> RunVerdict | None:
        """The verdict of a run: it changes with its newest window, and with the end of the job."""
        name, chosen = row["name"], self._range

        def judge() -> RunVerdict:
            account = account_of(self.store, name)
            return run_of(account if chosen is None or chosen[0] != name else account.between(*chosen[1:]))

        try:
            return self._runs.get((*_newest(row), chosen), judge)
        except StoreError:  # the job has gone since the list of jobs was read
            return None

    def worker_steps(self, name: str) -> WorkerSlowdowns:
        """Exact S of each worker in each step."""
        return self._cached_of_job(name, ("workers",), self._results, self._read_worker_steps)

    def worker_map(self, name: str) -> WorkerMap:
        """Exact S_w of each worker, over all steps and in each, with rank and host."""
        return self._cached_of_job(name, ("map",), self._results, self._build_worker_map)

    def step_starts(self, name: str) -> dict[int, float | None]:
        """Map step number to its start in seconds since the epoch; None where unknown."""
        return self._cached_of_job(name, ("starts",), self._results, self._read_step_starts)

    def job(self, name: str) -> PipelineJob:
        """The pipeline with its trace, ready to be replayed; the last few stay in memory."""
        return cast("PipelineJob", self._job(self._pipeline(name)))

    def job_of(self, stored: Stored) -> Job:
        """The same of any job, of the window that `stored` is of."""
        window = {"job_id": stored.job_id, "number": stored.window, "imported_at": stored.imported_at}
        return self._job(self._row(stored.name) | window)

    def _job(self, row: dict[str, Any]) -> Job:
        return self._cached(row, ("job",), self._jobs, lambda row: job_of(self.store.load(row["name"], row["number"])))

    def trace(self, name: str) -> Trace:
        """The trace of a pipeline, read anew. Raises NotStoredError for other jobs, or without its ops."""
        row = self._pipeline(name)
        return cast("Trace", self.store.load(row["name"], row["number"]))

    def table(self, name: str, table: str) -> pl.DataFrame:
        """A table of the report of the job; those of large jobs take a while to build, so they are kept."""
        return self._cached_of_job(name, (table,), self._tables, lambda _: self.stored(name).table(table))

    def by_worker(self, name: str) -> pl.DataFrame:
        """The table `by_worker` of the report of the job; of a job without workers, its ranks as if they were some: of
        post-training, the trainer and the engines.
        """
        stored = self.stored(name)
        if stored.has_table("by_worker"):
            return self.table(name, "by_worker")
        if stored.report is not None and stored.report.job.engines is not UNSET:
            ranks = pl.DataFrame({"rank": range(stored.report.job.engines + 1), "host": None})
        else:
            ranks = stored.table("by_rank")
        return ranks.select(pl.col("rank").alias("dp_rank"), "rank", "host", pp_rank=pl.lit(0), slowdown=pl.lit(1.0))

    def step(self, name: str, step: int) -> StepOps:
        """The ops of one step, recorded and, of pipelines, replayed; the last few stay in memory.

        Raises SelectionError for a step that the job lacks.
        """
        return self._cached_of_job(name, ("step", step), self._steps, lambda _: self._take_apart(name, step))

    def replay(self, name: str) -> JobReplay:
        """The graph of the job and what each op costs; it stays in memory with the job."""
        job = self.job(name)
        with self._building:
            return job.replay

    def ahead(self, *reads: Callable[[], object]) -> list[threading.Thread]:
        """Prefetch what a page will request, each in the background, while the browser loads the page.

        Errors end the thread and surface when the result is requested. Does nothing if many reads are running.
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
            _prefetch(read)
        finally:
            self._ahead.release()

    def newest(self) -> str:
        """The job imported last."""
        jobs = self.jobs()
        if jobs.is_empty():
            raise NotStoredError(f"{self.path}: the store holds no job; add one with `{adding(self.path)}`")
        return str(jobs.sort("imported_at", "job_id", descending=True)["name"][0])

    def _take_apart(self, name: str, step: int) -> StepOps:
        row = self._row(name)
        if not KINDS[row["kind"]].timeline.peers:
            return lane_ops(cast("OpTrace", self.store.load(row["name"], row["number"])), step)
        replay = self.replay(name)
        with self._expanding:  # one at a time: each needs memory for its whole step
            return step_ops(replay.only_steps([step]))

    def _row(self, name: str) -> dict[str, Any]:
        """Return the row of one job in the list of jobs, with the figures of the chosen window."""
        if self._chosen is not None and self._chosen[0] == name:
            number = self._chosen[1]
            return self.of_store(("row", name, number), lambda catalogue: catalogue.job_row(name, number))
        rows = self.jobs().filter(pl.col("name") == name)
        if rows.is_empty():
            raise self._missing(name)
        return rows.row(0, named=True)

    def _pipeline(self, name: str) -> dict[str, Any]:
        """Return the row of a job that is a pipeline. Raises NotStoredError for another."""
        row = self._row(name)
        if (why := KINDS[row["kind"]].no_workers) is not None:
            raise NotStoredError(f"the job {name!r} {why}")
        return row

    def _read_stored(self, row: dict[str, Any]) -> Stored:
        return _stored(row, self.store.report(row["name"], row["number"]) if row["analysed"] else None)

    def _read_workers(self, row: dict[str, Any]) -> pl.DataFrame:
        rows = self.store.workers(row["name"], row["number"])
        if rows is None:
            raise NotStoredError(f"the job {row['name']!r} {KINDS[row['kind']].no_workers or _WITHOUT}")
        return rows

    def _read_worker_steps(self, row: dict[str, Any]) -> WorkerSlowdowns:
        return WorkerSlowdowns.of_rows(self._read_workers(row))

    def _build_worker_map(self, row: dict[str, Any]) -> WorkerMap:
        name = row["name"]
        stored = self._cached(row, ("stored",), self._results, self._read_stored)
        worker_steps = self._cached(row, ("workers",), self._results, self._read_worker_steps)
        if stored.report is None:
            raise NotStoredError(f"the job {name!r} {_WITHOUT}")
        return WorkerMap.of(stored.report, worker_steps)

    def _read_step_starts(self, row: dict[str, Any]) -> dict[int, float | None]:
        frame = self._read_workers(row)
        return dict(zip(frame["step"].to_list(), frame["started_at"].to_list(), strict=True))

    def _missing(self, name: str) -> NotStoredError:
        close = nearest(name, self.jobs()["name"])
        hint = f"did you mean {short(close)!r}?" if close is not None else "the page Jobs lists those that there are"
        return NotStoredError(f"no job named {name!r} in this store; {hint}")

    def _cached_of_job(
        self, name: str, key: tuple[Any, ...], cache: ResultCache, read: Callable[[dict[str, Any]], _Result]
    ) -> _Result:
        """Return the result of `read` for the newest window of a job; cached, because a window never changes."""
        return self._cached(self._row(name), key, cache, read)

    def _cached(
        self, row: dict[str, Any], key: tuple[Any, ...], cache: ResultCache, read: Callable[[dict[str, Any]], _Result]
    ) -> _Result:
        # Identifies a window of the list of jobs, also among later windows of the same name.
        return cache.get((row["job_id"], row["number"], row["imported_at"], *key), lambda: read(row))


def _prefetch(read: Callable[[], object]) -> None:
    """Read ahead and ignore errors: the page that needs the data shows them."""
    try:
        read()
    except TracekitError:
        logging.getLogger(__name__).info("what a page is about to ask for could not be read", exc_info=True)


def _newest(row: dict[str, Any]) -> tuple[Any, ...]:
    """The key of the cached verdict of a run: its newest window, and its end."""
    return row["job_id"], row["number"], row["imported_at"], row["watched_until_s"]


def _stored(row: dict[str, Any], report: Report | None) -> Stored:
    other = report is None and bool(row["analysed"])
    fields = ("name", "job_id", "windows", "source", "imported_at", "started_at", "ended_at")
    return Stored(
        **{field: row[field] for field in fields},
        window=row["number"],
        metadata=json.loads(row["metadata"]),
        kind=KINDS[row["kind"] if report is None else report.job.source],
        report=report,
        problem=row["problem"] or (OTHER_VERSION if other else None),
    )


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Figures of a study. `curves`: quantiles as of `figures.quantiles`; `culprits`: recurring ones at that `rate`.

    `jobs`: those that count, with `causes`, their kinds of cause; the job that loses most first.
    """

    name: str
    figures: FleetFigures
    curves: pl.DataFrame
    culprits: pl.DataFrame
    rate: float
    jobs: pl.DataFrame


class FleetStudy:
    """The study in a folder. Its report stays in memory until the study changes.

    Building it takes seconds for 100,000 jobs, so that is done when the server starts and after a run has changed the
    study.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._study = Study(path)
        self._reports = ResultCache(1)

    def report(self) -> FleetReport:
        """Return the report of the study as it is now. Raises StudyError if there is no study."""
        return self._reports.get((self._study.state(),), self._report)

    def of_job(self, job: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the causes of a job, and its fixes that save something, by its number in the study."""
        causes, fixes = (self._study.table(name).filter(pl.col("job") == job).collect() for name in ("causes", "fixes"))
        return causes, fixes.drop_nulls("saved_gpu_hours")

    def read_ahead(self) -> None:
        """Build the report in the background, so that the first request finds it ready."""
        threading.Thread(target=_prefetch, args=(self.report,), daemon=True, name="fleet report").start()

    def _report(self) -> FleetReport:
        jobs = counted_jobs(self._study)
        causes = self._study.table("causes").group_by("job").agg(causes=pl.col("kind").unique()).collect()
        return FleetReport(
            self.path.name,
            figures_of(self._study),
            quantiles(jobs, CURVE),
            recurring_culprits(self._study, FALSE_DISCOVERY_RATE),
            FALSE_DISCOVERY_RATE,
            jobs.join(causes, on="job", how="left").sort(
                "lost_gpu_hours", "job", descending=[True, False], nulls_last=True
            ),
        )


class ResultCache:
    """The last `most` results, each read once: reading twice at a time takes twice the time and memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keeping = threading.Lock()
        self._results: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._under_way: dict[tuple[Any, ...], threading.Lock] = {}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        with self._keeping:
            return key in self._results

    def get(self, key: tuple[Any, ...], read: Callable[[], _Read]) -> _Read:
        """Return the result of `read`; read again only after eviction. Callers wait for a read in progress."""
        with self._keeping:
            if key in self._results:
                self._results.move_to_end(key)
                return cast("_Read", self._results[key])
            reading = self._under_way.setdefault(key, threading.Lock())
        with reading:
            if key in self:
                return self.get(key, read)
            try:
                result = read()
            finally:
                with self._keeping:
                    self._under_way.pop(key, None)
            with self._keeping:
                self._results[key] = result
                while len(self._results) > self._most:
                    self._results.popitem(last=False)
        return result
