"""A bill in the terminal.

In: a `Bill`. Out: what rich prints.
"""

from __future__ import annotations

import polars as pl
from rich.console import Console
from rich.text import Text

from tracekit.base.text import printable, short, three_digits
from tracekit.bill.ledger import Bill
from tracekit.costs.parts import BillPart
from tracekit.dashboards.terminal.tables import labelled, new_table
from tracekit.report.finding import kind_words

#: Longer names are cut.
_LONGEST_NAME = 46


def print_bill(bill: Bill, console: Console, by: str, gpu_hour: float | None) -> None:
    """Print the totals of each part, cause, week, team or job; what is unknown, with each reason. `gpu_hour`: the price
    of a GPU-hour, in any currency.
    """
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
        name = row[by] or "unknown"
        if row.get("cause"):
            name = f"{row['part']}: {kind_words(row['cause'])}"
        add(name, row, gpu_hours if of_parts else row["gpu_hours"])
    useful = gpu_hours if of_parts else float(totals["useful"].sum())
    add("wall clock", {"hours": hours, "gpu_hours": gpu_hours, "useful": useful}, gpu_hours)
    console.print(table)
    if bill.notes:
        console.print()
        console.print(labelled(("Note", printable(note)) for note in bill.notes))
