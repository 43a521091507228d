"""A fleet's report as one self-contained HTML page.

In: figures of a study. Out: the text of the page. Names are escaped wherever they appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from tracekit.base.atomic_write import Kind, starting_with
from tracekit.dashboards.documents.card import plain, sections
from tracekit.dashboards.documents.page import head
from tracekit.fleet.figures import FleetFigures
from tracekit.fleet.words import answer_rows, culprits_table, headline, tables

_BEGINNING = "<!doctype html>\n<!-- tracekit fleet report -->\n"
#: The kind of file that a page replaces.
FLEET_PAGE_FILE = Kind("a page that `tracekit fleet report --html` wrote", starting_with(_BEGINNING.encode()))
#: Size of a curve, pixels, with room for its numbers.
_WIDTH, _HEIGHT, _LEFT, _BELOW = 480, 200, 40, 24


def fleet_page(figures: FleetFigures, curves: pl.DataFrame, culprits: pl.DataFrame, rate: float, name: str) -> str:
    """The whole page. `curves`: `figures.quantiles` for many shares. `culprits`: recurring ones at that rate."""
    rows = "".join(f"<dt>{plain(about)}</dt><dd>{plain(words)}</dd>" for about, words in answer_rows(figures))
    body = sections([*tables(figures), culprits_table(culprits, rate)])
    return (
        f'{_BEGINNING}<html lang="en" class="tracekit">{head(plain(name))}<body><main>'
        f"<header><h1><bdi>{plain(name)}</bdi></h1><p>{figures.jobs:,} jobs</p></header>"
        f'<section class="card {"bad" if figures.straggling_jobs.value > 0 else "good"}"><p class="headline">'
        f"{plain(headline(figures))}</p><dl>{rows}</dl></section>"
        f'<div class="pair">{_curves(curves) if figures.jobs else ""}</div>{body}'
        f"<footer>Made by tracekit.</footer></main>"
        "</body></html>\n"
    )


def _curves(curves: pl.DataFrame) -> str:
    lines = [("waste_jobs", "bar", "of jobs"), ("waste_hours", "pick", "of GPU-hours")]
    values = [curves[column].to_list() for column, _, _ in lines]
    low = min(min(curve) for curve in values)
    high = max(low + 1e-9, *map(max, values))
    polylines = "".join(
        f'<polyline fill="none" stroke="var(--{colour})" stroke-width="2" points="'
        f'{_points(curve, curves["quantile"].to_list(), low, high)}"/>'
        for curve, (_, colour, _) in zip(values, lines, strict=True)
    )
    legend = "".join(
        f'<span><i style="background: var(--{colour})"></i>share {words}</span>' for _, colour, words in lines
    )
    return (
        '<section><h2>What jobs lose: cumulative distribution</h2><svg role="img" aria-label="Share of jobs and of'
        f' GPU-hours that lose at most that" viewBox="0 0 {_LEFT + _WIDTH + 20} {_HEIGHT + _BELOW}">{polylines}'
        f'{"".join(_ticks(low, high))}</svg><p class="legend">{legend}</p></section>'
    )


def _points(values: Sequence[float], shares: Sequence[float], low: float, high: float) -> str:
    """A step function: the share rises where a value is reached."""
    points, before = [], 0.0
    for value, share in zip(values, shares, strict=True):
        x = _LEFT + _WIDTH * (value - low) / (high - low)
        points += [f"{x:.1f},{_HEIGHT * (1 - before):.1f}", f"{x:.1f},{_HEIGHT * (1 - share):.1f}"]
        before = share
    return " ".join(points)


def _ticks(low: float, high: float) -> Iterator[str]:
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + part * (high - low)
        yield f'<text x="{_LEFT + _WIDTH * part:.0f}" y="{_HEIGHT + 16}" text-anchor="middle">{value:.0%}</text>'
        yield f'<text x="{_LEFT - 6}" y="{_HEIGHT * (1 - part) + 4:.0f}" text-anchor="end">{part:.0%}</text>'
