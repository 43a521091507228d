"""What the pages offer as files: every table of a report as CSV.

In: the name of a table and of a job, from the address. Out: the file, or a 4xx with one line that says why.
"""

from __future__ import annotations

import flask
import polars as pl

from tracekit.dashboards.context import results
from tracekit.dashboards.queries import Stored
from tracekit.errors import SelectionError, TracekitError
from tracekit.report import DIAGNOSIS_TABLES, JSON_TABLES

#: Tables of a report that are a file of their own.
TABLES = (*JSON_TABLES, *DIAGNOSIS_TABLES)
_PER_STEP = "by_worker_per_step"


def register(server: flask.Flask) -> None:
    """Answer the addresses of the files."""
    server.add_url_rule("/download/<name>.csv", "download", _csv)


def _csv(name: str) -> flask.Response:
    try:
        table = _table(name, flask.request.args.get("job"))
    except TracekitError as error:
        return flask.Response(f"{error}\n", 404, mimetype="text/plain")
    response = flask.Response(table.write_csv(), mimetype="text/csv")
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return response


def _table(name: str, job: str | None) -> pl.DataFrame:
    """The table `name`: the list of jobs, or a table of one job. Raises SelectionError or StoreError."""
    if name == "jobs":
        lists = pl.col("cause_kinds", "cause_places").list.join("; ")
        return results().jobs().drop("job_id", "analysed").with_columns(lists)
    if name not in (*TABLES, _PER_STEP):
        raise SelectionError(f"no table {name!r}; there are jobs, {', '.join(TABLES)} and {_PER_STEP}")
    stored = results().stored(results().newest() if job is None else job)
    return _per_step(stored) if name == _PER_STEP else _flat(stored.table(name))


def _flat(table: pl.DataFrame) -> pl.DataFrame:
    """The columns that a CSV file can hold."""
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
