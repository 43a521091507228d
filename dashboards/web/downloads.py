"""Downloads: every table of a report as CSV, and the report as a page.

In: the name of a table and of a job, from the address. Out: the file, or a status and a one-line reason.
"""

from __future__ import annotations

import re

import flask
import polars as pl

from tracekit.base.errors import NotStoredError
from tracekit.base.safe_csv import safe_csv
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.ui.context import choose_window, results
from tracekit.job.tables import JSON_TABLES
from tracekit.report.report import COMMON_TABLES
from tracekit.show.documents.page import page

#: Tables of a report that are a file of their own.
TABLES = (*JSON_TABLES, "by_rank", *COMMON_TABLES)
_PER_STEP = "by_worker_per_step"


def download(name: str) -> flask.Response:
    """The file of a table. Raises StoreError or SelectionError."""
    return csv_file(name, _table(name))


def csv_file(name: str, table: pl.DataFrame) -> flask.Response:
    """A table as a file to save."""
    response = flask.Response(safe_csv(table), mimetype="text/csv")
    response.headers["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return response


def report_page() -> flask.Response:
    """The report on a job as one HTML page, as `tracekit whatif --html` writes it. Raises StoreError."""
    stored = results().stored(_job())
    response = flask.Response(page(results().job_of(stored).report), mimetype="text/html")
    response.headers["Content-Disposition"] = f'attachment; filename="{file_stem(stored.name)}.html"'
    return response


def file_stem(job: str) -> str:
    """The name of a job as that of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", job)[:80].strip("._") or "job"


def _job() -> str:
    """The job in the address, else the newest; its window is chosen."""
    job = flask.request.args.get("job") or results().newest()
    if (window := flask.request.args.get("window")) is not None:
        choose_window(job, window)
    return job


def _table(name: str) -> pl.DataFrame:
    """The table `name`: the list of jobs, or a table of one job. Raises StoreError or SelectionError."""
    if name == "jobs":
        lists = pl.col("cause_kinds", "cause_places", "cause_hosts").list.join("; ")
        return results().jobs().drop("job_id", "number", "analysed", "metadata", "tracekit").with_columns(lists)
    if name not in (*TABLES, _PER_STEP):
        raise NotStoredError(f"no table {name!r}; there are jobs, {', '.join(TABLES)} and {_PER_STEP}")
    stored = results().stored(_job())
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
