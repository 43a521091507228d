"""`tracekit bill`: what every hour of a run went to, in hours, GPU-hours and money.

In: a run directory, a store, or a trace. Out: the bill in the terminal, as JSON or CSV.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError
from tracekit.base.look import Look
from tracekit.base.stderr import progress
from tracekit.commands.options import PATH, PriceType, console, read_job

if TYPE_CHECKING:
    from tracekit.bill.ledger import Bill

#: As `tracekit.bill.ledger.GROUPS`; that module imports polars.
_GROUPS = ("part", "cause", "week", "team", "job")


@click.command("bill")
@click.argument("source", metavar="DIR|STORE|TRACE", type=PATH)
@click.option("--by", type=click.Choice(_GROUPS), default="part", show_default=True, help="What to total.")
@click.option("--gpu-hour", type=PriceType(0), metavar="PRICE", help="State the cost in money, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print every row as CSV.")
def bill_command(source: Path, by: str, gpu_hour: float | None, as_json: bool, as_csv: bool) -> None:
    """What the hours of a run went to: useful steps, stragglers, input, checkpoints, restarts and lost work, ...

    DIR is what `tracekit collect --segments DIR` leaves of a command, with all its attempts; STORE is a store of jobs
    and of windows of running jobs; TRACE is anything that `tracekit whatif` reads. The rows add up to the wall clock;
    what no recording shows is a row, too.
    """
    from tracekit.base.safe_csv import safe_csv
    from tracekit.bill.bill_of_run import bill_of_run
    from tracekit.bill.stored import bill_of_job, bill_of_store
    from tracekit.dashboards.terminal.bill import print_bill
    from tracekit.sources.recognise import source_of
    from tracekit.store import Store

    if as_json and as_csv:
        raise SelectionError("one of --json and --csv at a time")
    with progress("reading the recording"):
        kind = source_of(Look(source))
        if kind is not None and kind.name == "segments":
            bill = bill_of_run(source)
        elif kind is not None and kind.name == "store":
            bill = bill_of_store(Store(source))
        else:
            bill = bill_of_job(read_job(source))
    if as_json:
        click.echo(msgspec.json.encode(bill.output(gpu_hour)))
    elif as_csv:
        priced = bill.rows if gpu_hour is None else bill.rows.with_columns(cost=bill.rows["gpu_hours"] * gpu_hour)
        click.echo(safe_csv(priced), nl=False)
    else:
        is_store = kind is not None and kind.name == "store"
        print_bill(bill, console(), by, gpu_hour, _next(source, bill) if is_store else command("whatif", source))


def _next(store: Path, bill: Bill) -> str:
    """The command that says more about the job of a store that lost most."""
    lost = {job: run.gpu_hours_lost for job, run in bill.runs.items()}
    return command("whatif", "--store", store, "--job", max(lost, key=lambda job: lost[job]))
