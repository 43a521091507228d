"""What the page Job shows of a job besides its findings: what each GPU did, and the tables of its report.

In: a stored job and its report. Out: components; nothing where the report has no such parts.
"""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
from dash import html
from dash.development.base_component import Component

from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.figures.gpu_pictures import expert_loads, metric_band, rank_times
from tracekit.dashboards.browser.ui.components import figure_panel, folded_panel, href, note, panel, row_table
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.words import figure_columns
from tracekit.report.report import Report
from tracekit.report.section import Table

#: A table of at most so many columns fits into half of a page.
NARROW = 5


def ranks_picture(stored: Stored, report: Report) -> list[Component]:
    """What the GPU of each rank did, if that was recorded."""
    ranks: list[dict[str, Any]] = msgspec.to_builtins(report.by_rank or [])
    if not ranks or "compute_s" not in ranks[0]:
        return []
    if report.gpu:
        ranks = [ranks[0] | {"before_first_s": report.gpu.before_first.seconds}]
    drawn = figure_panel(
        "What each GPU did",
        rank_times(ranks, viewer().theme),
        label="Time of each rank's GPU that was computing, exposed communication, or idle",
        table=pl.DataFrame(ranks, infer_schema_length=None),
        csv=href("/download/by_rank.csv", job=stored.name),
    )
    return [drawn]


def metrics_pictures(report: Report) -> list[Component]:
    """The metric of each culprit that was tested, over the band of its peers."""
    tests = report.metrics.tests if report.metrics else []
    return [
        figure_panel(
            f"Metrics: {test.metric} of {short(test.host)}",
            metric_band(test.band, viewer().theme),
            label=f"{test.sentence}. Dotted: the beginning and the end of what the trace shows",
            table=pl.DataFrame({name: getattr(test.band, name) for name in ("time", "own", "low", "high")}),
        )
        for test in tests
        if test.band is not None
    ]


def experts_picture(report: Report) -> list[Component]:
    """Which ranks have how many tokens of experts, if those are uneven."""
    if not report.experts or not report.experts.layers:
        return []
    layers = report.experts.layers
    drawn = figure_panel(
        "Loads of experts",
        expert_loads(layers, viewer().theme),
        label="Tokens of each rank over the mean, in each layer of experts",
        table=pl.DataFrame(
            [(row.layer, row.max_over_mean, row.deviation) for row in layers],
            ["layer", "max_over_mean", "deviation"],
            orient="row",
        ),
    )
    return [drawn]


def sections(report: Report) -> list[Component]:
    """The tables of the report, folded unless it is of post-training; of one GPU without those that compare ranks."""
    alone = bool(report.gpu)
    tables = [
        html.Div(_table(section), className="half" if len(section.heads) <= NARROW else "whole")
        for section in report.sections
        if len(section.rows) > alone and not section.title.startswith(("GPU ", "Loads of experts"))
    ]
    if not tables:
        return []
    shown = html.Div(tables, className="row")
    return [shown if report.rl else folded_panel("Critical path and times by kind", shown)]


def _table(section: Table) -> Component:
    table = row_table(section.heads, section.rows, section.title, figure_columns(section))
    return panel(section.title, table, note(section.note) if section.note else None)
