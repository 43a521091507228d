"""Commands that get recordings: `tracekit import`, `attach`, `synth` and `doctor`.

In: traces of any format, a job that `tracekit collect` launched, causes and a seed, the training's Python. Out: jobs in
a store, a recording of a few steps and its report, simulated traces, a line for each dependency of collecting.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from tracekit.base import memory
from tracekit.base.arguments import OUT, OUT_STORE, PATH, FiniteRange
from tracekit.base.errors import ExitCode, SelectionError, TracekitError
from tracekit.base.paths import command, quoted
from tracekit.base.processes import answers_of, serve
from tracekit.base.stderr import advance, progress, say
from tracekit.base.text import counted, printable, short
from tracekit.collectors.launch.doctor import Check, CheckOutcome, checks
from tracekit.commands.options import AS_JSON, FULL, UNIT, console, layout_sizes, made_folder, read_job, store_at
from tracekit.sources.load import are_one_job, jobs_in, plugged_in
from tracekit.sources.registry import FORMATS

if TYPE_CHECKING:
    from tracekit.collectors.merge.placement import LayoutOptions
    from tracekit.store import Incoming, Store
    from tracekit.synth import SynthSpec

#: Value of an option if it is given without one.
_LIST = "?"
#: Jobs that are stored together: copying a store's catalogue takes as long as storing several jobs.
_TOGETHER = 50
#: Below so many jobs, starting processes takes longer than analysing them; files above so many bytes go from process to
#: process more slowly than they are analysed.
_FEW, _LARGE_BYTES = 12, 64 << 20
_READ = "from tracekit.commands.record import send_jobs; send_jobs()"


@click.command("import")
@click.argument("traces", nargs=-1, type=PATH)
@click.option("--format", "importer", is_flag=False, flag_value=_LIST, help="Format of the traces; alone, lists them.")
@click.option("--layout", type=PATH, help="YAML file with the parallel sizes, of a published trace or of segments.")
@click.option(
    "--unit", type=UNIT, help="Unit of the times in the traces, if their format does not state it [default: s]."
)
@click.option("--store", type=OUT_STORE, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")
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
    if importer == _LIST:
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
    target = store_at(store)
    target.check_new(None)
    continuable = len(jobs) > _TOGETHER
    readings = [_Reading(paths, name, layout, importer, unit, not no_analysis, continuable) for paths in jobs]
    if continuable and not replace:
        readings = list(_missing(readings, target))
    stored: list[str] = []
    with progress() as show_stage:
        try:
            for incoming in _in_batches(readings, show_stage):
                target.add(incoming, replace=replace)
                stored += [item.name for item in incoming]
                for item in incoming:
                    place = printable(str(target.path))
                    click.echo(f"Imported {short(item.name)} ({item.trace.ops.height:,} ops) into {place}")
        except KeyboardInterrupt:
            if continuable:
                say(f"tracekit: {counted(len(stored), 'job')} of {len(readings):,} stored; the same command goes on")
            raise
        except TracekitError as error:
            if not stored:
                raise
            error.args = (f"{error}; the {len(stored):,} jobs before it are stored, and the same command goes on",)
            raise
    if stored:
        click.echo(f"Next: {command('whatif', '--store', target.path, '--job', stored[-1])}")


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
    """Runs in a worker process: sends the trace of each requested job with its findings."""
    serve(_incoming)


def _incoming(reading: _Reading, show_stage: Callable[[str], None] | None = None) -> Incoming:
    """Read and analyse a job."""
    from tracekit.store import Incoming

    job = read_job(*reading.paths, layout=reading.layout, importer=reading.importer, unit=reading.unit)
    job.validate()
    name = job.trace.name if reading.name is None else reading.name
    return Incoming(job.trace, name, reading.source, job.stored(progress=show_stage) if reading.analysed else None)


def _in_batches(readings: Sequence[_Reading], show_stage: Callable[[str], None]) -> Iterator[list[Incoming]]:
    """The jobs, `_TOGETHER` at a time; says on stderr which could not be analysed."""
    from tracekit.report.findings import Unanalysed

    batch: list[Incoming] = []
    for number, item in enumerate(_readings_in_parallel(readings, show_stage), 1):
        if isinstance(item.findings, Unanalysed):
            click.echo(f"tracekit: stored without a report: {printable(item.findings.problem)}", err=True)
        batch.append(item)
        if len(batch) == _TOGETHER or number == len(readings):
            show_stage("writing the store")
            yield batch
            batch = []
        if number < len(readings) and len(readings) >= _FEW:
            advance("importing", number, len(readings), "jobs")


def _readings_in_parallel(readings: Sequence[_Reading], show_stage: Callable[[str], None]) -> Iterator[Incoming]:
    processes = len(os.sched_getaffinity(0))
    if len(readings) >= _FEW and processes > 1 and not any(reading.is_large for reading in readings):
        yield from answers_of(_READ, readings, processes, name=lambda reading: short(reading.paths[0].name))
        return
    for reading in readings:
        show_stage(f"reading {short(reading.paths[0].name)}")
        yield _incoming(reading, show_stage)


def _missing(readings: Sequence[_Reading], store: Store) -> Iterator[_Reading]:
    """The jobs that the store does not have, from the same place and as they are there now."""
    stored_at = {job.source: job.imported_at.timestamp() for job in store.jobs()} if store.is_store() else {}
    missing = [reading for reading in readings if reading.changed_at >= stored_at.get(reading.source, -math.inf)]
    if len(missing) < len(readings):
        click.echo(f"{len(readings) - len(missing):,} of {len(readings):,} jobs are in the store already")
    yield from missing


@click.command("attach")
@click.argument("job", required=False)
@click.option("--steps", type=click.IntRange(2), default=5, show_default=True, metavar="N", help="Record N steps.")
@click.option("--out", type=OUT, help="Also write the trace to this Parquet file.")
@layout_sizes
@FULL
@AS_JSON
@click.option(
    "--timeout",
    type=FiniteRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this long.",
)
def attach_command(
    job: str | None,
    steps: int,
    out: Path | None,
    layout: LayoutOptions,
    full: bool,
    as_json: bool,
    timeout: float,
) -> None:
    """Record a few steps of a running job, on all ranks, and report on them.

    JOB is the name of a job on this host, the process id of its launcher, or its folder (--segments), from any host
    that sees it. It may be omitted if only one job is running. Start the job with `tracekit collect --idle`.
    """
    memory.reuse_large_arrays()
    from tracekit.analysis.job.pipeline import PipelineJob
    from tracekit.base.atomic_write import check_writable
    from tracekit.collectors.launch.attach import record_steps
    from tracekit.collectors.merge.merge import merge_attempt
    from tracekit.collectors.merge.run_facts import recording_cost
    from tracekit.collectors.run_directory.segments import read_clocks
    from tracekit.collectors.run_directory.steering import find_job, name_of_job
    from tracekit.dashboards.terminal.report import print_report
    from tracekit.trace.canonical import TRACE_FILE

    if out is not None:
        check_writable(out, TRACE_FILE)
    directory = find_job(job)
    name = name_of_job(directory)  # while it runs
    with progress() as show_stage:
        attached = record_steps(directory, steps, timeout, show_stage)
        cost = recording_cost(attached.recording)
        show_stage("analysing them")
        merged = merge_attempt(
            attached.recording,
            name=name,
            first_step=attached.first_step,
            options=layout,
            clocks=read_clocks(directory),
            running=True,
        )
        report = PipelineJob(merged.trace).whatif()
    if out is not None:
        merged.trace.write_parquet(out)
    if as_json:
        click.echo(report.to_json())
    else:
        source = None if out is None else quoted(out)
        print_report(report, console(), source=source, path=out, full=full)
    say(f"tracekit: {cost if isinstance(cost, str) else cost.sentence()}")
    if out is not None:
        say(f"Wrote {printable(str(out))}")
    elif not as_json:
        say("tracekit: this trace is not kept; --out FILE keeps it, for `tracekit whatif FILE --full`")


@click.command("synth")
@click.option("-o", "--out", required=True, type=OUT, help="Canonical Parquet file to write; a folder with --jobs.")
@click.option("--jobs", type=click.IntRange(1, 1_000_000), help="Simulate so many jobs, each with a seed of its own.")
@click.option("--dp", default=4, show_default=True, help="Data-parallel size.")
@click.option("--pp", default=4, show_default=True, help="Pipeline stages.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--vpp", default=1, show_default=True, help="Model chunks per stage.")
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "1f1b", "interleaved"]),
    help="Order of forwards and backwards [default: 1f1b, interleaved with --vpp].",
)
@click.option("--microbatches", default=8, show_default=True, help="Microbatches per step and DP rank.")
@click.option("--steps", default=20, show_default=True, help="Steps to simulate.")
@click.option("--overlap-dp", is_flag=True, help="Overlap gradient reduction with the backwards.")
@click.option("--noise", default=0.02, show_default=True, help="Relative spread of compute durations.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same trace.")
@click.option("--name", default="synthetic", show_default=True, help="Name of the job.")
@click.option("--cause", "causes", multiple=True, metavar="CAUSE", help="Inject this cause. Repeatable.")
def synth_command(
    out: Path,
    jobs: int | None,
    dp: int,
    pp: int,
    tp: int,
    vpp: int,
    schedule: str | None,
    microbatches: int,
    steps: int,
    overlap_dp: bool,
    noise: float,
    seed: int,
    name: str,
    causes: tuple[str, ...],
) -> None:
    """Simulate a job with known stragglers, or a folder of such jobs.

    A CAUSE is a name with optional settings, such as "slow-worker:dp=1,pp=2,factor=1.5", "slow-last-stage",
    "sequence-length-imbalance", "python-gc", "slow-p2p-link", "slow-nic", "late-data-loading", "slow-steps",
    "clock-offset", "missing-ranks", "missing-steps"; its place is drawn from the seed unless given.
    """
    from tracekit.base.atomic_write import check_writable
    from tracekit.synth import SIMULATED_FILE, Schedule, SynthSpec, parse_cause, synthesize, write_simulated
    from tracekit.trace.model import Layout

    chosen = schedule or ("interleaved" if vpp > 1 else "1f1b")
    spec = SynthSpec(
        layout=Layout(dp=dp, pp=pp, tp=tp, vpp=vpp),
        schedule=Schedule(chosen),
        microbatches=microbatches,
        steps=steps,
        overlap_dp=overlap_dp,
        seed=seed,
        noise=noise,
        causes=tuple(parse_cause(cause) for cause in causes),
        name=name,
    )
    if jobs is not None:
        _write_jobs(spec, jobs, out)
        return
    check_writable(out, SIMULATED_FILE)
    with progress("simulating") as show_stage:
        trace = synthesize(spec)
        show_stage("writing")
        write_simulated(trace, out)
    click.echo(f"Wrote {printable(str(out))}: {trace.ops.height:,} ops. Next: {command('whatif', out)}")


def _write_jobs(spec: SynthSpec, jobs: int, out: Path) -> None:
    """Write jobs that differ in their seed, and so in noise and in places that are drawn. Raises OutputError."""
    from tracekit.synth import synthesize, write_simulated

    made_folder(out)
    with progress():
        for number in range(jobs):
            name = f"{spec.name}-{number:06d}"
            trace = synthesize(replace(spec, seed=spec.seed + number, name=name))
            write_simulated(trace, out / f"{number:06d}.parquet")
            advance("simulating", number + 1, jobs, "jobs")
    click.echo(f"Wrote {jobs:,} jobs into {printable(str(out))}")
    click.echo(f"Next: {command('fleet', 'run', out, '--out', 'study')}")


class DoctorOutput(Struct, frozen=True):
    """The output of `tracekit doctor --json`."""

    works: bool
    checks: list[Check]


@click.command("doctor")
@click.option("--python", metavar="PATH", help="Interpreter of the training [default: this one].")
@click.option("--store", type=OUT_STORE, help="Store to write to [default: $TRACEKIT_STORE, else ./tracekit.store].")
@AS_JSON
def doctor_command(python: str | None, store: Path | None, as_json: bool) -> int:
    """Will `tracekit collect` work here? Checks what it needs, and tries it with two ranks."""
    results = []
    with progress("checking, and training two ranks for a moment"):
        for check in checks(python or sys.executable, store):
            results.append(check)
            if not as_json:
                click.echo(f"{check.outcome:<5}  {check.subject:<11}  {printable(check.detail)}")
    fails = any(check.outcome is CheckOutcome.FAILS for check in results)
    if as_json:
        click.echo(msgspec.json.encode(DoctorOutput(not fails, results)))
    else:
        click.echo(
            "\nCollecting will not work here yet." if fails else "\nNext: tracekit collect -- torchrun ... train.py"
        )
    return ExitCode.CONDITION if fails else ExitCode.DONE
