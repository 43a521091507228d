"""`tracekit info`: the content of a trace, or the jobs in a store.

In: a trace or a store. Out: text in the terminal.
"""

from __future__ import annotations

from pathlib import Path

import click

from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.commands.options import console, load, trace_source


@click.command("info")
@trace_source
def info_command(
    trace: Path | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    job: str | None,
    window: int | None,
) -> None:
    """Show the content of a trace, or list the jobs of a folder or a store."""
    from tracekit.commands.recognise import jobs_in
    from tracekit.show.terminal.info import print_folder, print_jobs, print_trace

    if trace is None and job is None and window is None:
        from tracekit.store import Store, default_store

        if layout is not None or unit is not None:
            raise SelectionError("--layout and --unit belong to a TRACE; name the trace file too")
        opened = Store(store or default_store())
        print_jobs(opened.name, opened.jobs(), console())
        return
    if trace is not None and len(jobs := jobs_in(trace)) > 1:
        print_folder(trace, jobs, console())
        return
    with progress() as tell:
        tell("reading the trace")
        loaded = load(trace, layout=layout, unit=unit, store=store, job=job, window=window).trace
    print_trace(loaded, console())
