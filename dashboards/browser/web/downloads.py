"""Downloads: every table of a report as CSV or XLSX, and the report as a page.

In: the name of a table and of a job, from the address. Out: the file, or a status and a one-line reason.
"""

from __future__ import annotations

import io
import re

import flask
import polars as pl

from tracekit.base.errors import NotStoredError, SelectionError, extra
from tracekit.base.safe_csv import safe_csv
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.context import choose_window, results
from tracekit.dashboards.documents.page import page
from tracekit.report.report import COMMON_TABLES, PIPELINE_TABLES

#: Tables of a report that are a file of their own.
TABLES = (*PIPELINE_TABLES, "by_rank", *COMMON_TABLES)
_PER_STEP = "by_worker_per_step"
#: All tables of a report, as the name of a workbook.
REPORT = "report"
#: Rows of a sheet, without the heads.
MOST_SHEET_ROWS = 1_048_575
#: Text from outside stays text.
_AS_TEXT = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}


def download(name: str) -> flask.Response:
    """The file of a table. Raises StoreError or SelectionError."""
    return csv_file(name, _table(name))


def csv_file(name: str, table: pl.DataFrame) -> flask.Response:
    """A table as a file to save."""
    return _file(f"{name}.csv", safe_csv(table), "text/csv")


def workbook(name: str) -> flask.Response:
    """A table as a file for Excel, or with REPORT all of a job, a sheet for each.

    Raises StoreError, SelectionError or MissingExtraError.
    """
    with extra("xlsx", "a file for Excel"):
        from xlsxwriter import Workbook
    if name == REPORT:
        stored = results().stored(_job())
        stem = file_stem(stored.name)
        sheets = {one: _flat(stored.table(one)) for one in TABLES if stored.has_rows(one)}
    else:
        stem, sheets = name, {name: _table(name)}
    longest = max((table.height for table in sheets.values()), default=0)
    if longest > MOST_SHEET_ROWS:
        raise SelectionError(f"{longest:,} rows are more than the {MOST_SHEET_ROWS:,} of a sheet; CSV has all")
    file = io.BytesIO()
    with Workbook(file, _AS_TEXT) as book:
        for title, table in sheets.items():
            table.write_excel(book, title, float_precision=6)
    return _file(f"{stem}.xlsx", file.getvalue(), "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet")


def report_page() -> flask.Response:
    """The report on a job as one HTML page, as `tracekit whatif --html` writes it. Raises StoreError."""
    stored = results().stored(_job())
    analysis = results().job_of(stored).analysis
    return _file(f"{file_stem(stored.name)}.html", page(analysis.report, analysis.lanes), "text/html")


def _file(name: str, content: str | bytes, kind: str) -> flask.Response:
    response = flask.Response(content, mimetype=kind)
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
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
    by_step = results().worker_steps(stored.name)
    steps, dp_ranks, stages = by_step.slowdown.shape
    return pl.DataFrame(
        {
            "step": by_step.steps.repeat(dp_ranks * stages),
            "dp_rank": pl.Series(by_step.dp_ranks.repeat(stages).tolist() * steps),
            "pp_rank": pl.Series(list(range(stages)) * (steps * dp_ranks)),
            "slowdown": by_step.slowdown.ravel(),
        }
    )
