"""Tables that terminal reports share.

In: results as data. Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.report.section import Table as Section

#: Columns between panels.
_GAP = 3


def new_table(*headers: str) -> Table:
    """A table without lines: text to the left, figures to the right."""
    table = Table(box=None, padding=(0, 1), header_style="bold underline")
    for number, header in enumerate(headers):
        text = number == 0 or header == "host"
        justify: Literal["left", "right"] = "left" if text else "right"
        # Rich shrinks the columns that may wrap, down to nothing, if a table is too wide.
        table.add_column(header, justify=justify, no_wrap=number > 0, overflow="fold", min_width=len(header))
    return table


def section_table(section: Section) -> RenderableType:
    """A table of a report; of one without rows, what it says instead."""
    if not section.rows:
        return Text(f"{section.title}: {section.note}")
    table = new_table(*section.heads)
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    table.caption, table.caption_justify = section.note, "left"
    return table


def side_by_side(panels: Sequence[RenderableType], console: Console) -> RenderableType:
    """Panels in rows, each with as many panels as fit into the console."""
    rows: list[list[RenderableType]] = []
    left = 0
    for panel in panels:
        width = console.measure(panel).maximum + _GAP
        if not rows or width > left:
            rows.append([])
            left = console.width + _GAP
        rows[-1].append(panel)
        left -= width
    grids: list[RenderableType] = []
    for row in rows:
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        grid.add_row(*row)
        grids.append(Padding(grid, (0, 0, 1, 0)))
    return Group(*grids)


def labelled(rows: Iterable[tuple[str, str | None]]) -> Table:
    """Sentences with their subject to their left, in colour for trust and for missing data; leaves out empty ones."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in rows:
        if words:
            line = Text(words, style="yellow" if name == "Missing" else "")
            if name == "Trust":
                line.highlight_regex("^yes", "green")
                line.highlight_regex("^NO", "bold red")
            grid.add_row(name, line)
    return grid


def slowdown_text(value: float) -> Text:
    """S with three decimals, marked if it is straggling."""
    return Text(f"{value:.3f}", style="bold #fe9929" if value >= 1.1 else "")
