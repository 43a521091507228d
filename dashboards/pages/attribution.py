"""Attribution: which op kind, stage and DP rank costs the time, by both estimates; compute or communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from dash import ClientsideFunction, Input, State, clientside_callback, dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.figures.attribution import Estimates, correlations, estimates
from tracekit.dashboards.ui.components import figure_parts, href, note, panel, term
from tracekit.dashboards.ui.context import viewer
from tracekit.dashboards.ui.sentences import believed, correlation_words, diagnosis_words, kinds_words
from tracekit.dashboards.ui.shell import job_page


def build(stored: Stored, **_: str) -> list[Component]:
    """The page of one job; it has no state but the job."""
    report = stored.report
    assert report is not None
    kinds, stages, dp_ranks = (stored.table(name) for name in ("by_kind", "by_pp_rank", "by_dp_rank"))
    by_kind = _estimates(report, kinds, "kind", "kind")
    by_stage = _estimates(report, stages, "pp_rank", "stage")
    by_dp_rank = _estimates(report, dp_ranks, "dp_rank", "dp_rank")
    dear = "If ideal takes a replay for each of them: left out for a job this large."
    said = [note(dear)] if all(value is None for value in by_dp_rank.fixed_s) else []
    return [
        panel(
            "Compute or communication",
            html.P(diagnosis_words(report), className="verdict"),
            html.P(believed(report, kinds_words(report))),
            html.P(
                [
                    "Two estimates, because stragglers hide each other. ",
                    term("S alone", "Alone"),
                    ": what the set adds to the ideal step. ",
                    term("If ideal"),
                    ": how much shorter the step as it ran gets when the set is ideal. Beside them what its ",
                    term("launch delays"),
                    " add. A click on a bar asks the what-if of it.",
                ],
                className="note",
            ),
        ),
        _panel(stored, by_kind, kinds, ["By ", term("op kind")], "op kind", "kind", lying=True),
        html.Div(
            [
                html.Div(
                    _panel(stored, by_stage, stages, ["By ", term("stage")], "stage", "pp_rank"), className="half"
                ),
                html.Div(_correlation(report), className="half"),
            ],
            className="row",
        ),
        _panel(stored, by_dp_rank, dp_ranks, ["By ", term("DP rank")], "DP rank", "dp_rank", said=said),
        dcc.Store(id="attribution-job", data=stored.name),
    ]


def _estimates(report: dict[str, Any], table: pl.DataFrame, column: str, word: str) -> Estimates:
    """Seconds from the ratios of a table. Reports of an earlier version lack columns of the DP ranks."""
    times = report["step_time_s"]
    names = [str(name) for name in table[column]]
    late = table["launch_delay_slowdown"]
    return Estimates(
        names=names,
        selections=[f"{word}={name}" for name in names],
        alone_s=[(value - 1) * times["ideal"] for value in table["slowdown"]],
        fixed_s=list(table["saved_s"]) if "saved_s" in table.columns else [None] * table.height,
        late_s=[None if value is None else (value - 1) * times["original"] for value in late],
    )


def _panel(
    stored: Stored,
    found: Estimates,
    table: pl.DataFrame,
    title: list[Any],
    what: str,
    column: str,
    *,
    lying: bool = False,
    said: Sequence[Component] = (),
) -> Component:
    name = f"by_{column}"
    worst = max(range(len(found.names)), key=lambda at: found.alone_s[at] or 0.0)
    link = dcc.Link(
        f"What if {what} {found.names[worst]} were as fast as its peers?",
        href=href("/whatif", job=stored.name, select=found.selections[worst]),
    )
    parts = figure_parts(
        estimates(found, viewer().theme, x=what, lying=lying),
        label=f"What each {what} costs a step, alone and if ideal; the largest is {found.names[worst]}",
        table=table,
        csv=href(f"/download/{name}.csv", job=stored.name),
        id=f"attribution-{column}",
    )
    return panel(title, *said, *parts, extra=link)


def _correlation(report: dict[str, Any]) -> Component:
    """Whether forwards and backwards of the same microbatch are long together."""
    rows = report["forward_backward_correlation"]
    stages, values = [row["pp_rank"] for row in rows], [row["r"] for row in rows]
    title = "Forward and backward of the same microbatch"
    if all(value is None for value in values):
        return panel(title, note("Their durations do not vary, so there is nothing to correlate."))
    said = believed(report, correlation_words(report))
    parts = figure_parts(
        correlations(stages, values, viewer().theme),
        label=said,
        table=pl.DataFrame({"pp_rank": stages, "r": values}, schema={"pp_rank": pl.Int64, "r": pl.Float64}),
        id="attribution-correlation",
    )
    return panel(title, html.P(said), *parts)


clientside_callback(
    ClientsideFunction("attribution", "open"),
    Input("attribution-kind", "clickData"),
    Input("attribution-pp_rank", "clickData"),
    Input("attribution-dp_rank", "clickData"),
    State("attribution-job", "data"),
    prevent_initial_call=True,
)

job_page(__name__, "/attribution", "Attribution", build)
