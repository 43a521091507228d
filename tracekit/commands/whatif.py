"""`tracekit whatif`: the report on a job, for any kind of trace.

In: a trace, a folder of torch.profiler or a job in a store. Out: the report in the terminal, as JSON or in files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base import memory
from tracekit.base.command_line import quoted
from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import printable, short
from tracekit.commands.arguments import Condition, parse_layers, parse_steps
from tracekit.commands.options import OUT, PATH, Price, as_arguments, console, job_source, load
from tracekit.commands.recognise import only_job

if TYPE_CHECKING:
    from tracekit.job.op import OpJob

#: The FILE that stands for stdout.
STDOUT = Path("-")


@click.command("whatif")
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=PATH)
@job_source
@click.option("--fix", multiple=True, metavar="SELECTION", help="What if these were as fast as peers? Repeatable.")
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
@click.option("--explain", is_flag=True, help="Show how every number of the first screen was computed.")
@click.option("--gpu-hour", type=Price(0), metavar="PRICE", help="State the cost in money, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
@click.option("--markdown", type=PATH, metavar="FILE", help="Write answer, causes and fixes as Markdown; - for stdout.")
@click.option("--html", type=OUT, metavar="FILE", help="Write one page that needs no network, with figures.")
@click.option("--redact", is_flag=True, help="Leave out the names of the job and of its hosts, in every output.")
@click.option("--csv", "csv_directory", type=OUT, metavar="DIR", help="Also write every table as CSV into DIR.")
@click.option("--parquet", "parquet_file", type=OUT, metavar="FILE", help="Also write exact S per worker and step.")
@click.option("--fail-on", metavar="CONDITION", help="Exit with 3 if it holds, such as 'slowdown>1.1'.")
def whatif_command(
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
    explain: bool,
    gpu_hour: float | None,
    as_json: bool,
    markdown: Path | None,
    html: Path | None,
    redact: bool,
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
    from tracekit.job.load import are_gpu_traces
    from tracekit.job.pipeline import Job

    condition = None if fail_on is None else Condition(fail_on)
    memory.reuse_large_arrays()
    documents = {"--markdown": markdown, "--html": html, "--redact": redact or None}
    of_pipelines: dict[str, object] = {
        "--layers": layers,
        "--ignore-steps": ignore_steps,
        "--csv": csv_directory,
        "--parquet": parquet_file,
        "--fail-on": fail_on,
        "--gpu-hour": gpu_hour,
        "--explain": explain or None,
    }
    if len(traces) == 1:
        traces = (only_job(traces[0]),)
    if traces and are_gpu_traces(traces):
        of_pipelines |= {"--layout": layout, "--unit": unit, "--store": store, "--job": job}
        _refuse(of_pipelines, f"{traces[0]} is of torch.profiler (docs/kineto.md)")
        _check_files(None, markdown, html)
        return _whatif_of_gpus(
            traces, fix, keep, by, kernel_classes,
            as_json=as_json, full=full, markdown=markdown, html=html, redact=redact,
        )  # fmt: skip
    if kernel_classes:
        raise SelectionError("--kernel-class is for traces of torch.profiler")
    if len(traces) > 1:
        raise SelectionError(f"{len(traces)} traces: only files of torch.profiler can form one job together")
    trace = traces[0] if traces else None
    _check_files(parquet_file, markdown, html)
    with progress() as tell:
        tell("reading the trace")
        loaded = load(trace, layout, unit, store, job, window, method)
        if not isinstance(loaded, Job):
            name = short(loaded.trace.name) if trace is None else trace
            _refuse(of_pipelines | documents, f"{name} is an op trace (docs/op-trace.md)")
            from tracekit.job.op import OpJob

            assert isinstance(loaded, OpJob)  # GPU traces were handled above
            return _whatif_of_ops(loaded, fix, keep, by, tell, as_json=as_json)
        if ignore_steps is not None:
            loaded = loaded.without_steps(parse_steps(ignore_steps, "--ignore-steps"))
        if redact:
            loaded = Job(loaded.trace.redacted(), loaded.method)
        tell("building the dependency graph")
        prepared = loaded.replayed()
        del loaded  # and with it the ops, which nothing reads any more
        report = prepared.whatif(fix=fix, keep=keep, by=by, layers=parse_layers(layers), progress=tell)
        if html is not None:
            from tracekit.show.documents.page import page, write_page

            tell("the slowest steps")
            write_page(html, page(report, gpu_hour=gpu_hour))
    if csv_directory is not None:
        report.write_csv(csv_directory)
    if parquet_file is not None:
        report.write_parquet(parquet_file)
    source = "JOB" if redact else as_arguments(trace, layout, unit, store, job, window)
    if markdown is not None:
        from tracekit.show.documents.markdown import markdown as as_markdown

        _write_markdown(markdown, as_markdown(report, gpu_hour=gpu_hour, source=source))
    if as_json:
        click.echo(report.to_json())
    elif markdown != STDOUT:
        from tracekit.show.terminal.pipeline import print_report

        print_report(report, console(), source=source, full=full, explain=explain, gpu_hour=gpu_hour)
    _say_written(csv_directory, parquet_file, markdown, html)
    return ExitCode.CONDITION if condition is not None and condition.holds(report.attribution) else ExitCode.DONE


def _check_files(parquet_file: Path | None, markdown: Path | None, html: Path | None) -> None:
    """Raise OutputError, before the analysis, for a file that cannot be written."""
    from tracekit.base.atomic_write import check_writable

    if parquet_file is not None:
        from tracekit.report.tables import TABLE_FILE

        check_writable(parquet_file, TABLE_FILE)
    if markdown is not None and markdown != STDOUT:
        from tracekit.show.documents.markdown import MARKDOWN_FILE

        check_writable(markdown, MARKDOWN_FILE)
    if html is not None:
        from tracekit.show.documents.page import PAGE_FILE

        check_writable(html, PAGE_FILE)


def _say_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and path != STDOUT:
            click.echo(f"Wrote {printable(str(path))}", err=True)


def _write_markdown(path: Path, text: str) -> None:
    from tracekit.show.documents.markdown import write_markdown

    if path == STDOUT:
        click.echo(text, nl=False)
    else:
        write_markdown(path, text)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise SelectionError if an option was given that only pipeline traces support."""
    if given := [name for name, value in options.items() if value is not None]:
        raise SelectionError(f"{given[0]} is for pipeline traces; {why}")


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
    from tracekit.show.terminal.op import print_op_report

    tell("building the op graph")
    report = job.whatif(fix=fix, keep=keep, by=by, progress=tell)
    if as_json:
        click.echo(report.to_json())
    else:
        print_op_report(report, console())
    return 0


def _whatif_of_gpus(
    traces: tuple[Path, ...],
    fix: tuple[str, ...],
    keep: tuple[str, ...],
    by: tuple[str, ...],
    kernel_classes: tuple[str, ...],
    *,
    as_json: bool,
    full: bool,
    markdown: Path | None,
    html: Path | None,
    redact: bool,
) -> int:
    """`whatif` for traces of torch.profiler."""
    from tracekit.job.gpu import GpuJob, load_gpu
    from tracekit.show.terminal.gpu import print_gpu_report

    with progress() as tell:
        job = load_gpu(*traces, kernel_classes=kernel_classes, progress=tell)
        if redact:
            job = GpuJob(job.recording.redacted())
        report = job.whatif(fix=fix, keep=keep, by=by, progress=tell)
    source = "FOLDER" if redact else quoted(*traces)
    if html is not None:
        from tracekit.show.documents.gpu import gpu_page
        from tracekit.show.documents.page import write_page

        write_page(html, gpu_page(report))
    if markdown is not None:
        from tracekit.show.documents.gpu import gpu_markdown

        _write_markdown(markdown, gpu_markdown(report, source=source))
    _say_written(markdown, html)
    if as_json:
        click.echo(report.to_json())
    elif markdown != STDOUT:
        print_gpu_report(report, console(), source=source, asked=by, full=full)
    return 0
