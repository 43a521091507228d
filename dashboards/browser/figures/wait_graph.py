"""The figure of the page Hang: the wait-for graph, folded by process group, culprits first."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence

import plotly.graph_objects as go

from tracekit.base.text import ranks_text, short
from tracekit.dashboards.browser.data.hang_graph import Node
from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import Theme

#: Most culprits and groups drawn one below the other; the table has all.
MOST_ROWS = 12
_ROW_HEIGHT, _LABEL, _RUNS = 58, 24, 4
#: Pixels: of a column, of a letter, and between the text of a box and its border.
COLUMN_PX, _LETTER_PX, _PAD_PX = 230, 7, 6


def graph_width(nodes: Sequence[Node]) -> int:
    """Pixels that the columns of a graph need."""
    return COLUMN_PX * (1 + max((node.column for node in nodes), default=0))


def wait_graph(nodes: Sequence[Node], theme: Theme) -> go.Figure:
    """The nodes in columns, culprits at the left; an arrow points from each waiting node to the one that blocks it."""
    rows: defaultdict[int, int] = defaultdict(int)
    places: dict[int, tuple[float, float]] = {}
    for number, node in enumerate(nodes):
        if rows[node.column] < MOST_ROWS:
            places[number] = (node.column, -float(rows[node.column]))
        rows[node.column] += 1
    most = max((min(count, MOST_ROWS) for count in rows.values()), default=1)
    drawn = figure(theme, height=60 + _ROW_HEIGHT * max(most, 2))
    for number, (x, y) in places.items():
        for held in nodes[number].held_by:
            if held in places:
                end_x, end_y = places[held]
                _arrow(drawn, (x - _half(nodes[number]), y), (end_x + _half(nodes[held]), end_y), theme)
    for number, (x, y) in places.items():
        _box(drawn, nodes[number], x, y, theme)
    axis = {"visible": False, "fixedrange": True}
    drawn.update_xaxes(range=[-0.5, max((x for x, _ in places.values()), default=0) + 0.5], **axis)
    drawn.update_yaxes(range=[-max(most, 2) + 0.5, 0.5], **axis)
    return drawn


def _arrow(drawn: go.Figure, begin: tuple[float, float], end: tuple[float, float], theme: Theme) -> None:
    drawn.add_annotation(
        x=end[0],
        y=end[1],
        ax=begin[0],
        ay=begin[1],
        xref="x",
        yref="y",
        axref="x",
        ayref="y",
        text="",
        showarrow=True,
        arrowhead=2,
        arrowwidth=1.5,
        arrowcolor=theme.dimmed,
    )


def _words(node: Node) -> tuple[str, str]:
    return ranks_text(node.ranks, _RUNS), short(node.label, _LABEL)


def _half(node: Node) -> float:
    """Half the width of a box, in columns."""
    return (_LETTER_PX * max(map(len, _words(node))) / 2 + _PAD_PX) / COLUMN_PX


def _box(drawn: go.Figure, node: Node, x: float, y: float, theme: Theme) -> None:
    culprit, (ranks, label) = node.column == 0, _words(node)
    drawn.add_annotation(
        x=x,
        y=y,
        text=f"<b>{ranks}</b><br>{html.escape(label)}",
        showarrow=False,
        bgcolor=theme.paper,
        bordercolor=theme.outline if culprit else theme.grid,
        borderwidth=2 if culprit else 1,
        borderpad=5,
        font={"color": theme.text, "size": 12},
    )
