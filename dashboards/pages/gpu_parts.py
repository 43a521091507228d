"""What the page Job shows of a job that torch.profiler recorded: who holds the others up, and what GPUs did.

In: a stored job with the report that docs/kineto.md describes. Out: components.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component
from tracekit.analysis.gpu.remedy import OF_ALL

from tracekit.base.text import seconds, short
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.figures.job import rank_times
from tracekit.dashboards.pages.job_parts import AnswerRow, answer_card, do_first
from tracekit.dashboards.pages.op_parts import MOST_ROWS, by_label, critical_path, rest, trust_row
from tracekit.dashboards.ui.components import figure_panel, note, panel, plain_table, scrolled
from tracekit.dashboards.ui.context import viewer
from tracekit.dashboards.ui.sentences import gpu_action, gpu_cost, gpu_culprit, op_headline


def gpu_content(stored: Stored) -> list[Component]:
    """The page of one recording."""
    report = stored.op_report
    assert report is not None
    tables = [by_label(stored, labels, shares) for labels, shares in report["by_label"].items() if labels != "rank"]
    return [
        html.Div([_hero(report), _ranks(report)], className="first-screen"),
        _breakdown(stored, report),
        html.Div(
            [html.Div(_waits(stored, report), className="half"), html.Div(_kernels(report), className="half")],
            className="row",
        ),
        critical_path(report, report["recording_time_s"]["recorded"], "Critical path of the recording"),
        *tables,
        _about(stored, report),
    ]


def _hero(report: dict[str, Any]) -> Component:
    """Who, why, what to do first, what that saves, and whether to believe it."""
    culprit = report["verdict"]["culprit"] or {"causes": []}
    rows: list[AnswerRow] = [("Who", gpu_culprit(report), None)]
    if report["verdict"].get("kind") in OF_ALL:  # all ranks lose more together than to the one that they wait for
        if culprit["causes"]:
            rows.append(("Also", f"rank {culprit['rank']} costs {culprit['cost']}", None))
    else:
        # Reports of older stores have no words for what a cause does, nor for what to do.
        for number, one in enumerate(culprit["causes"]):
            effect = f"{one['effect']}: " if "effect" in one else ""
            rows.append(("Also" if number else "Why", f"{effect}{one['evidence']} ({one['cause']})", None))
    if said := gpu_cost(report):
        rows.append(("Costs", said, None))
    rows.append(trust_row(report))
    first = gpu_action(report)
    action = None if first is None else do_first(first[0], f"saves {first[1]}" if first[1] else None)
    return answer_card(op_headline(report), action, rows, report["trust"])


def _ranks(report: dict[str, Any]) -> Component:
    ranks = report["by_rank"]
    return figure_panel(
        "What each GPU did",
        rank_times(ranks, viewer().theme),
        label="Time of each rank's GPU that was computing, exposed communication, or idle",
        table=pl.DataFrame(ranks, infer_schema_length=None),
    )


def _breakdown(stored: Stored, report: dict[str, Any]) -> Component:
    """Costliest ranks first."""
    rows = sorted(report["by_rank"], key=lambda row: -row["sole_delay_s"])[:MOST_ROWS]
    times = {
        "slowdown alone": [_ratio(row["slowdown"]) for row in rows],
        **{title: [seconds(row[key]) for row in rows] for title, key in _COLUMNS.items()},
    }
    table = pl.DataFrame({"rank": [f"{row['rank']}" for row in rows], **times})
    return panel("By rank", scrolled(plain_table(table), "By rank"), *rest(stored, len(report["by_rank"])))


_COLUMNS = {
    "sole delay": "sole_delay_s",
    "waits": "wait_s",
    "compute": "compute_s",
    "communication": "communication_s",
    "of it exposed": "exposed_communication_s",
    "copies": "memory_s",
    "idle": "idle_s",
    "of": "span_s",
}


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _waits(stored: Stored, report: dict[str, Any]) -> Component:
    """Who waits for whom, longest first."""
    every = report["wait_for"]
    rows = sorted(every, key=lambda row: -row["wait_s"])[:MOST_ROWS]
    table = pl.DataFrame(
        {
            "rank": [f"{row['rank']}" for row in rows],
            "waits for rank": [f"{row['for_rank']}" for row in rows],
            "in collectives": [seconds(row["wait_s"]) for row in rows],
            "of the group": [short(row["group"]) for row in rows],
        }
    )
    body = scrolled(plain_table(table), "Who waits for whom") if rows else note("Nobody waits for anybody.")
    return panel("Who waits for whom", body, *rest(stored, len(every)))


def _kernels(report: dict[str, Any]) -> Component:
    """Time by class of kernels; the longest that no class knows behind them."""
    classes, unknown = report["kernel_classes"], report["unknown_kernels"][:5]
    total = sum(row["seconds"] for row in classes) or 1.0
    names = [row["kernel_class"] for row in classes] + [f"other: {short(row['name'])[:60]}" for row in unknown]
    rows = [*classes, *unknown]
    table = pl.DataFrame(
        {
            "kernels": names,
            "ops": [f"{row['ops']:,}" for row in rows],
            "time": [seconds(row["seconds"]).replace(" ", "\u00a0") for row in rows],
            "share": [f"{row['seconds'] / total:.1%}" for row in rows],
        }
    )
    return panel("Kernels, over all ranks", scrolled(plain_table(table), "Kernels"))


def _about(stored: Stored, report: dict[str, Any]) -> Component:
    job, matches = report["job"], report["collectives"]
    rows = {
        "Kind": "recording of torch.profiler: the pages about pipelines do not apply",
        "Traced": f"{job['ranks']:,} of {job['world_size'] or job['ranks']:,} ranks, {job['steps']:,} steps,"
        f" {job['gpu_ops']:,} GPU ops",
        "GPU": short(job["gpu"] or "not recorded"),
        "Collectives": f"{matches['matched']:,} matched, {matches['unmatched']:,} kernels not",
        "Launched before": f"{job['gpu_ops_without_launch']:,} GPU ops",
        "Imported": viewer().moment(stored.imported_at),
        "Source": short(stored.source),
    }
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in rows.items()]
    return panel("About this job", html.Table(html.Tbody(body), className="plain about"))
