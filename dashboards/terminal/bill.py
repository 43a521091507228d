"""A bill in the terminal: how much was useful and what cost most, then the table.

In: a `Bill`. Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

import polars as pl
from rich.console import Console
from rich.text import Text

from tracekit.base.text import printable, short, three_digits
from tracekit.bill.ledger import Bill
from tracekit.costs.parts import BillPart
from tracekit.dashboards.run_words import cause_sentence
from tracekit.dashboards.terminal.tables import labelled, new_table
from tracekit.report.finding import kind_words

#: Longer names are cut.
_LONGEST_NAME = 46
#: The rows of what has no team, or no time.
_WITHOUT = {"team": "no team", "week": "no date"}
#: Parts that somebody can win back by fixing their cause.
_LOSSES = (
    BillPart.STRAGGLERS,
    BillPart.HOST,
    BillPart.COMMUNICATION,
    BillPart.COMPUTE,
    BillPart.POST_TRAINING,
    BillPart.INPUT,
    BillPart.IDLE,
)


def print_bill(bill: Bill, console: Console, by: str, gpu_hour: float | None, next_command: str) -> None:
    """Print the totals of each part, cause, week, team or job; what is unknown, with each reason. `gpu_hour`: the price
    of a GPU-hour, in any currency. `next_command`: what says more about the job that lost most.
    """
    console.print(Text(headline(bill), style="bold"))
    console.print(labelled(_worst(bill, gpu_hour)))
    console.print()
    totals, hours = bill.by(by), sum(bill.wall_s.values()) / 3600
    if by == "part":  # the unknown is the last part
        unknown = pl.col("part") == BillPart.UNKNOWN
        totals = pl.concat([totals.remove(unknown), bill.by("cause").filter(unknown)], how="diagonal")
    of_parts = by in ("part", "cause")
    heads = [by, "hours", "GPU-hours", "share" if of_parts else "useful", *(["cost"] if gpu_hour is not None else [])]
    table = new_table(*heads)
    table.columns[0].no_wrap = True
    gpu_hours = bill.gpu_hours

    def add(name: str, row: dict[str, float], whole: float) -> None:
        useful = row["gpu_hours"] if of_parts else row["useful"]
        share = useful / whole if whole else 0.0
        money = [] if gpu_hour is None else [f"{row['gpu_hours'] * gpu_hour:,.2f}"]
        table.add_row(
            Text(short(name, _LONGEST_NAME)),
            three_digits(row["hours"]),
            three_digits(row["gpu_hours"]),
            f"{share:.1%}",
            *money,
        )

    for row in totals.iter_rows(named=True):
        name = _WITHOUT[by] if row[by] is None else row[by]
        if row.get("cause"):
            name = f"{row['part']}: {kind_words(row['cause'])}"
        add(name, row, gpu_hours if of_parts else row["gpu_hours"])
    useful = gpu_hours if of_parts else float(totals["useful"].sum())
    add("wall clock", {"hours": hours, "gpu_hours": gpu_hours, "useful": useful}, gpu_hours)
    console.print(table)
    if bill.notes:
        console.print()
        console.print(labelled(("Note", printable(note)) for note in bill.notes))
    console.print(Text.assemble("\n", ("Next   ", "bold"), next_command), soft_wrap=True)


def headline(bill: Bill) -> str:
    """How much was useful, and what most of the rest went to: "84% of 0.00435 GPU-hours were useful; ..."."""
    whole = bill.gpu_hours
    parts = {
        part: hours / whole if whole else 0.0 for part, hours in bill.by("part").select("part", "gpu_hours").rows()
    }
    words = f"{parts.pop(BillPart.USEFUL, 0.0):.0%} of {three_digits(whole)} GPU-hours were useful"
    most = max(parts, key=lambda part: parts[part], default=None)
    return words if most is None else f"{words}; the largest other part is {most}, {parts[most]:.0%}"


def _worst(bill: Bill, gpu_hour: float | None) -> Iterator[tuple[str, str]]:
    """Yield the cause that cost most, with its place and its times where these are known, and the bill without it."""
    cost = _costliest_of_runs(bill) or _costliest_of_rows(bill)
    if cost is None:
        return
    words, hours = cost
    whole, rest = bill.gpu_hours, bill.gpu_hours - hours
    useful = float(bill.by("part").filter(part=BillPart.USEFUL)["gpu_hours"].sum())
    money = "" if gpu_hour is None else f", {hours * gpu_hour:,.2f} less at {gpu_hour:g} a GPU-hour"
    then = f"; {useful / whole:.0%} to {useful / rest:.0%} useful" if rest > 0 else ""
    yield "Worst", words
    yield "Without", f"{three_digits(whole)} to {three_digits(rest)} GPU-hours{money}{then}"


def _costliest_of_runs(bill: Bill) -> tuple[str, float] | None:
    """The sentence about the costliest cause of all jobs, and its GPU-hours; None if no cause stands out."""
    causes = [(run.alarming[0].gpu_hours_lost, job, run) for job, run in bill.runs.items() if run.alarming]
    if not causes:
        return None
    hours, job, run = max(causes, key=lambda cause: cause[0])
    of_job = f"{short(job)}: " if len(bill.wall_s) > 1 else ""
    return f"{of_job}{cause_sentence(run.alarming[0], UTC, run)}", hours


def _costliest_of_rows(bill: Bill) -> tuple[str, float] | None:
    """The same of a bill without places: the costliest cause of a loss."""
    losses = bill.by("cause").filter(pl.col("part").is_in(list(map(str, _LOSSES)))).sort("gpu_hours", descending=True)
    if losses.is_empty():
        return None
    cause, hours = losses.select("cause", "gpu_hours").row(0)
    return f"{kind_words(cause)}, {three_digits(hours)} GPU-hours", hours
