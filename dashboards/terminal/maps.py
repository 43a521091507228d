"""Pictures of a job in characters: the map of workers, and the steps.

In: S of workers, or a `Report` on a pipeline. Out: what rich prints.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.text import seconds
from tracekit.dashboards.figures.worker_cells import WorkerCells, level_of, worker_cells
from tracekit.dashboards.terminal.colours import LOST
from tracekit.report.finding import Place
from tracekit.report.report import Report, WorkerGrid

#: The largest map, DP ranks x stages; larger jobs are pooled.
LARGEST_MAP = (24, 32)
#: From S = 1 on, the denser the slower.
_GLYPHS = "·░▒▓▆█"
_SPARKS = "▁▂▃▄▅▆▇█"
#: The number of bars in the line of steps.
_LINE_BARS = 24


def small_map(report: Report, grid: WorkerGrid, rows: int) -> RenderableType | None:
    """`merged_map` of a job, the culprit's DP ranks marked; None where the leading cause is no one's."""
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
    cells = worker_cells(slowdown, dp_ranks, (len(dp_ranks), LARGEST_MAP[1]))
    merged, each = _alike(cells, accused), ""
    if len(merged) > rows:
        each = ", each row the worst of its DP ranks"
        cells = worker_cells(slowdown, dp_ranks, (rows, LARGEST_MAP[1]))
        ends = [*(first - 1 for first in cells.dp_ranks[1:]), dp_ranks[-1]]
        merged = [
            (first, end, _levels(cells, row)) for row, (first, end) in enumerate(zip(cells.dp_ranks, ends, strict=True))
        ]
    most = max(max(levels) for _, _, levels in merged)
    if most == 0:
        return None
    stages = slowdown.shape[1]
    across = f"{cells.patch[1]} stages in a cell"
    if cells.patch[1] == 1:
        across = "one stage" if stages == 1 else f"stages 0 to {stages - 1} across"
    title = Text("Workers", style="bold")
    title.append(f"  how much each slows the job, {across}{each}: ", style="not bold")
    for level, words in ((0, " hardly  "), (most, " most")):
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
    """The DP ranks on which a cause sits, as far as it sits on some only."""
    ends = [end for link in where.links for end in link.ends]
    return {worker.dp_rank for worker in (*where.workers, *ends)} | set(where.dp_ranks)


def _alike(cells: WorkerCells, accused: Set[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """First and last DP rank of each run that looks alike, and its levels; `accused` DP ranks and others are apart."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for row, dp_rank in enumerate(cells.dp_ranks):
        levels = _levels(cells, row)
        if runs and runs[-1][2] == levels and (runs[-1][1] in accused) == (dp_rank in accused):
            runs[-1] = (runs[-1][0], dp_rank, levels)
        else:
            runs.append((dp_rank, dp_rank, levels))
    return runs


def _levels(cells: WorkerCells, row: int) -> tuple[int, ...]:
    return tuple(level_of(value) for value in cells.slowdown[row])


def steps_line(report: Report, bars: int = _LINE_BARS) -> Text:
    """The recorded times of the steps in one line: bars, and the extremes in words."""
    times = report.step_times().recorded
    line = Text("Steps    ", style="bold")
    if len(times) == 1:
        return line.append(f"only step {report.by_step[0].step} was traced", style="not bold")
    line.append(sparkline(times / np.median(times), bars), style=f"not bold {LOST}")
    extremes = f"{seconds(float(times.min()))} to {seconds(float(times.max()))}"
    return line.append(f" {extremes}, most lost in step {report.worst_step.step}", style="not bold")


def sparkline(slowdown: Floats, width: int) -> str:
    """S over time as at most `width` bars, each the largest of its share; noise stays flat.

    Also accepts step times, as multiples of the usual one.
    """
    size = -(-len(slowdown) // width)
    peaks = [float(slowdown[at : at + size].max()) for at in range(0, len(slowdown), size)]
    low = min(peaks)
    high = max(*peaks, low + 0.05)
    return "".join(_SPARKS[round((peak - low) / (high - low) * (len(_SPARKS) - 1))] for peak in peaks)
