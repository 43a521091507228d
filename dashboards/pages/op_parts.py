"""What the page Job shows of an op trace: a job of any shape, of which there is no pipeline to draw.

In: a stored job with the report that docs/op-trace.md describes. Out: components.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.figures.job import step_times
from tracekit.dashboards.ui.components import figure_panel, note, panel, plain_table, term
from tracekit.dashboards.ui.context import viewer
from tracekit.dashboards.ui.sentences import op_headline
from tracekit.text import seconds, short

#: Rows of a table that are shown; the report has all.
MOST_ROWS = 20


def op_content(stored: Stored) -> list[Component]:
    """The page of one op trace."""
    report = stored.op_report
    assert report is not None
    tables = [by_label(labels, shares) for labels, shares in report["by_label"].items()]
    return [
        _verdict(report),
        html.Div(
            [html.Div(_step_times(report), className="half"), html.Div(_about(stored, report), className="half")],
            className="row",
        ),
        critical_path(report, report["step_time_s"]["recorded"], "Critical path of the recorded step"),
        *tables,
    ]


def _verdict(report: dict[str, Any]) -> Component:
    return panel("Verdict", html.P(op_headline(report).sentence, className="verdict"), *trust_lines(report))


def trust_lines(report: dict[str, Any]) -> list[Component]:
    """Why not to trust the numbers, if so, and how well the replay fits the recording."""
    trust = report["trust"]
    lines: list[Component] = []
    if not trust["trustworthy"]:
        why = "; ".join(map(short, trust["reasons"]))
        lines.append(html.P(f"Do not trust S and what follows from it: {why}", className="warning"))
    lines.append(
        html.P(
            [
                term("replay error"),
                f" {_share(trust['replay_error'])}, ",
                term("launch delays"),
                f" add {_share(trust['discrepancy'])}",
            ],
            className="note",
        )
    )
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _step_times(report: dict[str, Any]) -> Component:
    times = report["step_time_s"]
    return figure_panel(
        ["Mean step time: ", term("recorded"), ", ", term("original"), ", ", term("ideal")],
        step_times(times["recorded"], times["original"], times["ideal"], viewer().theme),
        label=f"Step time recorded {seconds(times['recorded'])}, original {seconds(times['original'])},"
        f" ideal {seconds(times['ideal'])}",
        table=pl.DataFrame({"replay": list(times), "mean_step_time_s": list(times.values())}),
    )


def _about(stored: Stored, report: dict[str, Any]) -> Component:
    job, who = report["job"], viewer()
    rows = {
        "Kind": "op trace: the pages about pipelines do not apply",
        "Traced": f"{job['ranks']:,} ranks, {job['steps']:,} steps, {job['ops']:,} ops",
        "Imported": who.moment(stored.imported_at),
        "Source": short(stored.source),
    }
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in rows.items()]
    return panel("About this job", html.Table(html.Tbody(body), className="plain"))


def critical_path(report: dict[str, Any], recorded: float, title: str) -> Component:
    """Of what, and of whom, the recorded step consists; `recorded`: its seconds."""
    path = report["critical_path"]
    label = next(name for name in ("peer", "kind") if f"by_{name}" in path)
    parts = [(short(row[label]), row["recorded_s"]) for row in path[f"by_{label}"][:MOST_ROWS]]
    parts.append(("launch delays", path["delay_s"]))
    parts += [(f"rank {row['rank']}", row["recorded_s"]) for row in path["by_rank"][:MOST_ROWS]]
    table = pl.DataFrame(
        {
            "on the critical path": [name for name, _ in parts],
            "of a step": [seconds(value) for _, value in parts],
            "share": [f"{value / recorded:.1%}" for _, value in parts],
        }
    )
    return panel(title, html.Div(plain_table(table), className="table-scroll"))


def by_label(labels: str, shares: list[dict[str, Any]]) -> Component:
    """S by a label, costliest first."""
    table = pl.DataFrame(
        {
            labels.replace(",", ", "): [short(_value(row["value"])) for row in shares[:MOST_ROWS]],
            "ops": [f"{row['ops']:,}" for row in shares[:MOST_ROWS]],
            "S": ["-" if row["slowdown"] is None else f"{row['slowdown']:.3f}" for row in shares[:MOST_ROWS]],
            "adds to the ideal step": [seconds(row["added_s"]) for row in shares[:MOST_ROWS]],
            "saves if ideal": [seconds(row["saved_s"]) for row in shares[:MOST_ROWS]],
        }
    )
    more = len(shares) - MOST_ROWS
    rest = [note(f"{more:,} more: `tracekit whatif --by {labels} --json` lists all.")] if more > 0 else []
    return panel(f"S by {short(labels)}", html.Div(plain_table(table), className="table-scroll"), *rest)


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
