"""What the page Job shows of a job besides its findings: what each GPU did, and the tables of its report.

In: a stored job and its report. Out: components; nothing where the report has no such parts.
"""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.figures.gpu_pictures import rank_times
from tracekit.dashboards.browser.ui.components import figure_panel, folded_panel, href, note, panel, row_table
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.figures.sections import picture
from tracekit.dashboards.words import figure_columns
from tracekit.report.report import Report
from tracekit.report.section import Picture, Series, ShareGrid, Table

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


def pictures_of_sections(report: Report) -> list[Component]:
    """The metrics of culprits over those of their peers, and the pictures among the sections, each with its figures."""
    return [
        figure_panel(part.title, picture(part, viewer().theme), label=_label(part), table=_figures(part))
        for part in report.pictures
    ]


def _label(part: Picture) -> str:
    """A picture in words."""
    if isinstance(part, ShareGrid):
        return f"{part.unit} over the mean, {part.down} by {part.across}"
    if isinstance(part, Series):
        return part.note or f"{', '.join(line.name for line in part.lines)} over {part.axis}"
    return "; ".join(part.notes) or part.title


def _figures(part: Picture) -> pl.DataFrame:
    """The figures of a picture as a table."""
    if isinstance(part, ShareGrid):
        columns = zip(*part.values, strict=True)
        return pl.DataFrame({part.down: part.rows, **dict(zip(part.columns, columns, strict=True))}, strict=False)
    if isinstance(part, Series):
        band = {} if part.usual is None else {"low": part.usual.low, "high": part.usual.high}
        return pl.DataFrame({part.axis: part.places} | {line.name: line.values for line in part.lines} | band)
    rows = [(part.rows[bar.row], part.legend[bar.what].name, bar.start_s, bar.end_s, bar.words) for bar in part.bars]
    return pl.DataFrame(rows, ["row", "what", "start_s", "end_s", "words"], orient="row")


def sections(report: Report) -> list[Component]:
    """The tables of the report, folded unless it is of post-training; of one GPU without those that compare ranks."""
    alone = bool(report.gpu)
    tables = [
        html.Div(_table(section), className="half" if len(section.heads) <= NARROW else "whole")
        for section in report.tables_of_sections
        if len(section.rows) > alone and not section.title.startswith("GPU ")
    ]
    if not tables:
        return []
    shown = html.Div(tables, className="row")
    return [shown if report.rl else folded_panel("Critical path and times by kind", shown)]


def _table(section: Table) -> Component:
    table = row_table(section.heads, section.rows, section.title, figure_columns(section))
    return panel(section.title, table, note(section.note) if section.note else None)
