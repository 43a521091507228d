"""Tables, maps of workers, steps and colours that the screens of the terminal share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, Literal

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.base.text import printable, seconds
from tracekit.dashboards.theme import LIGHT
from tracekit.dashboards.words import gaps_of_bars, lines_of
from tracekit.report.finding import UNNAMED, LossKind, Place
from tracekit.report.report import Report, WorkerGrid
from tracekit.report.tables import Section
from tracekit.report.tables import Table as TableOfReport

#: Columns between panels; the narrowest that a column of words gets, and the longest word that it does not break.
_GAP, _NARROWEST, _LONGEST_WORD = 3, 16, 24
#: The largest map, DP ranks x stages; larger jobs are pooled.
LARGEST_MAP = (24, 32)
#: From S = 1 on, the denser the slower.
_GLYPHS = "·░▒▓▆█"
_SPARKS = "▁▂▃▄▅▆▇█"
#: The number of bars in the line of steps.
_LINE_BARS = 24
#: Lost time.
LOST: Final = LIGHT.slow[3]
#: Verdicts: a cause costs time, no cause does, no verdict.
BAD: Final = f"bold white on {LIGHT.bad}"
GOOD: Final = "bold black on green"
UNSURE: Final = "bold black on grey70"
#: By the kind of a loss; BAD for the others.
VERDICT_STYLE: Final[dict[str, str]] = {LossKind.BALANCED: GOOD, **dict.fromkeys(UNNAMED, UNSURE)}


class FittingTable(Table):
    """A table that becomes a list where it does not fit, a block per row, so that no cell is cut. Its caption has the
    width of the terminal.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows as blocks, then its caption."""
        caption, self.caption = self.caption, None
        if sum(self._least_width(console, column) + 2 for column in self.columns) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from map(self._block, zip(*(column.cells for column in self.columns), strict=True))
        self.caption = caption
        if caption:
            yield Text(str(caption), style="dim italic")

    @staticmethod
    def _least_width(console: Console, column: Column) -> int:
        """The width that a column needs: that of its cells, or of a few words if they may wrap."""
        cells = [console.measure(cell) for cell in (column.header, *column.cells)]
        longest, word = max(cell.maximum for cell in cells), max(cell.minimum for cell in cells)
        return longest if column.no_wrap else min(longest, max(_NARROWEST, min(_LONGEST_WORD, word)))

    def _block(self, cells: Sequence[RenderableType]) -> RenderableType:
        labels = [
            (str(column.header), str(cell))
            for column, cell in zip(self.columns[1:], cells[1:], strict=True)
            if str(cell)
        ]
        facts = Text(", ".join(f"{head} {cell}".strip() for head, cell in labels))
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
    return Group(Text(printable(section.title), style="bold underline"), *map(Text, lines_of(section, console.width)))


def section_table(section: TableOfReport) -> RenderableType:
    """A table of a report; of one without rows, what it says instead."""
    return filled_table(section) if section.rows else Text(f"{section.title}: {section.note}")


def filled_table(section: TableOfReport) -> Table:
    """A table of a report that has rows."""
    table = new_table(*section.heads)
    for row in section.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    table.caption = "\n".join(printable(line) for line in (section.note or "").split("\n"))
    table.caption_justify = "left"
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


def small_map(report: Report, grid: WorkerGrid, rows: int) -> RenderableType | None:
    """`merged_map` of a job, the culprit's DP ranks marked; None if the leading cause is on no worker."""
    lead = report.leading_finding
    if lead is not None and lead.where == Place(steps=lead.where.steps):
        return None
    accused = set() if lead is None else _rows_of(lead.where)
    return merged_map(grid.slowdown, grid.dp_ranks, rows, accused)


def merged_map(
    slowdown: Floats, dp_ranks: Sequence[int], rows: int, accused: Set[int] = frozenset()
) -> RenderableType | None:
    """S of every worker, DP ranks down, stages across, in at most `rows` rows, its scale in words in the line above;
    None where all workers are alike.

    Neighbouring DP ranks that look alike share a row, but for the `accused`, which are marked. Where more rows than
    that differ, a row is the worst of several.
    """
    from tracekit.dashboards.figures.worker_map import pooled_to  # only pipelines have workers

    cells = pooled_to(slowdown, len(dp_ranks), LARGEST_MAP[1])
    merged, remark = _runs_of_alike(dp_ranks, cells.levels.tolist(), accused), ""
    if len(merged) > rows:
        remark = ", each row the worst of its DP ranks"
        cells = pooled_to(slowdown, rows, LARGEST_MAP[1])
        firsts = dp_ranks[:: cells.row_block]
        ends = [*(first - 1 for first in firsts[1:]), dp_ranks[-1]]
        merged = list(zip(firsts, ends, cells.levels.tolist(), strict=True))
    highest = max(max(levels) for _, _, levels in merged)
    if highest == 0:
        return None
    stages = slowdown.shape[1]
    across = f"{cells.column_block} stages in a cell"
    if cells.column_block == 1:
        across = "one stage" if stages == 1 else f"stages 0 to {stages - 1} across"
    title = Text("Workers", style="bold")
    title.append(f"  how much each slows the job, {across}{remark}: ", style="not bold")
    for level, words in ((0, " hardly  "), (highest, " most")):
        title.append(*_cell(level)).append(words, style="not bold")
    lines: list[RenderableType] = [title]
    for first, end, levels in merged:
        line = Text.assemble(((f"  dp {first} " if first == end else f"  dp {first}-{end} ").ljust(9), "dim"))
        for level in levels:
            line.append(*_cell(level))
        if not accused.isdisjoint(range(first, end + 1)):
            line.append(" <")
        lines.append(line)
    return Group(*lines)


def _cell(level: int) -> tuple[str, str]:
    """A cell of a map, and its style: colour only says whether time is lost."""
    return _GLYPHS[level] * 2, f"not bold {LOST}" if level else "not bold grey50"


def _rows_of(where: Place) -> set[int]:
    """The DP ranks that a cause is on; none if it is on all."""
    ends = [end for link in where.links for end in link.ends]
    return {worker.dp_rank for worker in (*where.workers, *ends)} | set(where.dp_ranks)


def _runs_of_alike(
    dp_ranks: Sequence[int], levels_of: Sequence[list[int]], accused: Set[int]
) -> list[tuple[int, int, list[int]]]:
    """First and last DP rank of each run that looks alike, and its levels; `accused` DP ranks and others are apart."""
    runs: list[tuple[int, int, list[int]]] = []
    for dp_rank, levels in zip(dp_ranks, levels_of, strict=True):
        if runs and runs[-1][2] == levels and (runs[-1][1] in accused) == (dp_rank in accused):
            runs[-1] = (runs[-1][0], dp_rank, levels)
        else:
            runs.append((dp_rank, dp_rank, levels))
    return runs


def steps_line(report: Report, bars: int = _LINE_BARS) -> Text:
    """The recorded times of the steps in one line: bars, and the extremes in words."""
    times = report.step_times()
    line = Text("Steps    ", style="bold")
    if len(times.steps) == 1:
        return line.append(f"only step {report.by_step[0].step} was traced", style="not bold")
    line.append(sparkline(times.recorded / np.median(times.recorded), bars, times.steps), style=f"not bold {LOST}")
    extremes = f"{seconds(float(times.recorded.min()))} to {seconds(float(times.recorded.max()))}"
    return line.append(f" {extremes}, most lost in step {report.worst_step.step}", style="not bold")


def sparkline(slowdown: Floats, width: int, steps: Int32s | None = None) -> str:
    """S over time in at most `width` characters: bars, each the largest of its share; noise stays flat. `steps`: their
    numbers; where some were not recorded is a space.

    Also accepts step times, as multiples of the usual one.
    """
    size = -(-len(slowdown) // width)
    gaps = set[int]() if steps is None else gaps_of_bars(steps, size)
    while -(-len(slowdown) // size) + len(gaps) > width and size < len(slowdown):
        size += 1
        gaps = gaps_of_bars(steps, size) if steps is not None else gaps
    peaks = [float(slowdown[first : first + size].max()) for first in range(0, len(slowdown), size)]
    low = min(peaks)
    high = max(*peaks, low + 0.05)
    bars = [_SPARKS[round((peak - low) / (high - low) * (len(_SPARKS) - 1))] for peak in peaks]
    return "".join(f" {bar}" if number in gaps else bar for number, bar in enumerate(bars))
