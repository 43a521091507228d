"""Job: the answer first, with small pictures of workers, steps or GPUs beside it; then why, and what each fix saves.

The same for a job of any source; only pipelines have workers, to which the page then links.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import cost, percent_sure, seconds, short, sure, with_error
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.pages.gpu_parts import gpu_panels
from tracekit.dashboards.pages.job_parts import fix_levels, hero, numbers, pictures, way
from tracekit.dashboards.pages.job_windows import history, window_bar
from tracekit.dashboards.pages.section_parts import experts_picture, sections
from tracekit.dashboards.ui.charts import waterfall
from tracekit.dashboards.ui.components import (
    as_table,
    folded,
    href,
    note,
    panel,
    row_table,
    term,
)
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.sentences import advised, costs_time, fix_place, place_words
from tracekit.dashboards.ui.shell import job_page
from tracekit.report.applied import AppliedFix


def build(stored: Stored, rank: str = "", q: str = "", **_: str) -> list[Component]:
    """The page of one job. `rank`: whose GPU to show; `q`: the filter of kernels and operators."""
    report = stored.report
    assert report is not None
    beside, gpu = pictures(stored, report), gpu_panels(stored, report, rank, q)
    why = [
        panel("Why: the evidence", _causes(stored, report)),
        _waterfall(stored, report),
        panel("All fixes, priced", *_fixes(report)),
        *_applied(stored.name),
    ]
    return [
        *window_bar(stored),
        html.Div([hero(stored, report), *beside], className="first-screen" if beside else None),
        *([*gpu, *why] if "gpu" in report else [*why, *gpu]),
        *experts_picture(report),
        *sections(stored, report),
        *history(stored),
        _about(stored, report),
    ]


def _causes(stored: Stored, report: dict[str, Any]) -> Component:
    remedies = advised(report)
    return html.Ol([html.Li(_cause(stored, report, cause, remedies)) for cause in report["causes"]], className="causes")


def _cause(stored: Stored, report: dict[str, Any], cause: dict[str, Any], advised_kinds: Collection[str]) -> list[Any]:
    """`advised_kinds`: the kinds of cause for which a fix is promised; only they get a remedy."""
    costs = costs_time(report, cause)  # else the trace is at fault, or there is no cause
    head: list[Any] = [html.B(cause["title"])]
    if costs or cause["suggested_fix"]:
        head.append(f"  {place_words(report, cause) or 'whole job'}, {cause['when']}")
    if costs:
        price = cost(cause["saved_s"], cause["alone_s"], report["job"]["whole"])
        head += [": ", way(stored, price, "/workers") or price, f", {sure(cause['confidence'])}"]
    parts: list[Component] = [html.Div(head), html.Div(cause["effect"])]
    advice = (("What to do", "suggested_fix"), ("More to check", "next_check"))
    parts += _labelled(cause, [each for each in advice if each[1] != "suggested_fix" or cause["kind"] in advised_kinds])
    method = _labelled(cause, (("Looks like", "signature"), ("Wrong if", "refuted_by")))
    if figures := [html.Li(one["words"]) for one in cause["evidence"]]:
        method.insert(0, html.Ul(figures, className="evidence"))
    if method:
        parts.append(folded("Method", *method))
    if stored.has_workers and (costs or cause["suggested_fix"]):
        parts.append(html.Div(_ways_on(cause, stored.name), className="ways-on"))
    return parts


def _labelled(cause: dict[str, Any], rows: Sequence[tuple[str, str]]) -> list[Component]:
    """The sentences of a cause under these keys, each after its label."""
    labels = [(html.Span(f"{label}: ", className="label"), cause[key]) for label, key in rows if cause[key]]
    return [html.Div(list(each)) for each in labels]


def _ways_on(cause: dict[str, Any], name: str) -> list[Component]:
    """Where the cause can be seen: on the map with its place marked, and op by op in a step in which it acts."""
    where = cause["where"]
    workers = where["workers"]
    worker = f"{workers[0]['dp_rank']},{workers[0]['pp_rank']}" if len(workers) == 1 else None
    step = where["steps"][0] if where["steps"] else cause["since_step"]
    return [
        dcc.Link("Show on the worker map", href=href("/workers", job=name, worker=worker, host=where["host"] or None)),
        dcc.Link("Show op by op", href=href("/timeline", job=name, worker=worker, step=step)),
    ]


def _waterfall(stored: Stored, report: dict[str, Any]) -> Component:
    """From the recorded step over the fixes to what is left."""
    levels = fix_levels(stored, report)
    said = note("Fixes in the order in which they save most on top of each other; all else stays as recorded.")
    table = pl.DataFrame({"level": [one.title for one in levels], "step_s": [one.end_s for one in levels]})
    return panel("What fixes would give back", waterfall(levels), said, as_table(table), id="waterfall")


def _fixes(report: dict[str, Any]) -> list[Component]:
    """Fixes for a named cause first, then what any job could try."""
    if not report["fixes"]:
        return [note("Nothing to fix.")]
    whole = report["job"]["whole"]
    then = [f"{whole.capitalize()} then, ", term("recorded")]
    heads = ["Fix", "Where", term("sure", "Sure"), then, f"Saves a {whole}", term("GPU-hours a day")]
    names = ("Fix", "Where", "Sure", f"{whole.capitalize()} then", f"Saves a {whole}", "GPU-hours a day")
    rows: dict[bool, list[list[Any]]] = {True: [], False: []}
    for fix in report["fixes"]:
        confidence = fix["confidence"]
        place = html.Td(fix_place(report, fix), className="short")
        cells = [_title(fix), place, "-" if confidence is None else percent_sure(confidence)]
        if fix["withheld"] is not None:
            cells.append(html.Td(f"not promised: {fix['withheld']}", colSpan=3, className="note"))
        else:
            a_day = f"{fix['saved_gpu_hours_per_day']:,.1f}" if report["assumptions"] else "-"
            cells += [seconds(fix["new_step_s"]), with_error(fix["saved_s"], fix["error_s"]), a_day]
        rows[confidence is not None].append(cells)
    parts = []
    for for_cause, label in ((True, "Fixes for a cause"), (False, "Fixes that any job could try")):
        if not rows[for_cause]:
            continue
        table = row_table(heads, rows[for_cause], label, range(2, 6), names=names)
        parts.append(table if for_cause else folded(f"{label}: {len(rows[False])}", table))
    return [*parts, *(note(f"{words}.") for words in report["assumptions"])]


def _applied(name: str) -> list[Component]:
    """The fixes of this job that another run has, and those that this run has: expected and got."""
    rows = [
        html.P([html.B(one.title), f": {one.outcome}, ", _runs(one)])
        for one in results().applied()
        if name in (one.before, one.after)
    ]
    return [panel("Fixes applied", *rows)] if rows else []


def _runs(fix: AppliedFix) -> Component:
    between = href("/compare", job=fix.after, **{"with": fix.before})
    return dcc.Link(f"from {short(fix.before)} to {short(fix.after)}", href=between, className="way")


def _title(fix: dict[str, Any]) -> list[Any]:
    """What to do, whether it is a bound, and what its price takes for granted."""
    title: list[Any] = [fix["title"]]
    if fix["bound"]:
        title += [" (", term("at most"), ")"]
    if assumed := fix["assumes"]:
        title.append(html.Div([term("assumes"), f" {assumed}"], className="note"))
    return title


def _about(stored: Stored, report: dict[str, Any]) -> Component:
    who = viewer()
    rows: dict[str, Any] = {
        "Analysed": short(report["job"]["sizes"]),
        "First step": who.moment(stored.started_at),
        "Last step": who.moment(stored.ended_at),
        "Imported": who.moment(stored.imported_at),
        "Source": short(stored.source),
        "Trust": numbers(report),
    }
    if isinstance(source := stored.metadata.get("layout_source"), str):
        rows["Layout known by"] = short(source)
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in rows.items()]
    links = [
        html.A(f"{table}.csv", href=href(f"/download/{table}.csv", job=stored.name), download="")
        for table in ("causes", "fixes", "by_worker", "by_rank", "by_step")
        if table in report
    ]
    return panel(
        "About this job",
        html.Table(html.Tbody(body), className="plain about"),
        html.P([html.Span([link, " "]) for link in links]),
    )


job_page(
    __name__,
    "/job",
    "Job",
    build,
    lambda found, texts: [partial(found.worker_map, texts["job"])],
    any_job=True,
)
