"""Downloads: every table of a report as CSV.

In: the name of a table and of a job, from the address. Out: the file, or a status and a one-line reason.
"""

from __future__ import annotations

import flask
import polars as pl

from tracekit.base.errors import NotStoredError
from tracekit.base.safe_csv import safe_csv
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.ui.context import choose_window, results
from tracekit.job.tables import JSON_TABLES
from tracekit.report.report import COMMON_TABLES

#: Tables of a report that are a file of their own.
TABLES = (*JSON_TABLES, "by_rank", *COMMON_TABLES)
_PER_STEP = "by_worker_per_step"


def download(name: str) -> flask.Response:
    """The file of a table. Raises StoreError or SelectionError."""
    return csv_file(name, _table(name, flask.request.args.get("job")))


def csv_file(name: str, table: pl.DataFrame) -> flask.Response:
    """A table as a file to save."""
    response = flask.Response(safe_csv(table), mimetype="text/csv")
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return response


def _table(name: str, job: str | None) -> pl.DataFrame:
    """The table `name`: the list of jobs, or a table of one job. Raises StoreError or SelectionError."""
    if name == "jobs":
        lists = pl.col("cause_kinds", "cause_places", "cause_hosts").list.join("; ")
        return results().jobs().drop("job_id", "number", "analysed", "metadata", "tracekit").with_columns(lists)
    if name not in (*TABLES, _PER_STEP):
        raise NotStoredError(f"no table {name!r}; there are jobs, {', '.join(TABLES)} and {_PER_STEP}")
    job = results().newest() if job is None else job
    if (window := flask.request.args.get("window")) is not None:
        choose_window(job, window)
    stored = results().stored(job)
    return _per_step(stored) if name == _PER_STEP else _flat(stored.table(name))


def _flat(table: pl.DataFrame) -> pl.DataFrame:
    """Keep the columns that a CSV file can hold."""
    return table.select(name for name, kind in table.schema.items() if not kind.is_nested() and kind != pl.Null)


def _per_step(stored: Stored) -> pl.DataFrame:
    found = results().worker_steps(stored.name)
    steps, dp_ranks, stages = found.slowdown.shape
    return pl.DataFrame(
        {
            "step": found.steps.repeat(dp_ranks * stages),
            "dp_rank": pl.Series(found.dp_ranks.repeat(stages).tolist() * steps),
            "pp_rank": pl.Series(list(range(stages)) * (steps * dp_ranks)),
            "slowdown": found.slowdown.ravel(),
        }
    )
