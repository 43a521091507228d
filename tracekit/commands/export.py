"""`tracekit store export`: a timeline for viewing, or the trace itself.

In: a trace or a job in a store. Out: a file for ui.perfetto.dev, or canonical Parquet.
"""

from __future__ import annotations

from pathlib import Path

import click

from tracekit.base.errors import OutputError, SelectionError
from tracekit.base.stderr import progress
from tracekit.base.text import counted, printable
from tracekit.commands.arguments import parse_steps
from tracekit.commands.options import OUT, JobArguments, trace_source

#: How the names of its files end: a timeline is packed JSON, whatever it is called.
_ENDINGS = (".gz", ".json", ".parquet")


@click.command("export")
@trace_source
@click.option("-o", "--out", required=True, type=OUT, help="File to write: a timeline ending in .json.gz, or .parquet.")
@click.option("--steps", metavar="STEPS", help="Steps to write, such as 100-103 [default: all, or the slowest].")
def export_command(
    source: JobArguments,
    out: Path,
    steps: str | None,
) -> None:
    """Write the recorded, original and ideal timeline for ui.perfetto.dev; or the trace itself as .parquet.

    Of traces of torch.profiler, --steps are those of the training loop.
    """
    from tracekit.base.atomic_write import check_writable
    from tracekit.trace.canonical import TRACE_FILE
    from tracekit.trace.chrome import TIMELINE_FILE

    as_trace = out.suffix == ".parquet"
    check_writable(out, TRACE_FILE if as_trace else TIMELINE_FILE)
    if out.suffix not in _ENDINGS:
        raise OutputError(f"{out}: expected a name that ends in {', '.join(_ENDINGS)}; choose another --out")
    if as_trace and steps is not None:
        raise SelectionError("--steps chooses what a timeline shows; a .parquet file gets the whole trace")
    if any(trace.exists() and out.exists() and out.samefile(trace) for trace in source.traces):
        raise OutputError(f"{out}: is the trace to export, which it would replace; choose another --out")
    with progress("reading the trace") as tell:
        loaded = source.load()
        if as_trace:
            tell("writing")
            loaded.trace.write_parquet(out)
            click.echo(f"Wrote {printable(str(out))}: {loaded.trace.ops.height:,} ops")
            return
        tell("replaying and writing")
        exported = loaded.export(out, steps=None if steps is None else parse_steps(steps, "--steps"))
    chosen = f", {exported.steps} of {counted(exported.steps_in_job, 'step')}" if exported.steps_in_job else ""
    if steps is None and exported.steps < exported.steps_in_job:
        chosen += ", the slowest ones; choose others with --steps"
    slices = counted(exported.slices, "slice")
    click.echo(f"Wrote {printable(str(out))}: {slices}{chosen}. Open it in https://ui.perfetto.dev")
