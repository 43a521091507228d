"""Shared by several commands: options that name a job, loading it, and the terminal's console.

In: what the user typed. Out: jobs, or a SelectionError for contradictory options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.base.command_line import quoted
from tracekit.base.errors import SelectionError
from tracekit.base.stderr import hushed_panics
from tracekit.base.text import short
from tracekit.commands.complete import job_names
from tracekit.commands.recognise import explained, only_job

if TYPE_CHECKING:
    from rich.console import Console

    from tracekit.job.job import Job


class _Path(click.Path):
    """A path; an empty one, as from a variable that is not set, would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises SelectionError for an empty one."""
        if value == "":
            raise SelectionError(f"{'PATH' if param is None else param.human_readable_name}: the path is empty")
        return super().convert(value, param, ctx)


#: The argument or option is a path.
PATH = _Path(path_type=Path)


class _Out(_Path):
    """The path of a command's output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject `-`, which usually means stdout: here it would become a file or folder of that name.

        Raises SelectionError.
        """
        if value in ("-", Path("-")):
            option = param.opts[-1] if isinstance(param, click.Option) else "-"
            raise SelectionError(f"{option}: '-' does not mean stdout here; name a file or folder")
        return super().convert(value, param, ctx)


#: An option for an output path.
OUT = _Out(path_type=Path)


class Price(click.FloatRange):
    """A price of something: a finite number, not below zero."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises SelectionError, NaN and infinity included."""
        price = float(click.FLOAT.convert(value, param, ctx))
        if not 0 <= price < math.inf:
            option = param.opts[-1] if isinstance(param, click.Option) else "price"
            raise SelectionError(f"{option}: {price} is not a number of at least 0, such as 2.5")
        return price


#: Units of times in traces.
UNIT = click.Choice(["s", "ms", "us", "ns"])


def trace_source(command: Any) -> Any:
    """Options that name a job: a trace file with --layout and --unit, or --store with --job."""
    return click.argument("trace", required=False, type=PATH)(job_source(command))


def job_source(command: Any) -> Any:
    """The options that name a job."""
    for decorate in (
        click.option("--layout", type=PATH, help="YAML file with the parallel sizes of a published trace."),
        click.option("--unit", type=UNIT, help="Unit of the times in TRACE [default: s]."),
        click.option("--store", type=PATH, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store]."),
        click.option("--job", shell_complete=job_names, help="Job in the store [default: the newest]."),
        click.option("--window", type=int, help="Window of the job, if it has several [default: the newest]."),
    )[::-1]:
        command = decorate(command)
    return command


def load(
    *traces: Path | None,
    layout: Path | None = None,
    unit: str | None = None,
    store: Path | None = None,
    job: str | None = None,
    window: int | None = None,
    method: str = "tracekit",
    kernel_classes: Sequence[str] = (),
) -> Job:
    """Return the job that the options name; without any, the newest in the default store, with a note that says so."""
    from tracekit.job.load import load_from_store, load_trace

    paths = [trace for trace in traces if trace is not None]
    if paths:
        if store is not None or job is not None or window is not None:
            raise SelectionError("give a TRACE, or --store and --job, not both")
        if len(paths) == 1:
            paths = [only_job(paths[0])]
        with explained(paths[0]), hushed_panics():
            return load_trace(*paths, layout=layout, unit=unit, method=method, kernel_classes=kernel_classes)
    if layout is not None:
        raise SelectionError("--layout belongs to a TRACE; name the trace file too")
    if unit is not None:
        raise SelectionError("--unit belongs to a TRACE; a store holds seconds")
    loaded = load_from_store(job, store=store, window=window, method=method)
    if job is None:
        click.echo(f"No job named: taking the newest one in the store, {short(loaded.trace.name)}", err=True)
    return loaded


def as_arguments(
    *traces: Path | None,
    layout: Path | None = None,
    unit: str | None = None,
    store: Path | None = None,
    job: str | None = None,
    window: int | None = None,
) -> str:
    """Return the arguments that name the same job on the command line."""
    named = {"--layout": layout, "--unit": unit, "--store": store, "--job": job, "--window": window}
    given = [
        word
        for name, value in named.items()
        if value is not None
        for word in (name, value if isinstance(value, Path) else str(value))
    ]
    return quoted(*(trace for trace in traces if trace is not None), *given)


def console() -> Console:
    """A console for stdout, be it a terminal or not: into a file or a pipe, it writes no blanks at the ends of lines.

    If its reader closes it, the command ends with BrokenPipeError.
    """
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1
            raise BrokenPipeError

        def print(self, *objects: Any, **options: Any) -> None:
            if self.is_terminal:
                super().print(*objects, **options)
            else:
                with self.capture() as captured:
                    super().print(*objects, **options)
                self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))

    return Terminal(highlight=False, soft_wrap=False)
