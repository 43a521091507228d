"""Shell completion: names of jobs in a store.

In: the arguments typed so far. Out: names, or nothing: a completion prints no error. The catalogue is read with DuckDB
alone, which loads in half the time of what commands need.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base.text import printable

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

#: Most names to complete: more are no help on a terminal.
_MOST_NAMES = 200
#: As `tracekit.store.folder` names it, whose import takes longer than all of this.
_CATALOGUE = "catalog.duckdb"
_NEWEST_FIRST = "SELECT name FROM jobs WHERE starts_with(name, $typed) ORDER BY job_id DESC LIMIT $most"


def job_names(context: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """The jobs that begin with what is `typed`, in the store that the command line names, else in the default one."""
    from click.shell_completion import CompletionItem

    # Before an option without its value, click has parsed the options, but not the arguments: `hang STORE --job`.
    given = context.params.get("store") or next(filter(_is_store, _words()), None)
    store = Path(given or os.environ.get("TRACEKIT_STORE") or "tracekit.store")
    # Unprintable names cannot be typed either.
    names = [name for name in _stored(store, typed) if name.strip() and name == printable(name)]
    return [CompletionItem(_quoted(name)) for name in names]


def traces_or_job_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Jobs if a store is named, else files."""
    from click.shell_completion import CompletionItem

    if context.params.get("store") is None:
        return [CompletionItem(typed, type="file")]
    return job_names(context, parameter, typed)


def _words() -> list[str]:
    """The command line so far."""
    from click.shell_completion import split_arg_string

    return split_arg_string(os.environ.get("COMP_WORDS", ""))


def _is_store(path: str | Path) -> bool:
    return (Path(path) / _CATALOGUE).is_file()


def _stored(store: Path, typed: str) -> list[str]:
    """The newest jobs of a store in a folder; empty for anything else."""
    if not _is_store(store):
        return []
    import duckdb

    try:
        with duckdb.connect(str(store / _CATALOGUE), read_only=True) as connection:
            rows = connection.execute(_NEWEST_FIRST, {"typed": typed, "most": _MOST_NAMES}).fetchall()
    except (duckdb.Error, OSError):  # damaged, or of another version: the command itself reports it
        return []
    return [name for (name,) in rows]


def _quoted(name: str) -> str:
    """The name quoted for the shell: bash inserts words as they are, zsh and fish quote them."""
    return shlex.quote(name) if os.environ.get("_TRACEKIT_COMPLETE", "").startswith("bash") else name
