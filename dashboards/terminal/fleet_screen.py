"""A fleet's report in the terminal.

In: figures of a study, or of two. Out: what rich prints.
"""

from __future__ import annotations

from collections import Counter

import polars as pl
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tracekit.base.text import printable
from tracekit.dashboards.terminal.tables import LOST, filled_table, labelled, new_table
from tracekit.dashboards.words import figure_columns
from tracekit.fleet.figures import FleetFigures
from tracekit.fleet.study_comparison import ChangeDirection, FleetComparison
from tracekit.fleet.words import answer_rows, culprits_table, headline, tables
from tracekit.report.tables import Table

#: Lines of the first screen, and rows of each table on it.
_SCREEN, _MOST_ROWS = 24, 4
_STYLES = {ChangeDirection.WORSE: f"bold {LOST}", ChangeDirection.BETTER: "green", ChangeDirection.UNCLEAR: ""}


def print_fleet(
    figures: FleetFigures, culprits: pl.DataFrame, rate: float, console: Console, *, study: str, full: bool = False
) -> None:
    """Print the answer, with machines that recur and the costliest causes as far as they fit on one screen.

    `culprits`: with the false-discovery rate `rate`. `full`: all tables. `study`: its path, for commands to type next.
    """
    answer = labelled((name, printable(words)) for name, words in answer_rows(figures))
    first = Group(Text(printable(headline(figures)), style="bold"), Padding(answer, (1, 0)))
    console.print(first)
    all_tables = list(tables(figures))
    if full:
        for table in all_tables:
            console.print(_console_table(table))
        print_culprits(culprits, rate, console, all_culprits=f"tracekit fleet culprits {study}")
        return
    room = _SCREEN - len(console.render_lines(first)) - 1
    for table in (culprits_table(culprits, rate), *all_tables[:1]):
        for rows in range(min(len(table.rows), _MOST_ROWS), 0, -1):
            lines = _console_table(replace(table, rows=table.rows[:rows], note=""))
            if (height := len(console.render_lines(lines))) <= room:
                console.print(lines)
                room -= height
                break
    console.print(Text.assemble(("Next   ", "bold"), f"tracekit fleet report {study} --full"), soft_wrap=True)


def print_culprits(culprits: pl.DataFrame, rate: float, console: Console, most: int = 10, *, all_culprits: str) -> None:
    """Print machines that recur, at that false-discovery rate. `all_culprits`: the command that prints all."""
    table = culprits_table(culprits.head(most), rate)
    if not table.rows:
        console.print(f"No host or GPU holds up jobs more often than by chance (false-discovery rate {rate:.0%}).")
        return
    more = culprits.height - most
    rest = f" {more:,} more with `{all_culprits}`." if more > 0 else ""
    console.print(_console_table(replace(table, note=f"{table.note}{rest}")))


def print_fleet_comparison(comparison: FleetComparison, console: Console) -> None:
    """Print what changed from one study to the next."""
    directions = Counter(change.direction for change in comparison.changes)
    console.print(
        f"{directions[ChangeDirection.WORSE]} of {len(comparison.changes)} figures are worse,"
        f" {directions[ChangeDirection.BETTER]} better;"
        f" {comparison.jobs_before:,} jobs before, {comparison.jobs_after:,} after",
        style="bold",
    )
    table = new_table("Share", "before", "after", "change", "95% interval", "")
    for row in comparison.changes:
        table.add_row(
            Text(printable(f"{row.group}: {row.name}")),
            *(f"{value:.1%}" for value in (row.before, row.after)),
            f"{row.change.value:+.1%}",
            f"{row.change.low:+.1%} to {row.change.high:+.1%}",
            Text(str(row.direction), style=_STYLES[row.direction]),
        )
    console.print(Padding(table, (1, 0)))
    console.print("Each interval alone misses the true change in 5% of cases, so some rows stand out by chance.")


def _console_table(table: Table) -> RenderableType:
    lines, figures = filled_table(table), figure_columns(table.rows)
    for number, (column, texts) in enumerate(zip(lines.columns, zip(*table.rows, strict=True), strict=True)):
        column.justify = "right" if number in figures else "left"
        column.no_wrap = not any(" " in text for text in texts)  # words break only if all columns have shrunk
    return Group(Text(table.title, style="bold"), Padding(lines, (0, 0, 1, 0)))
