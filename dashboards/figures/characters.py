"""The pictures of a report in characters, for terminals and Markdown.

In: a `Picture` of a report, and a width. Out: lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import numpy as np

from tracekit.base.text import printable, seconds, short
from tracekit.report.section import BarTimeline, Picture, Series, ShareGrid

#: Shares over the mean from which on a cell of a grid is darker.
_SHADES, _FROM = "·░▒▓█", (0.05, 0.2, 0.5, 1.0)
_SPARKS = "▁▂▃▄▅▆▇█"
#: What bars of a timeline can be, in the order of the legend.
_WHATS = "█▓▒░:-+=*"
#: The most rows of a timeline; the width of names, and of the ends of a range.
_MOST_ROWS, _NAMES, _ENDS = 24, 16, 24


def lines_of(drawn: Picture, width: int) -> list[str]:
    """The picture, then what its characters mean."""
    match drawn:
        case ShareGrid():
            return [*_grid(drawn, width - _NAMES)]
        case Series():
            return [*_series(drawn, width - _NAMES - _ENDS)]
        case BarTimeline():
            return [*_timeline(drawn, width - _NAMES)]
        case _:
            assert_never(drawn)


def _named(name: str, marks: str) -> str:
    shown = short(printable(name), _NAMES - 2) if name else ""
    return f"{shown:<{_NAMES}}{marks}".rstrip()


def _grid(drawn: ShareGrid, width: int) -> Iterator[str]:
    for name, values in zip(drawn.rows, drawn.values, strict=True):
        places = np.searchsorted(_FROM, values[:width], side="right")
        yield _named(f"{drawn.down} {name}", "".join(_SHADES[place] for place in places.tolist()))
    bounds = ", ".join(f"{shade} {bound:.0%}" for shade, bound in zip(_SHADES[1:], _FROM, strict=True))
    yield f"{drawn.across}s in order; more {drawn.unit} than the mean: {_SHADES[0]} hardly, {bounds}"


def _series(drawn: Series, width: int) -> Iterator[str]:
    for line in drawn.lines:
        values = np.array([np.nan if value is None else value for value in line.values])
        cells = [cell[~np.isnan(cell)] for cell in np.array_split(values, min(width, len(values)) or 1)]
        peaks = [float(cell.max()) if len(cell) else None for cell in cells]
        if not np.isnan(values).all():
            least, most = float(np.nanmin(values)), float(np.nanmax(values))
            span = most - least or 1.0
            marks = "".join(
                " " if peak is None else _SPARKS[round((peak - least) / span * (len(_SPARKS) - 1))] for peak in peaks
            )
            yield _named(line.name, f"{marks} {least:,.3g} to {most:,.3g} {drawn.unit}")
    ends = f"{drawn.axis} {drawn.places[0]:,.4g} to {drawn.places[-1]:,.4g}" if drawn.places else drawn.axis
    yield "; ".join(filter(None, (ends, drawn.note)))


def _timeline(drawn: BarTimeline, width: int) -> Iterator[str]:
    end_s = max((bar.end_s for bar in drawn.bars), default=0.0) or 1.0
    shown = np.unique(np.linspace(0, len(drawn.rows) - 1, min(len(drawn.rows), _MOST_ROWS)).astype(int)).tolist()
    of_row: dict[int, np.ndarray] = {row: np.zeros((len(drawn.legend), width)) for row in shown}
    edges = np.linspace(0, end_s, width + 1)
    for bar in drawn.bars:
        if bar.row in of_row:
            inside = np.minimum(edges[1:], bar.end_s) - np.maximum(edges[:-1], bar.start_s)
            of_row[bar.row][bar.what] += np.maximum(inside, 0)
    for row, spent in of_row.items():
        marks = np.where(spent.any(axis=0), spent.argmax(axis=0), len(drawn.legend))
        yield _named(drawn.rows[row], "".join((*_WHATS[: len(drawn.legend)], " ")[mark] for mark in marks.tolist()))
    seen = {bar.what for bar in drawn.bars}
    legend = enumerate(zip(_WHATS, drawn.legend, strict=False))
    yield ", ".join(f"{mark} {what.name}" for number, (mark, what) in legend if number in seen)
    few = [f"{len(shown)} of {len(drawn.rows)} rows"] if len(shown) < len(drawn.rows) else []
    yield "; ".join([f"{seconds(end_s)} in all", *few, *drawn.notes])
