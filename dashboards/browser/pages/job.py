"""Job: the answer first, with small pictures of workers, steps or GPUs beside it; then why, and what each fix saves.

The same for a job of any source; only pipelines have workers, to which the page then links.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import code_name, percent_sure, printable, seconds, short, sure, with_error
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.pages.gpu_parts import gpu_panels
from tracekit.dashboards.browser.pages.job_parts import fix_levels, hero, pictures
from tracekit.dashboards.browser.pages.job_windows import history, open_incidents, window_bar
from tracekit.dashboards.browser.pages.run_parts import run_panel
from tracekit.dashboards.browser.pages.section_parts import pictures_of_sections, sections
from tracekit.dashboards.browser.ui.charts import waterfall
from tracekit.dashboards.browser.ui.components import (
    folded,
    folded_panel,
    href,
    note,
    panel,
    row_table,
    term,
)
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import advised, cost_words, costs_time, fix_place, place_words
from tracekit.dashboards.browser.ui.shell import job_page
from tracekit.report.conclusions import Finding, Fix
from tracekit.report.report import Report

#: Causes that are shown at once.
MOST_CAUSES = 3


def build(stored: Stored, rank: str = "", q: str = "", **_: str) -> list[Component]:
    """The page of one job. `rank`: whose GPU to show; `q`: the filter of kernels and operators."""
    report = stored.report
    assert report is not None
    beside = pictures(stored, report)
    return [
        *window_bar(stored),
        *open_incidents(stored),
        *run_panel(stored, report),
        html.Div([hero(stored, report), *beside], className="first-screen" if beside else None),
        *_causes(stored, report),
        *_fixes(stored, report),
        *_applied(stored.name),
        *pictures_of_sections(report),
        *gpu_panels(stored, report, rank, q),
        *sections(report),
        *history(stored),
        _about(stored, report),
    ]


def _causes(stored: Stored, report: Report) -> list[Component]:
    causes = [html.Li(_cause(stored, report, cause)) for cause in report.findings]
    more = html.Ol(causes[MOST_CAUSES:], className="causes", start=str(MOST_CAUSES + 1))
    folded_causes = [folded(f"{len(causes) - MOST_CAUSES} more", more)] if len(causes) > MOST_CAUSES else []
    return [panel("Why", html.Ol(causes[:MOST_CAUSES], className="causes"), *folded_causes)] if causes else []


def _cause(stored: Stored, report: Report, cause: Finding) -> list[Any]:
    """A cause and, unless it is the one that the answer above advises on, what to do about it."""
    costs = costs_time(report, cause)  # else the trace is at fault, or there is no cause
    head: list[Any] = [html.B(cause.title)]
    if costs or cause.suggested_fix:
        head.append(f"  {place_words(report, cause) or 'whole job'}, {cause.when}")
    if costs:
        price = cost_words(report, cause, bound=cause.bound)
        head.append(f": {price}, {sure(cause.confidence)}")
    parts: list[Component] = [html.Div(head), html.Div(_effect(cause, costs=costs))]
    evidence = [("Looks like", "signature"), ("Wrong if", "refuted_by")]
    if cause.effect != report.answer.why:
        if cause.spent or cause.kind in advised(report):  # time that was seen to be spent is no replay's figure
            parts += _labelled(cause, [("What to do", "suggested_fix")])
        evidence.insert(0, ("More to check", "next_check"))
    figures = [html.Ul([html.Li(one.words) for one in cause.evidence], className="evidence")]
    foot = [folded("Evidence", *(figures if cause.evidence else []), *_labelled(cause, evidence))]
    if stored.has_workers and (costs or cause.suggested_fix):
        foot += _ways_on(cause, stored.name)
    return [*parts, html.Div(foot, className="ways-on")]


def _effect(cause: Finding, *, costs: bool) -> str:
    """What a cause does; of what a recording's time is spent on, also the line of Python, or why it has no price."""
    words, spent = [cause.effect], cause.spent
    if spent and spent.where and (where := code_name(spent.where)) not in words[0]:
        words.append(f"at {where}")
    if spent and not costs:
        words.append(f"saving unknown: {printable(spent.cannot_tell or 'it has no price')}")
    return ", ".join(words)


def _labelled(cause: Finding, rows: Sequence[tuple[str, str]]) -> list[Component]:
    """The sentences of a cause under these keys, each after its label."""
    labels = [
        (html.Span(f"{label}: ", className="label"), getattr(cause, key)) for label, key in rows if getattr(cause, key)
    ]
    return [html.Div(list(each)) for each in labels]


def _ways_on(cause: Finding, name: str) -> list[Component]:
    """Where the cause can be seen: on the map with its place marked, and op by op in a step in which it acts."""
    where = cause.where
    workers = where.workers
    worker = f"{workers[0].dp_rank},{workers[0].pp_rank}" if len(workers) == 1 else None
    step = where.steps[0] if where.steps else cause.since_step
    return [
        dcc.Link("Show on the worker map", href=href("/workers", job=name, worker=worker, host=where.host or None)),
        dcc.Link("Show op by op", href=href("/timeline", job=name, worker=worker, step=step)),
    ]


def _times(fix: Fix) -> list[str]:
    """The step with a fix, and what it saves: without the profiler, where that is known."""
    saves, step_s = fix.saves_step_s, fix.unprofiled_step_s
    if saves is not None and step_s is not None:
        return [seconds(step_s - saves.value), seconds(saves.value) if fix.bound else saves.words]
    return [seconds(fix.new_step_s or 0.0), with_error(fix.saved_s or 0.0, fix.error_s)]


def _fixes(stored: Stored, report: Report) -> list[Component]:
    """The fixes for a named cause, below a chart if several save most together; folded, what any job could try."""
    whole, where = report.job.whole, [] if report.gpu else ["Where"]  # one GPU is one place
    hours = ["GPU-hours a day"] if report.assumptions else []
    unprofiled = any(fix.saves_step_s for fix in report.fixes)
    whole = "step" if unprofiled else whole
    then = ["Step after, without the profiler"] if unprofiled else [f"{whole.capitalize()} after, ", term("recorded")]
    heads = ["Fix", *where, term("sure", "Sure"), then, f"Saves a {whole}", *map(term, hours)]
    rows: dict[bool, list[list[Any]]] = {True: [], False: []}
    for fix in report.fixes:
        confidence = fix.confidence
        place = [html.Td(fix_place(report, fix), className="short")] if where else []
        cells = [_title(fix), *place, "-" if confidence is None else percent_sure(confidence)]
        if fix.withheld is not None:
            cells.append(html.Td(f"not promised: {fix.withheld}", colSpan=2 + len(hours), className="note"))
        else:
            a_day = [f"{fix.saved_gpu_hours_per_day or 0.0:,.1f}"] if hours else []
            cells += [*_times(fix), *a_day]
        rows[confidence is not None].append(cells)
    of_cause, of_any_job = "What fixes give back", f"Fixes that any job could try: {len(rows[False])}"
    said = [note(f"{words}.") for words in report.assumptions]
    tables = [
        row_table(heads, rows[each], label, range(1 + len(where), len(heads)))
        for each, label in ((True, of_cause), (False, of_any_job))
    ]
    priced = [tables[0], *said]
    if levels := fix_levels(stored, report):
        priced = [waterfall(levels), folded(f"All fixes, priced: {len(rows[True])}", *priced)]
    return [
        *([panel(of_cause, *priced)] if rows[True] else []),
        *([folded_panel(of_any_job, tables[1], *said)] if rows[False] else []),
    ]


def _applied(name: str) -> list[Component]:
    """The fixes of this job that another run has, and those that this run has: expected and got."""
    rows = []
    for fix in results().applied():
        if name in (fix.before, fix.after):
            between = href("/compare", job=fix.after, **{"with": fix.before})
            runs = dcc.Link(f"from {short(fix.before)} to {short(fix.after)}", href=between, className="way")
            rows.append(html.P([html.B(fix.title), f": {fix.outcome}, ", runs]))
    return [panel("Fixes applied", *rows)] if rows else []


def _title(fix: Fix) -> list[Any]:
    """What to do, whether it is a bound, and what its price takes for granted."""
    title: list[Any] = [fix.title]
    if fix.bound:
        title += [" (", term("at most"), ")"]
    if assumed := fix.assumes:
        title.append(html.Div([term("assumes"), f" {assumed}"], className="note"))
    return title


def _about(stored: Stored, report: Report) -> Component:
    who = viewer()
    rows: dict[str, Any] = {
        "Analysed": short(report.job.sizes),
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
        for table in ("causes", "fixes", "by_worker", "by_rank", "by_step")
        if stored.has_table(table)
    ]
    return folded_panel(
        "About this job, and its tables as CSV",
        html.Table(html.Tbody(body), className="plain about"),
        html.P([html.Span([link, " "]) for link in links]),
    )


job_page(
    __name__,
    "/job",
    "Job",
    build,
    lambda reads, texts: [partial(reads.worker_map, texts["job"])],
    any_job=True,
)
