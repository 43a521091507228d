"""The report as HTML: the card with the answer, tables of causes and fixes, and its pictures as SVG.

Names are escaped wherever they appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files

import numpy as np

from tracekit.analysis.job.job import Job
from tracekit.base.errors import TraceError
from tracekit.base.text import cost_alone, printable, seconds, short
from tracekit.dashboards.figures.worker_map import Pooled, level_of, pooled_to
from tracekit.dashboards.theme import DARK, LIGHT, LOST_LEVELS, Theme
from tracekit.dashboards.words import answer_rows, figure_columns, first_line, gaps_of_bars, tables, worker_name
from tracekit.report.finding import UNNAMED, LossKind
from tracekit.report.report import Report, WorkerGrid
from tracekit.report.tables import BarTimeline, Picture, Section, Series, ShareGrid, Table
from tracekit.trace.model import Worker

_TONES = {LossKind.BALANCED: "good", **dict.fromkeys(UNNAMED, "unsure")}
#: The largest map, DP ranks x stages, and the largest number of bars; beyond that, the maximum of several is shown.
_LARGEST_MAP, _MOST_BARS = (64, 32), 240
_CELL, _GAP, _LEFT, _TOP = 22, 2, 44, 18
_BAR, _HEIGHT = 8, 96
#: Width of a picture, height of stacked bars; of a timeline the height of a row, the width of its name, and how many
#: rows are drawn thinner.
_WIDE, _BARS_HIGH = 1000, 160
_ROW, _NAMES, _MANY_ROWS = 20, 64, 100


def card(source: Report | Job) -> str:
    """A report, or the report on a job, as a notebook shows it: the answer and, if the job loses time, workers, steps,
    causes and fixes.
    """
    try:
        report = source if isinstance(source, Report) else source.report
    except TraceError as error:
        return f"<p>{escape(repr(source))}<br>{plain(str(error))}</p>"
    parts = sections(report.pictures)
    parts = pair(report) + parts if report.by_worker else parts + sections(report.overview)
    pictures = parts + sections(tables(report)) if report.verdict.losses else sections(report.asked)
    return (
        f'<div class="tracekit"><style>{style()}</style><header><b>{plain(short(report.name))}</b>'
        f" <span>{plain(report.job.sizes)}</span></header>{answer_of(report)}{pictures}</div>"
    )


@cache
def style() -> str:
    """The style sheet of everything below an element of class `tracekit`: dark if the system is.

    JupyterLab states its own theme, which takes precedence over the system's.
    """
    sheet = files("tracekit.dashboards.documents").joinpath("card.css").read_text(encoding="utf-8")
    dark = f'.tracekit:not([data-jp-theme-light="true"] *) {{ {_colours(DARK)} }}'
    return f".tracekit {{ {_colours(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{sheet}"


def _colours(theme: Theme) -> str:
    """A theme as variables of a style sheet. `--l0` to `--l5` are the levels of `worker_map`."""
    colours = {
        "paper": theme.paper,
        "text": theme.text,
        "dim": theme.dimmed,
        "line": theme.grid,
        "good": theme.ideal,
        "bad": theme.bad,
        "unsure": theme.dimmed,
        "bar": theme.recorded,
        "pick": theme.outline,
        **dict(zip(("forward", "backward", "weight", "other"), theme.kinds[:4], strict=True)),
        "communication": theme.wait,
        **{f"l{level}": colour for level, colour in enumerate(theme.slow)},
    }
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def answer_of(report: Report, *, gpu_hour: float | None = None) -> str:
    """The answer: what, who, why, what to do, and whether to believe it. `gpu_hour`: as for the terminal."""
    return answer_card(*first_line(report), answer_rows(report, gpu_hour))


def answer_card(kind: LossKind, label: str, headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """The card of an answer, in the colour of its kind of loss. `label`: the kind in words; `rows`: (name, text)."""
    listed = "".join(f"<dt>{plain(name)}</dt><dd>{plain(words)}</dd>" for name, words in rows)
    return (
        f'<section class="card {_TONES.get(kind, "bad")}"><p class="headline"><b>{plain(label)}</b>'
        f" {plain(headline)}</p><dl>{listed}</dl></section>"
    )


def pair(report: Report) -> str:
    """The worker map and the steps, side by side where there is room."""
    return (
        f'<div class="pair"><section><h2>Workers</h2><div class="scroll">{worker_map(report)}</div></section>'
        f"<section><h2>Steps</h2>{step_bars(report)}</section></div>"
    )


def sections(parts: Iterable[Section]) -> str:
    """Tables and pictures with their titles and remarks."""
    return "".join(f"<section><h2>{plain(part.title)}</h2>{_section(part)}</section>" for part in parts)


def _section(part: Section) -> str:
    if isinstance(part, Table):
        return (table(part.heads, part.rows) if part.rows else "") + _notes(part.note)
    if isinstance(part, BarTimeline):
        return picture(part) + _notes(*part.notes)
    return picture(part) + (_notes(part.note) if isinstance(part, Series) else "")


def _notes(*notes: str | None) -> str:
    return "".join(f"<p>{plain(note)}</p>" for note in notes if note)


def plain(text: str) -> str:
    """Any text, escaped so that a browser shows it literally."""
    return escape(printable(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, figures to the right. Each cell carries its head, because narrow screens show rows as blocks."""
    rows = tuple(rows)
    figures = figure_columns(rows)
    kinds = [' class="figure"' if number in figures else "" for number in range(len(heads))]
    head = "".join(f"<th{kind}>{plain(name)}</th>" for name, kind in zip(heads, kinds, strict=True))
    cells = (
        "".join(
            f'<td{kind} data-head="{plain(name)}">{plain(cell)}</td>'
            for name, kind, cell in zip(heads, kinds, row, strict=True)
        )
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"


def worker_map(report: Report) -> str:
    """A map of the share of a step that every worker alone costs, DP ranks down, stages across."""
    grid = report.worker_grid()
    cells = pooled_to(grid.slowdown, *_LARGEST_MAP)
    rows, columns = cells.values.shape
    width, height = _LEFT + columns * _CELL, _TOP + rows * _CELL
    firsts, across = grid.dp_ranks[:: cells.row_block], cells.column_block
    marks = [*_cells(grid, cells, firsts), *_ticks(firsts, range(0, columns * across, across))]
    patch = cells.row_block, across
    note = "" if patch == (1, 1) else f"<p>A cell is the worst of {patch[0]} x {patch[1]} workers.</p>"
    words = [f"&lt; {LOST_LEVELS[0]:.0%}", *(f"{share:.0%}" for share in LOST_LEVELS)]
    legend = "".join(f'<span><i class="level{level}"></i>{word}</span>' for level, word in enumerate(words))
    return (
        f'<svg class="map" role="img" aria-label="What each worker alone costs of a step, DP ranks down, stages across"'
        f' viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(marks)}</svg>'
        f'{note}<p class="legend">share of a step that it alone costs {legend}</p>'
    )


def _cells(grid: WorkerGrid, cells: Pooled, dp_ranks: Sequence[int]) -> Iterator[str]:
    for row, values in enumerate(cells.values):
        for column, value in enumerate(values):
            worker = Worker(dp_ranks[row], column * cells.column_block)
            workers, rank = f"workers from {worker} on", None
            if cells.row_block == cells.column_block == 1:
                row_of_worker = grid.rows[worker]
                rank = row_of_worker.rank
                name = "not recorded" if rank is None else worker_name(worker, rank, row_of_worker.host)
                workers = f"{name}, dp {worker.dp_rank}, stage {worker.pp_rank}"
            mark = "" if rank is None else f' data-rank="{rank}"'
            yield _cell((row, column), value, f"{workers}: alone costs {cost_alone(value)} of a step", mark)


def _cell(place: tuple[int, int], slowdown: float, words: str, mark: str = "") -> str:
    """The cell at a row and column, in the colour of its slowdown. `words`: for people who point at it."""
    return (
        f'<rect class="level{level_of(slowdown)}"{mark} x="{_LEFT + place[1] * _CELL}" y="{_TOP + place[0] * _CELL}"'
        f' width="{_CELL - _GAP}" height="{_CELL - _GAP}"><title>{plain(words)}</title></rect>'
    )


def _row_name(row: int, name: str) -> str:
    return f'<text x="{_LEFT - 6}" y="{_TOP + row * _CELL + _CELL // 2 + 3}" text-anchor="end">{plain(name)}</text>'


def _ticks(dp_ranks: Sequence[int], stages: Iterable[int]) -> Iterator[str]:
    """Numbers of DP ranks and stages, as many as fit without overlap."""
    rows = len(dp_ranks)
    yield from (_row_name(row, str(dp_ranks[row])) for row in range(0, rows, -(-rows // 32)))
    for column, stage in enumerate(stages):
        x = _LEFT + column * _CELL + (_CELL - _GAP) // 2
        yield f'<text x="{x}" y="{_TOP - 6}" text-anchor="middle">{stage}</text>'


def step_bars(report: Report) -> str:
    """Recorded time of each step; the slowest ones of the timeline are marked."""
    times, lost_s = report.step_times(), [row.lost_s or 0.0 for row in report.by_step]
    size = -(-len(times.steps) // _MOST_BARS)
    starts = np.arange(0, len(times.steps), size)
    peaks = np.maximum.reduceat(times.recorded, starts)
    gaps = gaps_of_bars(times.steps, size)
    top, width, x = float(peaks.max()), (len(starts) + len(gaps)) * _BAR, 0
    bars = []
    for number, (start, peak) in enumerate(zip(starts, peaks, strict=True)):
        x += _BAR * (number in gaps)
        slowest = start + int(times.recorded[start : start + size].argmax())
        height = max(1.0, _HEIGHT * float(peak) / top)
        bars.append(
            f'<rect class="bar" data-step="{times.steps[slowest]}" x="{x}" y="{_HEIGHT - height:.1f}"'
            f' width="{_BAR - 1}" height="{height:.1f}"><title>step {times.steps[slowest]}: {seconds(float(peak))},'
            f" {seconds(lost_s[slowest])} lost</title></rect>"
        )
        x += _BAR
    note = "" if size == 1 else f"<p>A bar is the slowest of {size} steps.</p>"
    note += "<p>Steps were not recorded where bars have a space between them.</p>" if gaps else ""
    return (
        f'<svg class="steps" role="img" aria-label="Recorded time of each step" viewBox="0 0 {width} {_HEIGHT}"'
        f' width="{width}" height="{_HEIGHT}" preserveAspectRatio="none">{"".join(bars)}</svg>'
        f"<p>Steps {times.steps[0]} to {times.steps[-1]}, recorded: mean {seconds(report.step_time_s.recorded)},"
        f" slowest {seconds(top)}.</p>{note}"
    )


def picture(section: Picture) -> str:
    """A picture of a report in its shape."""
    match section:
        case ShareGrid():
            return _grid(section)
        case Series():
            return _bars(section) if section.stacked else _lines(section)
        case BarTimeline():
            return _timeline(section)


def _grid(grid: ShareGrid) -> str:
    width, height = _LEFT + len(grid.columns) * _CELL, _TOP + len(grid.rows) * _CELL
    marks = [
        _cell((row, column), 1 + value, f"{grid.down} {name}, {grid.across} {across}: {value:+.0%} {grid.unit}")
        for row, (name, values) in enumerate(zip(grid.rows, grid.values, strict=True))
        for column, (across, value) in enumerate(zip(grid.columns, values, strict=True))
    ]
    names = [_row_name(row, name) for row, name in enumerate(grid.rows)]
    legend = plain(f"{grid.down} down, {grid.across} across")
    return _svg("map", grid.title, (width, height), [*marks, *names], legend)


def _bars(series: Series) -> str:
    """A bar at each place, of its parts; the first at the bottom."""
    totals = [sum(line.values[place] or 0.0 for line in series.lines) for place in range(len(series.places))]
    scale, width, marks = _BARS_HIGH / max(*totals, 1e-12), _WIDE / max(len(totals), 1), list[str]()
    for number, place in enumerate(series.places):
        top = float(_BARS_HIGH)
        for line in series.lines:
            value = line.values[number] or 0.0
            top -= value * scale
            marks.append(
                f'<rect class="what{line.tone}" x="{number * width:.1f}" y="{top:.1f}" width="{width * 0.9:.1f}"'
                f' height="{value * scale:.1f}"><title>{plain(series.axis)} {place:g}, {plain(line.name)}:'
                f" {value:,.4g} {plain(series.unit)}</title></rect>"
            )
    legend = _legend((line.tone, line.name) for line in series.lines)
    return _svg("series", series.title, (_WIDE, _BARS_HIGH), marks, f"{legend} {plain(series.note or '')}")


def _lines(series: Series) -> str:
    """Lines over the band of what is usual."""
    low, high = ([], []) if series.usual is None else (series.usual.low, series.usual.high)
    values = [
        value for row in (low, high, *(line.values for line in series.lines)) for value in row if value is not None
    ]
    if not values:
        return ""
    begin, span = series.places[0], series.places[-1] - series.places[0]
    lowest, highest = min(values), max(values)
    scale = (_WIDE - _LEFT - 10) / (span or 1.0), (_HEIGHT - 16) / (highest - lowest or 1.0)

    def point(place: float, value: float) -> str:
        return f"{_LEFT + (place - begin) * scale[0]:.1f},{_HEIGHT - 8 - (value - lowest) * scale[1]:.1f}"

    def points(row: Sequence[float | None]) -> list[str]:
        return [point(place, value) for place, value in zip(series.places, row, strict=False) if value is not None]

    marks = [
        f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{value:,.4g}</text>'
        for value, y in ((highest, 12), (lowest, _HEIGHT - 4))
    ]
    marks.append(f'<polygon class="peers" points="{" ".join([*points(high), *reversed(points(low))])}"/>')
    marks += [
        f'<path class="end" d="M{point(place, lowest)} L{point(place, highest)}"/>'
        for place in series.marks
        if begin <= place <= begin + span
    ]
    marks += [
        f'<polyline class="line what{line.tone}" points="{" ".join(points(line.values))}"/>' for line in series.lines
    ]
    usual = "" if series.usual is None else f'<span><i class="peers"></i>{plain(series.usual.name)}</span>'
    legend = f"{plain(series.unit)} over {seconds(span)} {_legend((line.tone, line.name) for line in series.lines)}"
    return _svg("series", series.title, (_WIDE, _HEIGHT), marks, f"{legend}{usual}")


def _timeline(timeline: BarTimeline) -> str:
    """Bars in rows; rows without names are thin, and those with a name and no bars are headings."""
    has_names, is_thin = any(timeline.rows), len(timeline.rows) >= _MANY_ROWS
    thin = 2 if is_thin else 6
    high, begin, gap = (_ROW, _NAMES, 3) if has_names else (thin, 0, 1)
    end_s = max((bar.end_s for bar in timeline.bars), default=0.0)
    scale, rows_with_bars = (_WIDE - begin - 10) / (end_s or 1.0), {bar.row for bar in timeline.bars}
    marks = []
    for row, name in enumerate(timeline.rows):
        at_end = f'x="{begin - 6}" text-anchor="end"' if row in rows_with_bars else 'x="0"'
        if name:
            marks.append(f'<text {at_end} y="{(row + 1) * high - 6}">{plain(name)}</text>')
    marks += [
        f'<rect class="what{timeline.legend[bar.what].tone}" x="{begin + bar.start_s * scale:.2f}" y="{bar.row * high}"'
        f' width="{max((bar.end_s - bar.start_s) * scale, 0.1):.2f}" height="{high - gap}"><title>'
        f"{plain(bar.words)}</title></rect>"
        for bar in timeline.bars
    ]
    seen = {bar.what for bar in timeline.bars}
    legend = _legend((what.tone, what.name) for number, what in enumerate(timeline.legend) if number in seen)
    return _svg("timeline", timeline.title, (_WIDE, len(timeline.rows) * high), marks, legend)


def _legend(entries: Iterable[tuple[int, str]]) -> str:
    return "".join(f'<span><i class="what{tone}"></i>{plain(name)}</span>' for tone, name in entries)


def _svg(kind: str, title: str, size: tuple[int, int], marks: Sequence[str], legend: str) -> str:
    width, height = size
    return (
        f'<div class="scroll"><svg class="{kind}" role="img" aria-label="{plain(title)}" viewBox="0 0 {width}'
        f' {height}" width="{width}" height="{height}">{"".join(marks)}</svg></div><p class="legend">{legend}</p>'
    )
