"""The worker map, the steps, the pipeline and the metrics of a report as SVG, coloured by the style sheet around them.

In: a `Report` on a pipeline. Out: markup without a script; tooltips show every figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from tracekit.analysis.bubbles.picture import LEGEND, WHATS
from tracekit.base.text import cost_alone, seconds
from tracekit.dashboards.figures.worker_cells import WorkerCells, level_of, worker_cells
from tracekit.dashboards.figures.worker_map import LOST_LEVELS
from tracekit.dashboards.words import worker_name
from tracekit.report.metrics import Band
from tracekit.report.pictures import Picture
from tracekit.report.report import Report, WorkerGrid
from tracekit.trace.model import Worker

#: The largest map, DP ranks x stages, and the largest number of bars; beyond that, the maximum of several is shown.
_LARGEST_MAP, _MOST_BARS = (64, 32), 240
_CELL, _GAP, _LEFT, _TOP = 22, 2, 44, 18
_BAR, _HEIGHT = 8, 96
#: Width of the pipeline, and height of a stage.
_WIDE, _ROW = 1000, 20


def worker_map(report: Report) -> str:
    """What every worker alone costs of a step, DP ranks down, stages across."""
    grid = report.worker_grid()
    cells = worker_cells(grid.slowdown, grid.dp_ranks, _LARGEST_MAP)
    rows, columns = cells.slowdown.shape
    width, height = _LEFT + columns * _CELL, _TOP + rows * _CELL
    marks = [*_cells(grid, cells), *_ticks(cells)]
    note = (
        "" if cells.patch == (1, 1) else f"<p>A cell is the worst of {cells.patch[0]} x {cells.patch[1]} workers.</p>"
    )
    words = [f"&lt; {LOST_LEVELS[0]:.0%}", *(f"{share:.0%}" for share in LOST_LEVELS)]
    legend = "".join(f'<span><i class="level{level}"></i>{word}</span>' for level, word in enumerate(words))
    return (
        f'<svg class="map" role="img" aria-label="What each worker alone costs of a step, DP ranks down, stages across"'
        f' viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(marks)}</svg>'
        f'{note}<p class="legend">share of a step that it alone costs {legend}</p>'
    )


def _cells(grid: WorkerGrid, cells: WorkerCells) -> Iterator[str]:
    for row, values in enumerate(cells.slowdown):
        for column, value in enumerate(values):
            worker = Worker(cells.dp_ranks[row], column * cells.patch[1])
            named, rank = f"workers from {worker} on", None
            if cells.patch == (1, 1):
                row_of_worker = grid.rows[worker]
                named = f"{worker_name(row_of_worker)}, dp {worker.dp_rank}, stage {worker.pp_rank}"
                rank = row_of_worker.rank
            mark = "" if rank is None else f' data-rank="{rank}"'
            words = f"{escape(named)}: alone costs {cost_alone(value)} of a step"
            yield (
                f'<rect class="level{level_of(value)}"{mark} x="{_LEFT + column * _CELL}" y="{_TOP + row * _CELL}"'
                f' width="{_CELL - _GAP}" height="{_CELL - _GAP}"><title>{words}</title></rect>'
            )


def _ticks(cells: WorkerCells) -> Iterator[str]:
    """Numbers of DP ranks and stages, as many as fit without overlap."""
    rows, columns = cells.slowdown.shape
    for row in range(0, rows, -(-rows // 32)):
        y = _TOP + row * _CELL + _CELL // 2 + 3
        yield f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{cells.dp_ranks[row]}</text>'
    for column in range(columns):
        x = _LEFT + column * _CELL + (_CELL - _GAP) // 2
        yield f'<text x="{x}" y="{_TOP - 6}" text-anchor="middle">{column * cells.patch[1]}</text>'


def step_bars(report: Report) -> str:
    """Recorded time of each step; the slowest ones of the timeline are marked."""
    times, lost_s = report.step_times(), [row.lost_s or 0.0 for row in report.by_step]
    size = -(-len(times.steps) // _MOST_BARS)
    starts = np.arange(0, len(times.steps), size)
    peaks = np.maximum.reduceat(times.recorded, starts)
    top, width = float(peaks.max()), len(starts) * _BAR
    bars = []
    for number, (start, peak) in enumerate(zip(starts, peaks, strict=True)):
        slowest = start + int(times.recorded[start : start + size].argmax())
        height = max(1.0, _HEIGHT * float(peak) / top)
        bars.append(
            f'<rect class="bar" data-step="{times.steps[slowest]}" x="{number * _BAR}" y="{_HEIGHT - height:.1f}"'
            f' width="{_BAR - 1}" height="{height:.1f}"><title>step {times.steps[slowest]}: {seconds(float(peak))},'
            f" {seconds(lost_s[slowest])} lost</title></rect>"
        )
    note = "" if size == 1 else f"<p>A bar is the slowest of {size} steps.</p>"
    return (
        f'<svg class="steps" role="img" aria-label="Recorded time of each step" viewBox="0 0 {width} {_HEIGHT}"'
        f' width="{width}" height="{_HEIGHT}" preserveAspectRatio="none">{"".join(bars)}</svg>'
        f"<p>Steps {times.steps[0]} to {times.steps[-1]}, recorded: mean {seconds(report.step_time_s.recorded)},"
        f" slowest {seconds(top)}.</p>{note}"
    )


def pipeline(pictures: Sequence[Picture]) -> str:
    """What each stage computes and waits for, the pictures below each other on one axis of time."""
    scale = (_WIDE - _LEFT - 10) / max(picture.window_s for picture in pictures)
    marks, top = [], 0
    for picture in pictures:
        marks.append(f'<text x="0" y="{top + _ROW - 6}">{escape(picture.name)}</text>')
        top += _ROW
        for stage in range(picture.stages):
            y = top + stage * _ROW + _ROW - 6
            marks.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{stage}</text>')
        marks += [
            f'<rect class="what{WHATS.index(bar.what)}" x="{_LEFT + bar.start_s * scale:.2f}"'
            f' y="{top + bar.stage * _ROW}" width="{max((bar.end_s - bar.start_s) * scale, 0.1):.2f}"'
            f' height="{_ROW - 3}"><title>{escape(bar.words)}</title></rect>'
            for bar in picture.bars
        ]
        top += picture.stages * _ROW
    drawn = {bar.what for picture in pictures for bar in picture.bars}
    legend = "".join(
        f'<span><i class="what{at}"></i>{LEGEND[at]}</span>' for at, what in enumerate(WHATS) if what in drawn
    )
    return (
        f'<svg class="pipeline" role="img" aria-label="Stages of the pipeline over time: computes, and bubbles by what'
        f' is waited for" viewBox="0 0 {_WIDE} {top}" width="{_WIDE}" height="{top}">{"".join(marks)}</svg>'
        f'<p class="legend">{legend}</p>'
    )


def metric_band(band: Band, label: str) -> str:
    """The series of a suspect over the band of its peers, and when the trace shows it slow. `label`: in words."""
    points = list(zip(band.time, band.own, band.low, band.high, strict=True))
    values = [value for _, *row in points for value in row if value is not None]
    if not values:
        return ""
    least, most = min(values), max(values)
    scale = (_WIDE - _LEFT - 10) / (band.time[-1] - band.time[0] or 1.0), (_HEIGHT - 16) / (most - least or 1.0)

    def at(time: float, value: float) -> str:
        return f"{_LEFT + (time - band.time[0]) * scale[0]:.1f},{_HEIGHT - 8 - (value - least) * scale[1]:.1f}"

    upper = [at(time, high) for time, _, _, high in points if high is not None]
    lower = [at(time, low) for time, _, low, _ in reversed(points) if low is not None]
    own = [at(time, value) for time, value, _, _ in points if value is not None]
    ends = "".join(
        f'<path class="end" d="M{at(time, least)} L{at(time, most)}"/>'
        for time in (band.from_s, band.to_s)
        if band.time[0] <= time <= band.time[-1]
    )
    ticks = "".join(
        f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{value:,.4g}</text>'
        for value, y in ((most, 12), (least, _HEIGHT - 4))
    )
    peers = " ".join([*upper, *lower])
    return (
        f'<svg class="metric" role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDE} {_HEIGHT}"'
        f' width="{_WIDE}" height="{_HEIGHT}">{ticks}<polygon class="peers" points="{peers}"/>{ends}'
        f'<polyline class="own" points="{" ".join(own)}"/></svg><p class="legend">{band.unit} over'
        f' {seconds(band.time[-1] - band.time[0])} <span><i class="own"></i>the host</span><span><i class="peers">'
        "</i>its peers, the middle 80 %</span>; dotted: the beginning and the end of what the trace shows</p>"
    )
