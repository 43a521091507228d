"""`tracekit compare`: changes between two runs.

In: two traces, or two jobs in a store. Out: one screen in the terminal, or JSON.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.base.text import short
from tracekit.commands.complete import traces_or_job_names
from tracekit.commands.options import PATH, UNIT, JobArguments, console


@click.command("compare")
@click.argument("before", metavar="A", shell_complete=traces_or_job_names)
@click.argument("after", metavar="B", shell_complete=traces_or_job_names)
@click.option("--layout", type=PATH, help="YAML file with the parallel sizes of published traces.")
@click.option("--unit", type=UNIT, help="Unit of the times in both traces [default: s].")
@click.option("--store", type=PATH, help="A and B are jobs in this store: their newest windows.")
@click.option("--fix", metavar="NAME", help="The fix of A that B has, by its kind or title: keep what it gave back.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_command(
    before: str, after: str, layout: Path | None, unit: str | None, store: Path | None, fix: str | None, as_json: bool
) -> None:
    """Compare run A with run B: faster or slower, by how much, how certain, and which causes came and went.

    A and B are traces or, with --store, names of jobs. With --fix, the store keeps what the fix was expected to save
    and what it saved, for the dashboard and `fleet report`.
    """
    from tracekit.report.applied import ComparedOutput, fix_applied
    from tracekit.report.comparison import compare_runs

    if fix is not None and before == after:
        raise SelectionError("--fix: A and B are the same job; B is the one that has the fix")
    if fix is not None and store is None:
        raise SelectionError("--fix: a store keeps the result; give --store, and A and B as names of its jobs")
    sources = [
        JobArguments((Path(name),), layout, unit) if store is None else JobArguments(store=store, job=name)
        for name in (before, after)
    ]
    with progress() as tell:
        reports = []
        for name, source in zip((before, after), sources, strict=True):
            tell(f"analysing {short(name)}")
            reports.append(source.load().whatif())
    comparison = compare_runs((reports[0], reports[1]))
    applied = None
    if fix is not None and store is not None:
        from tracekit.store import Store
        from tracekit.store.handling import current_user

        opened = Store(store)
        expected = opened.report(before)
        promised = reports[0] if expected is None else expected
        applied = fix_applied((reports[0], reports[1]), promised.fixes, fix, time.time(), current_user())
        opened.note_applied(applied)
    if as_json:
        click.echo(msgspec.json.encode(ComparedOutput(**msgspec.structs.asdict(comparison.output), fix=applied)))
        return
    from tracekit.dashboards.terminal.comparison import print_comparison

    print_comparison(comparison, console(), commands=[f"tracekit whatif {sources[1].arguments}"], fix=applied)
