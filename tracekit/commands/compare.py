"""`tracekit compare`: changes between two runs.

In: two traces, or two jobs in a store. Out: one screen in the terminal, or JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.base.text import short
from tracekit.commands.complete import traces_or_job_names
from tracekit.commands.options import PATH, UNIT, as_arguments, console, load

if TYPE_CHECKING:
    from tracekit.report.pipeline import Report


@click.command("compare")
@click.argument("before", metavar="A", shell_complete=traces_or_job_names)
@click.argument("after", metavar="B", shell_complete=traces_or_job_names)
@click.option("--layout", type=PATH, help="YAML file with the parallel sizes of published traces.")
@click.option("--unit", type=UNIT, help="Unit of the times in both traces [default: s].")
@click.option("--store", type=PATH, help="A and B are jobs in this store, of each the newest window.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(
    before: str, after: str, layout: Path | None, unit: str | None, store: Path | None, as_json: bool
) -> None:
    """Compare run A with run B: faster or slower, by how much, how certain, and which causes came and went.

    A and B are traces or, with --store, names of jobs.
    """
    from tracekit.analysis.attribution.comparison import compare_runs

    with progress() as tell:
        reports = []
        for name in (before, after):
            tell(f"analysing {short(name)}")
            reports.append(_report(name, layout, unit, store))
    first, second = reports
    found = compare_runs(
        (first.name, second.name), (first.to_dict(), second.to_dict()), (first.worker_steps(), second.worker_steps())
    )
    if as_json:
        click.echo(json.dumps(found.to_dict(), allow_nan=False))
        return
    from tracekit.show.terminal.comparison import print_comparison

    again = as_arguments(*_named(after, layout, unit, store))
    print_comparison(found, console(), commands=[f"tracekit whatif {again}"])


def _named(
    name: str, layout: Path | None, unit: str | None, store: Path | None
) -> tuple[Path | None, Path | None, str | None, Path | None, str | None, None]:
    """The arguments of `load` for one of the two."""
    if store is None:
        return Path(name), layout, unit, None, None, None
    return None, layout, unit, store, name, None


def _report(name: str, layout: Path | None, unit: str | None, store: Path | None) -> Report:
    from tracekit.job.op import OpJob
    from tracekit.job.pipeline import Job

    named = _named(name, layout, unit, store)
    job = load(*named)
    if not isinstance(job, Job):
        what = "an op trace (docs/op-trace.md)" if isinstance(job, OpJob) else "of torch.profiler (docs/kineto.md)"
        raise SelectionError(
            f"{short(name)} is {what}; only pipeline traces are compared, `tracekit whatif {as_arguments(*named)}`"
            " reads it"
        )
    return job.whatif()
