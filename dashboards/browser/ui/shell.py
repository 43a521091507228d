"""The frame of every page: the header, the tabs of a job, its range of time, sharing, and the registration of pages
and callbacks, which shows errors in their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial, wraps
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar, get_type_hints

import dash
import flask
import msgspec
import plotly.graph_objects as go
from dash import ClientsideFunction, Input, callback, clientside_callback, dcc, html, set_props
from dash.development.base_component import Component
from werkzeug.exceptions import BadRequest, HTTPException

from tracekit.base.errors import NotStoredError, SelectionError, StoreError
from tracekit.base.paths import adding, command
from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import OTHER_VERSION, Results, Stored
from tracekit.dashboards.browser.data.replays import LONGEST_ADDRESS
from tracekit.dashboards.browser.data.stored_kinds import PIPELINE
from tracekit.dashboards.browser.ui.components import (
    attributes,
    badge,
    error_message,
    guarded,
    href,
    note,
    panel,
    problem,
    term,
    text_field,
)
from tracekit.dashboards.browser.ui.context import (
    choose_range,
    choose_window,
    chosen_range,
    chosen_window,
    results,
    service,
    viewer,
)
from tracekit.dashboards.browser.ui.sentences import Tone, headline, run_headline
from tracekit.dashboards.documents.markdown import messages
from tracekit.report.report import Report
from tracekit.store import HANG

Layout = Callable[..., Any]
#: Most impossible rows of a store that a page lists; the server's log has all.
MOST_LEFT_OUT = 20
#: Functions that read the data of a page, given its address.
Reads = Callable[[Results, Mapping[str, str]], Sequence[Callable[[], object]]]

_reads: dict[str, Reads] = {}
#: Id of the element that shows errors of callbacks without a better place for them.
TROUBLE = "page-trouble"
#: Pages send a few kilobytes; what a callback may cost grows with them.
MOST_BYTES = 1 << 17

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")

_CODE = re.compile(r"`([^`]+)`")
#: Placeholder for the address of the page, which the browser fills in. `printable` removes it from names.
ADDRESS = "\ue000"
#: Ranges that end with the job: name and seconds.
_LAST = (("last 15 minutes", 900.0), ("last hour", 3600.0), ("last day", 86400.0), ("last week", 604800.0))


def page(module: str, path: str, title: str, build: Layout, reads: Reads = lambda *_: ()) -> None:
    """Register a page: `build` gets the state in the URL as text by name and returns the content of the page.

    `reads`: the data it needs, prefetched as soon as a browser requests the document around it.
    """
    _reads[path] = reads

    def layout(**state: Any) -> Any:
        args = {name: value for name, value in state.items() if isinstance(value, str)}
        seen, left_out = {}, None
        with suppress(StoreError):  # the content shows the error
            seen["data_state"] = results().state()  # before anything is read, so that nothing newer goes unnoticed
            left_out = _left_out(results().left_out())
        content = guarded(_within_limits(build))(**args)
        alerts = html.Div(id=TROUBLE, role="alert")
        parts = [*(content if isinstance(content, list) else [content]), left_out, alerts]
        return html.Main(as_prose(parts), id="page", **attributes(data_page=path, **seen))

    dash.register_page(module, path=path, title=f"{title} - tracekit", name=title, layout=layout)


def _within_limits(build: Layout) -> Layout:
    """The page, or SelectionError for an address longer than the dashboard makes any."""

    def limited(**args: str) -> Any:
        if (length := sum(map(len, args.values()))) > LONGEST_ADDRESS:
            raise SelectionError(f"the address has {length:,} characters; expected at most {LONGEST_ADDRESS:,}")
        return build(**args)

    return limited


def _left_out(lines: Sequence[str]) -> Component | None:
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


def job_page(module: str, path: str, build: Layout, reads: Reads = lambda *_: ()) -> None:
    """Register a page of one job: `build` gets the `Stored` job and its report first. Without `job=`, it is the newest.

    `reads`: the data it needs besides the job's report, for an address that names the job. `window=` chooses the window
    of the job.
    """

    def all_reads(results: Results, args: Mapping[str, str]) -> Sequence[Callable[[], object]]:
        if "job" not in args:
            return [results.jobs]
        return [partial(results.stored, args["job"]), *reads(results, args)]

    def layout(job: str | None = None, window: str | None = None, **state: str) -> list[Component]:
        name = results().newest() if job is None else job
        remarks = []
        try:
            choose_range(name, state.pop("since", ""), state.pop("until", ""))
        except SelectionError as error:
            whole_run = dcc.Link("All of the run", href=href(path, job=name, since=None))
            remarks.append(problem(str(error), title="This range cannot be shown", link=whole_run))
        if window is not None:
            choose_window(name, window)
        try:
            stored = results().stored(name)
        except NotStoredError as error:
            if window is None:
                raise
            newest = dcc.Link("The newest window of this job", href=href(path, job=name, window=None))
            return [problem(str(error), link=newest)]
        if job is None:
            remarks.append(note(f"No job named in the address: this is the newest one, {short(name)}."))
        if path not in stored.kind.pages:
            return [job_head(stored, path), *remarks, _pipelines_only(stored)]
        if stored.report is None:
            why = stored.problem or "It was stored without an analysis (collected, or imported with --no-analysis)."
            advice = f"Import its trace again with `{adding(results().path)} --replace` to see its results here."
            if why == OTHER_VERSION:
                advice = f"`{command('store', 'repair', '--store', results().path)}` analyses it again."
            return [job_head(stored, path), *remarks, problem(f"{why} {advice}", title="Not analysed")]
        args = {name: text for name, text in state.items() if name not in ("stored", "report")}  # names of arguments
        content = guarded(build)(stored, stored.report, **args)
        return [job_head(stored, path), *remarks, *(content if isinstance(content, list) else [content])]

    page(module, path, PIPELINE.pages[path], layout, all_reads)


def _pipelines_only(stored: Stored) -> Component:
    link = dcc.Link("the page Job", href=href("/job", job=stored.name))
    words = "This page is about the workers of a pipeline, which this job does not have. Its results are on "
    return panel("Not for this job", html.P([words, link, "."]))


def job_head(stored: Stored, active: str) -> Component:
    """The title of the job, its badges and the links to its other pages."""
    badges: list[Any] = []
    shared: list[Component] = []
    if stored.report is not None:
        shared = [share(stored.name, stored.report)]
        verdict = run_headline(stored.report, viewer().zone) or headline(stored.report)
        badges = [badge(verdict.badge, verdict.tone, loud=verdict.tone is Tone.BAD), trust_badge(stored.report)]
    hung = active == "/hang" or any(incident.cause.kind == HANG for incident in results().incidents(stored.name))
    tabs = [
        html.Span(title, className="job-tab active", **attributes(aria_current="page"))
        if path == active
        else dcc.Link(title, href=href(path, job=stored.name), className="job-tab")
        for path, title in stored.kind.pages.items()
        if path != "/hang" or hung
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
        scope = f"of {stored.windows}" if chosen_range(stored.name) is None else "in the range"
        return [note(f"{words}: the newest {scope}.")]
    return [note([f"{words}. ", dcc.Link("Newest window", href=href(path, job=stored.name, window=None))])]


def trust_badge(report: Report) -> Component:
    """A badge that tells if the figures are trustworthy."""
    trusted = report.trust.trustworthy
    label = term("trust", "trustworthy" if trusted else "not trustworthy")
    return badge(label, Tone.GOOD if trusted else Tone.BAD, loud=not trusted)


def frame() -> Component:
    """The whole document: header, then the page that the URL names."""
    theme_name = viewer().theme.name
    local = viewer().zone is not UTC and str(viewer().zone) != "UTC"
    zone = html.Button(
        "Times: local" if local else "Times: UTC",
        id="zone",
        title="Switch between UTC and the time zone of this browser",
        **attributes(data_zone="local" if local else "utc"),
    )
    theme = html.Button(
        f"Theme: {theme_name}",
        id="theme",
        title="Switch between the light and the dark theme",
        **attributes(data_theme=theme_name),
    )
    find = html.Button("Search", id="find", title="Find a job, worker or host: /", **attributes(aria_keyshortcuts="/"))
    keys = html.Button("?", id="keys", title="Keys", **attributes(aria_label="Keys", aria_keyshortcuts="?"))
    fleet = [] if service().study is None else [dcc.Link("Fleet", href=href("/fleet"))]
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
        className=f"frame {theme_name}",
    )


def _log_out() -> list[Component]:
    if not flask.g.get("can_log_out"):
        return []
    button = html.Button("Log out", title=f"End the session of {short(flask.g.user)} in this browser")
    return [html.Form(button, action=href("/logout"), method="POST")]


def answers(
    *wiring: Any, on_error: Callable[[Exception], Any] | None = None
) -> Callable[[Callable[_Arguments, _Answer]], Callable[_Arguments, _Answer]]:
    """`dash.callback` for the pages: check values against the annotations and show errors on the page.

    `wiring`: outputs, inputs and states. `on_error`: returns the outputs after an error, if they have a place for it.
    """

    def register(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        wired = callback(*wiring, prevent_initial_call=True, on_error=failed)
        registered: Callable[_Arguments, _Answer] = wired(checked(function))
        return registered

    def failed(error: Exception) -> Any:
        if isinstance(error, HTTPException):  # the answer is a status, not a page
            raise error
        return (on_error or say_failure)(error)

    return register


def opens_links(*charts: str) -> None:
    """Let a click on a point of these charts follow the link that is the first of its `customdata`."""
    clicks = (Input(name, "clickData", allow_optional=True) for name in charts)
    clientside_callback(ClientsideFunction("tracekit", "open"), *clicks, prevent_initial_call=True)


def checked(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Wrap the callback to raise BadRequest for values that do not fit its annotations, which no page sends."""
    expected, hints = signature(function), get_type_hints(function)

    @wraps(function)
    def safely(*values: _Arguments.args, **keywords: _Arguments.kwargs) -> _Answer:
        try:
            given = expected.bind(*values, **keywords).arguments
        except TypeError as error:
            raise BadRequest(f"{function.__name__}: {error}") from None
        if flask.request.content_length is None or flask.request.content_length > MOST_BYTES:
            raise BadRequest(f"{function.__name__}: more than {MOST_BYTES:,} bytes")
        for name, value in given.items():
            several = expected.parameters[name].kind is Parameter.VAR_POSITIONAL
            if not all(_has_type(member, hints[name]) for member in (value if several else [value])):
                raise BadRequest(f"{function.__name__}: {name} = {value!r:.60} is not {hints[name]}")
        return _in_prose(function(*values, **keywords))

    return safely


def _in_prose(answer: _Answer) -> _Answer:
    """The outputs of a callback, with the texts of components as people read them."""
    for output in answer if isinstance(answer, list | tuple) else (answer,):
        if isinstance(output, Component):
            as_prose(output)
        elif isinstance(output, list):
            _in_prose(output)
    return answer


def _has_type(value: Any, kind: Any) -> bool:
    """True if a value from JSON is of that type; a TypedDict needs at least its keys."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def say_failure(error: Exception) -> None:
    """Show a message over the page and leave the rest of it unchanged."""
    message = as_prose(error_message(error))
    message.children = [*message.children, html.Button("Close", **attributes(data_close=TROUBLE))]
    set_props(TROUBLE, {"children": message})


def as_prose(content: Any) -> Any:
    """`content` and all components in it, changed in place; text with code becomes a list of parts.

    Reports keep plain text, which terminals and messages show as it is.
    """
    match content:
        case html.Code() | html.Pre():
            return content
        case Component():
            if (children := getattr(content, "children", None)) is not None:
                content.children = as_prose(children)
            return content
        case list() | tuple():
            return [part for child in content for part in _as_components(child)]
        case str():
            return _parts(content)
        case _:
            return content


def _as_components(content: Any) -> list[Any]:
    prose = as_prose(content)
    return prose if isinstance(content, str) and isinstance(prose, list) else [prose]


def _parts(text: str) -> Any:
    parts = _CODE.split(text)  # text and code in turn
    prose = [html.Code(part) if number % 2 else part.replace(" -> ", " \u2192 ") for number, part in enumerate(parts)]
    return prose[0] if len(prose) == 1 else [part for part in prose if part]


def share(job: str, report: Report) -> Component:
    """The menu Share."""
    copies = [
        html.Button(f"Copy {'as' if form == 'Markdown' else 'for'} {form}", **attributes(data_copy=text))
        for form, text in messages(report, ADDRESS).items()
    ]
    page = html.A("Download HTML", href=href("/download/report.html", job=job), download="", className="button")
    status = html.Span(role="status", className="note")
    return html.Details(
        [html.Summary("Share"), html.Div([*copies, page, xlsx("report", "Download XLSX", "button", job=job), status])],
        className="share",
    )


def xlsx(name: str, words: str, style: str = "", **state: object) -> Component:
    """The link to a file for Excel (`web/serving.py`), or how to get one where the extra is missing."""
    if find_spec("xlsxwriter") is None:
        return html.Span("XLSX: pip install 'tracekit-analysis[xlsx]'", className="note")
    return html.A(words, href=href(f"/download/{name}.xlsx", **state), download="", className=style)


def range_control(job: str, path: str) -> list[Component]:
    """The chosen range, with links to others and a form; nothing if the job has no times.

    Pages of a job with several windows show the newest one in the range; charts of time show the range alone.
    """
    all_spans = results().spans(job, 1)
    if all_spans.is_empty():
        return []
    begin, end = float(all_spans["start_s"][0]), float(all_spans["end_s"][0])
    chosen = chosen_range(job)
    label = "All of the run" if chosen is None else "Range"
    moments = [viewer().moment(time_s) for time_s in ((begin, end) if chosen is None else chosen.within(begin, end))]
    links = [
        dcc.Link(name, href=href(path, job=job, since=_iso(max(end - length, begin)), until=_iso(end), window=None))
        for name, length in _LAST
        if length < end - begin
    ]
    if chosen is not None:
        links.insert(0, dcc.Link("all of the run", href=href(path, job=job, since=None, until=None)))
    texts = ("", "") if chosen is None else (chosen.begin, chosen.end)
    fields = [
        text_field(f"range-{name}", name.title(), text, placeholder=_iso(default_s), sent_as=name, style="wide")
        for name, text, default_s in zip(("since", "until"), texts, (begin, end), strict=True)
    ]
    form = html.Form(
        [dcc.Input(type="hidden", name="job", value=job), *fields, html.Button("Show")], action=href(path), method="GET"
    )
    summary = html.Summary([html.B(f"{label}: "), f"{moments[0]} to {moments[1]}"])
    return [html.Details([summary, html.Div(links, className="ways-on"), form], className="time-range")]


def in_range(fig: go.Figure, job: str) -> go.Figure:
    """A figure over the steps of a job (`step_axis`), zoomed to the chosen range."""
    if (chosen := chosen_range(job)) is not None:
        starts = results().step_starts(job)
        steps = [step for step, start in starts.items() if start is not None and chosen.since <= start <= chosen.until]
        if steps:
            fig.update_layout(meta=fig.layout.meta | {"range": [min(steps) - 0.5, max(steps) + 0.5]})
    return fig


def _iso(moment: float) -> str:
    """As addresses write a moment."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
