"""The wait-for graph of a hang report, folded by process group, and its figure."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.hang.hang_report import HangReport
from tracekit.base.text import ranks_text, short
from tracekit.dashboards.figures.charts import figure
from tracekit.dashboards.theme import Theme

#: Most culprits and groups drawn one below the other; the table has all.
MOST_ROWS = 12
_ROW_HEIGHT, _LABEL, _RUNS = 58, 24, 4
#: Pixels: of a column, of a letter, and between the text of a box and its border.
COLUMN_PX, _LETTER_PX, _PAD_PX = 230, 7, 6


@dataclass(frozen=True, slots=True)
class Node:
    """Ranks that share a place in the graph. `column`: 0 for culprits, else the number of waits between them and the
    nearest culprit. `held_by`: the nodes (by number) that they wait for.
    """

    column: int
    label: str
    ranks: tuple[int, ...]
    operation: str
    held_by: tuple[int, ...]


def fold(report: HangReport) -> tuple[Node, ...]:
    """Fold the wait-for graph of a hang report into nodes: culprits, undecided ranks, then the waiting
    ranks, grouped by process group and distance from the culprits.
    """
    nodes = [Node(0, culprit.stall_class, (culprit.rank,), culprit.operation, ()) for culprit in report.culprits]
    nodes += [
        Node(0, "all alike" if question.alike else "cannot tell", question.ranks, question.operation, ())
        for question in report.undecided
    ]
    place = {rank: number for number, node in enumerate(nodes) for rank in node.ranks}
    waiting = {wait.rank: wait for wait in report.waiting if wait.rank not in place}
    column = _columns(place, {rank: wait.waits_for for rank, wait in waiting.items()})
    together: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, wait in sorted(waiting.items()):
        together[column[rank], wait.group or "unnamed group"].append(rank)
    first = len(nodes)
    keys = sorted(together)
    place |= {rank: first + number for number, key in enumerate(keys) for rank in together[key]}
    for number, key in enumerate(keys):
        ranks = together[key]
        held_by = {place[other] for rank in ranks for other in waiting[rank].waits_for if other in place} - {
            first + number
        }
        operation = waiting[ranks[0]].operation
        nodes.append(Node(key[0], key[1], tuple(ranks), operation, tuple(sorted(held_by))))
    return tuple(nodes)


def _columns(culprits: Iterable[int], waits_for: dict[int, Sequence[int]]) -> dict[int, int]:
    """Return the number of waits between each waiting rank and the nearest culprit; 1 where unknown."""
    waiters: defaultdict[int, list[int]] = defaultdict(list)
    for rank, held in waits_for.items():
        for other in held:
            waiters[other].append(rank)
    columns: dict[int, int] = {}
    column, ring = 1, list(culprits)
    while ring:
        ring = [rank for other in ring for rank in waiters.pop(other, ()) if rank in waits_for and rank not in columns]
        columns |= dict.fromkeys(ring, column)
        column += 1
    return {rank: columns.get(rank, 1) for rank in waits_for}


def node_table(nodes: Sequence[Node]) -> pl.DataFrame:
    """The same as a table, culprits first."""
    rows = []
    for node in nodes:
        awaited = dict.fromkeys(ranks_text(nodes[held].ranks) for held in node.held_by)
        rows.append((ranks_text(node.ranks, most=1000), node.label, node.operation, ", ".join(awaited)))
    return pl.DataFrame(rows, dict.fromkeys(("ranks", "what", "operation", "wait for"), pl.String()), orient="row")


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
    tallest = max((min(count, MOST_ROWS) for count in rows.values()), default=1)
    fig = figure(theme, height=60 + _ROW_HEIGHT * max(tallest, 2))
    for number, (x, y) in places.items():
        for held in nodes[number].held_by:
            if held in places:
                end_x, end_y = places[held]
                _arrow(fig, (x - _half_width(nodes[number]), y), (end_x + _half_width(nodes[held]), end_y), theme)
    for number, (x, y) in places.items():
        _box(fig, nodes[number], x, y, theme)
    axis = {"visible": False, "fixedrange": True}
    fig.update_xaxes(range=[-0.5, max((x for x, _ in places.values()), default=0) + 0.5], **axis)
    fig.update_yaxes(range=[-max(tallest, 2) + 0.5, 0.5], **axis)
    return fig


def _arrow(fig: go.Figure, begin: tuple[float, float], end: tuple[float, float], theme: Theme) -> None:
    fig.add_annotation(
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


def _node_words(node: Node) -> tuple[str, str]:
    return ranks_text(node.ranks, _RUNS), short(node.label, _LABEL)


def _half_width(node: Node) -> float:
    """Half the width of a box, in columns."""
    return (_LETTER_PX * max(map(len, _node_words(node))) / 2 + _PAD_PX) / COLUMN_PX


def _box(fig: go.Figure, node: Node, x: float, y: float, theme: Theme) -> None:
    culprit, (ranks, label) = node.column == 0, _node_words(node)
    fig.add_annotation(
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
