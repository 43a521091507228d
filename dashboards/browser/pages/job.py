"""Job: the answer first, with small pictures of workers, steps or GPUs, then findings, windows and the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import (
    code_name,
    percent_sure,
    printable,
    seconds,
    short,
    sure,
    three_digits,
)
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.pages.gpu_parts import gpu_panels, pictures_of_sections, ranks_picture, sections
from tracekit.dashboards.browser.pages.incidents import handled, incident_table
from tracekit.dashboards.browser.ui.charts import Level, steps_picture, waterfall, worker_cells
from tracekit.dashboards.browser.ui.components import (
    attributes,
    badge,
    facts_table,
    folded,
    folded_panel,
    href,
    note,
    panel,
    row_table,
    term,
)
from tracekit.dashboards.browser.ui.context import chosen_window, results, viewer
from tracekit.dashboards.browser.ui.sentences import (
    Tone,
    advised,
    costs_time,
    first_action,
    fix_place,
    headline,
    node_words,
    place_words,
    run_headline,
    why_no_advice,
)
from tracekit.dashboards.browser.ui.shell import job_page
from tracekit.dashboards.words import (
    core_rows,
    coverage_words,
    elsewhere_words,
    fix_times,
    lost_words,
    run_advice,
    run_of_several,
    since_words,
    steps_words,
    times_words,
    trust_row,
    who_words,
)
from tracekit.report.conclusions import Finding, Fix, RunCause, RunVerdict, State
from tracekit.report.finding import kind_words
from tracekit.report.report import Report

#: Causes that are shown at once.
MOST_CAUSES = 3
#: A label, its sentence, and the link to where its figures can be seen.
AnswerRow = tuple[str, str | None, Component | None]
#: Windows that are counted around the one shown, and those that are listed with their headline.
MOST_AROUND, MOST_LISTED = 60, 20
#: A watched job is stale after this many window lengths and this many seconds, like `TracekitStoppedReporting`.
STALE_WINDOWS, STALE_S = 5, 60.0

_HEADS = ("Cause", "Where", "Lost", "GPU-hours", "Steps", "When", "State")
_TONES = {State.OPEN: Tone.BAD, State.OVER: Tone.GOOD, State.ENDED: Tone.UNSURE}


def build(stored: Stored, report: Report, rank: str = "", q: str = "", **_: str) -> list[Component]:
    """The page of one job. `rank`: whose GPU to show; `q`: the filter of kernels and operators."""
    charts = pictures(stored, report)
    return [
        *window_bar(stored),
        *open_incidents(stored),
        *run_panel(stored, report),
        html.Div([hero(stored, report), *charts], className="first-screen" if charts else None),
        *_causes(stored, report),
        *_fixes(stored, report),
        *_applied(stored.name),
        *pictures_of_sections(report),
        *gpu_panels(stored, report, rank, q),
        *sections(stored, report),
        *history(stored),
        _about_panel(stored, report),
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
        head.append(f": {cause.costs}, {sure(cause.confidence)}")
    parts: list[Component] = [html.Div(head), html.Div(_effect(cause, costs=costs))]
    evidence = [("Looks like", "signature"), ("Wrong if", "refuted_by")]
    if cause.effect != report.answer.why:
        if cause.spent or cause.kind in advised(report):  # time seen in the recording is not from a replay
            parts += _labelled(cause, [("What to do", "suggested_fix")])
        evidence.insert(0, ("More to check", "next_check"))
    figures = [html.Ul([html.Li(remark.words) for remark in cause.evidence], className="evidence")]
    foot = [folded("Evidence", *(figures if cause.evidence else []), *_labelled(cause, evidence))]
    if costs or cause.suggested_fix:
        foot += _links(stored, cause)
    return [*parts, html.Div(foot, className="ways-on")]


def _effect(cause: Finding, *, costs: bool) -> str:
    """The effect of a cause; for causes in a recording, also the line of Python, or why it has no price."""
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
    return [html.Div(list(parts)) for parts in labels]


def _links(stored: Stored, cause: Finding) -> list[Component]:
    """Where the cause can be seen: on the map with its place marked, and op by op in a step in which it acts."""
    where = cause.where
    workers = where.workers
    worker = f"{workers[0].dp_rank},{workers[0].pp_rank}" if len(workers) == 1 else None
    step = where.steps[0] if where.steps else cause.since_step
    links = {
        "Show on the worker map": _workers_address(stored, "/workers", worker=worker, host=where.host or None),
        "Show op by op": _workers_address(stored, "/timeline", worker=worker, step=step),
    }
    return [dcc.Link(words, href=address) for words, address in links.items() if address is not None]


def _fixes(stored: Stored, report: Report) -> list[Component]:
    """The fixes for a named cause, below a chart if several save most together; folded, what any job could try."""
    whole, where = report.job.whole, [] if report.gpu else ["Where"]  # one GPU is one place
    hours = ["GPU-hours a day"] if report.assumptions else []
    unprofiled = any(fix.saves_step_s for fix in report.fixes)
    whole = "step" if unprofiled else whole
    after = (
        ["Step after, estimated without the profiler"]
        if unprofiled
        else [f"{whole.capitalize()} after, ", term("recorded")]
    )
    heads = ["Fix", *where, term("sure", "Sure"), after, f"Saved per {whole}", *map(term, hours)]
    rows: dict[bool, list[list[Any]]] = {True: [], False: []}
    for fix in report.fixes:
        confidence = fix.confidence
        place = [html.Td(fix_place(report, fix), className="short")] if where else []
        cells = [_title(fix), *place, "-" if confidence is None else percent_sure(confidence)]
        if fix.withheld is not None:
            cells.append(html.Td(f"not promised: {fix.withheld}", colSpan=2 + len(hours), className="note"))
        else:
            a_day = [f"{fix.saved_gpu_hours_per_day or 0.0:,.1f}"] if hours else []
            cells += [*fix_times(fix), *a_day]
        rows[confidence is not None].append(cells)
    cause_title, other_title = "What fixes give back", f"Fixes that any job could try: {len(rows[False])}"
    notes = [note(f"{words}.") for words in report.assumptions]
    tables = [
        row_table(heads, rows[for_cause], label, range(1 + len(where), len(heads)))
        for for_cause, label in ((True, cause_title), (False, other_title))
    ]
    priced = [tables[0], *notes]
    if levels := fix_levels(stored, report):
        priced = [waterfall(levels), folded(f"All fixes, priced: {len(rows[True])}", *priced)]
    return [
        *([panel(cause_title, *priced)] if rows[True] else []),
        *([folded_panel(other_title, tables[1], *notes)] if rows[False] else []),
    ]


def _applied(name: str) -> list[Component]:
    """The fixes of this job that another run has, and those that this run has: expected and got."""
    rows = []
    for fix in results().store.applied():
        if name in (fix.before, fix.after):
            between = href("/compare", job=fix.after, **{"with": fix.before})
            runs = dcc.Link(f"from {short(fix.before)} to {short(fix.after)}", href=between, className="way")
            rows.append(html.P([html.B(fix.title), f": {fix.outcome}, ", runs]))
    return [panel("Fixes applied", *rows)] if rows else []


def _title(fix: Fix) -> list[Any]:
    """The title of a fix, whether its saving is a bound, and the assumptions of its price."""
    title: list[Any] = [fix.title]
    if fix.bound:
        title += [" (", term("at most"), ")"]
    if assumed := fix.assumes:
        title.append(html.Div([term("assumes"), f" {assumed}"], className="note"))
    return title


def _about_panel(stored: Stored, report: Report) -> Component:
    user = viewer()
    rows: dict[str, Any] = {
        "Analysed": short(report.job.sizes),
        "First step": user.moment(stored.started_at),
        "Last step": user.moment(stored.ended_at),
        "Imported": user.moment(stored.imported_at),
        "Source": short(stored.source),
    }
    if isinstance(source := stored.metadata.get("layout_source"), str):
        rows["Layout known by"] = short(source)
    links = [
        html.A(f"{table}.csv", href=href(f"/download/{table}.csv", job=stored.name), download="")
        for table in ("causes", "fixes", "by_worker", "by_rank", "by_step")
        if stored.has_table(table)
    ]
    return folded_panel(
        "About this job, and its tables as CSV",
        facts_table(rows),
        html.P([html.Span([link, " "]) for link in links]),
    )


def hero(stored: Stored, report: Report) -> Component:
    """What, who, why, what to do first, what that saves, and whether to believe it: each with the way to see it."""
    verdict, trust = headline(report), report.trust
    prefix = "Now: " if run_of_several(report) else ""
    rows = [row for row in _rows(stored, report) if row[1]]
    parts: list[Any] = [
        html.P(f"{prefix}{verdict.sentence}", className="verdict"),
        _action(stored, report),
        html.Dl(
            [part for label, words, link in rows for part in (html.Dt(label), html.Dd([words, " ", link]))],
            className="answer",
        ),
    ]
    if not trust.trustworthy:
        reasons = "; ".join(map(short, trust.reasons))
        parts.append(html.P(["Do not trust these figures: ", reasons], className="warning"))
    return html.Section(parts, className=f"panel hero {verdict.tone}", **attributes(aria_label="The answer"))


def _action(stored: Stored, report: Report) -> Component:
    action = first_action(report)
    if action is None:
        healthy = headline(report).tone is Tone.GOOD
        nothing = "Nothing to do in this window." if stored.windows > 1 else "Nothing to do."
        message = nothing if healthy else f"No advice: {why_no_advice(report)}."
        return html.Div(html.P(message), className="action")
    first = html.P([html.Span("Do this first: ", className="label"), html.B(action[0])])
    details = [f"{words.rstrip('.')}." for words in (action[1], node_words(report)) if words]
    parts = [*details, page_link(stored, "price other fixes", "/whatif")]
    return html.Div([first, html.P([child for part in parts for child in (part, " ")])], className="action")


def _rows(stored: Stored, report: Report) -> list[AnswerRow]:
    answer = report.answer
    step = report.worst_step.step if report.by_step else None
    path = page_link(stored, "critical path of the slowest step", "/timeline", step=step, critical="yes")
    core = dict(core_rows(answer, since=since_words(report, viewer().zone)))
    return [
        ("Who", core.get("Who"), page_link(stored, "worker map", "/workers", worker=culprit(report))),
        ("Why", core.get("Why"), path),
        ("Costs", core.get("Cost"), page_link(stored, "steps", "/workers") if "Why" in core else path),
        ("More to check", answer.check, None),
        ("Run", others_note(stored, report), None),
        (*trust_row(answer.trust, trustworthy=report.trust.trustworthy), None),
        *((remark.name, remark.words, None) for remark in report.remarks),
    ]


def page_link(stored: Stored, words: str, path: str, **state: object) -> Component | None:
    """A link to a page of the job that is about workers; None if the job has none."""
    address = _workers_address(stored, path, **state)
    return None if address is None else dcc.Link(words, href=address, className="way")


def _workers_address(stored: Stored, path: str, **state: object) -> str | None:
    """The address of a page of the job that is about workers; None if the job has none."""
    return href(path, job=stored.name, **state) if stored.has_rows("by_worker") else None


def culprit(report: Report) -> str | None:
    """The worker of the costliest cause that sits on one, as addresses write it."""
    culprits = report.answer.culprits
    return f"{culprits[0].dp_rank},{culprits[0].pp_rank}" if culprits else None


def pictures(stored: Stored, report: Report) -> list[Component]:
    """Next to the answer: small charts of workers and steps, or the GPU time of the ranks."""
    if not report.by_worker:
        return ranks_picture(stored, report)
    worker_map = results().worker_map(stored.name)
    parts = [panel("Steps", steps_picture(report.by_step, stored.name))]
    if worker_map.slowdown.size > 1:
        parts.insert(0, panel("Workers", worker_cells(worker_map, stored.name)))
    return [html.Div(parts, className="pictures")]


def fix_levels(stored: Stored, report: Report) -> list[Level]:
    """The recorded step, the step after each fix of the best combination, and the rest; empty without a combination."""
    fixes = [fix for fix in report.fixes if fix.kind == "combination" and fix.withheld is None]
    if not fixes:
        return []
    step_s, theme = report.step_time_s.recorded, viewer().theme
    workers, whatif = _workers_address(stored, "/workers"), _workers_address(stored, "/whatif")
    levels = [Level("Recorded", 0, step_s, theme.recorded, seconds(step_s), workers)]
    doubtful = {fix.title for fix in report.fixes if fix.withheld is not None}
    for fix in fixes[0].details["sequence"]:
        saved_s = fix["marginal_saved_s"]
        title = f"{fix['title']} (not promised alone)" if fix["title"] in doubtful else fix["title"]
        levels.append(Level(title, step_s, step_s - saved_s, theme.changed, f"-{seconds(saved_s)}", whatif))
        step_s -= saved_s
    return [*levels, Level("With these fixes", 0, step_s, theme.changed, seconds(step_s), whatif)]


def window_bar(stored: Stored) -> list[Component]:
    """Which window this is, when the newest came, and the way to the others."""
    live = next(results().live_jobs().filter(pl.col("name") == stored.name).iter_rows(named=True), None)
    if live is None or (stored.windows < 2 and not live["watched"] and live["ending"] is None):
        return []
    rows = results().history(stored.name, MOST_AROUND, stored.window).to_dicts()
    numbers = [row["number"] for row in rows]
    current = next((row for row in rows if row["number"] == stored.window), None)
    steps = "" if current is None else f", steps {current['first_step']} to {current['last_step']}"
    earlier = max((number for number in numbers if number < stored.window), default=None)
    later = min((number for number in numbers if number > stored.window), default=None)
    newest = "" if numbers[-1] == live["number"] else f"; the newest is {live['number']}"
    parts: list[Any] = [
        _window_link("Earlier window", stored.name, earlier),
        html.B(f"Window {stored.window} of {numbers[0]} to {numbers[-1]}{newest}{steps}"),
        _window_link("Later window", stored.name, later),
        _age(live),
    ]
    if chosen_window(stored.name) is not None:
        parts.append(dcc.Link("Newest window", href=href("/job", job=stored.name, window=None)))
    return [
        html.Section(
            html.Div(parts, className="window-way"),
            className="panel windows",
            **attributes(aria_label="Windows of this job", data_window=str(stored.window)),
        )
    ]


def _window_link(words: str, job: str, window: int | None) -> Component:
    if window is None:
        return html.Span(words, className="note")
    return dcc.Link(words, href=href("/job", job=job, window=window))


def _age(live: dict[str, Any]) -> Component:
    """The age of the newest window; a badge once no window has come for too long."""
    if not live["watched"]:
        ending = printable(live["ending"] or "ended")
        return html.Span(f"{ending}; the last window came {viewer().moment(live['added_at'])}", className="note")
    stale_after = STALE_WINDOWS * ((live["ended_at"] or 0.0) - (live["started_at"] or 0.0)) + STALE_S
    age = max(time.time() - live["added_at"], 0.0)  # of another machine, whose clock may be ahead
    stale = age > stale_after
    return html.Span(
        f"{'stale' if stale else 'live'}: newest window {_span(age)} ago",
        className=f"badge {'slow loud' if stale else 'fine'}",
        **attributes(data_added_at=f"{live['added_at']:.3f}", data_stale_after=f"{stale_after:.3f}"),
    )


def _span(age_s: float) -> str:
    """A time span in its largest unit, as assets/live.js writes it."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, each_s = next((pair for pair in units if age_s >= 2 * pair[1]), ("s", 1))
    return f"{age_s // each_s:.0f} {unit}"


def open_incidents(stored: Stored) -> list[Component]:
    """The open incidents of the job, with advice: they lead the page."""
    incidents = results().incidents(stored.name, only_open=True)
    return [panel("Open incident", incident_table(handled(incidents), of_job=True))] if incidents else []


def history(stored: Stored) -> list[Component]:
    """The findings of the last windows, and the closed incidents of the job."""
    incidents = [incident for incident in results().incidents(stored.name) if incident.closed_at is not None]
    parts = []
    if incidents:
        parts.append(panel("Closed incidents of this job", incident_table(handled(incidents), of_job=True)))
    if stored.windows < 2:
        return parts
    rows = [
        [
            dcc.Link(f"{row['number']}", href=href("/job", job=stored.name, window=row["number"])),
            f"{row['first_step']} to {row['last_step']}",
            viewer().moment(row["added_at"]),
            "-" if row["share"] is None else f"{row['share']:z.1%}",
            printable(row["headline"] or row["problem"] or "not analysed"),
        ]
        for row in reversed(results().history(stored.name, MOST_LISTED).to_dicts())
    ]
    heads = ("Window", "Steps", "Stored", "Lost", "What it showed")
    return [*parts, panel("History", row_table(heads, rows, "Windows of this job", numbers=(3,)))]


def run_panel(stored: Stored, report: Report) -> list[Component]:
    """The first sentence about the run, what to do first, and its causes; nothing if the page is about one window."""
    run, verdict = run_of_several(report), run_headline(report, viewer().zone)
    if run is None or verdict is None:
        return []
    parts: list[Any] = [html.P(verdict.sentence, className="verdict")]
    if (advice := run_advice(run, report)) is not None:
        parts.append(html.P([html.Span("Do: ", className="label"), html.B(printable(advice))], className="action"))
    if run.causes:
        parts.append(_run_causes(stored.name, run))
    if covers := coverage_words(run):
        parts.append(note(f"Covers {covers}."))
    return [html.Section(parts, className=f"panel hero {verdict.tone}", **attributes(aria_label="The run"))]


def others_note(stored: Stored, report: Report) -> str | None:
    """The culprits that other windows of the run name, for the page of one window."""
    if stored.windows < 2 or report.run:
        return None
    run = results().run(stored.name)
    return None if run is None else elsewhere_words(run, report)


def _run_causes(job: str, run: RunVerdict) -> Component:
    """The causes that were large in some window; the others folded, so that all of them add up to the bill."""
    rows = [_row(job, cause) for cause in run.alarming]
    small = [_row(job, cause) for cause in run.causes if cause not in run.alarming]
    parts = [row_table(_HEADS, rows, "What the run lost", (2, 3))] if rows else []
    total = lost_words(run, "lost in all")
    if small:
        parts.append(folded(f"{len(small)} smaller; {total}", row_table(_HEADS, small, "Smaller losses", (2, 3))))
    elif len(rows) > 1:
        parts.append(note(f"{total}."))
    return html.Div(parts)


def _row(job: str, cause: RunCause) -> list[Any]:
    name = kind_words(cause.cause)
    return [
        dcc.Link(name, href=href("/job", job=job, window=cause.worst_window)),
        who_words(cause) if cause.ranks else "whole job",
        f"{cause.lost_share:.1%}",
        "-" if cause.gpu_hours_lost is None else three_digits(cause.gpu_hours_lost),
        short(steps_words(cause)),
        times_words(cause, viewer().zone) or "-",
        badge(str(cause.state).replace("-", " "), _TONES[cause.state], loud=cause.state is State.OPEN),
    ]


job_page(__name__, "/job", build, lambda reads, args: [partial(reads.worker_map, args["job"])])
