"""The report on a post-training run in the terminal.

In: an `RlReport`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tracekit.analysis.rl.report import RlReport, headline
from tracekit.base.text import short
from tracekit.show.rl_words import answer_rows, sizes, tables
from tracekit.show.terminal.tables import labelled, section_table, side_by_side


def print_rl(report: RlReport, name: str, console: Console) -> None:
    """Print the first line, what it rests on, and tables of phases, losses and prices."""
    phases, losses, prices = tables(report)
    console.print(Text(f"{short(name)}   {sizes(report)}\n"))
    console.print(Text(f"{headline(report)}\n", style="bold"))
    console.print(labelled(answer_rows(report)))
    console.print()
    console.print(side_by_side([section_table(one) for one in (phases, losses) if one.rows], console))
    console.print(section_table(prices))
