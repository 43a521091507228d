"""`tracekit whatif`: the report on a job, for any kind of trace; `tracekit rl`, with the options of post-training.

In: a trace, a folder of torch.profiler or a job in a store. Out: the report in the terminal, as JSON or in files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from tracekit.base import memory
from tracekit.base.arguments import OUT, OUT_OR_STDOUT, PATH, SectionedCommand
from tracekit.base.errors import ExitCode, FormatError, SelectionError
from tracekit.base.paths import Look
from tracekit.base.stderr import progress, say
from tracekit.base.text import printable, short
from tracekit.commands.options import (
    AS_JSON,
    FULL,
    GPU_HOUR,
    HTML,
    Condition,
    JobArguments,
    console,
    executor_of,
    job_source,
    parse_layers,
    parse_steps,
    read_job,
)
from tracekit.sources.load import is_a, wrong_source
from tracekit.sources.source import Content
from tracekit.trace.model import Format

if TYPE_CHECKING:
    from tracekit.analysis.experts.expert_loads import RebalancePlan
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.job.job import Analysis, ReportOptions
    from tracekit.analysis.job.pipeline_report import WorkerLanes
    from tracekit.analysis.metrics.samples import MetricSource
    from tracekit.report.questions import Experts
    from tracekit.report.report import Report

#: The FILE that means stdout.
STDOUT = Path("-")
#: Memory of an analysis in one piece for each byte of a Parquet file, at most.
_BYTES_PER_BYTE = 40
#: And for each op, if its rows are shuffled.
_BYTES_PER_OP = 200


#: The options of --help by section.
_SECTIONS = {
    "The job": ("layout", "unit", "store", "job", "window", "ignore_steps", "kernel_classes"),
    "What if": ("fix", "keep", "by", "layers", "gpus", "gpu_from", "precision"),
    "Look closer": ("bubbles", "schedules", "overlap", "experts", "expert_loads", "plans", "metrics", "unprofiled"),
    "The analysis": ("method", "engine"),
    "The report": ("full", "explain", "gpu_hour", "as_json", "form", "markdown", "html", "csv_directory",
                   "parquet_file", "redact", "fail_on"),
}  # fmt: skip


@click.command("whatif", cls=SectionedCommand, sections=_SECTIONS)
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=PATH)
@job_source
@click.option("--fix", multiple=True, metavar="SELECTION", help="What if these were as fast as peers? Repeatable.")
@click.option("--keep", multiple=True, metavar="SELECTION", help="What if only these ops were as recorded? Repeatable.")
@click.option("--by", multiple=True, metavar="LABEL[,LABEL]", help="Loss by a label, such as host or rank. Repeatable.")
@click.option(
    "--kernel-class",
    "kernel_classes",
    multiple=True,
    metavar="CLASS=REGEX|FILE",
    help="Class of GPU kernels by name, or a YAML file of such patterns. Repeatable.",
)
@click.option("--bubbles", is_flag=True, help="Where the stages of the pipeline are idle, and why.")
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="SCHEDULE",
    help="--bubbles, and the price of this schedule: gpipe, 1f1b, interleaved:chunks=V, zb-h1. Repeatable.",
)
@click.option("--overlap", is_flag=True, help="What communication compute hides, what waits, what hiding costs.")
@click.option("--experts", is_flag=True, help="Loads of experts, and what uneven ones cost.")
@click.option("--expert-loads", type=PATH, metavar="FILE", help="--experts, with the tokens of each expert as JSONL.")
@click.option(
    "--rebalance",
    "plans",
    multiple=True,
    metavar="PLAN",
    help="--experts, and the price of this plan: balanced, capacity=C, replicas=N, volume=R, chunks. Repeatable.",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    help="What if it ran on this GPU? A passport's file or a name, also 'FILE on rank=0-7'. Repeatable.",
)
@click.option("--gpu-from", metavar="GPU", help="The GPU of the trace [default: a known one of its name].")
@click.option("--precision", metavar="TYPE", help="--gpu, with matrix products in bf16, fp16, tf32, fp8, ...")
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
@click.option(
    "--engine",
    type=click.Choice(["local", "processes", "ray"]),
    help="In one piece, or a pipeline in batches of steps on processes or Ray [default: as memory allows].",
)
@click.option(
    "--metrics",
    metavar="SOURCE",
    help="Ask metrics about culprits: Parquet, OpenMetrics text, an answer or the URL of Prometheus.",
)
@click.option(
    "--unprofiled",
    type=PATH,
    metavar="TRACE",
    help="The same job by `tracekit collect`: how long its steps take.",
)
@FULL
@click.option("--explain", is_flag=True, help="Show how every number of the first screen was computed.")
@GPU_HOUR
@AS_JSON
@click.option("--as", "form", metavar="NAME", help="Print the report in the form of a plug-in (docs/extending.md).")
@click.option(
    "--markdown", type=OUT_OR_STDOUT, metavar="FILE", help="Write answer, causes and fixes as Markdown; - for stdout."
)
@HTML
@click.option("--redact", is_flag=True, help="Leave out the names of the job and of its hosts, in every output.")
@click.option("--csv", "csv_directory", type=OUT, metavar="DIR", help="Also write every table as CSV into DIR.")
@click.option("--parquet", "parquet_file", type=OUT, metavar="FILE", help="Also write exact S per worker and step.")
@click.option("--fail-on", metavar="CONDITION", help="Exit with 3 if it holds, such as 'slowdown>1.1'.")
def whatif_command(
    source: JobArguments,
    fix: tuple[str, ...],
    keep: tuple[str, ...],
    by: tuple[str, ...],
    kernel_classes: tuple[str, ...],
    bubbles: bool,
    schedules: tuple[str, ...],
    overlap: bool,
    experts: bool,
    expert_loads: Path | None,
    plans: tuple[str, ...],
    gpus: tuple[str, ...],
    gpu_from: str | None,
    precision: str | None,
    layers: str | None,
    ignore_steps: str | None,
    method: str,
    engine: str | None,
    metrics: str | None,
    unprofiled: Path | None,
    full: bool,
    explain: bool,
    gpu_hour: float | None,
    as_json: bool,
    form: str | None,
    markdown: Path | None,
    html: Path | None,
    redact: bool,
    csv_directory: Path | None,
    parquet_file: Path | None,
    fail_on: str | None,
) -> int:
    """What do stragglers cost, who causes it, and what would fixing it give back?

    TRACE is a canonical Parquet file, a published trace with --layout, a folder or files of torch.profiler, or a report
    that --json printed; without it the job comes from the store.

    A SELECTION reads like "worker=5,2", "stage=3 and step=100-200", "kind=gc", "slowest=3%",
    "everything but communication". A CONDITION compares slowdown, waste, replay_error, discrepancy, or what a kind of
    cause costs of the step, with a number: "slowdown>1.1", "python-gc>5%". A SCHEDULE may state the share of the
    weight gradients in the whole backward: "zb-h1,weight=0.4".
    """
    from tracekit.analysis.job.job import ReportOptions, hardware_question, measured_steps
    from tracekit.report.report import write_tables

    condition = None if fail_on is None else Condition(fail_on)
    memory.reuse_large_arrays()
    if as_json and markdown == STDOUT:
        raise SelectionError("--json and --markdown - both write to stdout; give --markdown a file")
    _check_writable(parquet_file, markdown, html)
    _check_schedules(schedules)
    priced, logged = _read_asked(expert_loads, plans)
    witness = None if metrics is None else _witness(metrics, redact=redact)
    render = None if form is None else _renderer(form, alone=not as_json and markdown != STDOUT)
    options = ReportOptions(
        fix=fix,
        keep=keep,
        by=by,
        layers=parse_layers(layers),
        worker_steps=parquet_file is not None,
        bubbles=bubbles,
        schedules=schedules,
        overlap=overlap,
        experts=experts or expert_loads is not None,
        expert_loads=logged,
        plans=tuple(priced),
        hardware=hardware_question(gpus, gpu_from, precision),
        metrics=witness,
        measured=measured_steps(None if unprofiled is None else read_job(unprofiled)),
    )
    with progress("reading the trace") as show_stage:
        steps = () if ignore_steps is None else parse_steps(ignore_steps, "--ignore-steps")
        lanes: WorkerLanes | None = None
        source_name: str | None = "JOB" if redact else source.arguments
        if source.is_report:
            _refuse_others(_OF_REPORTS, "needs the ops of its trace, and a report has none")
            report, source_name = source.report(), None
        elif (used := engine or _engine_for(source)) != "local":
            options.refuse_measured(source.arguments, "a pipeline")
            analysis = _in_batches(source, used, options, method, redact=redact, ignored=steps, show_stage=show_stage)
            report, lanes = _parts(analysis)
        else:
            try:
                loaded = source.load(method=method, kernel_classes=kernel_classes)
            except FormatError:
                loads = _loads_without_gpus(source.traces, priced, logged) if options.wants_experts else None
                if loads is None:
                    raise
                _print_loads(loads, as_json=as_json)
                return ExitCode.DONE
            if steps:
                loaded = loaded.without_steps(steps)
            if redact:
                loaded = loaded.redacted()
            show_stage("building the dependency graph")
            prepared = loaded.lean()
            del loaded  # and with it the ops of a pipeline, which nothing reads any more
            report, lanes = _parts(prepared.analyse(options, show_stage))
        if not source.is_report:
            report = source.with_run(report, redact=redact)
        if overlap and not report.overlap:
            say(f"tracekit: --overlap is for recordings of GPUs, and {short(report.name)} is not one")
        if html is not None:
            from tracekit.base.atomic_write import write_text
            from tracekit.dashboards.documents.page import PAGE_FILE, page

            show_stage("the slowest steps")
            write_text(html, page(report, lanes, gpu_hour=gpu_hour), PAGE_FILE)
    if csv_directory is not None:
        write_tables(report.frames() | ({} if lanes is None else lanes.frames()), csv_directory)
    if parquet_file is not None and lanes is not None:
        lanes.write_parquet(parquet_file)
    if markdown is not None:
        from tracekit.dashboards.documents.markdown import markdown as as_markdown
        from tracekit.dashboards.documents.markdown import write_markdown

        text = as_markdown(report, gpu_hour=gpu_hour, source=source_name)
        click.echo(text, nl=False) if markdown == STDOUT else write_markdown(markdown, text)
    if render is not None:
        click.echo(render(report), nl=False)
    elif as_json:
        click.echo(report.to_json())
    elif markdown != STDOUT:
        from tracekit.dashboards.terminal.report import print_report

        path = None if source_name is None or redact else source.in_browser
        print_report(report, console(), source=source_name, path=path, full=full, explain=explain, gpu_hour=gpu_hour)
    for path in (csv_directory, parquet_file, markdown, html):
        if path is not None and path != STDOUT:
            click.echo(f"Wrote {printable(str(path))}", err=True)
    if report.metrics and report.metrics.problem is not None:
        raise FormatError(report.metrics.problem)
    return ExitCode.DONE if condition is None else condition.judge(report)


def _witness(source: str, *, redact: bool) -> MetricSource:
    """The source of metrics. Raises FormatError for anything else, SelectionError with --redact."""
    from tracekit.collectors.importers.metrics import open_metrics

    if redact:
        raise SelectionError("--metrics names hosts, which --redact leaves out; give one of them")
    return open_metrics(source)


def _parts(analysis: Analysis) -> tuple[Report, WorkerLanes | None]:
    """The report, and the lanes of a pipeline; what else the analysis holds is freed."""
    return analysis.report, analysis.lanes


def _engine_for(source: JobArguments) -> str:
    """The engine for a job: batches of steps for a pipeline that is too large for the memory that is free."""
    free = _free_bytes()
    if not source.traces:
        window = source.stored_window()
        ops = window.ops if window.kind.in_batches else 0
    else:
        (path, *more) = source.traces
        if more or not path.is_file() or path.stat().st_size * _BYTES_PER_BYTE < free:
            return "local"  # and what reads a footer need not be imported
        from tracekit.trace.canonical import rows_of_file

        ops = source.of_file(rows_of_file) or 0
    if (needed := _BYTES_PER_OP * ops) < free:
        return "local"
    say(
        f"tracekit: the job needs about {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free: analysing it"
        " in batches of steps, as with --engine processes"
    )
    return "processes"


def _free_bytes() -> int:
    """Memory that the system could still give to processes, bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def _in_batches(
    source: JobArguments,
    engine: str,
    options: ReportOptions,
    method: str,
    *,
    redact: bool,
    ignored: Sequence[int],
    show_stage: Callable[[str], None],
) -> Analysis:
    """The analysis of a pipeline in batches of steps. Raises SelectionError for other jobs."""
    from tracekit.analysis.replay import Method
    from tracekit.fleet.batches import JobFile, analysed_in_batches
    from tracekit.trace.model import unit_of_time

    executor = executor_of(engine == "ray", os.environ.get("RAY_ADDRESS"), _free_bytes() * 3 // 4)
    unit = None if source.unit is None else unit_of_time(source.unit)

    def analysed(path: Path) -> Analysis:
        file = JobFile(path, source.layout, unit, Method(method), redact)
        return analysed_in_batches(file, executor, options=options, ignored=ignored, progress=show_stage)

    analysis = source.of_file(analysed)
    if analysis is None:
        raise SelectionError(f"--engine {engine} is for a pipeline in one Parquet file or stored window; leave it out")
    return analysis


def _read_asked(path: Path | None, plans: tuple[str, ...]) -> tuple[list[RebalancePlan], Loads | None]:
    """The plans, and the loads of experts in a file; before the analysis. Raises SelectionError or FormatError."""
    if path is None and not plans:
        return [], None
    from tracekit.analysis.experts.expert_loads import RebalancePlan
    from tracekit.analysis.experts.loads import Loads

    return [RebalancePlan.parse(text) for text in plans], None if path is None else Loads.read(path)


def _loads_without_gpus(
    traces: Sequence[Path], priced: Sequence[RebalancePlan], logged: Loads | None
) -> Experts | None:
    """The loads if the traces are torch.profiler's without GPU ops; None if they have no all-to-alls."""
    from tracekit.analysis.experts.balance import ExpertJob
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.collectors.importers.kineto.host_exchanges import host_exchanges

    members = host_exchanges(traces)
    return None if members.is_empty() else ExpertLoads(ExpertJob(members), logged).experts_with(priced)


#: Options that a recording without GPU ops can answer, and those that a report can.
_OF_LOADS = {"traces", "overlap", "experts", "expert_loads", "plans", "as_json", "full"}
_OF_REPORTS = {
    "traces",
    "full",
    "explain",
    "gpu_hour",
    "as_json",
    "form",
    "markdown",
    "html",
    "csv_directory",
    "fail_on",
}


def _refuse_others(options: Collection[str], why: str) -> None:
    """Raise SelectionError for an option that is not one of these, and say why."""
    context = click.get_current_context()
    for option in context.command.params:
        typed = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if typed and option.name not in options:
            raise SelectionError(f"{option.opts[-1]} {why}; leave it out")


def _print_loads(experts: Experts, *, as_json: bool) -> None:
    """Print loads without a report. Raises SelectionError for options that need one."""
    _refuse_others(_OF_LOADS, "needs GPU ops, and the recording has none")
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"experts": experts}))
        return
    from tracekit.analysis.job.build import experts_sentence, loads_sections
    from tracekit.dashboards.terminal.tables import labelled, section_panel

    out = console()
    out.print(
        labelled(
            [("Experts", experts_sentence(experts)), ("Missing", "no GPU ops were recorded, so nothing is priced")]
        )
    )
    for section in loads_sections(experts):
        out.print(section_panel(section, out))


def _renderer(name: str, *, alone: bool) -> Callable[[Report], str]:
    """The renderer of that name. Raises SelectionError if there is none, or if it is not `alone` on stdout."""
    from tracekit.dashboards.documents.markdown import renderer

    if not alone:
        raise SelectionError("--as prints to stdout, and so does --json or --markdown -; choose one")
    return renderer(name)


def _check_schedules(schedules: tuple[str, ...]) -> None:
    """Raise SelectionError, before the analysis, for a schedule that does not exist."""
    if schedules:
        from tracekit.analysis.bubbles.schedules import AskedSchedule

        for text in schedules:
            AskedSchedule.parse(text)


def _check_writable(parquet_file: Path | None, markdown: Path | None, html: Path | None) -> None:
    """Raise OutputError, before the analysis, for a file that cannot be written."""
    if all(path in (None, STDOUT) for path in (parquet_file, markdown, html)):
        return  # rarely needed, and the page takes long to import
    from tracekit.analysis.job.pipeline_report import TABLE_FILE
    from tracekit.base.atomic_write import check_writable
    from tracekit.dashboards.documents.markdown import MARKDOWN_FILE
    from tracekit.dashboards.documents.page import PAGE_FILE

    for path, kind in ((parquet_file, TABLE_FILE), (markdown, MARKDOWN_FILE), (html, PAGE_FILE)):
        if path is not None and path != STDOUT:
            check_writable(path, kind)


@click.command("rl")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--format", "written_by", type=click.Choice(["auto", *map(str, Format)]), default="auto", show_default=True,
    help="Who wrote the files; trajectories: the generic format of docs/rl.md.",
)  # fmt: skip
@click.option("--gpus", metavar="rollout=A,trainer=B", help="GPUs of the two roles, for split=A:B.")
@click.option("--slots", type=click.IntRange(1, 1 << 30), help="Most requests that an engine runs at once.")
@click.option(
    "--what-if", "what_ifs", multiple=True, metavar="X",
    help="Price X: staleness=K, partial=Q, engines=N, split=A:B, longest-first. Repeatable.",
)  # fmt: skip
@HTML
@AS_JSON
def rl_command(
    files: tuple[Path, ...],
    written_by: str,
    gpus: str | None,
    slots: int | None,
    what_ifs: tuple[str, ...],
    html: Path | None,
    as_json: bool,
) -> None:
    """Where did the step of post-training go, and what would a step of staleness buy?

    FILE is the log of verl, OpenRLHF, slime, NeMo-RL, SkyRL or open-instruct, or trajectories and phases with their
    times, such as the folder into which tracekit.rl records. From phases alone, only staleness has a price;
    trajectories show queues, tails and uneven engines, too.

    An X may set what generation and training take then, such as "staleness=1,generate=40,train=35" in seconds, and
    several changes go together: "staleness=1,partial=0.9".
    """
    from tracekit.analysis.job.rl_job import RlJob
    from tracekit.analysis.rl.rl_run import Gpus
    from tracekit.base.atomic_write import check_writable, write_text
    from tracekit.dashboards.documents.page import PAGE_FILE, page

    if html is not None:
        check_writable(html, PAGE_FILE)
    stated = None if gpus is None else Gpus.parse(gpus)
    with progress("reading the log") as show_stage:
        try:
            job = RlJob.read(files, None if written_by == "auto" else Format(written_by), gpus=stated, slots=slots)
        except FormatError as error:
            reports = [Look(file) for file in files if is_a(Content.REPORT, file)]
            raise (wrong_source(reports[0], Content.TRACE) if reports else None) or error from None
        report = job.whatif(fix=what_ifs, progress=show_stage)
    if html is not None:
        write_text(html, page(report), PAGE_FILE)
        click.echo(f"Wrote {printable(str(html))}", err=True)
    if as_json:
        click.echo(report.to_json())
    else:
        from tracekit.dashboards.terminal.report import print_report

        print_report(report, console())
