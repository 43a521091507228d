"""The panels of the page Compare: verdict, costs, steps, causes and workers of two sides.

In: two sides and their reports. Out: Dash components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from dash import html
from dash.development.base_component import Component
from msgspec import structs

from tracekit.analysis.numeric.statistics import MeanDifference, difference_of_means
from tracekit.base.text import seconds, short, sure, three_digits
from tracekit.dashboards.browser.ui.components import (
    badge,
    figure_panel,
    figure_parts,
    halves,
    href,
    inline_csv,
    note,
    panel,
    row_table,
    term,
)
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.figures import costs, distributions, step_series
from tracekit.dashboards.browser.ui.sentences import Tone, place_words
from tracekit.dashboards.figures.charts import worker_heatmap
from tracekit.dashboards.figures.worker_map import WorkerMap
from tracekit.report.compare import CauseChange, ChangeEffect, Side, cost_changes, verdict
from tracekit.report.conclusions import Finding
from tracekit.report.report import Report
from tracekit.trace.model import Worker

#: Most workers listed, and rows of the table next to a map.
MOST_WORKERS, MAP_ROWS = 20, 200
#: A worker whose slowdown alone changed by less is not listed.
LEAST_CHANGE = 0.01
_TONES = {ChangeEffect.BETTER: Tone.GOOD, ChangeEffect.WORSE: Tone.BAD}


def verdict_panel(before: Side, after: Side, extra: Component) -> Component:
    """The answer in one sentence and every figure before and after. `extra`: shown below the figures."""
    judged = verdict(before, after)
    outcome: Component = html.Span(str(judged.outcome), className="badge")
    if judged.outcome in _TONES:
        outcome = badge(str(judged.outcome), _TONES[judged.outcome], loud=True)
    return panel(
        "Did it help?",
        html.Div([html.P(judged.sentence, className="verdict"), outcome], className="verdict-line"),
        *(html.P(text, className="warning") for text in judged.notes),
        _figures(before, after),
        html.Div(extra, className="below"),
        note(
            "Intervals: 95%, bootstrap over blocks of steps; where steps resemble their neighbours, blocks are longer."
        ),
    )


def _hours_lost(before: float | None, after: float | None) -> Iterator[list[Any]]:
    """GPU-hours a day on both sides, where the GPUs of both are known."""
    if before is not None and after is not None:
        yield _row(["GPU-hours lost a day"], _without_interval(before, after), "{:,.1f}".format, share=False)


def _figures(before: Side, after: Side) -> Component:
    """Every figure before and after, with the interval of its change where steps give one."""
    rows = [
        _row([term("recorded"), " step time"], difference_of_means(before.recorded_s, after.recorded_s), seconds),
        _row([term("lost", "Lost"), " a step"], difference_of_means(before.lost_s, after.lost_s), seconds),
        _row(
            ["Share lost"],
            difference_of_means(before.lost_share_by_step(), after.lost_share_by_step()),
            "{:.1%}".format,
            share=False,
            points=True,
        ),
        *_hours_lost(before.lost_gpu_hours_per_day, after.lost_gpu_hours_per_day),
        _row(["Steps"], _without_interval(len(before.steps), len(after.steps)), "{:,.0f}".format, share=False),
    ]
    if before.tokens_per_s and after.tokens_per_s:
        rows.append(_row(["Tokens a second"], _without_interval(before.tokens_per_s, after.tokens_per_s), three_digits))
    heads = ["", f"Before: {short(before.title)}", f"After: {short(after.title)}", "Change", "95% interval"]
    return row_table(heads, rows, "Figures before and after", range(1, 5))


def _without_interval(before: float, after: float) -> MeanDifference:
    return MeanDifference(float(before), float(after), None, None)


def _row(
    title: list[Any], change: MeanDifference, show: Callable[[float], str], *, share: bool = True, points: bool = False
) -> list[Any]:
    """`share`: also give the change in percent. `points`: the values are percentages, their change is in points."""
    sign = "+" if change.difference > 0 else ""
    size = f" ({change.share:+.1%})" if share and change.before else ""
    interval = "" if change.low is None or change.high is None else f"{show(change.low)} to {show(change.high)}"
    by = f"{change.difference * 100:.1f} points" if points else show(change.difference)
    return [html.Th(title, scope="row"), show(change.before), show(change.after), f"{sign}{by}{size}", interval]


def cost_panels(before: Report, after: Report) -> Component:
    """The costs of op kinds and stages on either side."""
    panels = []
    for title, rows, column, y in (
        ("op kind", "by_kind", "kind", ""),
        ("stage", "by_pp_rank", "pp_rank", "stage"),
    ):
        changes = cost_changes(before, after, rows, column)
        frame = pl.DataFrame(
            {
                column: [change.name for change in changes],
                "before_s": pl.Series([change.before_s for change in changes], dtype=pl.Float64),
                "after_s": pl.Series([change.after_s for change in changes], dtype=pl.Float64),
                "change_s": [change.difference_s for change in changes],
            }
        )
        heading = ["Cost by ", term(title), ", each ", term("costs alone", "alone")]
        label = f"What each {title} alone costs a step, before and after"
        fig = costs(changes, viewer().theme, y=y)
        panels.append(figure_panel(heading, fig, label=label, table=frame, csv=inline_csv(frame)))
    return halves(*panels)


def step_panels(before: Side, after: Side, *, split: bool) -> Component:
    """Step times and their distribution. `split`: both sides are parts of one job."""
    frame = pl.concat(
        [
            pl.DataFrame(
                {
                    "side": [name] * len(side.steps),
                    "step": side.steps,
                    "recorded_s": side.recorded_s,
                    "lost_s": side.lost_s,
                }
            )
            for name, side in (("before", before), ("after", after))
        ]
    )
    charts = (
        figure_panel(
            "Step times; dashed: mean",
            step_series(before, after, viewer().theme, split=split),
            label="Recorded time of each step before and after, with the means",
            table=frame,
            csv=inline_csv(frame),
        ),
        figure_panel(
            "Distribution of the step times",
            distributions(before, after, viewer().theme),
            label="Cumulative distribution of the recorded step times before and after",
            table=frame.select("side", "recorded_s").sort("side", "recorded_s"),
            csv=inline_csv(frame),
        ),
    )
    return halves(*charts)


def causes_panel(change: CauseChange, reports: Mapping[str, Report], staying: str) -> Component:
    """Causes gone, new and staying. `reports`: by "before" and "after"; `staying`: the heading of the latter."""
    before, after = reports["before"], reports["after"]
    columns = (
        ("Gone", [_cause(before, cause, "cost") for cause in change.gone], "No cause went away."),
        ("New", [_cause(after, cause, "costs") for cause in change.new], "No cause is new."),
        (
            staying,
            [_cause(after, later, "costs", earlier=earlier) for earlier, later in change.staying],
            "No other cause.",
        ),
    )
    return panel(
        "Causes",
        html.Div(
            [
                html.Div([html.H3(title), html.Ul(items, className="cause-list") if items else note(none)])
                for title, items, none in columns
            ],
            className="thirds",
        ),
    )


def _cause(report: Report, cause: Finding, word: str, earlier: Finding | None = None) -> Component:
    words = cause.costs
    if earlier is None:
        words = words.replace("costs", word, 1)
    elif earlier is not cause:
        words = f"{earlier.costs.replace('costs', 'cost', 1)}, now {words}"
    since = "" if cause.since_step is None else f", since step {cause.since_step}"
    return html.Li(
        [
            html.B(cause.title),
            f", {place_words(report, cause) or 'whole job'}{since}: {words}, {sure(cause.confidence)}",
        ]
    )


def worker_panels(before: Side, after: Side, reports: Mapping[str, Report], *, split: bool) -> Sequence[Component]:
    """Both worker maps, and the workers that changed most.

    `reports`: by "before" and "after"; `split`: both sides are parts of one job.
    """
    maps = [
        panel(
            [f"{title.capitalize()}: what each worker ", term("costs alone"), " of a step"],
            *figure_parts(
                worker_heatmap(_map_of(side), None, viewer().theme),
                label=f"What each worker alone costs of a step {title} the change, DP ranks down, stages across",
                table=_map_table(side),
                csv=href(f"/download/{'by_worker_per_step' if split else 'by_worker'}.csv", job=side.job),
                most=MAP_ROWS,
            ),
        )
        for title, side in (("before", before), ("after", after))
    ]
    return (halves(*maps), _largest(before, after, reports))


def _map_of(side: Side) -> WorkerMap:
    """The map of the job of a side, of its steps alone and without the names of hosts."""
    return structs.replace(results().worker_map(side.job), slowdown=side.workers, hosts=())


def _map_table(side: Side) -> pl.DataFrame:
    stages = side.workers.shape[1]
    return pl.DataFrame(
        {
            "dp_rank": np.repeat(side.dp_ranks, stages),
            "pp_rank": np.tile(np.arange(stages), len(side.dp_ranks)),
            "slowdown": side.workers.ravel(),
        }
    ).sort("slowdown", descending=True, maintain_order=True)


def _largest(before: Side, after: Side, reports: Mapping[str, Report]) -> Component:
    """The workers of which what they alone cost changed most, where both sides have the same ones."""
    if before.workers.shape != after.workers.shape or not np.array_equal(before.dp_ranks, after.dp_ranks):
        return panel(
            "Workers that changed most", note("The two jobs have different workers, so workers cannot be paired.")
        )
    places = ["dp_rank", "pp_rank"]
    changed = (
        _map_table(after)
        .select(*places, after=1 - 1 / pl.col("slowdown"))
        .join(_map_table(before).select(*places, before=1 - 1 / pl.col("slowdown")), on=places)
        .with_columns(change=pl.col("after") - pl.col("before"))
        .sort(pl.col("change").abs(), descending=True, maintain_order=True)
        .head(MOST_WORKERS)
    )
    changed = changed.filter(pl.col("change").abs() >= LEAST_CHANGE)
    if changed.is_empty():
        return panel(
            "Workers that changed most", note(f"What each worker alone costs changed by less than {LEAST_CHANGE:.0%}.")
        )
    for name in ("before", "after"):
        columns = (pl.col(column).alias(f"{column} {name}") for column in ("rank", "host"))
        workers = reports[name].table("by_worker").select(*places, *columns)
        changed = changed.join(workers, on=places, how="left", maintain_order="left")
    one_host = changed["host before"].equals(changed["host after"])
    hosts = ["host after"] if one_host else ["host before", "host after"]
    heads = ["Rank", *(["Host"] if one_host else ["Host before", "Host after"]), "DP rank, stage"]
    heads += ["Costs alone, before", "After", "Change"]
    rows = [
        ["-" if row["rank after"] is None else f"{row['rank after']}"]
        + ["-" if row[host] is None else short(row[host]) for host in hosts]
        + [Worker(row["dp_rank"], row["pp_rank"]).coordinates]
        + [f"{row['before']:z.1%}", f"{row['after']:z.1%}", f"{100 * row['change']:+.1f} points"]
        for row in changed.iter_rows(named=True)
    ]
    title = "Workers that changed most"
    return panel(title, row_table(heads, rows, title, range(2 + len(hosts), len(heads))))
