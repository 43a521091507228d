"""What the page Job shows of an op trace: a job of any shape, of which there is no pipeline to draw.

In: a stored job with the report that docs/op-trace.md describes. Out: components.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from tracekit.base.command_line import command
from tracekit.base.text import seconds, short
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.figures.job import step_times
from tracekit.dashboards.pages.job_parts import AnswerRow, answer_card
from tracekit.dashboards.ui.components import figure_panel, note, panel, plain_table, scrolled, term
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.sentences import op_headline

#: Rows of a table that are shown; the report has all.
MOST_ROWS = 20


def op_content(stored: Stored) -> list[Component]:
    """The page of one op trace."""
    report = stored.op_report
    assert report is not None
    tables = [by_label(stored, labels, shares) for labels, shares in report["by_label"].items()]
    return [
        html.Div(
            [answer_card(op_headline(report), None, [trust_row(report)], report["trust"]), _step_times(report)],
            className="first-screen",
        ),
        critical_path(report, report["step_time_s"]["recorded"], "Critical path of the recorded step"),
        *tables,
        _about(stored, report),
    ]


def trust_row(report: dict[str, Any]) -> AnswerRow:
    """How well the replay fits the recording."""
    trust = report["trust"]
    words = f"replay error {_share(trust['replay_error'])}, launch delays add {_share(trust['discrepancy'])}"
    return "Trust", f"{'yes' if trust['trustworthy'] else 'NO'}: {words}", None


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
    return panel("About this job", html.Table(html.Tbody(body), className="plain about"))


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
    return panel(title, scrolled(plain_table(table), title))


def rest(stored: Stored, count: int, *options: str) -> list[Component]:
    """The command that lists all rows of a table that has so many, unless they are shown."""
    if count <= MOST_ROWS:
        return []
    listing = command("whatif", "--store", results().path, "--job", stored.name, *options, "--json")
    return [note(f"{count - MOST_ROWS:,} more: `{listing}` lists all.")]


def by_label(stored: Stored, labels: str, shares: list[dict[str, Any]]) -> Component:
    """S by a label, costliest first."""
    table = pl.DataFrame(
        {
            labels.replace(",", ", "): [short(_value(row["value"])) for row in shares[:MOST_ROWS]],
            "ops": [f"{row['ops']:,}" for row in shares[:MOST_ROWS]],
            "slowdown": ["-" if row["slowdown"] is None else f"{row['slowdown']:.3f}" for row in shares[:MOST_ROWS]],
            "adds to the ideal step": [seconds(row["added_s"]) for row in shares[:MOST_ROWS]],
            "saves if ideal": [seconds(row["saved_s"]) for row in shares[:MOST_ROWS]],
        }
    )
    return panel(
        f"Slowdown by {short(labels)}",
        scrolled(plain_table(table), f"Slowdown by {short(labels)}"),
        *rest(stored, len(shares), "--by", labels),
    )


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
