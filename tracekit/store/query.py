"""A store as tables for SQL that somebody else wrote.

In: a store, and one SELECT of DuckDB's SQL. Out: its rows. The query runs in a DuckDB of its own, with the tables of
the catalogue, and can access the Parquet files of the store but nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError, StoreError
from tracekit.base.s3 import s3_url
from tracekit.store.folder import JOBS, Folder
from tracekit.store.store import Store
from tracekit.store.window import Part, StoredWindow

if TYPE_CHECKING:
    import duckdb

#: What a query sees of the tables of `schema.sql`.
_VIEWS = {
    "windows": """
        SELECT jobs.name AS job, windows.number AS "window", jobs.source,
               windows.* EXCLUDE (job_id, number, metadata), metadata::JSON AS metadata,
               findings.* EXCLUDE (job_id, number)
        FROM stored.windows JOIN stored.jobs USING (job_id) LEFT JOIN stored.findings USING (job_id, number)""",
    "jobs": """
        SELECT * EXCLUDE ("window", windows, all_steps), windows, all_steps
        FROM (SELECT *, count(*) OVER whole AS windows, sum(steps) OVER whole AS all_steps
              FROM main.windows WINDOW whole AS (PARTITION BY job))
        QUALIFY row_number() OVER (PARTITION BY job ORDER BY "window" DESC) = 1""",
    "findings": """
        SELECT jobs.name AS job, number AS "window", culprits.* EXCLUDE (job_id, number)
        FROM stored.culprits JOIN stored.jobs USING (job_id)""",
    "incidents": """
        SELECT incident_id, jobs.name AS job, incidents.* EXCLUDE (incident_id, job_id, cause), cause::JSON AS cause
        FROM stored.incidents JOIN stored.jobs USING (job_id)""",
    "hosts": "SELECT jobs.name AS job, host FROM stored.hosts JOIN stored.jobs USING (job_id)",
}
_TABLES = ("jobs", "windows", "findings", "culprits", "incidents", "hosts")
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # no table is looked for among Python's variables
    "temp_directory": "",
}


def rows_of(store: Store, sql: str, jobs: Sequence[str] = ()) -> pl.DataFrame:
    """The rows of one SELECT over the views `jobs`, `windows`, `findings`, `incidents`, `hosts` and `ops`.

    `jobs`: the jobs whose windows make up `ops`, by default all: their files are opened. Raises SelectionError for
    anything but one SELECT, and with what DuckDB says of it; StoreError, NotStoredError.
    """
    import duckdb

    with store.reading() as catalogue:
        tables = {name: catalogue.connection.sql(f"FROM {name}").to_arrow_table() for name in _TABLES}
        named = [window for job in jobs for window in catalogue.windows(job)] if jobs else catalogue.windows()
    with duckdb.connect(":memory:", config=_CONFIG) as connection:
        try:
            if [statement.type for statement in connection.extract_statements(sql)] != [duckdb.StatementType.SELECT]:
                raise SelectionError("expected one SELECT: nothing else may be done with a store")
            connection.execute("CREATE SCHEMA stored")
            for name, table in tables.items():
                connection.register("given", table)
                connection.execute(f"CREATE TABLE stored.{name} AS FROM given")
            connection.unregister("given")
            for name, view in _VIEWS.items():
                connection.execute(f"CREATE VIEW {name} AS {view}")
            if s3_url(store.path) is None:
                connection.execute("SET allowed_directories = [$jobs]", {"jobs": str(store.path.absolute() / JOBS)})
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
            try:
                return _rows(connection, sql)
            except duckdb.CatalogException as error:
                if "name ops does not exist" not in str(error).lower():
                    raise
            # Only now are files opened: no other table needs them.
            _add_ops(connection, store, [window for window in named if Part.OPS in window.files])
            return _rows(connection, sql)
        except duckdb.IOException as error:
            raise _damaged(store, error) from None
        except duckdb.Error as error:
            raise SelectionError(_line(error)) from None


def _add_ops(connection: duckdb.DuckDBPyConnection, store: Store, windows: Sequence[StoredWindow]) -> None:
    """Make the view `ops` of these windows: job, window, and the columns of their traces, null where one has none."""
    import duckdb

    if s3_url(store.path) is not None:
        raise SelectionError(f"{store.name}: ops are read from a folder only; copy the store into one (docs/store.md)")
    if not windows:
        raise SelectionError(f"{store.name}: no window has ops")
    folder = Folder(store.path.absolute())
    paths = [str(folder.file(window.job_id, window.number, Part.OPS)) for window in windows]
    connection.execute(
        "CREATE TABLE stored.paths AS"
        ' SELECT unnest($paths) AS filename, unnest($jobs) AS job, unnest($numbers) AS "window"',
        {"paths": paths, "jobs": [one.job for one in windows], "numbers": [one.number for one in windows]},
    )
    quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    try:
        connection.execute(
            f'CREATE VIEW ops AS SELECT job, "window", found.* EXCLUDE (filename)'  # noqa: S608 - our own paths, quoted
            f" FROM read_parquet([{quoted}], union_by_name = true, filename = true) AS found"
            " JOIN stored.paths USING (filename)"
        )
    except duckdb.Error as error:  # IOException, InvalidInputException, ...: a file of the store cannot be read
        raise _damaged(store, error) from None


def _damaged(store: Store, error: Exception) -> StoreError:
    check = command("store", "check", "--store", store.path)
    return StoreError(f"{store.name}: {_line(error)}; `{check}` says what is damaged")


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame:
    return pl.DataFrame(connection.sql(sql).to_arrow_table())


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
