"""The life of a job over the wall clock: spans of steps or windows, what each lost, and the figures of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.gpu.roofline import Card
from tracekit.analysis.whatif.timeline import labelled_ops, over_represented
from tracekit.base.errors import SelectionError
from tracekit.base.text import printable
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.figures.charts import figure
from tracekit.dashboards.theme import Theme
from tracekit.store import HANG
from tracekit.trace.facts import NAMES

#: Spans of a chart, and windows whose steps are shown one by one.
MOST_SPANS, MOST_STEPWISE = 240, 8
#: Most ops that are compared.
MOST_OPS = 5_000_000
#: Kinds of cause with a colour of their own; the others are one.
MOST_KINDS = 4
#: Planned parts of a stalled step.
_MEANT = ("checkpoint", "evaluation")
#: Room for the labels of the y axes, so that moments are below each other, pixels.
_LEFT = 104
_ROW_PX = 26
#: Where a click on a row of spans or events leads; None: nowhere.
Where = Callable[[int | None, int | None], str | None]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that began at `start_s`, seconds since the epoch, and ended at `end_s`, or took no time.

    `window`: one that shows it; None for a hang. `step`: of a checkpoint or an evaluation.
    """

    kind: str
    start_s: float
    end_s: float
    words: str
    window: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """`spans`: `start_s`, `end_s`, `window`, `step` (null if a span is of windows), `first_step`, `last_step`,
    `recorded_s`, `tokens_per_s`, `loss`, `mfu`, and whether the line is `broken` before it because steps in between
    were not recorded. `losses`: `start_s`, `end_s`, `kind`, `lost_s` of a mean step. Times are seconds since the epoch.

    Of few windows, spans are steps, from the reports; of more, they are windows or several of them, from the catalogue.
    """

    spans: pl.DataFrame
    losses: pl.DataFrame
    events: tuple[Event, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """When the first span begins and the last one ends."""
        return _time_range(self.spans)

    @property
    def stepwise(self) -> bool:
        """Whether spans are steps."""
        return bool(self.spans["step"].is_not_null().all())


def read_life(results: Results, job: str, since: float, until: float) -> Life | None:
    """The life of a job between two times; None if no step has a time."""
    parts = results.spans(job, MOST_SPANS, since, until)
    if parts.is_empty():
        return None
    few = int(parts["windows"].sum()) <= MOST_STEPWISE and parts["recorded_s"].null_count() == 0
    window_spans = parts.with_columns(window="last", step=pl.lit(None, pl.Int64), broken=_broken())
    spans = (_steps(results, job, parts) if few else window_spans).filter(
        (pl.col("end_s") >= since) & (pl.col("start_s") <= until)
    )
    events = [
        *_incidents(results, job, parts),
        *_restarts(parts),
        *(_stalls(results, job, parts, spans) if few else ()),
    ]
    visible = [event for event in events if event.end_s >= since and event.start_s <= until]
    return Life(
        _with_rates(spans),
        _losses(results, job, since, until, parts, spans),
        tuple(sorted(visible, key=lambda event: event.start_s)),
    )


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between ops in a range and those around it: `over_represented`, the numbers of steps, and the
    mean excess of a step, seconds.
    """

    table: pl.DataFrame
    inside: int
    outside: int
    inside_s: float
    outside_s: float


def read_differences(results: Results, job: str, since: float, until: float) -> Differences:
    """Compare the steps that begin in a range with those of the same windows and of windows around them.

    Raises SelectionError for a range of too many ops.
    """
    parts = results.spans(job, MOST_SPANS, since, until)
    wanted, ops_each = int(parts["windows"].sum()), int(parts["ops"].sum()) // int(parts["windows"].sum())
    limit = min(MOST_OPS // max(ops_each, 1), 2 * MOST_STEPWISE)
    if wanted > limit:
        raise SelectionError(f"the range has {wanted:,} windows of {ops_each:,} ops; at most {limit} can be compared")
    around = results.history(job, limit, int(parts.row(-1, named=True)["last"]))["number"].to_list()
    traces = [results.of_window(job, number).trace(job) for number in sorted({*parts["number"], *around})]
    ops = labelled_ops(traces)
    starts = [(index, step, start) for index, trace in enumerate(traces) for step, start in trace.step_starts.items()]
    begins = pl.DataFrame(starts, ["trace", "step", "start_s"], orient="row").cast(
        {"trace": pl.Int32, "step": pl.Int32}
    )
    ops = ops.join(begins, on=["trace", "step"], maintain_order="left")
    chosen = ops["start_s"].is_between(since, until)
    spent = ops.group_by("trace", "step", chosen.alias("chosen")).agg(pl.col("excess_s").sum())
    sides = [spent.filter(chosen=side)["excess_s"] for side in (True, False)]
    means = [float(side.sum()) / max(len(side), 1) for side in sides]
    return Differences(over_represented(ops, chosen), len(sides[0]), len(sides[1]), *means)


def _broken() -> pl.Expr:
    """Whether steps before this row are missing, or another attempt began."""
    return pl.col("restarted") | (pl.col("first_step") != pl.col("last_step").shift() + 1).fill_null(value=False)


def _steps(results: Results, job: str, parts: pl.DataFrame) -> pl.DataFrame:
    """A row for each step of the windows, joined with the values of the parts."""
    frames = []
    for number in parts["number"]:
        window = results.of_window(job, number)
        starts = window.step_starts(job)
        table = window.stored(job).table("by_step")
        logged = {name: table[name] if name in table.columns else None for name in NAMES}
        rows = table.select("step", "recorded_s").with_columns(**logged).cast(dict.fromkeys(NAMES, pl.Float64))
        frames.append(
            rows.with_columns(start_s=rows["step"].replace_strict(starts, return_dtype=pl.Float64), number=number)
        )
    steps = pl.concat(frames).drop_nulls("start_s").with_columns(end_s=pl.col("start_s") + pl.col("recorded_s"))
    part_columns = parts.select(
        pl.col("number").cast(pl.Int64), "restarted", "gpus", "gpu_model", "flops", "flops_per_token", of_mean="tokens"
    )
    first = pl.col("number") != pl.col("number").shift()
    return (
        steps.cast({"number": pl.Int64, "step": pl.Int64})
        .join(part_columns, on="number", maintain_order="left")
        .with_columns(restarted=pl.col("restarted") & first, first_step="step", last_step="step", window="number")
        .with_columns(tokens=pl.coalesce("tokens", "of_mean"))
        .with_columns(broken=_broken())
    )


def _with_rates(spans: pl.DataFrame) -> pl.DataFrame:
    """The spans with tokens a second, and the share of the peak of all GPUs, where these are known."""
    cards = {name: Card.named(name) for name in spans["gpu_model"].unique().drop_nulls()}
    peaks = {name: card.half for name, card in cards.items() if card is not None}
    flops = pl.coalesce("flops", pl.col("tokens") * pl.col("flops_per_token"))
    peak = pl.col("gpu_model").replace_strict(peaks, default=None, return_dtype=pl.Float64)
    return spans.select(
        *("start_s", "end_s", "window", "step", "first_step", "last_step", "recorded_s", "broken", "loss"),
        tokens_per_s=pl.col("tokens") / pl.col("recorded_s"),
        mfu=flops / pl.col("recorded_s") / pl.col("gpus") / peak,
    )


def _losses(
    results: Results, job: str, since: float, until: float, parts: pl.DataFrame, spans: pl.DataFrame
) -> pl.DataFrame:
    """`Life.losses`: those of a part count wherever steps of it were recorded."""
    stretch = pl.col("broken").cum_sum().alias("stretch")
    stretches = spans.group_by(pl.col("window").alias("last"), stretch).agg(
        pl.col("start_s").min(), pl.col("end_s").max()
    )
    losses = results.losses(job, MOST_SPANS, since, until)
    largest = losses.group_by("kind").agg(pl.col("lost_s").sum()).sort("lost_s", "kind", descending=True)["kind"]
    shown_kind = pl.when(pl.col("kind").is_in(largest[:MOST_KINDS].to_list())).then("kind").otherwise(pl.lit("others"))
    return (
        losses.group_by("span", shown_kind.alias("kind"))
        .agg(pl.col("lost_s").sum())
        .join(parts.select("span", "last", "steps"), on="span")
        .join(stretches.cast({"last": parts.schema["last"]}), on="last")
        .with_columns(pl.col("lost_s") / pl.col("steps"))
        .select("start_s", "end_s", "kind", "lost_s")
        .sort("start_s", "kind")
    )


def _incidents(results: Results, job: str, parts: pl.DataFrame) -> Iterator[Event]:
    """The incidents, for as long as windows show them; hangs by the clock of who found them."""
    last = _time_range(parts)[1]
    for incident in results.incidents(job):
        words, opened_s = printable(incident.cause.what), incident.opened_at.timestamp()
        if incident.cause.kind == HANG:
            yield Event(
                "hang",
                opened_s,
                max(opened_s, last) if incident.closed_at is None else incident.closed_at.timestamp(),
                words,
            )
        else:
            seen = parts.filter((pl.col("last") >= incident.opened_window) & (pl.col("number") <= incident.seen_window))
            if seen.height:
                begin, end = _time_range(seen)
                since = begin if incident.since is None else max(incident.since, begin)
                yield Event("incident", min(since, end), end, words, incident.seen_window)


def _time_range(spans: pl.DataFrame) -> tuple[float, float]:
    """When the first of these spans begins, and the last one ends."""
    begin, end = spans.select(pl.col("start_s").min(), pl.col("end_s").max()).row(0)
    return begin, end


def _restarts(parts: pl.DataFrame) -> Iterator[Event]:
    for number, start_s in parts.filter("restarted").select("number", "start_s").iter_rows():
        yield Event("restart", start_s, start_s, f"another attempt, from window {number} on", number)


def _stalls(results: Results, job: str, parts: pl.DataFrame, spans: pl.DataFrame) -> Iterator[Event]:
    """Checkpoints and evaluations that made a step longer."""
    times = {
        (window, step): (start, end)
        for window, step, start, end in spans.select("window", "step", "start_s", "end_s").iter_rows()
    }
    for number in parts["number"]:
        report = results.of_window(job, number).stored(job).report
        for stall in () if report is None else report.stalls:
            if stall.part in _MEANT and (when := times.get((number, stall.step))) is not None:
                words = f"step {stall.step} took {stall.extra_s:.3g} s longer"
                yield Event(stall.part, *when, words, number, stall.step)


def rates(
    spans: pl.DataFrame, column: str, theme: Theme, words: str, where: Where, *, events: Sequence[Event] = ()
) -> go.Figure:
    """One figure of each span, from its start to its end; the line breaks where steps are missing.

    `words`: hover text for the value, as Plotly formats it. `events`: incidents, as bands.
    """
    fig = figure(theme, height=200)
    x, y, data = list[float | None](), list[float | None](), list[Any]()
    for row in spans.iter_rows(named=True):
        steps = f"step {row['first_step']}"
        if row["last_step"] != row["first_step"]:
            steps = f"mean of steps {row['first_step']} to {row['last_step']}"
        if row["broken"] and x:
            x, y, data = [*x, row["start_s"] * 1e3], [*y, None], [*data, None]
        x += [row["start_s"] * 1e3, row["end_s"] * 1e3]
        y += [row[column]] * 2
        data += [[where(row["window"], row["step"]), steps]] * 2
    fig.add_scatter(
        x=x,
        y=y,
        customdata=data,
        mode="lines",
        line={"color": theme.recorded, "width": 2},
        hovertemplate=f"%{{customdata[1]}}: {words}<extra></extra>",
    )
    for event in events:
        if event.kind == "incident":
            fig.add_shape(
                type="rect",
                x0=event.start_s * 1e3,
                x1=event.end_s * 1e3,
                y0=0,
                y1=1,
                yref="paper",
                fillcolor=theme.slow[2],
                opacity=0.25,
                line={"width": 0},
                layer="below",
            )
    fig.update_yaxes(rangemode="normal" if column == "loss" else "tozero", tickformat=",.4g")
    fig.update_layout(hovermode="x")
    return fig


def losses(lost: pl.DataFrame, theme: Theme) -> go.Figure:
    """A stacked chart of the seconds that a mean step loses to each kind of cause: `Life.losses`."""
    fig = figure(theme, height=220, legend=True)
    kinds = lost.group_by("kind").agg(pl.col("lost_s").sum()).sort("lost_s", descending=True)["kind"].to_list()
    for kind, shade in zip(sorted(kinds, key=lambda kind: kind == "others"), theme.slow[3:] * 2, strict=False):
        rows = lost.filter(pl.col("kind") == kind)
        fig.add_bar(
            x=((rows["start_s"] + rows["end_s"]) * 500).to_list(),
            width=((rows["end_s"] - rows["start_s"]) * 1e3).to_list(),
            y=rows["lost_s"].to_list(),
            name=kind,
            marker={"color": theme.dimmed if kind == "others" else shade},
            hovertemplate=f"{kind}: %{{y:.3g}} s a step<extra></extra>",
        )
    fig.update_layout(barmode="stack")
    fig.update_yaxes(rangemode="tozero")
    return fig


def event_chart(events: Sequence[Event], theme: Theme, where: Where) -> go.Figure:
    """A chart with a row for each kind of event and a bar for the duration of each."""
    kinds = list(dict.fromkeys(event.kind for event in events))
    fig = figure(theme, height=60 + _ROW_PX * len(kinds))
    colours = {"incident": theme.slow[3], "hang": theme.slow[5]}
    fig.add_bar(
        orientation="h",
        base=[event.start_s * 1e3 for event in events],
        x=[(event.end_s - event.start_s) * 1e3 for event in events],
        y=[event.kind for event in events],
        marker={"color": [colours.get(event.kind, theme.dimmed) for event in events]},
        customdata=[[where(event.window, event.step)] for event in events],
        text=[event.words for event in events],
        textposition="none",
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    fig.update_layout(barmode="overlay", bargap=0.4)
    fig.update_yaxes(type="category", showgrid=False, autorange="reversed")
    return fig


def cost_over_time(windows: pl.DataFrame, theme: Theme, where: Callable[[str, int], str]) -> go.Figure:
    """A point for each window: when it began, and the share of its step that is lost.

    `windows`: `job`, `number`, `at_s`, `share`; `where`: the link of a job and a window.
    """
    fig = figure(theme, height=200)
    judged = windows.drop_nulls("share").sort("at_s")
    fig.add_scatter(
        x=(judged["at_s"] * 1e3).to_list(),
        y=judged["share"].to_list(),
        customdata=[[where(job, number), job] for job, number in judged.select("job", "number").iter_rows()],
        mode="markers",
        marker={"color": theme.bad, "size": 7},
        hovertemplate="%{customdata[1]}: %{y:.1%} of the step<extra></extra>",
    )
    fig.update_yaxes(rangemode="tozero", tickformat=".0%")
    return fig


def on_the_clock(
    fig: go.Figure, ends: tuple[float, float], chosen: tuple[float, float] | None, zone: tzinfo, title: str
) -> go.Figure:
    """Give a figure the axis of time: from and to, seconds since the epoch. `chosen`: the range that a reader chose."""
    all_ms = [end * 1e3 for end in ends]
    shared: dict[str, Any] = {"axis": "time", "zone": str(zone), "left": _LEFT}
    if chosen is not None:
        shared["range"] = [end * 1e3 for end in chosen]
    fig.update_xaxes(type="date", range=all_ms, title={"text": title})
    fig.update_layout(meta=shared)
    return fig
