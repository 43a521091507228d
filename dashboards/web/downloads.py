"""Downloads: every table of a report as CSV.

In: the name of a table and of a job, from the address. Out: the file, or a status and a one-line reason.
"""

from __future__ import annotations

import flask
import polars as pl

from tracekit.base.errors import NotStoredError, SelectionError, StoreError, TracekitError
from tracekit.base.safe_csv import safe_csv
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.ui.context import choose_window, results
from tracekit.job.tables import JSON_TABLES
from tracekit.report.report import COMMON_TABLES

#: Tables of a report that are a file of their own.
TABLES = (*JSON_TABLES, "by_rank", *COMMON_TABLES)
_PER_STEP = "by_worker_per_step"


def register(server: flask.Flask) -> None:
    """Register the routes of the files."""
    server.add_url_rule("/download/<name>.csv", "download", _csv)


def refusal(error: TracekitError, *, selection: int = 400) -> flask.Response:
    """Return a one-line error: 404 if the store lacks the data, 503 if the store cannot be read.

    `selection`: the status of all other errors, which are in the request.
    """
    status = 404 if isinstance(error, NotStoredError) else 503 if isinstance(error, StoreError) else selection
    return flask.Response(f"{error}\n", status, mimetype="text/plain")


def _csv(name: str) -> flask.Response:
    try:
        table = _table(name, flask.request.args.get("job"))
    except TracekitError as error:
        return refusal(error, selection=404)
    response = flask.Response(safe_csv(table), mimetype="text/csv")
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return response


def _table(name: str, job: str | None) -> pl.DataFrame:
    """The table `name`: the list of jobs, or a table of one job. Raises SelectionError or StoreError."""
    if name == "jobs":
        lists = pl.col("cause_kinds", "cause_places", "cause_hosts").list.join("; ")
        return results().jobs().drop("job_id", "number", "analysed", "metadata", "tracekit").with_columns(lists)
    if name not in (*TABLES, _PER_STEP):
        raise SelectionError(f"no table {name!r}; there are jobs, {', '.join(TABLES)} and {_PER_STEP}")
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
