"""Figures of one step: the ops of some workers, recorded above ideal, and the critical path through them.

An op has its colour on the timeline page: grey if it takes as long as its peers, the scale of slowdown if it takes
longer, pale while it waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import plotly.graph_objects as go

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.dashboards.figures.charts import axis, figure
from tracekit.dashboards.figures.spans import (
    SHORTEST_PEER_S,
    Line,
    PathSpans,
    Replay,
    Spans,
    StepOps,
    Window,
    count,
    spans,
)
from tracekit.dashboards.theme import CLASSES, Theme, legend
from tracekit.trace.model import KINDS

#: More bars than this make a notebook slow; the shortest ones that are not slow are left out first.
MOST_BARS = 4000
#: Pixel columns of a wide figure.
_COLUMNS = 1200
_ROW_PX, _HEAD_PX = 46, 96
#: Position and height of a worker's lanes within its row: compute above communication, recorded above ideal.
_LANES = {
    (Replay.RECORDED, True): (-0.30, 0.26),
    (Replay.RECORDED, False): (-0.10, 0.10),
    (Replay.IDEAL, True): (0.14, 0.26),
    (Replay.IDEAL, False): (0.34, 0.10),
}
_COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one figure, [bars] each. `row`: the worker's; `offset`, `height`: position within the row; times in
    seconds.

    `ratio`: own cost over that of the peers, nan for waiting. `text`: the hover text.
    """

    row: Ints
    offset: Floats
    height: Floats
    start: Floats
    duration: Floats
    ratio: Floats
    text: Sequence[str]


def workers_that_fit(ops: StepOps, wanted: Ints) -> Ints:
    """The first of `wanted` (indices in `ops`) whose ops fit into a figure, at least one."""
    bar_counts = np.array([count(ops, wanted[index : index + 1], _lines(ops)) for index in range(len(wanted))])
    limit = int((np.cumsum(bar_counts) <= MOST_BARS).sum())
    return np.sort(wanted[: max(limit, 1)])


def timeline(ops: StepOps, workers: Ints, names: Sequence[str], theme: Theme) -> go.Figure:
    """A row for each of these workers (indices in `ops`): its recorded ops above its ideal ones."""
    lines = _lines(ops)
    end = max(ops.end(Replay.RECORDED), ops.end(Replay.IDEAL))
    visible = spans(ops, workers, lines, Window(ops.begin(), end, _COLUMNS))
    fig = _rows(names, theme, f"milliseconds of step {ops.step}; recorded above ideal")
    _draw(fig, _bars_of(visible, lines, len(workers)), theme)
    for replay in (Replay.RECORDED, Replay.IDEAL):
        fig.add_vline(x=ops.end(replay) * 1e3, line={"color": getattr(theme, replay), "width": 1.5, "dash": "dot"})
    return fig


def critical_path(ops: StepOps, path: PathSpans, row: Ints, names: Sequence[str], theme: Theme) -> go.Figure:
    """The ops on the critical path of the recorded step, a row for each worker, with a line that follows the path.
    `row`: of each op.
    """
    fig = _rows(names, theme, f"milliseconds of step {ops.step}: the ops that it consists of, one after the other")
    times = np.stack([path.start, path.start + path.duration], axis=1).ravel() * 1e3
    line = {"color": theme.text, "width": 1}
    fig.add_scatter(x=times, y=np.repeat(row, 2), mode="lines", line=line, hoverinfo="skip", showlegend=False)
    kind, size = ops.kind[path.op], len(row)
    ratio = path.duration / np.maximum(ops.median[kind], SHORTEST_PEER_S)
    text = [
        f"{KINDS[code]}<br>{start * 1e3:,.2f} ms + {length * 1e3:,.2f} ms{_against_peers(beyond)}"
        for code, start, length, beyond in zip(kind, path.start, path.duration, ratio, strict=True)
    ]
    _draw(fig, Bars(row, np.full(size, -0.3), np.full(size, 0.6), path.start, path.duration, ratio, text), theme)
    return fig


def _lines(ops: StepOps) -> list[Line]:
    return [Line(replay, stream) for replay in (Replay.RECORDED, Replay.IDEAL) for stream in ops.streams()]


def _rows(names: Sequence[str], theme: Theme, x: str) -> go.Figure:
    """An empty figure with a row for each name, the first on top."""
    fig = figure(theme, height=_HEAD_PX + _ROW_PX * max(len(names), 2), x=x, legend=True)
    fig.update_layout(
        barmode="overlay",
        bargap=0,
        legend={"traceorder": "normal", "title": {"text": "time, against its peers: "}},
        hovermode="closest",
    )
    fig.update_yaxes(axis([escape(name) for name in names], max(len(names), 1), down=True, showgrid=False))
    fig.update_xaxes(rangemode="tozero")
    return fig


def _bars_of(visible: Spans, lines: Sequence[Line], workers: int) -> Bars:
    """For each span, a bar for its own cost, and one for its wait before that."""
    track = np.repeat(np.arange(workers * len(lines)), visible.first[1:] - visible.first[:-1])
    row, line = np.divmod(track, len(lines))
    lanes = np.array([_LANES[drawn_line.replay, drawn_line.stream == _COMPUTE] for drawn_line in lines])[line]
    duration, wait = visible.duration.astype(np.float64), visible.wait.astype(np.float64)
    labels = [f"{lines[index].replay}: {KINDS[code]}" for index, code in zip(line, visible.kind, strict=True)]
    text = [
        f"{name}<br>{start * 1e3:,.2f} ms + {length * 1e3:,.2f} ms"
        + (f", {waited * 1e3:,.2f} ms of it waiting" if waited > 0 else "")
        + _against_peers(ratio)
        for name, start, length, waited, ratio in zip(labels, visible.start, duration, wait, visible.ratio, strict=True)
    ]
    waits = np.flatnonzero(wait > 0)
    own_s = duration - wait
    no_ratio = np.full(len(waits), np.nan)
    return Bars(
        row=np.concatenate([row[waits], row]),
        offset=np.concatenate([lanes[waits, 0], lanes[:, 0]]),
        height=np.concatenate([lanes[waits, 1], lanes[:, 1]]),
        start=np.concatenate([visible.start[waits], visible.start + wait]),
        duration=np.concatenate([wait[waits], own_s]),
        ratio=np.concatenate([no_ratio, visible.ratio.astype(np.float64)]),
        text=[*(text[index] for index in waits.tolist()), *text],
    )


def _against_peers(ratio: float) -> str:
    if not np.isfinite(ratio):
        return "<br>most of its peers have no such op" if ratio > 0 else ""
    return f"<br>{ratio:.2f} times what its peers take"


def _draw(fig: go.Figure, bars: Bars, theme: Theme) -> None:
    """The bars, a trace for each class of slowness and one for waiting."""
    colours = legend(theme)
    waiting = len(colours) - 1
    group = np.where(np.isnan(bars.ratio), waiting, np.searchsorted(CLASSES, bars.ratio, side="right"))
    for number, (colour, name) in enumerate(colours):
        (bars_of_class,) = np.nonzero(group == number)
        if not len(bars_of_class):
            continue
        fig.add_bar(
            orientation="h",
            base=bars.start[bars_of_class] * 1e3,
            x=bars.duration[bars_of_class] * 1e3,
            y=bars.row[bars_of_class],
            offset=bars.offset[bars_of_class],
            width=bars.height[bars_of_class],
            marker={"color": colour, "line": {"width": 0}},
            text=[bars.text[index] for index in bars_of_class.tolist()],
            textposition="none",
            hovertemplate="%{text}<extra></extra>",
            name=name,
        )
