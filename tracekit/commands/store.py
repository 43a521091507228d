"""`tracekit store`: maintenance of a store.

In: options. Out: a line for everything found or done. `check` exits with 3 if anything is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import click

from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import printable, short
from tracekit.commands.complete import job_names
from tracekit.commands.options import OUT

_PATH = click.Path(path_type=Path)
_STORE = click.option("--store", type=_PATH, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@click.group("store")
def store_command() -> None:
    """Keep a store in order: list windows, check, repair, prune, migrate."""


@store_command.command()
@click.argument("job", shell_complete=job_names)
@_STORE
def windows(job: str, store: Path | None) -> None:
    """List the windows of JOB, oldest first."""
    from tracekit.store import Part, Store, default_store

    opened = Store(store or default_store())
    headlines = dict(opened.history(job).select("number", "headline").iter_rows())
    for window in opened.windows(job):
        slowdown = "not analysed" if window.slowdown is None else f"S = {window.slowdown:.3f}"
        if headline := headlines.get(window.number):
            slowdown = f"{slowdown}: {printable(headline)}"
        pruned = "" if Part.OPS in window.files else ", ops pruned"
        click.echo(
            f"{window.number:>6}  {window.added_at:%Y-%m-%d %H:%M:%S}  steps {window.first_step} to {window.last_step},"
            f" {window.ops:,} ops{pruned}  {slowdown}"
        )


@store_command.command()
@click.argument("job", required=False, shell_complete=job_names)
@_STORE
@click.option("--open", "only_open", is_flag=True, help="Only those that are open.")
def incidents(job: str | None, store: Path | None, only_open: bool) -> None:
    """List the incidents of JOB, or of all jobs, newest first: which cause acted on it, when, and for how long."""
    from tracekit.live.incident_words import advice, lasted
    from tracekit.store import Store, default_store

    for incident in Store(store or default_store()).incidents(job, only_open=only_open):
        windows = "" if incident.opened_window is None else f" since window {incident.opened_window}"
        state = f"open for {lasted(incident)}"
        if incident.closed_at is not None:
            state = f"lasted {lasted(incident)}, {incident.closed_because}"
        click.echo(
            f"{incident.incident_id:>6}  {incident.opened_at:%Y-%m-%d %H:%M:%S}  {short(incident.job)}{windows},"
            f" {printable(state)}: {printable(incident.cause.what)}"
        )
        if incident.closed_at is None:
            for title, text in advice(incident):
                click.echo(f"{title:>14}: {printable(text)}")


@store_command.command()
@_STORE
def check(store: Path | None) -> int:
    """Read every file and report damage; changes nothing. Exits with 3 if anything is damaged."""
    from tracekit.store import Store, default_store
    from tracekit.store.care import damages

    path = store or default_store()
    with progress() as tell:
        found = list(damages(Store(path), tell))
    _echo(found)
    result = f"{len(found)} damaged" if found else "all files are whole"
    click.echo(f"{printable(str(path))}: {result}")
    return ExitCode.CONDITION if found else ExitCode.DONE


@store_command.command()
@_STORE
def repair(store: Path | None) -> None:
    """Drop what is damaged, with a line for each; everything else stays."""
    from tracekit.store import Store, default_store
    from tracekit.store.care import repair as repairing

    path = store or default_store()
    with progress() as tell:
        done = repairing(Store(path), tell)
    if not _echo(done):
        click.echo(f"{printable(str(path))}: nothing to repair")


@store_command.command()
@_STORE
@click.option("--older-than", metavar="AGE", help="Remove ops of windows added longer ago, such as 30d or 12h.")
@click.option(
    "--max-size", metavar="SIZE", help="Remove the oldest ops until all files take at most this, such as 50G."
)
def prune(store: Path | None, older_than: str | None, max_size: str | None) -> None:
    """Remove raw ops by age or size; reports and findings stay."""
    from tracekit.store import Store, default_store
    from tracekit.store.care import prune as pruning

    if older_than is None and max_size is None:
        raise SelectionError("say what to prune with --older-than or --max-size")
    path = store or default_store()
    age = None if older_than is None else _age(older_than)
    most = None if max_size is None else _size(max_size)
    with progress() as tell:
        removed = pruning(Store(path), older_than=age, most_bytes=most, tell=tell)
    if not _echo(removed):
        click.echo(f"{printable(str(path))}: nothing to prune")


@store_command.command()
@click.argument("old", type=_PATH)
@click.option("--out", type=OUT, help="New store [default: the same name ending in .store].")
def migrate(old: Path, out: Path | None) -> None:
    """Put the jobs of OLD, a store in one file as an older tracekit wrote it, into a new store. OLD stays as it is."""
    from tracekit.store.care import migrate as migrating

    new = out or old.with_suffix(".store")
    with progress() as tell:
        jobs = migrating(old, new, tell)
    click.echo(f"Migrated {jobs} job{'s' * (jobs != 1)} to {short(str(new))}; {short(str(old))} is no longer needed")


def _echo(lines: Sequence[str]) -> int:
    """Print lines; return their number."""
    for line in lines:
        click.echo(printable(line))
    return len(lines)


def _age(text: str) -> timedelta:
    """`30d`, `12h` or `90m`. Raises SelectionError for anything else."""
    match = re.fullmatch(r"(\d{1,6})([dhm])", text)
    if match is None:
        raise SelectionError(
            f"--older-than {text!r:.40}; expected a number of days, hours or minutes, such as 30d or 12h"
        )
    return timedelta(**{{"d": "days", "h": "hours", "m": "minutes"}[match[2]]: int(match[1])})


def _size(text: str) -> int:
    """`50G` or the like in bytes. Raises SelectionError for anything else."""
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", text.upper())
    if match is None:
        raise SelectionError(f"--max-size {text!r:.40}; expected a number of bytes, such as 500M or 50G")
    return int(match[1]) * _UNITS[match[2]]
