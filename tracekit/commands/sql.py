"""`tracekit store sql`: questions about a store that no other command answers.

In: one SELECT. Out: its rows in the terminal, as JSON, CSV or Parquet.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from tracekit.base.errors import SelectionError
from tracekit.commands.complete import job_names
from tracekit.commands.options import OUT, STORE, console, store_at

#: Rows of a table in the terminal.
_MOST_ROWS = 50


@click.command("sql")
@click.argument("query")
@STORE
@click.option("--job", "jobs", multiple=True, shell_complete=job_names, help="Ops of this job only; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--parquet", type=OUT, metavar="FILE", help="Write the rows to FILE instead of printing them.")
def sql_command(
    query: str, store: Path | None, jobs: tuple[str, ...], as_json: bool, as_csv: bool, parquet: Path | None
) -> None:
    """Ask a store in SQL: one SELECT, as DuckDB understands it.

    Tables: jobs (the newest window of each), windows, findings (causes of a window), losses (what all its steps lost,
    by cause and place), incidents, hosts, ops. For the columns of a table, ask "DESCRIBE jobs". docs/store.md has
    questions with their answers.
    """
    import polars as pl

    from tracekit.analysis.job.worker_lanes import TABLE_FILE, TABLE_KEY
    from tracekit.base.atomic_write import check_writable, replacing
    from tracekit.base.safe_csv import safe_csv
    from tracekit.base.text import counted, printable
    from tracekit.store.query import rows_of

    if (parquet is not None) + as_json + as_csv > 1:
        raise SelectionError("one of --json, --csv and --parquet at a time")
    if parquet is not None:
        check_writable(parquet, TABLE_FILE)
    rows = rows_of(store_at(store), query, jobs)
    if parquet is not None:
        with replacing(parquet, TABLE_FILE) as temporary, open(temporary, "wb") as file:
            rows.write_parquet(file, metadata={TABLE_KEY: "sql"})
        click.echo(f"Wrote {printable(str(parquet))}: {counted(rows.height, 'row')}")
    elif as_json:
        click.echo(rows.write_json())
    elif as_csv:
        nested = [name for name, kind in rows.schema.items() if kind.is_nested()]
        texts = [pl.Series(name, [*map(_json, rows[name].to_list())], pl.String) for name in nested]
        click.echo(safe_csv(rows.with_columns(texts)), nl=False)
    else:
        width = console().width
        with pl.Config(
            tbl_rows=_MOST_ROWS,
            tbl_width_chars=width,
            fmt_str_lengths=width,
            tbl_formatting="NOTHING",
            tbl_hide_dataframe_shape=True,
            tbl_hide_column_data_types=True,
        ):
            click.echo("\n".join(printable(line.rstrip()[1:]) for line in str(rows).splitlines()))
        if rows.height > _MOST_ROWS:
            click.echo(f"{rows.height:,} rows; --csv prints all")


def _json(value: object) -> str | None:
    """A list or a struct as one cell of CSV."""
    return None if value is None else json.dumps(value, default=str)
