"""`tracekit compare`: changes between two runs.

In: two traces, or two jobs in a store. Out: one screen in the terminal, or JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.base.stderr import progress
from tracekit.base.text import short
from tracekit.commands.complete import traces_or_job_names
from tracekit.commands.options import PATH, UNIT, as_arguments, console, load

if TYPE_CHECKING:
    from tracekit.report.report import Report


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
    found = compare_runs((first.to_dict(), second.to_dict()))
    if as_json:
        click.echo(json.dumps(found.to_dict(), allow_nan=False))
        return
    from tracekit.show.terminal.comparison import print_comparison

    again = as_arguments(Path(after) if store is None else None, **_named(after, layout, unit, store))
    print_comparison(found, console(), commands=[f"tracekit whatif {again}"])


def _named(name: str, layout: Path | None, unit: str | None, store: Path | None) -> dict[str, Any]:
    """Return the arguments of `load` for one of the two, all by name but the trace."""
    return {"layout": layout, "unit": unit} if store is None else {"store": store, "job": name}


def _report(name: str, layout: Path | None, unit: str | None, store: Path | None) -> Report:
    return load(Path(name) if store is None else None, **_named(name, layout, unit, store)).whatif()
