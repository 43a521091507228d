"""`tracekit import`: traces and their reports into a store.

In: traces of any known format. Out: jobs in a store. They are stored 50 at a time, all of these or none, so that an
import of many that ends early goes on where it ended. Many small ones are analysed in processes of their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError, TracekitError
from tracekit.base.processes import answers_of, serve
from tracekit.base.stderr import advance, progress, say
from tracekit.base.text import counted, printable, short
from tracekit.commands.options import OUT, PATH, UNIT, read_job, store_at

if TYPE_CHECKING:
    from tracekit.store import Incoming, Store

#: Value of an option if it is given without one.
_LIST = "?"
#: Jobs that are stored together: copying a store's catalogue takes as long as storing several jobs.
_TOGETHER = 50
#: Below so many jobs, starting processes takes longer than analysing them; files above so many bytes go from process to
#: process more slowly than they are analysed.
_FEW, _LARGE_BYTES = 12, 64 << 20
_READ = "from tracekit.commands.importing import send_jobs; send_jobs()"


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
    """Put traces and their reports into a store.

    Up to 50 are stored together: all of them, or none if one is bad. More are stored 50 at a time; after an import
    that ended early, repeat the command.
    """
    from tracekit.sources.load import are_one_job
    from tracekit.sources.search import jobs_in

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
    opened = store_at(store)
    opened.check_new(None)
    goes_on = len(jobs) > _TOGETHER
    readings = [_Reading(paths, name, layout, importer, unit, not no_analysis, goes_on) for paths in jobs]
    if goes_on and not replace:
        readings = list(_missing(readings, opened))
    stored: list[str] = []
    with progress() as tell:
        try:
            for incoming in _in_batches(readings, tell):
                opened.add(incoming, replace=replace)
                stored += [item.name for item in incoming]
                for item in incoming:
                    place = printable(str(opened.path))
                    click.echo(f"Imported {short(item.name)} ({item.trace.ops.height:,} ops) into {place}")
        except KeyboardInterrupt:
            if goes_on:
                say(f"tracekit: {counted(len(stored), 'job')} of {len(readings):,} stored; the same command goes on")
            raise
        except TracekitError as error:
            if not stored:
                raise
            error.args = (f"{error}; the {len(stored):,} jobs before it are stored, and the same command goes on",)
            raise
    if stored:
        click.echo(f"Next: {command('whatif', '--store', opened.path, '--job', stored[-1])}")


@dataclass(frozen=True, slots=True)
class _Reading:
    """One job to read, from `paths`, and whether to analyse it; the rest as of the command's options.

    `anywhere`: whether the store keeps the path from the root, by which an import from any folder knows the job again.
    """

    paths: tuple[Path, ...]
    name: str | None
    layout: Path | None
    importer: str | None
    unit: str | None
    analysed: bool
    anywhere: bool

    @property
    def source(self) -> str:
        """Where the job comes from, as in the store."""
        return printable(str(self.paths[0].absolute() if self.anywhere else self.paths[0]))

    @property
    def changed_at(self) -> float:
        """When what it comes from was changed last, seconds since the epoch."""
        return max((path.stat().st_mtime for path in self.paths if path.exists()), default=math.inf)

    @property
    def is_large(self) -> bool:
        """Whether reading it takes a process of its own, or all of this one's memory."""
        return any(path.is_dir() or path.stat().st_size > _LARGE_BYTES for path in self.paths if path.exists())


def send_jobs() -> None:
    """In a process of its own: for each job that it is asked for, the trace with its findings."""
    serve(_incoming)


def _incoming(reading: _Reading, tell: Callable[[str], None] | None = None) -> Incoming:
    """Read and analyse a job."""
    from tracekit.store import Incoming

    job = read_job(*reading.paths, layout=reading.layout, importer=reading.importer, unit=reading.unit)
    job.validate()
    name = job.trace.name if reading.name is None else reading.name
    return Incoming(job.trace, name, reading.source, job.stored(progress=tell) if reading.analysed else None)


def _in_batches(readings: Sequence[_Reading], tell: Callable[[str], None]) -> Iterator[list[Incoming]]:
    """The jobs, `_TOGETHER` at a time; says on stderr which could not be analysed."""
    from tracekit.report.findings import Unanalysed

    batch: list[Incoming] = []
    for number, item in enumerate(_read(readings, tell), 1):
        if isinstance(item.findings, Unanalysed):
            click.echo(f"tracekit: stored without a report: {printable(item.findings.problem)}", err=True)
        batch.append(item)
        if len(batch) == _TOGETHER or number == len(readings):
            tell("writing the store")
            yield batch
            batch = []
        if number < len(readings) and len(readings) >= _FEW:
            advance("importing", number, len(readings), "jobs")


def _read(readings: Sequence[_Reading], tell: Callable[[str], None]) -> Iterator[Incoming]:
    processes = len(os.sched_getaffinity(0))
    if len(readings) >= _FEW and processes > 1 and not any(reading.is_large for reading in readings):
        yield from answers_of(_READ, readings, processes, name=lambda reading: short(reading.paths[0].name))
        return
    for reading in readings:
        tell(f"reading {short(reading.paths[0].name)}")
        yield _incoming(reading, tell)


def _missing(readings: Sequence[_Reading], store: Store) -> Iterator[_Reading]:
    """The jobs that the store does not have, from the same place and as they are there now."""
    stored_at = {job.source: job.imported_at.timestamp() for job in store.jobs()} if store.is_store() else {}
    missing = [reading for reading in readings if reading.changed_at >= stored_at.get(reading.source, -math.inf)]
    if len(missing) < len(readings):
        click.echo(f"{len(readings) - len(missing):,} of {len(readings):,} jobs are in the store already")
    yield from missing
