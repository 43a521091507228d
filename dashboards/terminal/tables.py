"""Tables that terminal reports share.

In: results as data. Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tracekit.dashboards.figures.characters import lines_of
from tracekit.dashboards.terminal.colours import LOST
from tracekit.report.section import Section
from tracekit.report.section import Table as TableOfReport

#: Columns between panels; the narrowest that a column of words gets, and the longest word that it does not break.
_GAP, _NARROWEST, _LONGEST_WORD = 3, 16, 24


class FittingTable(Table):
    """A table that becomes a list where it does not fit, a block per row, so that no cell is cut. Its caption has the
    width of the terminal.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows as blocks, then its caption."""
        caption, self.caption = self.caption, None
        if sum(self._least(console, column) + 2 for column in self.columns) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from map(self._block, zip(*(column.cells for column in self.columns), strict=True))
        self.caption = caption
        if caption:
            yield Text(str(caption), style="dim italic")

    @staticmethod
    def _least(console: Console, column: Column) -> int:
        """The width that a column needs: that of its cells, or of a few words if they may wrap."""
        cells = [console.measure(cell) for cell in (column.header, *column.cells)]
        whole, word = max(cell.maximum for cell in cells), max(cell.minimum for cell in cells)
        return whole if column.no_wrap else min(whole, max(_NARROWEST, min(_LONGEST_WORD, word)))

    def _block(self, cells: Sequence[RenderableType]) -> RenderableType:
        named = [
            (str(column.header), str(cell))
            for column, cell in zip(self.columns[1:], cells[1:], strict=True)
            if str(cell)
        ]
        facts = Text(", ".join(f"{head} {cell}".strip() for head, cell in named))
        subject = f"{self.columns[0].header} {cells[0]}" if str(cells[0]).isdecimal() else str(cells[0])
        return Group(Padding(Text(subject, style="bold"), (0, 0, 0, 1)), Padding(facts, (0, 0, 0, 3)))


def new_table(*headers: str) -> Table:
    """A table without lines: text to the left, figures to the right."""
    table = FittingTable(box=None, padding=(0, 1), header_style="bold underline")
    for number, header in enumerate(headers):
        text = number == 0 or header == "host"
        justify: Literal["left", "right"] = "left" if text else "right"
        # Rich shrinks the columns that may wrap, down to nothing, if a table is too wide.
        table.add_column(header, justify=justify, no_wrap=number > 0, overflow="fold", min_width=len(header))
    return table


def section_panel(section: Section, console: Console) -> RenderableType:
    """A table of a report, or a picture of it in characters."""
    if isinstance(section, TableOfReport):
        return section_table(section)
    return Group(Text(section.title, style="bold underline"), *map(Text, lines_of(section, console.width)))


def section_table(section: TableOfReport) -> RenderableType:
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
    room = 0
    for panel in panels:
        width = console.measure(panel).maximum + _GAP
        if not rows or width > room:
            rows.append([])
            room = console.width + _GAP
        rows[-1].append(panel)
        room -= width
    grids: list[RenderableType] = []
    for row in rows:
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        grid.add_row(*row)
        grids += [Text(), grid] if grids else [grid]
    return Group(*grids)


def labelled(rows: Iterable[tuple[str, str | None]]) -> Table:
    """Sentences with their subject to their left, in colour for trust and for missing data; leaves out empty ones."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in rows:
        if words:
            line = Text(words, style="bold" if name == "Missing" else "")
            if name == "Trust":
                line.highlight_regex("^yes", "green")
                line.highlight_regex("^NO", "bold")
            grid.add_row(name, line)
    return grid


def print_next(commands: Iterable[str], console: Console) -> None:
    """Print what to type next, each command on one line, for copying."""
    console.print()
    console.print(Text("Next", style="bold"))
    for command in commands:
        console.print(Text(f"  {command}"), soft_wrap=True)


def slowdown_text(value: float) -> Text:
    """S with three decimals, marked if it is straggling."""
    return Text(f"{value:.3f}", style=f"bold {LOST}" if value >= 1.1 else "")
