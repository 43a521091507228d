"""Job: the verdict on one job, why it is slow, and what each fix would buy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.figures.job import step_times
from tracekit.dashboards.pages.gpu_parts import gpu_content
from tracekit.dashboards.pages.op_parts import op_content
from tracekit.dashboards.ui.components import figure_panel, href, note, panel, term
from tracekit.dashboards.ui.context import viewer
from tracekit.dashboards.ui.sentences import NO_CAUSE, advice_words, advised, headline, sure
from tracekit.dashboards.ui.shell import job_page
from tracekit.text import cost, seconds, short

_ANSWER = (("Cost", "cost"), ("Who", "who"), ("Why", "why"), ("Check first", "check"))


def build(stored: Stored, **_: str) -> list[Component]:
    """The page of one job."""
    report = stored.report
    assert report is not None
    return [
        _verdict(report),
        panel("Causes", _causes(report, stored.name)),
        panel("Fixes", *_fixes(report)),
        html.Div(
            [html.Div(_step_times(report), className="half"), html.Div(_about(stored, report), className="half")],
            className="row",
        ),
    ]


def _verdict(report: dict[str, Any]) -> Component:
    trust, coverage = report["trust"], report["coverage"]
    lines: list[Any] = [html.P(headline(report).sentence, className="verdict")]
    lines += [html.P(words) for words in advice_words(report)]
    lines.append(_answer(report))
    if not trust["trustworthy"]:
        lines.append(
            html.P(["Do not trust S and what follows from it: ", "; ".join(trust["reasons"])], className="warning")
        )
    missing = coverage["workers_expected"] - coverage["workers_traced"]
    if missing or coverage["dropped"]:
        lines.append(
            note(
                f"{coverage['workers_traced']:,} of {coverage['workers_expected']:,} workers traced;"
                f" {len(coverage['dropped']):,} DP ranks left out of a step."
            )
        )
    shares = [
        html.Span([term(name), f" {'-' if report[key] is None else format(report[key], '.0%')}"])
        for name, key in (("M_W", "m_w"), ("M_S", "m_s"))
    ]
    lines.append(
        html.P(
            [
                term("replay error"),
                f" {trust['replay_error']:.2%}, ",
                term("launch delays"),
                f" add {trust['discrepancy']:.1%}, ",
                shares[0],
                ", ",
                shares[1],
            ],
            className="note",
        )
    )
    return panel("Verdict", *lines)


def _answer(report: dict[str, Any]) -> Component:
    """What it costs, who, why and what to check first; reports of older stores have no such sentences."""
    answer = report.get("answer") or {}
    rows = [(label, answer.get(key)) for label, key in _ANSWER if answer.get(key)]
    return html.Dl([part for label, words in rows for part in (html.Dt(label), html.Dd(words))], className="answer")


def _causes(report: dict[str, Any], name: str) -> Component:
    remedies = advised(report)
    return html.Ol([html.Li(_cause(cause, name, remedies)) for cause in report["causes"]], className="causes")


def _cause(cause: dict[str, Any], name: str, advised_kinds: Collection[str]) -> list[Any]:
    """`advised_kinds`: the kinds of cause for which a fix is promised; only they get a remedy."""
    found = cause["kind"] not in NO_CAUSE
    # Reports of older stores say since when only.
    since = "in every step" if cause["since_step"] is None else f"since step {cause['since_step']}"
    head: list[Any] = [html.B(cause["title"])]
    if found:
        head += [
            f"  {short(cause['where_text'])}, {cause.get('when', since)}: ",
            html.B(cost(cause["saved_s"], cause["alone_s"])),
            f", {sure(cause['confidence'])}",
        ]
    evidence = [
        html.Li(
            f"{one['name']}: {one['value']:.4g}{' ' + one['unit'] if one['unit'] else ''}"
            + (f" (needs {one['needed']:.4g})" if one["needed"] else "")
        )
        for one in cause["evidence"]
    ]
    figures = html.Details([html.Summary("Figures"), html.Ul(evidence, className="evidence")])
    # Reports of older stores have no words for what a cause does.
    parts = [html.Div(head), *([html.Div(cause["effect"])] if cause.get("effect") else []), figures]
    for label, key in (
        ("Looks like", "signature"),
        ("Next check", "next_check"),
        ("Usual remedy", "suggested_fix"),
        ("Wrong if", "refuted_by"),
    ):
        if cause[key] and (key != "suggested_fix" or cause["kind"] in advised_kinds):
            parts.append(html.Div([html.Span(f"{label}: ", className="label"), cause[key]]))
    if found:
        parts.append(dcc.Link("Show on the worker map", href=_map(cause["where"], name)))
    return parts


def _map(where: dict[str, Any], name: str) -> str:
    """The worker map with the place marked, where it is a worker or a host."""
    workers = where["workers"]
    worker = f"{workers[0]['dp_rank']},{workers[0]['pp_rank']}" if len(workers) == 1 else None
    return href("/workers", job=name, worker=worker, host=where["host"] or None)


def _fixes(report: dict[str, Any]) -> list[Component]:
    """Fixes for a named cause first, then what any job could try."""
    if not report["fixes"]:
        return [note("Nothing to fix.")]
    heads: list[Any] = [
        ("Fix", ""),
        ("Where", ""),
        (term("sure", "Sure"), "number"),
        (["Step then, ", term("recorded")], "number"),
        ("Saves a step", "number"),
        (term("GPU-hours a day"), "number"),
    ]
    rows = []
    for fix in report["fixes"]:
        confidence = fix.get("confidence")
        cells = [html.Td("-" if confidence is None else f"{min(confidence, 0.99):.0%}", className="number")]
        if fix["withheld"] is not None:
            cells.append(html.Td(f"not promised: {fix['withheld']}", colSpan=3, className="note"))
        else:
            error = f" ± {seconds(fix['error_s'])}" if fix["error_s"] else ""
            saves = seconds(fix["saved_s"]) + error
            figures = [seconds(fix["new_step_s"]), saves, f"{fix['saved_gpu_hours_per_day']:,.1f}"]
            cells += [html.Td(figure, className="number") for figure in figures]
        rows.append(
            html.Tr(
                [
                    html.Td(_title(fix)),
                    html.Td(short(fix["where_text"]), className="short"),
                    *cells,
                ]
            )
        )
    head = html.Thead(html.Tr([html.Th(shown, className=style) for shown, style in heads]))
    said = [*report.get("assumptions", []), "A fix without a confidence is for no named cause: any job could try it"]
    return [html.Table([head, html.Tbody(rows)], className="plain"), note(f"{'. '.join(said)}.")]


def _title(fix: dict[str, Any]) -> list[Any]:
    """What to do, whether it is a bound, and what its price takes for granted."""
    title: list[Any] = [fix["title"]]
    if fix["bound"]:
        title += [" (", term("at most"), ")"]
    if assumed := fix.get("assumes"):
        title.append(html.Div([term("assumes"), f" {assumed}"], className="note"))
    return title


def _step_times(report: dict[str, Any]) -> Component:
    times = report["step_time_s"]
    table = pl.DataFrame({"replay": list(times), "mean_step_time_s": list(times.values())})
    return figure_panel(
        ["Mean step time: ", term("recorded"), ", ", term("original"), ", ", term("ideal")],
        step_times(times["recorded"], times["original"], times["ideal"], viewer().theme),
        label=f"Step time recorded {seconds(times['recorded'])}, original {seconds(times['original'])},"
        f" ideal {seconds(times['ideal'])}",
        table=table,
    )


def _about(stored: Stored, report: dict[str, Any]) -> Component:
    layout, who = report["job"]["layout"], viewer()
    sizes = " x ".join(f"{name} {layout[name]}" for name in ("dp", "pp", "tp", "cp", "vpp") if layout[name] > 1)
    rows = {
        "Layout": f"{sizes or 'one worker'} on {layout['world_size']:,} GPUs",
        "Traced": f"{report['job']['steps']:,} steps, {report['job']['ops']:,} ops",
        "First step": who.moment(stored.started_at),
        "Last step": who.moment(stored.ended_at),
        "Imported": who.moment(stored.imported_at),
        "Source": short(stored.source),
    }
    if isinstance(source := stored.metadata.get("layout_source"), str):
        rows["Layout known by"] = short(source)
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in rows.items()]
    links = [
        html.A(f"{table}.csv", href=href(f"/download/{table}.csv", job=stored.name), download="")
        for table in ("causes", "fixes", "by_worker", "by_step")
    ]
    return panel(
        "About this job",
        html.Table(html.Tbody(body), className="plain"),
        html.P([html.Span([link, " "]) for link in links]),
    )


def build_ops(stored: Stored) -> list[Component]:
    """The page of an op trace: of GPUs, or of any other job."""
    of_gpus = stored.op_report is not None and "recording_time_s" in stored.op_report
    return gpu_content(stored) if of_gpus else op_content(stored)


job_page(__name__, "/job", "Job", build, build_ops=build_ops)
