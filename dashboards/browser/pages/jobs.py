"""Jobs: every job in one table, the one that loses most first; above it, open incidents.

The address holds the filter, the facets, the order and the part of the table, so a view can be sent to somebody. All
of it happens on the server: a browser gets 50 rows, however many jobs there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.detectors.detector import detector_of
from tracekit.base.errors import SelectionError
from tracekit.base.paths import adding, command
from tracekit.base.text import counted, printable, ranks_text, short
from tracekit.costs import TEAM_KEYS
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.charts import step_bars, trend
from tracekit.dashboards.browser.ui.components import (
    Views,
    attributes,
    badge,
    href,
    note,
    panel,
    row_table,
    sorting_head,
    text_field,
)
from tracekit.dashboards.browser.ui.context import results, service, viewer
from tracekit.dashboards.browser.ui.sentences import Tone, first_action, headline, run_headline, why_no_advice
from tracekit.dashboards.browser.ui.shell import page, xlsx
from tracekit.dashboards.words import run_advice, run_kind, run_of_several, run_sentence, who_words
from tracekit.report.finding import UNNAMED, LossKind, kind_words
from tracekit.store import HANG, Incident

#: Rows of a part of the table, cards above it, and values of a facet.
MOST_ROWS, MOST_CARDS, MOST_VALUES = 50, 3, 8
#: Every word of a filter is looked for in every job.
LONGEST_FILTER = 200
#: Orders by name: column, and whether the largest comes first.
ORDERS = {
    "lost": ("lost_gpu_hours_per_day", True),
    "saves": ("gives_back", True),
    "share": ("share", True),
    "tokens": ("tokens_per_s", True),
    "gpus": ("gpus", True),
    "added": ("imported_at", True),
    "job": ("name", False),
}
#: Columns that reports say: a job whose report is not to be trusted comes last in their orders.
_OF_REPORTS = ("lost_gpu_hours_per_day", "gives_back", "share")
#: Columns of the table, and the order that their heading chooses.
COLUMNS = {
    "Job": "job",
    "Verdict": None,
    "Lost": "share",
    "GPU-hours a day": "lost",
    "Cost a day": None,
    "First fix saves": "saves",
    "Culprit": None,
    "Trend": None,
    "Status": None,
    "Team": None,
    "Tokens/s": "tokens",
    "GPUs": "gpus",
    "Compare": None,
}
#: Those of figures: the column behind each, and how it is written.
FIGURES = {
    "Lost": ("share", ".0%"),
    "GPU-hours a day": ("lost_gpu_hours_per_day", ",.1f"),
    "First fix saves": ("gives_back", ",.1f"),
    "Tokens/s": ("tokens_per_s", ",.0f"),
    "GPUs": ("gpus", ","),
}
#: Columns that a facet narrows.
FACETS = {"verdict": "Verdict", "team": "Team", "status": "Status", "host": "Culprit's node"}
#: Ages of the newest window that the facet of time offers, days.
AGES = {"1": "last day", "7": "last week", "30": "last 30 days"}
_NOT_ANALYSED, _NO_VERDICT = "not analysed", "no verdict"
_UNSURE = UNNAMED | {_NOT_ANALYSED, _NO_VERDICT}


def build(q: str = "", sort: str = "lost", days: str = "", **state: str) -> list[Component]:
    """`q`: text that the jobs shown contain; `sort`: an order; `days`: of AGES; `at`: a part of the table; facets;
    `view`: the name of all this.
    """
    if len(q) > LONGEST_FILTER:
        raise SelectionError(f"the filter has {len(q):,} characters; expected at most {LONGEST_FILTER}")
    jobs = job_table()
    if jobs.is_empty():
        return [
            html.H1("Jobs"),
            panel(
                "No job yet",
                note(
                    f"The store is empty. Add one with `{adding(results().path)}`, record one with"
                    f" `{command('collect', '--store', results().path, '--', 'COMMAND')}`."
                ),
            ),
        ]
    filters = {name: state[name] for name in FACETS if state.get(name)}
    view = {
        "q": q or None,
        "sort": sort if sort in ORDERS and sort != "lost" else None,
        "days": days if days in AGES else None,
        **filters,
    }
    views = Views(
        id="jobs-views",
        query=urlencode({name: value for name, value in view.items() if value}),
        name=short(state["view"]) if state.get("view") else "",
    )
    part = state.get("at", "")
    return [
        html.H1("Jobs"),
        _summary(jobs),
        *_alarming_jobs(jobs),
        _table(jobs, view, int(part[:9]) if part.isdecimal() else 1, views),
    ]


def job_table() -> pl.DataFrame:
    """One row per job, as of `Results.jobs`, with what the table shows: `verdict`, `share` (lost), `team`, `culprit`,
    `host`, `status`, `tokens_per_s`, and `text`, all that a filter looks at, in lower case.
    """
    live = results().live_jobs().select("name", "watched", "ending")
    jobs = results().jobs().join(live, on="name", how="left", maintain_order="left")
    lost, saves = pl.col("lost_gpu_hours_per_day").clip(0.0), pl.col("gives_back").clip(0.0)
    cause, place, host = (pl.col(f"cause_{field}").list.first() for field in ("kinds", "places", "hosts"))
    labels = {kind: _label(kind) for kind in jobs.select(cause.unique().drop_nulls()).to_series()}
    straggler = pl.when(pl.col("verdict") == LossKind.STRAGGLER).then(
        cause.replace_strict(labels, default=None, return_dtype=pl.String)
    )
    metadata = pl.col("metadata").str
    tokens = pl.coalesce(metadata.json_path_match(f"$.{prefix}tokens_per_step") for prefix in ("", "label_"))
    table = jobs.with_columns(
        lost,
        saves,
        verdict=pl.when(pl.col("slowdown").is_null())
        .then(pl.lit(_NOT_ANALYSED))
        .when(~pl.col("trustworthy"))
        .then(pl.lit(_NO_VERDICT))
        .otherwise(pl.coalesce(straggler, "verdict", pl.lit("unknown")).str.replace_all("-", " ")),
        share=pl.coalesce("share", lost / (24 * pl.col("gpus"))).clip(0.0),
        team=pl.coalesce(metadata.json_path_match(f"$.{key}") for key in TEAM_KEYS),
        tokens_per_s=tokens.cast(pl.Float64, strict=False) / pl.col("recorded_s"),
        host=host,
        culprit=pl.when(~place.is_in(["whole job", "all ranks"])).then(place),
        status=pl.when("watched").then(pl.lit("running")).otherwise(pl.col("ending").fill_null("stored")),
    )
    table = table.update(_run_columns(table.schema), on="name")
    return table.update(_hang_columns(table.schema), on="name", how="full").with_columns(
        text=pl.concat_str(
            "name",
            "verdict",
            "team",
            "status",
            pl.col("cause_kinds", "cause_places", "cause_hosts").list.join(" "),
            separator=" ",
            ignore_nulls=True,
        ).str.to_lowercase()
    )


def _run_columns(schema: pl.Schema) -> pl.DataFrame:
    """The columns of `job_table` that are about the whole run, of jobs of several windows."""
    rows, zone = [], viewer().zone
    for name, run in results().runs().items():
        if not run.recorded_s:
            continue
        causes, kind, lost = run.alarming, str(run_kind(run)), run.gpu_hours_lost
        cause_name = _label(causes[0].cause) if causes and kind == LossKind.STRAGGLER and causes[0].is_known else None
        places = [who_words(cause) if cause.ranks else "whole job" for cause in causes]
        rows.append(
            {
                "name": name,
                "verdict": kind_words(cause_name or kind),
                "headline": run_sentence(run, zone),
                "share": run.lost_share,
                "lost_gpu_hours_per_day": lost and 24 * lost * 3600 / run.wall_s,
                "trustworthy": True,
                "straggling": bool(causes),
                "cause_kinds": [cause.cause for cause in causes],
                "cause_places": places,
                "culprit": ", ".join(dict.fromkeys(place for place in places if place != "whole job")) or None,
            }
        )
    return pl.DataFrame(rows, {name: schema[name] for name in rows[0]} if rows else {"name": pl.String})


def _hang_columns(schema: pl.Schema) -> pl.DataFrame:
    """The columns of `job_table` that differ while a job hangs, also of jobs that hung before they had a trace."""
    rows = []
    for name, incident in _hanging_jobs().items():
        ranks, host = results().hung_ranks(name), next(iter(incident.cause.hosts), None)
        lost = None if ranks is None else 24.0 * ranks
        row = {"name": name, "verdict": HANG, "status": "hangs", "share": 1.0, "headline": incident.cause.what}
        row |= {"gpus": ranks, "lost_gpu_hours_per_day": lost, "trustworthy": True, "straggling": True}
        culprit = ranks_text(incident.cause.ranks) if incident.cause.ranks else None
        rows.append(row | {"host": host, "culprit": culprit, "imported_at": incident.opened_at.timestamp()})
    return pl.DataFrame(rows, {name: schema[name] for name in rows[0]} if rows else {"name": pl.String})


def _hanging_jobs() -> dict[str, Incident]:
    return {incident.job: incident for incident in results().incidents(only_open=True) if incident.cause.kind == HANG}


def _label(kind: str) -> str | None:
    """The label instead of straggler if a cause of this kind leads; None for an unknown kind."""
    with suppress(KeyError):  # of a plug-in that is not installed here
        return detector_of(kind).label
    return None


def _summary(jobs: pl.DataFrame) -> Component:
    slow = jobs.filter(pl.col("trustworthy") & (pl.col("straggling") | (pl.col("share") >= VERDICT.headline_share)))
    if slow.is_empty():
        return html.H2("Nothing costs any analysed job 5% of its step", className="count")
    need = "job needs" if slow.height == 1 else "jobs need"
    counted_jobs = slow.drop_nulls("lost_gpu_hours_per_day")  # those whose GPUs are known
    if counted_jobs.is_empty():
        return html.H2(f"{slow.height:,} {need} attention", className="count")
    lost, all_hours = float(counted_jobs["lost_gpu_hours_per_day"].sum()), 24 * int(counted_jobs["gpus"].sum())
    price = service().gpu_hour
    money = "" if price is None else f", {lost * price:,.0f} at {price:g} a GPU-hour"
    words = f"{slow.height:,} {need} attention: {lost:,.0f} of {all_hours:,} GPU-hours a day are lost{money}"
    return html.H2(words, className="count")


def _alarming_jobs(jobs: pl.DataFrame) -> list[Component]:
    """The costliest jobs with an open incident."""
    affected, hanging = {incident.job for incident in results().incidents(only_open=True)}, _hanging_jobs()
    rows = jobs.filter(pl.col("name").is_in(affected)).sort("lost_gpu_hours_per_day", descending=True, nulls_last=True)
    names = rows.head(MOST_CARDS)["name"].to_list()
    cards = [hang_card(hanging[name]) if name in hanging else job_card(results().stored(name)) for name in names]
    return [html.Div(cards, className="job-cards")] if cards else []


def _table(jobs: pl.DataFrame, view: dict[str, str | None], part: int, views: Component) -> Component:
    rows = narrowed(jobs, view)
    column, largest_first = ORDERS[view["sort"] or "lost"]
    doubtful = ~pl.col("trustworthy").fill_null(value=True) & (column in _OF_REPORTS)
    rows = rows.sort(doubtful, column, "name", descending=[False, largest_first, False], nulls_last=True)
    parts = max(1, -(-rows.height // MOST_ROWS))
    part = min(max(part, 1), parts)
    page_rows = rows.slice((part - 1) * MOST_ROWS, MOST_ROWS)
    count = counted(jobs.height, "job") if rows.height == jobs.height else f"{rows.height:,} of {jobs.height:,} jobs"
    pages = [
        dcc.Link(words, href=_address(view, at=str(number)))
        for words, number in (("Previous", part - 1), ("Next", part + 1))
        if 1 <= number <= parts
    ]
    where = [note([f"Part {part:,} of {parts:,}. ", *(html.Span([page, " "]) for page in pages)])] if parts > 1 else []
    hint = [] if rows.height else [note(["No job fits. ", dcc.Link("All jobs", href=href("/"))])]
    files = html.Span(
        ["All as ", html.A("CSV", href=href("/download/jobs.csv"), download=""), " ", xlsx("jobs", "XLSX")]
    )
    return panel(count, _filter(view), _facets(jobs, view), views, *hint, _grid(page_rows, view), *where, extra=files)


def narrowed(jobs: pl.DataFrame, view: dict[str, str | None]) -> pl.DataFrame:
    """The jobs that contain the words of the filter and have the values of the facets."""
    for word in (view.get("q") or "").lower().split():
        jobs = jobs.filter(pl.col("text").str.contains(word, literal=True))
    if days := view.get("days"):
        jobs = jobs.filter(pl.col("imported_at") >= time.time() - 86_400 * int(days))
    for facet in FACETS:
        if value := view.get(facet):
            jobs = jobs.filter(pl.col(facet) == value)
    return jobs


def _address(view: dict[str, str | None], **changes: str | None) -> str:
    return href("/", **{**view, **changes})


def _filter(view: dict[str, str | None]) -> Component:
    """A field that puts its text into the address on Enter and keeps the rest of the address."""
    hidden = [
        dcc.Input(id=f"jobs-{name}", type="hidden", name=name, value=value)
        for name, value in view.items()
        if value and name != "q"
    ]
    field = text_field(
        "jobs-q", "Filter", view["q"] or "", placeholder="job, cause, node ...", style="wide", sent_as="q"
    )
    return html.Form([field, *hidden], action=href("/"), method="GET", role="search")


def _facets(jobs: pl.DataFrame, view: dict[str, str | None]) -> Component:
    """The values of each facet with the jobs that have them among those that fit all else; a click chooses one."""
    groups = []
    for facet, title in FACETS.items():
        values = narrowed(jobs, {**view, facet: None})[facet].drop_nulls()
        counts = values.value_counts(sort=True).sort("count", facet, descending=[True, False])
        offered = [(value, f"{short(value)} {count:,}") for value, count in counts.head(MOST_VALUES).iter_rows()]
        if (value := view.get(facet)) and value not in dict(offered):
            offered.append((value, f"{short(value)} 0"))
        if len(offered) > 1 or value:
            groups.append(_facet(view, facet, title, offered))
    groups.append(_facet(view, "days", "Stored", list(AGES.items())))
    return html.Div(groups, className="facets")


def _facet(view: dict[str, str | None], facet: str, title: str, offered: Sequence[tuple[str, str]]) -> Component:
    """Its values as links, the chosen one marked: it leads back to all."""
    links = [
        dcc.Link(
            words if view.get(facet) != value else f"{words} \u00d7",
            href=_address(view, **{facet: None if view.get(facet) == value else value}),
            className="facet chosen" if view.get(facet) == value else "facet",
        )
        for value, words in offered
    ]
    return html.Div([html.Span(title, className="label"), *links])


def _grid(rows: pl.DataFrame, view: dict[str, str | None]) -> Component:
    """The rows; columns of which no row has anything are left out."""
    trends = results().trends(tuple(rows["name"]))
    cells_of_rows = [_cells(row, trends.get(row["name"], [])) for row in rows.iter_rows(named=True)]
    columns = [name for name in COLUMNS if any(cells[name].children != "-" for cells in cells_of_rows)]
    body = [[cells[name] for name in columns] for cells in cells_of_rows]
    sorted_by = view["sort"] or "lost"
    addresses = {order: _address(view, sort=order) for order in ORDERS} | {"lost": _address(view, sort=None)}
    heads = [
        sorting_head(name, addresses[order], sorts=order == sorted_by) if order else name
        for name, order in COLUMNS.items()
        if name in columns
    ]
    numbers = [index for index, name in enumerate(columns) if name in (*FIGURES, "Cost a day")]
    return row_table(heads, body, "Jobs", numbers, id="jobs")


def _tone(verdict: str) -> Tone:
    if verdict == LossKind.BALANCED:
        return Tone.GOOD
    return Tone.UNSURE if verdict in _UNSURE else Tone.BAD


def _cells(row: dict[str, Any], shares: Sequence[float]) -> dict[str, Component]:
    name, verdict = row["name"], row["verdict"]
    tone = _tone(verdict)
    why = row["headline"] or row["problem"] or "stored without an analysis"
    causes = "; ".join(
        kind_words(kind) + ("" if place == "whole job" else f": {place}")
        for kind, place in zip(row["cause_kinds"] or (), row["cause_places"] or (), strict=False)
    )
    numbers = {
        title: html.Td("-" if row[column] is None else format(row[column], form), className="number")
        for title, (column, form) in FIGURES.items()
    }
    price, lost = service().gpu_hour, row["lost_gpu_hours_per_day"]
    money = "-" if price is None or lost is None else f"{lost * price:,.0f}"
    page_of = "/hang" if verdict == HANG else "/job"
    button = html.Button("Compare", className="chip-button", **attributes(data_compare=name, aria_pressed="false"))
    return {
        **numbers,
        "Cost a day": html.Td(money, className="number"),
        "Job": html.Td(dcc.Link(html.Bdi(short(name)), href=href(page_of, job=name), className="job")),
        "Verdict": html.Td(badge(verdict, tone, loud=tone is Tone.BAD), title=printable(why)),
        "Culprit": html.Td(short(row["culprit"] or "-"), title=printable(causes)),
        "Trend": html.Td(trend(shares) if len(shares) > 1 else "-"),
        "Status": html.Td(printable(row["status"]), title=f"stored {viewer().moment(row['imported_at'])}"),
        "Team": html.Td(short(row["team"] or "-")),
        "Compare": html.Td("-" if row["job_id"] is None else button),
    }


def job_card(stored: Stored) -> Component:
    """One job."""
    report = stored.report
    link = dcc.Link(html.Bdi(short(stored.name)), href=href("/job", job=stored.name))
    if report is None:  # the list of jobs says more than the report, which is gone or of an older version
        return html.Article(html.Header([html.H3(link), note(stored.problem)]), className="job-card")
    verdict, steps = run_headline(report, viewer().zone) or headline(report), report.by_step
    run = run_of_several(report)
    run_action = None if run is None else run_advice(run, report)
    action, saves = first_action(report) or (f"no advice: {why_no_advice(report)}", "")
    action, saves = (action, saves) if run_action is None else (run_action, "")
    lines = [html.Dt("Do first"), html.Dd(html.B(action))]
    lines += [html.Dt("Saves"), html.Dd(saves.removeprefix("saves "))] if saves else []
    picture = [step_bars(steps, stored.name, links=False)] if len(steps) > 1 else []
    return _card([html.H3(link), *picture], verdict.badge, verdict.tone, verdict.sentence, lines)


def hang_card(incident: Incident) -> Component:
    """A job that hangs."""
    cause = incident.cause
    link = dcc.Link(html.Bdi(short(incident.job)), href=href("/hang", job=incident.job))
    lines = [html.Dt("Who"), html.Dd(printable(cause.who))]
    lines += [html.Dt("Do first"), html.Dd(html.B(printable(cause.check)))] if cause.check else []
    return _card([html.H3(link)], cause.kind, Tone.BAD, printable(cause.what), lines)


def _card(head: list[Component], label: str, tone: Tone, sentence: str, lines: list[Component]) -> Component:
    return html.Article(
        [
            html.Header(head),
            badge(label, tone, loud=True),
            html.P(sentence, className="what"),
            html.Dl(lines, className="answer"),
        ],
        className=f"job-card {tone}",
    )


page(__name__, "/", "Jobs", build, lambda reads, _: [reads.jobs, reads.live_jobs])
