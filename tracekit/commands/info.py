"""`tracekit info`: the content of a trace, or the jobs in a store.

In: a trace or a store. Out: text in the terminal.
"""

from __future__ import annotations

import click

from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.commands.options import Source, console, trace_source


@click.command("info")
@trace_source
def info_command(
    source: Source,
) -> None:
    """Show the content of a trace, or list the jobs of a folder or a store."""
    from tracekit.commands.recognise import jobs_in
    from tracekit.show.terminal.info import print_folder, print_jobs, print_trace

    if not source.traces and source.job is None and source.window is None:
        from tracekit.store import Store, default_store

        if source.layout is not None or source.unit is not None:
            raise SelectionError("--layout and --unit belong to a TRACE; name the trace file too")
        opened = Store(source.store or default_store())
        print_jobs(opened.name, opened.jobs(), console())
        return
    for trace in source.traces:
        if len(jobs := jobs_in(trace)) > 1:
            print_folder(trace, jobs, console())
            return
    with progress() as tell:
        tell("reading the trace")
        loaded = source.load().trace
    print_trace(loaded, console())
