"""The frame of every page: the header, the tabs of a job, and the registration of pages.

In: a page's function from the state in the URL to its content. Out: that page in Dash, with errors shown in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from typing import Any

import dash
import flask
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.command_line import adding, command
from tracekit.base.errors import NotStoredError, SelectionError, StoreError
from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import OTHER_VERSION, Results, Stored
from tracekit.dashboards.browser.data.whatif_query import LONGEST_ADDRESS
from tracekit.dashboards.browser.ui.callbacks import TROUBLE
from tracekit.dashboards.browser.ui.components import attributes, badge, guarded, href, note, panel, problem, term
from tracekit.dashboards.browser.ui.context import (
    choose_range,
    choose_window,
    chosen_range,
    chosen_window,
    results,
    study,
    viewer,
)
from tracekit.dashboards.browser.ui.prose import as_prose
from tracekit.dashboards.browser.ui.sentences import Tone, headline, run_headline
from tracekit.dashboards.browser.ui.share import share
from tracekit.dashboards.browser.ui.time_range import range_control
from tracekit.dashboards.figures.theme import DARK
from tracekit.report.report import Report
from tracekit.store import HANG

Layout = Callable[..., Any]
#: Most impossible rows of a store that a page lists; the server's log has all.
MOST_LEFT_OUT = 20
#: Functions that read the data of a page, given its address.
Reads = Callable[[Results, Mapping[str, str]], Sequence[Callable[[], object]]]

_reads: dict[str, Reads] = {}


@dataclass(frozen=True, slots=True)
class Tab:
    """A page about one job. `any_job`: not only about pipelines."""

    title: str
    path: str
    any_job: bool = False


TABS = (
    Tab("Job", "/job", any_job=True),
    Tab("Time", "/time"),
    Tab("Workers", "/workers"),
    Tab("Pipeline", "/pipeline"),
    Tab("What-if", "/whatif", any_job=True),
    Tab("Timeline", "/timeline", any_job=True),
    Tab("Compare", "/compare", any_job=True),
    Tab("Hang", "/hang", any_job=True),
)


def page(module: str, path: str, title: str, build: Layout, reads: Reads) -> None:
    """Register a page: `build` gets the state in the URL as text by name and returns the content of the page.

    `reads`: the data it needs, prefetched as soon as a browser requests the document around it.
    """
    _reads[path] = reads

    def layout(**state: Any) -> Any:
        texts = {name: value for name, value in state.items() if isinstance(value, str)}
        seen, left_out = {}, None
        with suppress(StoreError):  # the content shows the error
            seen["data_state"] = results().state()  # before anything is read, so that nothing newer goes unnoticed
            left_out = _left_out(results().left_out())
        content = guarded(_within_limits(build))(**texts)
        trouble = html.Div(id=TROUBLE, role="alert")
        parts = [*(content if isinstance(content, list) else [content]), left_out, trouble]
        return html.Main(as_prose(parts), id="page", **attributes(data_page=path, **seen))

    dash.register_page(module, path=path, title=f"{title} - tracekit", name=title, layout=layout)


def _within_limits(build: Layout) -> Layout:
    """The page, or SelectionError for an address longer than the dashboard makes any."""

    def limited(**texts: str) -> Any:
        if (length := sum(map(len, texts.values()))) > LONGEST_ADDRESS:
            raise SelectionError(f"the address has {length:,} characters; expected at most {LONGEST_ADDRESS:,}")
        return build(**texts)

    return limited


def _left_out(lines: Sequence[str]) -> Component | None:
    """A panel of the stored rows that no page shows."""
    if not lines:
        return None
    repair = command("store", "repair", "--store", results().path)
    heading = note(f"These rows of the store are impossible; `{repair}` drops them:")
    return panel("Left out", heading, html.Ul([html.Li(line) for line in lines[:MOST_LEFT_OUT]]))


def read_ahead() -> None:
    """Prefetch before a request: after the document of a page, the browser requests the page itself."""
    reads = _reads.get(flask.request.path)
    if reads is not None and flask.request.method == "GET":
        results().ahead(*reads(results(), flask.request.args))


def job_page(
    module: str,
    path: str,
    title: str,
    build: Layout,
    reads: Reads | None = None,
    *,
    any_job: bool = False,
) -> None:
    """Register a page about one job: `build` gets the `Stored` job first. Without `job=` the newest is taken.

    `reads`: the data it needs besides the job's report, for an address that names the job. `any_job`: the page is not
    only about pipelines. `window=` chooses the window of the job.
    """

    def all_reads(results: Results, texts: Mapping[str, str]) -> Sequence[Callable[[], object]]:
        if "job" not in texts:
            return [results.jobs]
        return [partial(results.stored, texts["job"]), *(() if reads is None else reads(results, texts))]

    def layout(job: str | None = None, window: str | None = None, **state: str) -> list[Component]:
        name = results().newest() if job is None else job
        remarks = []
        try:
            choose_range(name, state.pop("since", ""), state.pop("until", ""))
        except SelectionError as error:
            all_of_it = dcc.Link("All of the run", href=href(path, job=name, since=None))
            remarks.append(problem(str(error), title="This range cannot be shown", way_on=all_of_it))
        if window is not None:
            choose_window(name, window)
        try:
            stored = results().stored(name)
        except NotStoredError as error:
            if window is None:
                raise
            newest = dcc.Link("The newest window of this job", href=href(path, job=name, window=None))
            return [problem(str(error), way_on=newest)]
        if job is None:
            remarks.append(note(f"No job named in the address: this is the newest one, {short(name)}."))
        if not (any_job or stored.has_workers):
            return [job_head(stored, path), *remarks, _pipelines_only(stored)]
        if stored.report is None:
            why = stored.problem or "It was stored without an analysis (collected, or imported with --no-analysis)."
            how = f"Import its trace again with `{adding(results().path)} --replace` to see its results here."
            if why == OTHER_VERSION:
                how = f"`{command('store', 'repair', '--store', results().path)}` analyses it again."
            return [job_head(stored, path), *remarks, problem(f"{why} {how}", title="Not analysed")]
        state.pop("stored", None)  # the name that the functions of the pages use for the job
        content = guarded(build)(stored, **state)
        return [job_head(stored, path), *remarks, *(content if isinstance(content, list) else [content])]

    page(module, path, title, layout, all_reads)


def _pipelines_only(stored: Stored) -> Component:
    """A placeholder for a page that only pipelines have."""
    link = dcc.Link("the page Job", href=href("/job", job=stored.name))
    words = "This page is about the workers of a pipeline, which this job does not have. Its results are on "
    return panel("Not for this job", html.P([words, link, "."]))


def job_head(stored: Stored, active: str) -> Component:
    """The title of the job, its badges and the links to its other pages."""
    badges: list[Any] = []
    shared = [] if stored.report is None else [share(stored)]
    if stored.report is not None:
        verdict = run_headline(stored.report, viewer().zone) or headline(stored.report)
        badges = [badge(verdict.badge, verdict.tone, loud=verdict.tone is Tone.BAD), trust_badge(stored.report)]
    hung = active == "/hang" or any(one.cause.kind == HANG for one in results().incidents(stored.name))
    tabs = [
        html.Span(tab.title, className="job-tab active", **attributes(aria_current="page"))
        if tab.path == active
        else dcc.Link(tab.title, href=href(tab.path, job=stored.name), className="job-tab")
        for tab in TABS
        if (tab.any_job or stored.has_workers) and (tab.path != "/hang" or hung)
    ]
    return html.Div(
        [
            html.Div([html.H1(short(stored.name)), *badges, *shared], className="job-title"),
            html.Nav(tabs, className="job-tabs", **attributes(aria_label="Pages of this job")),
            *([] if active in ("/job", "/time") else _which_window(stored, active)),
            *range_control(stored.name, active),
        ],
        className="job-head",
    )


def _which_window(stored: Stored, path: str) -> list[Component]:
    """A note with the window of the page, if the job has several; the page Job has its own with links to the others."""
    if stored.windows < 2:
        return []
    steps = [] if stored.report is None else [row.step for row in stored.report.by_step]
    words = f"Window {stored.window}{f', steps {steps[0]} to {steps[-1]}' if steps else ''}"
    if chosen_window(stored.name) is None:
        of = f"of {stored.windows}" if chosen_range(stored.name) is None else "in the range"
        return [note(f"{words}: the newest {of}.")]
    return [note([f"{words}. ", dcc.Link("Newest window", href=href(path, job=stored.name, window=None))])]


def trust_badge(report: Report) -> Component:
    """A badge that tells if the figures are trustworthy."""
    trusted = report.trust.trustworthy
    shown = term("trust", "trustworthy" if trusted else "not trustworthy")
    return badge(shown, Tone.GOOD if trusted else Tone.BAD, loud=not trusted)


def frame() -> Component:
    """The whole document: header, then the page that the URL names."""
    dark = viewer().theme is DARK
    local = viewer().zone is not UTC and str(viewer().zone) != "UTC"
    zone = html.Button(
        "Times: local" if local else "Times: UTC",
        id="zone",
        title="Switch between UTC and the time zone of this browser",
        **attributes(data_zone="local" if local else "utc"),
    )
    theme = html.Button(
        "Theme: dark" if dark else "Theme: light",
        id="theme",
        title="Switch between the light and the dark theme",
        **attributes(data_theme="dark" if dark else "light"),
    )
    find = html.Button("Search", id="find", title="Find a job, worker or host: /", **attributes(aria_keyshortcuts="/"))
    keys = html.Button("?", id="keys", title="Keys", **attributes(aria_label="Keys", aria_keyshortcuts="?"))
    fleet = [] if study() is None else [dcc.Link("Fleet", href=href("/fleet"))]
    head = [
        dcc.Link([html.B("tracekit"), " jobs"], href=href("/"), className="brand"),
        html.Nav(
            [dcc.Link("Incidents", href=href("/incidents")), dcc.Link("Hosts", href=href("/hosts")), *fleet],
            className="places",
            **attributes(aria_label="Pages of all jobs"),
        ),
        html.Div([find, zone, theme, keys, *_log_out()], className="switches"),
    ]
    return html.Div(
        [
            html.A("Skip to the page", href="#page", className="skip"),
            html.Header(head, className="top"),
            dcc.Loading(
                dash.page_container,
                id="loading-page",
                delay_show=300,
                overlay_style={"visibility": "visible", "opacity": 0.5},
            ),
        ],
        className="frame dark" if dark else "frame light",
    )


def _log_out() -> list[Component]:
    """A button for those who have logged in."""
    if not flask.g.get("can_log_out"):
        return []
    button = html.Button("Log out", title=f"End the session of {short(flask.g.user)} in this browser")
    return [html.Form(button, action=href("/logout"), method="POST")]
