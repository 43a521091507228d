"""The command line: thin commands over the library.

In: arguments. Out: a report, JSON or files; progress and errors on stderr. Exit codes: 0 done, 2 bad input (one clear
message), 3 a --fail-on condition holds, 4 a hang is found, 130 interrupted. Heavy imports live in the commands, so that
`--help` is fast.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit import __version__
from tracekit.arguments import Condition, parse_layers, parse_steps
from tracekit.collectors.launch.command import collect_command
from tracekit.dashboards.web.command import dashboard_command
from tracekit.errors import OutputError, SelectionError, TracekitError
from tracekit.hang_command import hang_command
from tracekit.stderr import hushed_panics, open_stderr, progress, say, silence_stdout
from tracekit.store_command import store_command
from tracekit.text import printable, short

if TYPE_CHECKING:
    from tracekit.findings import Findings, Unanalysed
    from tracekit.job import Job
    from tracekit.op_job import OpJob
    from tracekit.trace import Trace

EXIT_BAD_INPUT, EXIT_CONDITION, EXIT_INTERRUPTED = 2, 3, 130

# polars' allocator keeps freed memory for seconds, longer than most commands run: give it back at once.
os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")

_PATH = click.Path(path_type=Path)
_UNIT = click.Choice(["s", "ms", "us", "ns"])
#: Value of an option that is given without one.
_LIST = "?"


def main() -> None:
    """Entry point: run a command, turn every expected failure into one line and an exit code."""
    open_stderr()
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    output = sys.stdout
    try:
        code = commands.main(standalone_mode=False, obj=_analyse)
        click.echo(nl=False)  # flushes, and bears a stdout that was closed
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except TracekitError as error:
        say(f"tracekit: {printable(str(error))}")
        sys.exit(EXIT_BAD_INPUT)
    except BrokenPipeError:
        silence_stdout()
        sys.exit(0)
    except SystemExit as stop:
        if sys.stdout is output:
            raise
        silence_stdout()  # click replaces stdout and leaves with 1 where the reader of our output has left
        sys.exit(0 if stop.code == 1 else stop.code)
    except OSError as error:
        silence_stdout()
        say(f"tracekit: reading or writing failed: {printable(str(error))}; check disk and permissions")
        sys.exit(EXIT_BAD_INPUT)
    except MemoryError:
        say("tracekit: out of memory; analyse fewer steps or use a larger machine")
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tracekit")
def commands() -> None:
    """Find out what slows a large training job down, who causes it, and what each fix would buy."""


def _trace_source(command: Any) -> Any:
    """What names a job: a trace file with --layout and --unit, or --store with --job."""
    return click.argument("trace", required=False, type=_PATH)(_job_source(command))


def _job_source(command: Any) -> Any:
    """The options that name a job."""
    for decorate in (
        click.option("--layout", type=_PATH, help="YAML file with the parallel sizes of a published trace."),
        click.option("--unit", type=_UNIT, help="Unit of the times in TRACE [default: s]."),
        click.option("--store", type=_PATH, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store]."),
        click.option("--job", help="Job in the store [default: the newest]."),
        click.option("--window", type=int, help="Window of the job, where it has several [default: the newest]."),
    )[::-1]:
        command = decorate(command)
    return command


@commands.command()
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=_PATH)
@_job_source
@click.option("--fix", multiple=True, metavar="SELECTION", help="What if these ops were ideal? Repeatable.")
@click.option("--keep", multiple=True, metavar="SELECTION", help="What if only these ops were as recorded? Repeatable.")
@click.option("--by", multiple=True, metavar="LABEL[,LABEL]", help="S by any label, such as host or rank. Repeatable.")
@click.option(
    "--kernel-class",
    "kernel_classes",
    multiple=True,
    metavar="CLASS=REGEX|FILE",
    help="Class of GPU kernels by name, or a YAML file of such patterns. Repeatable.",
)
@click.option(
    "--layers", metavar="LAYERS", help="Transformer layers per stage, such as 9,9,9,9 [default: the trace's]."
)
@click.option("--ignore-steps", metavar="STEPS", help="Leave these steps out, such as 12,40-45.")
@click.option(
    "--method",
    type=click.Choice(["tracekit", "published"]),
    default="tracekit",
    show_default=True,
    help="Rules of the analysis: tracekit's own, or exactly those of the OSDI'25 paper.",
)
@click.option("--full", is_flag=True, help="Print every table, cause and fix, not only the answer.")
@click.option("--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Say the cost in money, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
@click.option("--csv", "csv_directory", type=_PATH, metavar="DIR", help="Also write every table as CSV into DIR.")
@click.option("--parquet", "parquet_file", type=_PATH, metavar="FILE", help="Also write exact S per worker and step.")
@click.option("--fail-on", metavar="CONDITION", help="Exit with 3 if it holds, such as 'slowdown>1.1'.")
def whatif(
    traces: tuple[Path, ...],
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    job: str | None,
    window: int | None,
    fix: tuple[str, ...],
    keep: tuple[str, ...],
    by: tuple[str, ...],
    kernel_classes: tuple[str, ...],
    layers: str | None,
    ignore_steps: str | None,
    method: str,
    full: bool,
    gpu_hour: float | None,
    as_json: bool,
    csv_directory: Path | None,
    parquet_file: Path | None,
    fail_on: str | None,
) -> int:
    """What do stragglers cost, who causes it, and what would fixing it give back?

    TRACE is a canonical Parquet file, a published trace with --layout, or a folder or files of torch.profiler; without
    it the job comes from the store.

    A SELECTION reads like "worker=5,2", "stage=3 and step=100-200", "kind=gc", "slowest=3%",
    "everything but communication". A CONDITION compares slowdown, waste, replay_error or discrepancy with a number.
    """
    from tracekit.job import Job

    condition = None if fail_on is None else Condition(fail_on)
    # Nothing here multiplies matrices: starting threads for it would take longer than numpy's import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if traces and _are_gpu_traces(traces):
        pipeline_only = {
            "--layout": layout, "--unit": unit, "--store": store, "--job": job, "--layers": layers,
            "--ignore-steps": ignore_steps, "--csv": csv_directory, "--parquet": parquet_file, "--fail-on": fail_on,
        }  # fmt: skip
        if given := [name for name, value in pipeline_only.items() if value is not None]:
            raise SelectionError(
                f"{given[0]} is for pipeline traces; {traces[0]} is of torch.profiler (docs/kineto.md)"
            )
        return _whatif_of_gpus(traces, fix, keep, by, kernel_classes, as_json=as_json)
    if kernel_classes:
        raise SelectionError("--kernel-class is for traces of torch.profiler")
    if len(traces) > 1:
        raise SelectionError(f"{len(traces)} traces: several files make one job only if they are of torch.profiler")
    trace = traces[0] if traces else None
    if parquet_file is not None:
        from tracekit.atomic_write import check_writable
        from tracekit.report import TABLE_FILE

        check_writable(parquet_file, TABLE_FILE)
    with progress() as tell:
        tell("reading the trace")
        loaded = _load(trace, layout, unit, store, job, window, method)
        if not isinstance(loaded, Job):
            pipeline_only = {
                "--layers": layers, "--ignore-steps": ignore_steps, "--csv": csv_directory, "--parquet": parquet_file,
                "--fail-on": fail_on,
            }  # fmt: skip
            if given := [name for name, value in pipeline_only.items() if value is not None]:
                name = short(loaded.trace.name) if trace is None else trace
                raise SelectionError(f"{given[0]} is for pipeline traces; {name} is an op trace (docs/op-trace.md)")
            return _whatif_of_ops(loaded, fix, keep, by, tell, as_json=as_json)
        if ignore_steps is not None:
            loaded = loaded.without_steps(parse_steps(ignore_steps, "--ignore-steps"))
        tell("building the dependency graph")
        report = loaded.whatif(fix=fix, keep=keep, by=by, layers=parse_layers(layers), progress=tell)
    if csv_directory is not None:
        report.write_csv(csv_directory)
    if parquet_file is not None:
        report.write_parquet(parquet_file)
    if as_json:
        click.echo(report.to_json())
    else:
        from tracekit.terminal import print_report

        source = _as_arguments(trace, layout, store, job, window)
        print_report(report, _console(), source=source, full=full, gpu_hour=gpu_hour)
    for path in (csv_directory, parquet_file):
        if path is not None:
            _done(path)
    return EXIT_CONDITION if condition is not None and condition.holds(report.attribution) else 0


def _whatif_of_ops(
    job: OpJob,
    fix: tuple[str, ...],
    keep: tuple[str, ...],
    by: tuple[str, ...],
    tell: Callable[[str], None],
    *,
    as_json: bool,
) -> int:
    """`whatif` for a job of any shape."""
    from tracekit.op_terminal import print_op_report

    tell("building the op graph")
    report = job.whatif(fix=fix, keep=keep, by=by, progress=tell)
    if as_json:
        click.echo(report.to_json())
    else:
        print_op_report(report, _console())
    return 0


def _are_gpu_traces(traces: tuple[Path, ...]) -> bool:
    """Whether these are traces of torch.profiler: none that another importer knows, and one that looks like it."""
    from tracekit.collectors.importers.kineto.reader import looks_like_kineto
    from tracekit.collectors.importers.registry import is_known

    return not any(map(is_known, traces)) and any(map(looks_like_kineto, traces))


def _whatif_of_gpus(
    traces: tuple[Path, ...],
    fix: tuple[str, ...],
    keep: tuple[str, ...],
    by: tuple[str, ...],
    kernel_classes: tuple[str, ...],
    *,
    as_json: bool,
) -> int:
    """`whatif` for traces of torch.profiler."""
    from tracekit.gpu_job import load_gpu
    from tracekit.gpu_terminal import print_gpu_report

    with progress() as tell:
        job = load_gpu(*traces, kernel_classes=kernel_classes, progress=tell)
        report = job.whatif(fix=fix, keep=keep, by=by, progress=tell)
    if as_json:
        click.echo(report.to_json())
    else:
        print_gpu_report(report, _console())
    return 0


@commands.command("import")
@click.argument("traces", nargs=-1, type=_PATH)
@click.option("--format", "importer", is_flag=False, flag_value=_LIST, help="Format of the traces; alone, lists them.")
@click.option("--layout", type=_PATH, help="YAML file with the parallel sizes, of a published trace or of segments.")
@click.option(
    "--unit", type=_UNIT, help="Unit of the times in the traces, where their format leaves it open [default: s]."
)
@click.option("--store", type=_PATH, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")
@click.option("--name", help="Name of the job in the store [default: the name in the trace]. For one trace.")
@click.option("--replace", is_flag=True, help="Replace a job of the same name.")
@click.option("--no-analysis", is_flag=True, help="Store the traces only; by default their reports are stored too.")
def import_(
    traces: tuple[Path, ...],
    importer: str | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    name: str | None,
    replace: bool,
    no_analysis: bool,
) -> None:
    """Put traces and their reports into a store: all of them, or none where one is bad."""
    from tracekit.any_job import load_any
    from tracekit.job import Job
    from tracekit.store import Incoming, Store, default_store

    if importer == _LIST:
        from tracekit.collectors.importers.registry import IMPORTERS

        for known in IMPORTERS.values():
            click.echo(f"{known.name:<20} {known.description}")
        return
    if not traces:
        raise SelectionError("no TRACE given; expected at least one, or --format alone to list the formats")
    if name is not None and len(traces) > 1:
        raise SelectionError(f"--name {name!r} for {len(traces)} traces; name one trace at a time")
    opened = Store(store or default_store())
    opened.check_new(None)
    incoming = []
    with progress() as tell:
        for path in traces:
            tell(f"reading {short(path.name)}")
            with hushed_panics():
                job = load_any(path, layout=layout, importer=importer, unit=unit)
            if not isinstance(job, Job):
                _ = job.graph  # its ops are checked where the graph is made of them
            job_name, source = job.trace.name if name is None else name, printable(str(path))
            incoming.append(Incoming(job.trace, job_name, source, None if no_analysis else _findings(job, tell)))
        tell("writing the store")
        opened.add(incoming, replace=replace)
    for item in incoming:
        click.echo(f"Imported {short(item.name)} ({item.trace.ops.height:,} ops) into {printable(str(opened.path))}")
    options = f"--store {shlex.quote(str(opened.path))} --job {shlex.quote(incoming[-1].name)}"
    click.echo(f"Next: tracekit whatif {printable(options)}")


def _findings(job: Job | OpJob, tell: Callable[[str], None]) -> Findings | Unanalysed:
    """What the analysis finds, or why nothing, said on stderr too: the trace is kept all the same."""
    from tracekit.findings import Unanalysed

    found = job.findings(progress=tell)
    if isinstance(found, Unanalysed):
        click.echo(f"tracekit: stored without a report: {printable(found.problem)}", err=True)
    return found


def _analyse(trace: Trace) -> Findings | Unanalysed:
    """What `tracekit collect` stores beside a trace."""
    from tracekit.job import Job

    return Job(trace).findings()


@commands.command()
@_trace_source
def info(
    trace: Path | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    job: str | None,
    window: int | None,
) -> None:
    """Say what a trace holds, or list the jobs of a store."""
    from tracekit.op_trace import OpTrace
    from tracekit.terminal_info import print_jobs, print_trace

    if trace is None and job is None and window is None:
        from tracekit.store import Store, default_store

        if layout is not None or unit is not None:
            raise SelectionError("--layout and --unit belong to a TRACE; name the trace file too")
        opened = Store(store or default_store())
        print_jobs(opened.path, opened.jobs(), _console())
        return
    loaded = _load(trace, layout, unit, store, job, window).trace
    if isinstance(loaded, OpTrace):
        from tracekit.op_terminal import print_op_trace

        print_op_trace(loaded, _console())
    else:
        print_trace(loaded, _console())


@commands.command()
@click.option("-o", "--out", required=True, type=_PATH, help="Canonical Parquet file to write.")
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
def synth(
    out: Path,
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
    """Simulate a job with known stragglers.

    A CAUSE is a name with optional settings, such as "slow-worker:dp=1,pp=2,factor=1.5", "slow-last-stage",
    "sequence-length-imbalance", "python-gc", "slow-p2p-link", "slow-nic", "late-data-loading", "slow-steps",
    "clock-offset", "missing-ranks", "missing-steps"; where it strikes is drawn from the seed unless said.
    """
    from tracekit.atomic_write import check_writable
    from tracekit.model import Layout
    from tracekit.synth import Schedule, SynthSpec, parse_cause, synthesize
    from tracekit.trace import TRACE_FILE

    check_writable(out, TRACE_FILE)
    chosen = schedule or ("interleaved" if vpp > 1 else "1f1b")
    with progress() as tell:
        tell("simulating")
        trace = synthesize(
            SynthSpec(
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
        )
        tell("writing")
        trace.write_parquet(out)
    next_command = f"tracekit whatif {shlex.quote(str(out))}"
    click.echo(f"Wrote {printable(str(out))}: {trace.ops.height:,} ops. Next: {printable(next_command)}")


@commands.command()
@_trace_source
@click.option(
    "-o", "--out", required=True, type=_PATH, help="File to write: a timeline ending in .json.gz, or .parquet."
)
@click.option("--steps", metavar="STEPS", help="Steps to write, such as 100-103 [default: all, or the slowest].")
def export(
    trace: Path | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    job: str | None,
    window: int | None,
    out: Path,
    steps: str | None,
) -> None:
    """Write the recorded, original and ideal timeline for ui.perfetto.dev; or the trace itself as .parquet."""
    from tracekit.atomic_write import check_writable
    from tracekit.chrome import TIMELINE_FILE
    from tracekit.job import Job
    from tracekit.trace import TRACE_FILE

    as_trace = out.suffix == ".parquet"
    if as_trace and steps is not None:
        raise SelectionError("--steps chooses what a timeline shows; a .parquet file gets the whole trace")
    check_writable(out, TRACE_FILE if as_trace else TIMELINE_FILE)
    if trace is not None and out.exists() and trace.exists() and out.samefile(trace):
        raise OutputError(f"{out}: is the trace to export, which would lose its other steps; choose another --out")
    with progress() as tell:
        tell("reading the trace")
        loaded = _load(trace, layout, unit, store, job, window)
        if as_trace:
            tell("writing")
            loaded.trace.write_parquet(out)
            click.echo(f"Wrote {printable(str(out))}: {loaded.trace.ops.height:,} ops")
            return
        if not isinstance(loaded, Job):
            raise SelectionError(f"{short(loaded.trace.name)} is an op trace, of which there is no timeline yet")
        tell("replaying and writing")
        exported = loaded.export(out, steps=None if steps is None else parse_steps(steps, "--steps"))
    chosen = f"{exported.steps} of {exported.steps_in_job} steps"
    if steps is None and exported.steps < exported.steps_in_job:
        chosen += ", the slowest ones; choose others with --steps"
    click.echo(f"Wrote {printable(str(out))}: {exported.slices:,} slices, {chosen}. Open it in https://ui.perfetto.dev")


commands.add_command(collect_command)
commands.add_command(dashboard_command)
commands.add_command(hang_command)
commands.add_command(store_command)


def _load(
    trace: Path | None,
    layout: Path | None,
    unit: str | None,
    store: Path | None,
    name: str | None,
    window: int | None,
    method: str = "tracekit",
) -> Job | OpJob:
    """The job the options name; without any, the newest in the default store, and say so."""
    from tracekit.any_job import load_any, load_any_from_store

    if trace is not None:
        if store is not None or name is not None or window is not None:
            raise SelectionError("give a TRACE, or --store and --job, not both")
        with hushed_panics():
            return load_any(trace, layout=layout, unit=unit, method=method)
    if layout is not None:
        raise SelectionError("--layout belongs to a TRACE; name the trace file too")
    if unit is not None:
        raise SelectionError("--unit belongs to a TRACE; a store holds seconds")
    job = load_any_from_store(name, store=store, window=window, method=method)
    if name is None:
        click.echo(f"No job named: taking the newest one in the store, {short(job.trace.name)}", err=True)
    return job


def _as_arguments(
    trace: Path | None, layout: Path | None, store: Path | None, job: str | None, window: int | None
) -> str:
    """How to name a job on the command line again."""
    named = {"": trace, "--layout": layout, "--store": store, "--job": job, "--window": window}
    given = {name: shlex.quote(printable(str(value))) for name, value in named.items() if value is not None}
    return " ".join(f"{name} {value}".strip() for name, value in given.items())


def _console() -> Any:
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with 1
            raise BrokenPipeError

    return _Console(highlight=False, soft_wrap=False)


def _done(path: Path) -> None:
    click.echo(f"Wrote {printable(str(path))}", err=True)


if __name__ == "__main__":
    main()
