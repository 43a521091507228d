"""`tracekit attach`: record a few steps of a running job and report on them.

In: a job that `tracekit collect` launched. Out: the report that `whatif` prints, and the cost of recording.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base import memory
from tracekit.base.command_line import quoted
from tracekit.base.stderr import progress, say
from tracekit.base.text import printable
from tracekit.commands.options import OUT, console, layout_sizes

if TYPE_CHECKING:
    from tracekit.collectors.merge.placement import LayoutOptions


@click.command("attach")
@click.argument("job", required=False)
@click.option("--steps", type=click.IntRange(2), default=5, show_default=True, metavar="N", help="Record N steps.")
@click.option("--out", type=OUT, help="Also write the trace to this Parquet file.")
@layout_sizes
@click.option("--full", is_flag=True, help="Print every table, cause and fix, not only the answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
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
    from tracekit.collectors.merge.recording_cost import recording_cost
    from tracekit.collectors.run_directory.host_clocks import read_clocks
    from tracekit.collectors.run_directory.steering import find_job, name_of_job
    from tracekit.dashboards.terminal.report import print_report
    from tracekit.trace.canonical import TRACE_FILE

    if out is not None:
        check_writable(out, TRACE_FILE)
    directory = find_job(job)
    name = name_of_job(directory)  # while it runs
    with progress() as tell:
        attached = record_steps(directory, steps, timeout, tell)
        cost = recording_cost(attached.recording)
        tell("analysing them")
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
