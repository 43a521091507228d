"""Timeline: every op of one step, as recorded against the ideal, coloured by how it compares with its peers.

The page is the controls and an empty canvas; assets/timeline.js asks for the ops themselves, so that the page is there
at once. All of its state is in the address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import polars as pl
from dash import ClientsideFunction, Input, Output, State, clientside_callback, dcc, html
from dash.development.base_component import Component
from msgspec import structs

from tracekit.base.text import seconds
from tracekit.dashboards.browser.data.queries import Results, Stored
from tracekit.dashboards.browser.data.stored_kinds import TimelineWords
from tracekit.dashboards.browser.data.view_state import (
    MOST_PINNED,
    DrawnReplays,
    Grouping,
    Order,
    Streams,
    TimelineState,
    state_of,
)
from tracekit.dashboards.browser.ui.components import attributes, choice, href, menu, panel, term, text_field
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.shell import job_page
from tracekit.dashboards.figures.lanes import LEVEL_STEP, LEVELS
from tracekit.dashboards.theme import CLASSES, ink_on, legend
from tracekit.report.report import Report

_KEYS = (
    "Point at an op for its figures, click it to keep them. Wheel zooms, Shift + wheel scrolls the rows, dragging pans,"
    " Shift + dragging or dragging the ruler selects a range for sums by kind. A click on a name at the left pins the"
    " row on top, or opens a group. The arrows of an op kept follow its microbatch. Keys: W and S (+ and -) zoom, A and"
    " D (left and right) pan, up and down scroll, Home shows all, R selects what is shown, N and P go to the next and"
    " previous op of the track, T pins its row, F fills the screen, Escape lets go."
)
_TOUCHES = (
    "Pinch to zoom, drag sideways to move, drag the ruler to select a range; tap an op to keep it, or a name to pin it."
)


def build(stored: Stored, report: Report, **args: str) -> list[Component]:
    """The page; `args` as in `read_state`."""
    steps, read = results().table(stored.name, "by_step"), state_of(results(), stored.name, args)
    words = stored.kind.timeline
    results().ahead(partial(results().step, stored.name, read.state.step))
    remarks = [html.P(f"{remark}.", className="warning", role="status") for remark in read.remarks]
    return [
        *remarks,
        panel(
            [term(part) if part == "ideal" else part for part in words.title],
            _controls(stored, words, read.state, steps),
            _canvas(stored, words, read.state),
            extra=_buttons(stored.name, report.job.whole, words, read.state),
        ),
        panel(f"The {words.longest[0]} ops of this view", *_table(stored, words, read.state)),
        dcc.Store(id="timeline-config", data=_config(stored, words, read.state)),
        dcc.Store(id="timeline-mounted"),
    ]


def _config(stored: Stored, words: TimelineWords, state: TimelineState) -> dict[str, Any]:
    return {
        "job": stored.name,
        "state": address(state),
        "colours": structs.asdict(viewer().theme),
        "bounds": list(CLASSES),
        "most_pinned": MOST_PINNED,
        **({} if words.peers else _lanes_config()),
    }


def _lanes_config() -> dict[str, Any]:
    """Levels in place of ratios to peers, each in a colour of its own."""
    colours, inks = _lane_colours()
    bounds = [(level - 0.5) * LEVEL_STEP for level in range(1, len(LEVELS))]
    return {"colours": structs.asdict(viewer().theme) | {"classes": colours, "on_classes": inks}, "bounds": bounds}


def address(state: TimelineState) -> dict[str, Any]:
    """The state as parameters of an address."""
    return {
        "step": state.step,
        "view": str(state.view),
        "streams": str(state.streams),
        "order": str(state.order),
        "worker": state.workers,
        "stage": state.stages,
        "dp_rank": state.dp_ranks,
        "from": state.from_ms,
        "to": state.to_ms,
        "at": None if state.top is None else f"{state.top.dp_rank},{state.top.pp_rank}",
        "op": None if state.op is None else str(state.op),
        "critical": "yes" if state.critical else None,
        "group": None if state.group is Grouping.WORKER else str(state.group),
        "find": state.find,
        "pin": state.pinned,
        "open": state.opened,
        "range": None if state.range_ms is None else "{:g}-{:g}".format(*state.range_ms),
    }


def _controls(stored: Stored, words: TimelineWords, state: TimelineState, steps: pl.DataFrame) -> Component:
    """The controls. Callbacks need all of them, so those that a job has no use for are hidden."""
    peers_class = "contents" if words.peers else "none"
    rows_class = "none" if len(results().by_worker(stored.name)) == 1 else "contents"
    options = {
        str(step): f"{step}: {seconds(recorded)}, {seconds(lost_s or 0.0)} lost"
        for step, recorded, lost_s in steps.select("step", "recorded_s", "lost_s").iter_rows()
    }
    step = html.Div(
        [
            menu("timeline-step", "Step", options, str(state.step)),
            html.Button(
                "←", id="timeline-previous", title="The step before", **attributes(aria_label="The step before")
            ),
            html.Button("→", id="timeline-next", title="The step after", **attributes(aria_label="The step after")),
        ],
        className=f"timeline-step {'none' if steps.height == 1 and not words.peers else ''}",
    )
    views = {
        DrawnReplays.BOTH: "Recorded and ideal",
        DrawnReplays.RECORDED: "Recorded",
        DrawnReplays.ORIGINAL: "Original",
        DrawnReplays.IDEAL: "Ideal",
    }
    groups = {Grouping.WORKER: words.group, Grouping.HOST: "By host"}
    groups |= {Grouping.STAGE: "By stage"} if words.peers else {}
    path = choice(
        "timeline-critical", "Critical path", {"no": "Hide", "yes": "Show"}, "yes" if state.critical else "no"
    )
    pipeline_choices = [
        choice("timeline-view", "Timeline", views, state.view),
        choice("timeline-streams", "Streams", {Streams.COMPUTE: "Compute", Streams.ALL: "All"}, state.streams),
        choice("timeline-order", "Order", {Order.RANK: "By rank", Order.SLOWEST: "Slowest first"}, state.order),
    ]
    row_choices = [
        choice("timeline-group", "Rows", groups, state.group),
        _filter("timeline-dp_rank", words.ranks, state.dp_ranks, "0-3 7"),
    ]
    filters = [
        _filter("timeline-stage", "Stages", state.stages, "0-3"),
        _filter("timeline-worker", "Worker", state.workers, "3,1"),
    ]
    more = [
        html.Div(pipeline_choices, className=peers_class),
        html.Div(row_choices, className=rows_class),
        html.Div(filters, className=peers_class),
    ]
    filtered = state.dp_ranks or state.stages or state.workers
    return html.Div(
        [
            step,
            html.Div(path, className=peers_class),
            _filter("timeline-find", "Find ops", state.find, words.find),
            html.Details(
                [html.Summary("Rows and filters"), html.Div(more, className="timeline-controls")],
                open=bool(filtered),
                className="timeline-more" if words.peers or rows_class == "contents" else "none",
            ),
        ],
        className="timeline-controls",
    )


def _filter(name: str, label: str, value: str, example: str) -> Component:
    return text_field(name, label, value, placeholder=f"e.g. {example}", wait_s=0.5, style="narrow")


def _buttons(job: str, whole: str, words: TimelineWords, state: TimelineState) -> list[Component]:
    export = href("/timeline/export.json.gz", job=job, step=state.step)
    perfetto = html.A(
        "Open in Perfetto",
        id="timeline-perfetto",
        href=export,
        download="",
        className="button",
        title="Downloads this step as a file to open in ui.perfetto.dev; a million ops take half a minute",
    )
    return [
        html.Span(id="timeline-export-said", role="status"),
        html.Button(f"Whole {whole}", id="timeline-home", title=f"Show the whole {whole} (Home)"),
        html.Button("Full screen", id="timeline-full", title="Fill the screen with the timeline (F)"),
        html.Button("PNG", id="timeline-png", title="Save what the canvas shows as an image"),
        *([perfetto] if words.peers else []),
    ]


def _legend(words: TimelineWords) -> Component:
    heading: Any = words.colours
    colours = list(zip(_lane_colours()[0], map(str, words.levels), strict=True))
    if words.peers:
        heading, colours = [words.colours, term("peers", "the peers"), ":"], legend(viewer().theme)
    entries = [html.Span([html.I(style={"background": colour}), name]) for colour, name in colours]
    return html.Div([html.Span(heading), *entries], className="timeline-legend")


def _lane_colours() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Colour and ink on it of each of `LEVELS`: lost time in the colours of slowdown, as on the page Job."""
    theme = viewer().theme
    colours = (*theme.kinds[:4], theme.slow[2], *theme.kinds[4:], theme.wait, theme.slow[4])
    return colours, tuple(map(ink_on, colours))


def _canvas(stored: Stored, words: TimelineWords, state: TimelineState) -> Component:
    """The empty elements that assets/timeline.js fills."""
    scope = f"step {state.step} of {stored.name}" if words.peers else stored.name
    tracks = f"a track per {words.who} and stream, time to the right"
    label = f"Timeline of {scope}: {tracks}. The table below lists the slowest ops of the same view."
    return html.Div(
        [
            html.Div(
                [
                    html.Canvas(id="timeline-overview", **attributes(aria_hidden="true")),
                    html.Div(
                        [html.Canvas(id="timeline-canvas"), html.Div(id="timeline-sizer")],
                        id="timeline-scroll",
                        tabIndex=0,
                        role="application",
                        **attributes(aria_label=label, aria_describedby="timeline-keys"),
                    ),
                    html.Div("Loading the step ...", id="timeline-status", role="status"),
                ],
                id="timeline-host",
            ),
            html.Aside(id="timeline-details", **attributes(aria_label="The op pointed at", aria_live="polite")),
            _legend(words),
            html.P(id="timeline-path-words", **attributes(aria_live="polite")),
            html.Details(
                [html.Summary("Mouse and keys"), html.P(_KEYS, id="timeline-keys")],
                id="timeline-help",
                className="folded",
            ),
            html.P(_TOUCHES, id="timeline-touches", className="note"),
        ],
        className="timeline",
    )


def _table(stored: Stored, words: TimelineWords, state: TimelineState) -> list[Component]:
    args = {name: value for name, value in address(state).items() if value not in (None, "")}
    csv = href("/timeline/slowest.csv", job=stored.name, **args)
    return [
        html.P(
            [
                words.longest[1],
                ", in the window shown above. ",
                html.A("CSV", id="timeline-csv", href=csv, download=""),
            ],
            className="note",
        ),
        html.Div(html.P("Loading ...", className="note"), id="timeline-slowest", className="table-wide stacked"),
    ]


clientside_callback(
    ClientsideFunction("timeline", "mount"),
    Output("timeline-mounted", "data"),  # a callback without an output does not run when the page appears
    Input("timeline-config", "data"),
)
clientside_callback(
    ClientsideFunction("timeline", "change"),
    *(
        Input(f"timeline-{name}", "value")
        for name in ("step", "view", "streams", "order", "critical", "group", "worker", "dp_rank", "stage", "find")
    ),
    prevent_initial_call=True,
)
clientside_callback(
    ClientsideFunction("timeline", "neighbour"),
    Output("timeline-step", "value"),
    Input("timeline-previous", "n_clicks"),
    Input("timeline-next", "n_clicks"),
    State("timeline-step", "value"),
    State("timeline-step", "options"),
    prevent_initial_call=True,
)


def _prefetches(stored: Results, args: Mapping[str, str]) -> list[Callable[[], object]]:
    """The graph of ops that have peers, and the step once the report tells which: the canvas asks for it as soon as the
    page is drawn.
    """

    def graph() -> None:
        if stored.stored(args["job"]).kind.timeline.peers:
            stored.replay(args["job"])

    def step() -> None:
        read = state_of(stored, args["job"], args)
        stored.step(args["job"], read.state.step)

    return [graph, step]


job_page(__name__, "/timeline", build, _prefetches)
