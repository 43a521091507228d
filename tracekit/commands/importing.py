"""`tracekit import`: traces and their reports into a store.

In: traces of any known format. Out: jobs in a store, all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.base.text import printable, short
from tracekit.commands.options import OUT, PATH, UNIT, read_job

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job
    from tracekit.report.findings import Findings, Unanalysed

#: Value of an option if it is given without one.
_LIST = "?"


@click.command("import")
@click.argument("traces", nargs=-1, type=PATH)
@click.option("--format", "importer", is_flag=False, flag_value=_LIST, help="Format of the traces; alone, lists them.")
@click.option("--layout", type=PATH, help="YAML file with the parallel sizes, of a published trace or of segments.")
@click.option(
    "--unit", type=UNIT, help="Unit of the times in the traces, if their format does not state it [default: s]."
)
@click.option("--store", type=OUT, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")
@click.option("--name", help="Name of the job in the store [default: the name in the trace]. For one trace.")
@click.option("--replace", is_flag=True, help="Replace a job of the same name.")
@click.option("--no-analysis", is_flag=True, help="Store the traces only; by default their reports are stored too.")
def import_command(
    traces: tuple[Path, ...],
    importer: str | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    name: str | None,
    replace: bool,
    no_analysis: bool,
) -> None:
    """Put traces and their reports into a store: all of them, or none if one is bad."""
    from tracekit.sources.load import are_one_job
    from tracekit.sources.search import jobs_in
    from tracekit.store import Incoming, Store, default_store

    if importer == _LIST:
        from tracekit.sources.plug_in import plugged_in
        from tracekit.sources.registry import FORMATS

        for entry in (*FORMATS.values(), *plugged_in()):
            click.echo(f"{entry.name:<20} {entry.description}")
        return
    if not traces:
        raise SelectionError("no TRACE given; expected at least one, or --format alone to list the formats")
    # Several files of torch.profiler are one job; each folder is one, unless it holds several.
    together = importer is None and not any(path.is_dir() for path in traces) and are_one_job(traces)
    jobs = [traces] if together else [(job,) for path in traces for job in jobs_in(path) or (path,)]
    if name is not None and len(jobs) > 1:
        raise SelectionError(f"--name {name!r} for {len(jobs)} traces; name one trace at a time")
    opened = Store(store or default_store())
    opened.check_new(None)
    incoming = []
    with progress() as tell:
        for path, *more in jobs:
            tell(f"reading {short(path.name)}")
            job = read_job(path, *more, layout=layout, importer=importer, unit=unit)
            job.validate()
            job_name, source = job.trace.name if name is None else name, printable(str(path))
            incoming.append(Incoming(job.trace, job_name, source, None if no_analysis else _findings(job, tell)))
        tell("writing the store")
        opened.add(incoming, replace=replace)
    for item in incoming:
        click.echo(f"Imported {short(item.name)} ({item.trace.ops.height:,} ops) into {printable(str(opened.path))}")
    click.echo(f"Next: {command('whatif', '--store', opened.path, '--job', incoming[-1].name)}")


def _findings(job: Job, tell: Callable[[str], None]) -> Findings | Unanalysed:
    """The findings of the analysis, or why there are none, also printed to stderr: the trace is stored in any case."""
    from tracekit.report.findings import Unanalysed

    findings = job.stored(progress=tell)
    if isinstance(findings, Unanalysed):
        click.echo(f"tracekit: stored without a report: {printable(findings.problem)}", err=True)
    return findings
