"""`tracekit store`: what a store or another path holds, its export, SQL, a running job on one screen, maintenance.

In: options, a trace or a job in a store, one SELECT. Out: a line for everything found or done, timelines, rows, a
screen of 80 columns. `check` exits with 3 if anything is damaged.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from msgspec import structs

from tracekit.base.arguments import OUT, STORE_PATH, FiniteRange
from tracekit.base.errors import ExitCode, NotStoredError, OutputError, SelectionError
from tracekit.base.paths import command
from tracekit.base.stderr import progress
from tracekit.base.text import bytes_of, counted, printable
from tracekit.commands.options import (
    STORE,
    JobArguments,
    console,
    job_names,
    job_source,
    parse_steps,
    store_at,
    trace_source,
)
from tracekit.sources.load import is_a, jobs_in
from tracekit.sources.source import Content

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tracekit.store import Store

#: How the names of its files end: a timeline is packed JSON, whatever it is called.
_ENDINGS = (".gz", ".json", ".parquet")
#: Rows of a table in the terminal.
_MOST_ROWS = 50

_Code = TypeVar("_Code")


@click.command("export")
@trace_source
@click.option("-o", "--out", required=True, type=OUT, help="File to write: a timeline ending in .json.gz, or .parquet.")
@click.option("--steps", metavar="STEPS", help="Steps to write, such as 100-103 [default: all, or the slowest].")
def export_command(
    source: JobArguments,
    out: Path,
    steps: str | None,
) -> None:
    """Write the recorded, original and ideal timeline for ui.perfetto.dev; or the trace itself as .parquet.

    Of traces of torch.profiler, --steps are those of the training loop.
    """
    from tracekit.base.atomic_write import check_writable
    from tracekit.trace.canonical import TRACE_FILE
    from tracekit.trace.chrome import TIMELINE_FILE

    as_trace = out.suffix == ".parquet"
    check_writable(out, TRACE_FILE if as_trace else TIMELINE_FILE)
    if out.suffix not in _ENDINGS:
        raise OutputError(f"{out}: expected a name that ends in {', '.join(_ENDINGS)}; choose another --out")
    if as_trace and steps is not None:
        raise SelectionError("--steps chooses what a timeline shows; a .parquet file gets the whole trace")
    if any(trace.exists() and out.exists() and out.samefile(trace) for trace in source.traces):
        raise OutputError(f"{out}: is the trace to export, which it would replace; choose another --out")
    with progress("reading the trace") as show_stage:
        loaded = source.load()
        if as_trace:
            show_stage("writing")
            loaded.trace.write_parquet(out)
            click.echo(f"Wrote {printable(str(out))}: {loaded.trace.ops.height:,} ops")
            return
        show_stage("replaying and writing")
        exported = loaded.export(out, steps=None if steps is None else parse_steps(steps, "--steps"))
    chosen = f", {exported.steps} of {counted(exported.steps_in_job, 'step')}" if exported.steps_in_job else ""
    if steps is None and exported.steps < exported.steps_in_job:
        chosen += ", the slowest ones; choose others with --steps"
    slices = counted(exported.slices, "slice")
    click.echo(f"Wrote {printable(str(out))}: {slices}{chosen}. Open it in https://ui.perfetto.dev")


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

    from tracekit.analysis.job.pipeline_report import TABLE_FILE, TABLE_KEY
    from tracekit.base.atomic_write import check_writable, replacing
    from tracekit.base.text import counted, printable
    from tracekit.report.tables import safe_csv
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


def _takes_job(body: Callable[..., None]) -> Callable[..., None]:
    """Give a command the job that is its argument, and its store; an argument that is a store counts as the store."""

    @click.argument("job", required=False, shell_complete=job_names)
    @STORE
    @functools.wraps(body)
    def with_job(job: str | None, store: Path | None, **options: object) -> None:
        from tracekit.live.watch import is_expected

        path = None if job is None else Path(job)
        if path is None or not (is_a(Content.STORE, path) or is_expected(path)):
            return body(job, store, **options)
        return body(None, _only_store(path, store), **options)

    return with_job


@click.command("top")
@_takes_job
@click.option("--every", type=FiniteRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Print one screen and leave.")
def top_command(job: str | None, store: Path | None, every: float, once: bool) -> None:
    """Show a running JOB: verdict, culprit, what to check, loss over its windows, map of workers.

    JOB may be a store instead. JOB is by default the one whose newest window was added last. Ctrl-C ends it.
    """
    from rich.live import Live
    from rich.text import Text

    from tracekit.live.watch import await_store, stopped_by_signals

    opened = store_at(store)
    if once:
        console().print(_frame(opened, job))
        return
    await_store(opened)
    screen = console()
    with stopped_by_signals() as stop, Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        while not stop.is_set():
            try:
                live.update(_frame(opened, job), refresh=True)
            except NotStoredError as error:
                live.update(Text(str(error)), refresh=True)
            stop.wait(every)


def _frame(store: Store, job: str | None) -> RenderableType:
    from tracekit.dashboards.terminal.top import TopState, frame

    return frame(TopState.of(store, store.newest() if job is None else job))


def _takes_store(body: Callable[..., _Code]) -> Callable[..., _Code]:
    """Give a command the store that is its argument or its option, else the default one."""

    @click.argument("path", metavar="[STORE]", required=False, type=STORE_PATH)
    @STORE
    @functools.wraps(body)
    def with_store(path: Path | None, store: Path | None, **options: object) -> _Code:
        from tracekit.store import default_store

        return body(_only_store(path, store) or default_store(), **options)

    return with_store


def _only_store(path: Path | None, store: Path | None) -> Path | None:
    """The store that is an argument, or that of --store. Raises SelectionError if there are two."""
    if path is not None and store is not None:
        raise SelectionError(f"two stores, {path} and {store}; give one, without --store")
    return path or store


def _name_of_job(context: click.Context, _: click.Parameter, job: str) -> str:
    """A job's name. Raises SelectionError for the path of a store."""
    if is_a(Content.STORE, path := Path(job)):
        right = command("store", str(context.info_name), "JOB", "--store", path)
        raise SelectionError(f"{job}: a store, not a job; type `{right}`")
    return job


@click.group("store")
def store_command() -> None:
    """List, query and export what a store, a folder or a trace holds; keep a store in order: check, repair, prune."""


for reader in (export_command, sql_command, top_command):
    store_command.add_command(reader)


@store_command.command("list")
@click.argument("traces", metavar="[TRACE]", nargs=1, required=False, type=STORE_PATH)
@job_source
def list_command(source: JobArguments) -> None:
    """List the jobs of a store or a folder of traces, or show what one trace holds.

    TRACE may be a store or a folder. Without it, lists the jobs of --store, or shows the --job of it.
    """
    from tracekit.dashboards.terminal.info import print_folder, print_jobs, print_trace

    stores = [path for path in source.traces if is_a(Content.STORE, path)]
    if stores and source.store is None:
        source = structs.replace(source, traces=(), store=stores[0])
    if not source.traces and source.job is None and source.window is None:
        if source.layout is not None or source.unit is not None:
            raise SelectionError("--layout and --unit belong to a TRACE; name the trace file too")
        opened = store_at(source.store)
        print_jobs(opened.name, opened.jobs(), console())
        return
    for trace in source.traces:
        if len(jobs := jobs_in(trace)) > 1:
            print_folder(trace, jobs, console())
            return
    with progress("reading the trace"):
        loaded = source.load().trace
    print_trace(loaded, console())


@store_command.command()
@click.argument("job", shell_complete=job_names, callback=_name_of_job)
@STORE
def windows(job: str, store: Path | None) -> None:
    """List the windows of JOB, oldest first."""
    from tracekit.dashboards.terminal.top import print_windows

    opened = store_at(store)
    print_windows(opened.windows(job), opened.history(job), console())


@store_command.command()
@_takes_job
@click.option("--open", "only_open", is_flag=True, help="Only those that are open.")
def incidents(job: str | None, store: Path | None, only_open: bool) -> None:
    """List the incidents of JOB, or of all jobs, newest first: which cause acted on it, when, and for how long.

    JOB may be a store instead.
    """
    from tracekit.dashboards.terminal.top import print_incidents

    opened = store_at(store)
    listed = opened.incidents(job, only_open=only_open)
    if job is not None and not listed:
        opened.windows(job)  # of a job that is not there, says which are
    print_incidents(listed, opened.handled, console())


@store_command.command()
@click.argument("incident", type=click.IntRange(min=1))
@STORE
@click.option("--owner", metavar="NAME", help="Who takes it.")
@click.option("--mute", metavar="AGE", help="Send no messages about it for so long, such as 4h; 0m: send them again.")
@click.option("--note", metavar="TEXT", help="What others should know.")
def handle(incident: int, store: Path | None, owner: str | None, mute: str | None, note: str | None) -> None:
    """Acknowledge INCIDENT, by its number: say who takes it, mute it, add a note.

    `tracekit store incidents` and the dashboard show the history.
    """
    from tracekit.store.incidents import IncidentChange, current_user

    now = time.time()
    until = None if mute is None else now + _age("--mute", mute).total_seconds()
    store_at(store).handle(incident, IncidentChange(now, current_user(), owner, until, note))


@store_command.command()
@_takes_store
def check(store: Path) -> int:
    """Read every file and say what is damaged, and how many reports another version of tracekit wrote.

    Changes nothing. Exits with 3 if there is anything that `repair` mends.
    """
    from tracekit.store import Store
    from tracekit.store.care import damages, renewable
    from tracekit.store.folder import outdated_line

    with progress() as show_stage:
        faults = list(damages(Store(store), show_stage))
    _echo(faults)
    result = f"{len(faults)} damaged" if faults else "all files are whole"
    click.echo(f"{printable(str(store))}: {result}")
    if windows := renewable(Store(store)):
        click.echo(printable(outdated_line(store, windows)))
    return ExitCode.CONDITION if faults or windows else ExitCode.DONE


@store_command.command()
@_takes_store
def repair(store: Path) -> None:
    """Drop what is damaged, with a line for each; everything else stays.

    A report that is damaged, or that another version of tracekit wrote, is made anew from the ops beside it.
    """
    from tracekit.sources.registry import job_of
    from tracekit.store import Store
    from tracekit.store.care import repair as repairing

    with progress() as show_stage:
        repairs = repairing(Store(store), lambda trace: job_of(trace).stored(), show_stage)
    if not _echo(repairs):
        click.echo(f"{printable(str(store))}: nothing to repair")


@store_command.command()
@_takes_store
@click.option("--older-than", metavar="AGE", help="Remove ops of windows added longer ago, such as 30d or 12h.")
@click.option(
    "--max-size", metavar="SIZE", help="Remove the oldest ops until all files take at most this, such as 50G."
)
def prune(store: Path, older_than: str | None, max_size: str | None) -> None:
    """Remove raw ops by age or size; reports and findings stay."""
    from tracekit.store import Store
    from tracekit.store.care import prune as pruning

    if older_than is None and max_size is None:
        raise SelectionError("say what to prune with --older-than or --max-size")
    age = None if older_than is None else _age("--older-than", older_than)
    most_bytes = None if max_size is None else bytes_of(max_size)
    if max_size is not None and most_bytes is None:
        raise SelectionError(f"--max-size {max_size!r:.40}; expected a number of bytes, such as 500M or 50G")
    with progress() as show_stage:
        removed = pruning(Store(store), older_than=age, most_bytes=most_bytes, show_stage=show_stage)
    if not _echo(removed):
        click.echo(f"{printable(str(store))}: nothing to prune")


def _echo(lines: Sequence[str]) -> int:
    """Print lines; return their number."""
    for line in lines:
        click.echo(printable(line))
    return len(lines)


def _age(option: str, text: str) -> timedelta:
    """`30d`, `12h` or `90m`. Raises SelectionError for anything else."""
    match = re.fullmatch(r"(\d{1,6})([dhm])", text)
    if match is None:
        raise SelectionError(f"{option} {text!r:.40}; expected a number of days, hours or minutes, such as 30d or 12h")
    return timedelta(**{{"d": "days", "h": "hours", "m": "minutes"}[match[2]]: int(match[1])})
