"""A store as tables for SQL from users.

In: a store, and one SELECT of DuckDB's SQL. Out: its rows. The query runs in a DuckDB of its own, with the tables of
the catalogue, and can access the Parquet files of the store but nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import polars as pl

from tracekit.base.errors import SelectionError, StoreError
from tracekit.base.paths import command, object_url
from tracekit.base.stderr import say_once
from tracekit.store.catalogue_file import CLOSED
from tracekit.store.catalogue_rows import WindowPart, frame
from tracekit.store.folder import JOBS, Folder, outdated_line
from tracekit.store.store import Store

if TYPE_CHECKING:
    import duckdb

#: What a query sees of the tables of `schema.sql`.
_VIEWS = {
    "windows": """
        SELECT jobs.name AS job, windows.number AS "window", jobs.source,
               windows.* EXCLUDE (job_id, number, metadata), metadata::JSON AS metadata,
               findings.* EXCLUDE (job_id, number)
        FROM stored.windows AS windows JOIN stored.jobs AS jobs USING (job_id)
             LEFT JOIN stored.findings AS findings USING (job_id, number)""",
    "jobs": """
        SELECT * EXCLUDE ("window", windows, all_steps), windows, all_steps
        FROM (SELECT *, count(*) OVER whole AS windows, sum(steps) OVER whole AS all_steps
              FROM main.windows WINDOW whole AS (PARTITION BY job))
        QUALIFY row_number() OVER (PARTITION BY job ORDER BY "window" DESC) = 1""",
    "findings": """
        SELECT jobs.name AS job, number AS "window", culprits.* EXCLUDE (job_id, number)
        FROM stored.culprits AS culprits JOIN stored.jobs AS jobs USING (job_id)""",
    "incidents": """
        SELECT incident_id, jobs.name AS job, incidents.* EXCLUDE (incident_id, job_id, cause), cause::JSON AS cause
        FROM stored.incidents AS incidents JOIN stored.jobs AS jobs USING (job_id)""",
}
#: What each window lost, by cause and place, from the table `costs`; `lost_s`: in all its steps.
_LOSSES = """
    CREATE VIEW losses AS
    SELECT jobs.name AS job, number AS "window", losses.kind, part, losses.cause, ranks, losses.hosts,
           losses.first_step, losses.last_step, since, until, (seconds + planned_s) * windows.steps AS lost_s
    FROM (
        SELECT job_id, number, unnest(from_json(json_extract(content, '$.losses'), '[{
            "kind": "VARCHAR", "part": "VARCHAR", "cause": "VARCHAR", "ranks": ["INTEGER"], "hosts": ["VARCHAR"],
            "first_step": "INTEGER", "last_step": "INTEGER", "since": "DOUBLE", "until": "DOUBLE",
            "seconds": "DOUBLE", "planned_s": "DOUBLE"}]'), recursive := true)
        FROM stored.costs WHERE json_valid(content)
    ) AS losses JOIN stored.jobs AS jobs USING (job_id) JOIN stored.windows AS windows USING (job_id, number)
"""
#: DuckDB's words for a table that a query needs.
_MISSING = re.compile(r"Table with name (\w+) does not exist")
#: How often to look whether Ctrl-C was pressed, seconds.
_LOOK_EVERY_S = 0.05
#: Types of DuckDB that polars cannot hold, or not write.
_NOT_IN_POLARS = re.compile(r"\b(BIGNUM|BIT|BLOB|INTERVAL|TIMESTAMP_N?S|UNION)\b")


def rows_of(store: Store, sql: str, jobs: Sequence[str] = ()) -> pl.DataFrame:
    """The rows of one SELECT over the views `jobs`, `windows`, `findings`, `losses`, `incidents`, `hosts` and `ops`.

    `jobs`: the jobs whose windows make up `ops`, by default all: their files are opened. Raises SelectionError for
    anything but one SELECT, and with DuckDB's message; StoreError, NotStoredError.
    """
    import duckdb

    with duckdb.connect(":memory:", config=CLOSED) as connection:
        try:
            if [statement.type for statement in connection.extract_statements(sql)] != [duckdb.StatementType.SELECT]:
                raise SelectionError("expected one SELECT: nothing else may be done with a store")
            connection.execute("CREATE SCHEMA stored")
            _add_tables(connection, store, ("jobs", "windows", "findings", "culprits", "incidents"))
            for name, view in _VIEWS.items():
                connection.execute(f"CREATE VIEW {name} AS {view}")
            if object_url(store.path) is None:
                connection.execute("SET allowed_directories = [$jobs]", {"jobs": str(store.path.absolute() / JOBS)})
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
            # What is large, or in files, is added once the query turns out to need it.
            extra_tables: dict[str, Callable[[duckdb.DuckDBPyConnection, Store], None]]
            extra_tables = {"hosts": _add_hosts, "losses": _add_losses, "ops": partial(_add_ops, jobs=jobs)}
            while True:
                try:
                    return _with_possible_times(
                        _interruptible(connection, lambda: frame(_plain_rows(connection.sql(sql))))
                    )
                except duckdb.CatalogException as error:
                    missing = _MISSING.search(str(error))
                    add = extra_tables.pop(missing[1].lower(), None) if missing else None
                    if add is None:
                        raise
                    add(connection, store)
        except duckdb.IOException as error:
            raise _damage_error(store, error) from None
        except duckdb.Error as error:
            raise SelectionError(_line(error)) from None


def _interruptible(connection: duckdb.DuckDBPyConnection, run_query: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """The answer to a query that Ctrl-C ends. The signal reaches any of DuckDB's threads, and wakes none that waits."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run_query)
        try:
            while not answer.done():
                wait([answer], _LOOK_EVERY_S)
        except KeyboardInterrupt:
            while not answer.done():  # it may not have begun
                connection.interrupt()
                wait([answer], _LOOK_EVERY_S)
            raise
        return answer.result()


def _plain_rows(query: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """The query with a name of its own for each column, and text in place of what polars cannot hold."""
    result = query.project("*")  # DuckDB numbers duplicate names
    texts = [
        f"{name}::VARCHAR AS {name}"
        for column, kind in zip(result.columns, result.types, strict=True)
        if _NOT_IN_POLARS.search(str(kind))
        for name in ['"' + column.replace('"', '""') + '"']
    ]
    return result.project(f"* REPLACE ({', '.join(texts)})") if texts else result


def _with_possible_times(rows: pl.DataFrame) -> pl.DataFrame:
    """The same rows. Raises SelectionError for a time that polars cannot show: infinity, the year 300,000."""
    for column in rows.iter_columns():
        for values in _leaves(column):
            if values.dtype in (pl.Date, pl.Datetime) and values.dt.year().null_count() > values.null_count():
                name = column.name.replace('"', '""')
                raise SelectionError(
                    f"{column.name}: has infinite times, or a year that cannot be shown; convert it to text:"
                    f' "{name}"::VARCHAR'
                )
    return rows


def _leaves(column: pl.Series) -> Iterator[pl.Series]:
    """A column or, if it is nested, all values in it, one type at a time."""
    if isinstance(column.dtype, pl.List | pl.Array):
        yield from _leaves(column.explode())
    elif isinstance(column.dtype, pl.Struct):
        for field in column.struct.fields:
            yield from _leaves(column.struct.field(field))
    else:
        yield column


def _add_tables(connection: duckdb.DuckDBPyConnection, store: Store, names: Sequence[str]) -> None:
    """Add tables of the catalogue without its impossible rows, as `stored.NAME`, which lists of tables do not show."""
    with store.reading() as catalogue:
        for name in names:
            rows = frame(catalogue.connection.sql(f"FROM {name}"))
            # Without its other methods, which DuckDB would answer with pyarrow.
            connection.register("rows", SimpleNamespace(__arrow_c_stream__=rows.__arrow_c_stream__))
            connection.execute(f"CREATE TABLE stored.{name} AS FROM rows")
            connection.unregister("rows")


def _add_hosts(connection: duckdb.DuckDBPyConnection, store: Store) -> None:
    _add_tables(connection, store, ["hosts"])
    connection.execute(
        "CREATE VIEW hosts AS SELECT jobs.name AS job, host FROM stored.hosts JOIN stored.jobs AS jobs USING (job_id)"
    )


def _add_losses(connection: duckdb.DuckDBPyConnection, store: Store) -> None:
    _add_tables(connection, store, ["costs"])
    connection.execute(_LOSSES)
    with store.reading() as catalogue:
        lacking = catalogue.outdated()
    if lacking:
        say_once(f"`losses` is not complete: {outdated_line(store.path, len(lacking))}")


def _add_ops(connection: duckdb.DuckDBPyConnection, store: Store, jobs: Sequence[str]) -> None:
    """Add `ops`: job, window, and the columns of the traces of these jobs or of all, null where one has none."""
    import duckdb

    if object_url(store.path) is not None:
        raise SelectionError(f"{store.name}: ops are read from a folder only; copy the store into one (docs/store.md)")
    with store.reading() as catalogue:
        chosen = [window for job in jobs for window in catalogue.windows(job)] if jobs else catalogue.windows()
    windows = [window for window in chosen if WindowPart.OPS in window.files]
    if not windows:
        raise SelectionError(f"{store.name}: no window has ops")
    folder = Folder(store.path.absolute())
    paths = [str(folder.ops(window)) for window in windows]
    connection.execute(
        "CREATE TABLE stored.paths AS"
        ' SELECT unnest($paths) AS filename, unnest($jobs) AS job, unnest($numbers) AS "window"',
        {"paths": paths, "jobs": [window.job for window in windows], "numbers": [window.number for window in windows]},
    )
    quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    try:
        connection.execute(
            f'CREATE VIEW ops AS SELECT job, "window", found.* EXCLUDE (filename)'  # noqa: S608 - our own paths, quoted
            f" FROM read_parquet([{quoted}], union_by_name = true, filename = true) AS found"
            " JOIN stored.paths USING (filename)"
        )
    except duckdb.Error as error:  # IOException, InvalidInputException, ...: a file of the store cannot be read
        raise _damage_error(store, error) from None


def _damage_error(store: Store, error: Exception) -> StoreError:
    check = command("store", "check", "--store", store.path)
    return StoreError(f"{store.name}: {_line(error)}; `{check}` says what is damaged")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
