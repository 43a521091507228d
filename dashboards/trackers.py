"""The figures of a job in an experiment tracker: Weights & Biases, MLflow or TensorBoard.

In: a report, or the windows of a job in a store as they are added. Out: a few series, and the report as an HTML page.
`python -m tracekit.dashboards.trackers KIND[:WHERE] STORE JOB` logs the windows whose numbers it reads, one a line, and
confirms each with a line; a process of its own, because trackers retry, block and hang.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.job.job import Job
from tracekit.base.errors import SelectionError
from tracekit.base.stderr import say
from tracekit.base.text import short
from tracekit.dashboards.documents.page import page
from tracekit.report.report import Report

#: How the series and the page are called there.
PREFIX, PAGE = "tracekit", "tracekit-report.html"


class Tracker(Struct):
    """Where figures go. `log`: values by name at a step; `attach`: an HTML page; `close`: write what is buffered."""

    log: Callable[[dict[str, float], int], object]
    attach: Callable[[str], object]
    close: Callable[[], object] = lambda: None


def series(report: Report) -> dict[str, float]:
    """At most 10 figures of a report (docs/report-schema.md): losses are seconds or milliseconds of the mean step.

    A figure that the report does not have is left out.
    """
    verdict, steps = report.verdict, report.steps_in_whole
    lost = {str(loss.kind): loss.lost_s / steps for loss in verdict.losses}
    workers = [row for row in report.by_worker or () if row.rank is not None]
    blamed = [rank for finding in report.findings for rank in finding.where.ranks]
    slowest = max(workers, key=lambda row: row.slowdown).rank if workers else next(iter(blamed), None)
    figures = {
        "step_s": report.step_time_s.recorded / steps,
        "slowdown": report.slowdown,
        "slowest_rank": slowest,
        "excess_ms": 1e3 * verdict.lost_s / steps,
        "straggler_ms": 1e3 * lost.get("straggler", 0.0),
        "data_wait_ms": 1e3 * lost.get("input-bound", 0.0),
        "exposed_communication_ms": 1e3 * lost.get("communication-bound", 0.0),
        "lost_gpu_hours": verdict.lost_gpu_hours,
        "trustworthy": float(report.trust.trustworthy),
        "tokens_per_s": report.tokens_per_s,
    }
    return {f"{PREFIX}/{name}": float(value) for name, value in figures.items() if value is not None}


def log_to(job: Job | Report, run: Any) -> None:
    """Log a job, or a report on one, to an active run: of wandb, of mlflow (a run, or the module, for its active run),
    or a SummaryWriter: a few series, and the page of the report. Raises SelectionError for anything else.
    """
    tracker, report = tracker_of(run), job.report if isinstance(job, Job) else job
    tracker.log(series(report), last_step(report))
    tracker.attach(page(report, job.analysis.lanes if isinstance(job, Job) else None))


def last_step(report: Report) -> int:
    """The last step that a report is about."""
    return report.by_step[-1].step


def tracker_of(run: Any) -> Tracker:
    """The tracker of an active run. Raises SelectionError for any other object."""
    if hasattr(run, "add_scalar"):  # a SummaryWriter

        def scalars(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                run.add_scalar(name, value, step)

        return Tracker(scalars, lambda page: _write(Path(run.log_dir), page))
    if hasattr(run, "log_metrics") or hasattr(run, "info"):
        from mlflow import MlflowClient

        info = getattr(run, "info", None) or run.active_run().info
        return _mlflow(MlflowClient(), info.run_id)
    if hasattr(run, "log"):

        def attach(page: str) -> None:
            import wandb

            run.log({PAGE.removesuffix(".html"): wandb.Html(page)})

        return Tracker(lambda values, step: run.log({**values, f"{PREFIX}/step": step}), attach)
    raise SelectionError(f"{type(run).__name__} is no run of wandb, mlflow or TensorBoard")


def opened(where: str, name: str) -> Tracker:
    """A new run of a tracker, called `name`. `where`: wandb[:PROJECT], mlflow[:URI] or tensorboard[:FOLDER]; by default
    what the environment says, else the project tracekit and the folder runs.
    """
    kind, _, place = where.partition(":")
    if kind == "wandb":
        import wandb

        silent = wandb.Settings(silent=True, console="off")
        run = wandb.init(project=place or None, name=name, settings=silent)
        tracker = tracker_of(run)
        return Tracker(tracker.log, tracker.attach, run.finish)
    if kind == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(place or None)
        existing = client.get_experiment_by_name(PREFIX)
        experiment = client.create_experiment(PREFIX) if existing is None else existing.experiment_id
        run_id = client.create_run(experiment, run_name=name).info.run_id
        tracker = _mlflow(client, run_id)
        return Tracker(tracker.log, tracker.attach, lambda: client.set_terminated(run_id))
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in name).lstrip(".")
    folder = Path(place or "runs") / (safe or "job")
    writer = EventFileWriter(str(folder))

    def log(values: dict[str, float], step: int) -> None:
        logged = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=logged)))
        writer.flush()

    return Tracker(log, lambda page: _write(folder, page), writer.close)


def _mlflow(client: Any, run_id: str) -> Tracker:
    def log(values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        client.log_batch(run_id, metrics=[Metric(name, value, now_ms, step) for name, value in values.items()])

    return Tracker(log, lambda page: client.log_text(run_id, page, PAGE))


def _write(folder: Path, page: str) -> None:
    from tracekit.base.atomic_write import write_text
    from tracekit.dashboards.documents.page import PAGE_FILE

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PAGE, page, PAGE_FILE)


def main(where: str, store_path: str, job: str) -> None:
    """Log the windows whose numbers come from stdin; at its end, attach the report on the last one."""
    from tracekit.bill.account import run_of_job
    from tracekit.sources.load import load_from_store
    from tracekit.store import Store

    store, last, confirmed = Store(Path(store_path)), None, sys.stdout
    sys.stdout = sys.stderr  # trackers print
    tracker = opened(where, short(job))
    for line in sys.stdin:
        if (report := store.report(job, int(line))) is not None:
            last = int(line)
            tracker.log(series(report), last_step(report))
        confirmed.write("logged\n")
        confirmed.flush()
    if last is not None:
        analysis = load_from_store(job, store=store_path, window=last).analysis
        tracker.attach(page(replace(analysis.report, run=run_of_job(store, job)), analysis.lanes))
    tracker.close()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # whatever a tracker raises ends this process only
        say(f"tracekit: --log: {short(f'{type(error).__name__}: {error}', 200)}")
        sys.exit(2)
