"""Workers: which worker, host, stage or DP rank is slow, since when, over all steps and step by step.

Buttons that choose a worker or a host have the id `{"type": "pick-worker", ...}` or `{"type": "pick-host", ...}`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import (
    ALL,
    ClientsideFunction,
    Input,
    Output,
    State,
    clientside_callback,
    ctx,
    dcc,
    html,
    no_update,
    set_props,
)
from dash.development.base_component import Component

from tracekit.base.text import cost_alone, listed, seconds, short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.view_state import (
    WorkerView,
    address,
    choose_box,
    choose_step,
    choose_worker,
    comma,
    read_view,
)
from tracekit.dashboards.browser.ui.components import (
    attributes,
    drawing,
    facts_table,
    figure_panel,
    figure_parts,
    guarded,
    halves,
    href,
    note,
    panel,
    row_table,
    scale,
    term,
    text_field,
    thirds,
)
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import MOST_NAMED, believed, host_words, space_words, time_words
from tracekit.dashboards.browser.ui.shell import answers, in_range, job_page
from tracekit.dashboards.figures.charts import step_times, step_workers, worker_heatmap, worker_over_steps
from tracekit.dashboards.figures.worker_map import WORTH_NAMING, WorkerMap, lost_alone
from tracekit.report.report import Report
from tracekit.trace.model import Worker

#: Bars of the strip above the scrubber; more steps are pooled.
MOST_BARS = 240
#: Workers that are shown step by step.
MOST_ROWS = 40
#: Workers of a host that are marked on the map.
MOST_MARKED = 500
#: Workers, hosts and steps listed.
LISTED = 10
HOSTS_LISTED = 12
SLOWEST_STEPS = 10


def build(stored: Stored, report: Report, **state: str) -> list[Component]:
    """`step`: its number; `worker`: `dp,pp`; `host`: its name; `dp_rank`, `stage`: those of several workers, `1-3`."""
    workers = results().worker_map(stored.name)
    view = read_view(workers, state)
    space, time = report.patterns.space, report.patterns.time
    pattern = [
        html.P(believed(report, words))
        for words in (
            *([] if space is None else [space_words(space, workers)]),
            *([] if time is None else [time_words(time, report.by_step)]),
        )
    ]
    listing = html.Div(slowest(workers, view.position, _cell(workers, view)), id="workers-list")
    history = html.Div(_detail(stored.name, workers, view), id="workers-detail")
    draining = html.Div(hosts(workers, view.host, report), id="workers-hosts")
    return [
        html.Div(_messages(view), id="workers-said", role="status"),
        panel("Who and since when", *pattern, *_missing(report)),
        thirds(_map_panel(stored.name, report, workers, view), panel("Slowest workers", listing)),
        halves(
            panel("One worker among its peers", history),
            panel("Hosts" if workers.only_host is None else "Host", draining),
        ),
        thirds(_times_panel(stored), panel("Slowest steps", slowest_steps(stored))),
        _steps_panel(stored, workers),
        dcc.Store(id="workers-job", data=stored.name),
        dcc.Store(id="workers-view", data=address(workers, view)),
    ]


def draw(workers: WorkerMap, view: WorkerView) -> go.Figure:
    """The map of the step, or of all: the slowest outlined, the chosen worker and host marked."""
    values = workers.values(view.position).ravel()
    marked = [cell for cell in workers.worst(view.position, LISTED) if values[cell] >= WORTH_NAMING]
    on_host: list[int] = []
    if view.host is not None:
        on_host = np.flatnonzero(workers.host.ravel() == workers.hosts.index(view.host))[:MOST_MARKED].tolist()
    fig = worker_heatmap(
        workers,
        view.position,
        viewer().theme,
        marked=marked,
        chosen=view.cell,
        dotted=on_host,
        boxed=() if view.box is None else view.box.cells(workers),
    )
    return fig.update_layout(meta={"box": True})


def _messages(view: WorkerView) -> list[Component]:
    return [note(text) for text in view.said]


def _cell(workers: WorkerMap, view: WorkerView) -> int:
    return workers.worst(None, 1)[0] if view.cell is None else view.cell


def _detail(job: str, workers: WorkerMap, view: WorkerView) -> list[Component]:
    return detail(workers, _cell(workers, view), job, view.position, default=view.cell is None)


def _missing(report: Report) -> list[Component]:
    coverage = report.coverage
    if not coverage or not (coverage.missing_workers or coverage.dropped):
        return []
    missing = [f"({worker.coordinates})" for worker in coverage.missing_workers]
    number = coverage.workers_expected - coverage.workers_traced
    count = "1 worker was" if number == 1 else f"{number:,} workers were"
    missing_text = f"{count} not traced: {listed(missing, MOST_NAMED)}. " if missing else ""
    blank = "A DP rank that lacks a stage cannot be replayed: it is blank in those steps, or not on the map at all."
    return [note(missing_text + blank)]


def _map_panel(job: str, report: Report, workers: WorkerMap, view: WorkerView) -> Component:
    go_to = text_field("workers-go", "Show rank", "", placeholder="9, or dp,stage: 1,2", wait_s=True, style="beside")
    parts = figure_parts(
        draw(workers, view),
        label=f"Map of what {workers.slowdown.size:,} workers alone cost of a step, DP ranks down, stages across",
        table=workers.table,
        csv=href("/download/by_worker.csv", job=job),
        id="workers-map",
    )
    return panel(
        ["What each ", term("worker"), " ", term("costs alone"), " of a step: DP ranks down, stages across"],
        _scrubber(job, report, workers, view),
        *parts,
        html.Div(several(job, workers, view), id="workers-several", role="status"),
        extra=go_to,
    )


def _times_panel(stored: Stored) -> Component:
    by_step, starts = stored.table("by_step"), results().step_starts(stored.name)
    moments = [viewer().moment(starts.get(step)) for step in by_step["step"]]
    return figure_panel(
        ["Time of each step: ", term("recorded"), ", ", term("ideal")],
        in_range(step_times(by_step, moments, viewer().theme), stored.name),
        label=f"Recorded and ideal time of {by_step.height:,} steps",
        table=by_step,
        csv=href("/download/by_step.csv", job=stored.name),
        id="workers-times",
        extra=html.Span("a click shows the step on the map", className="note"),
    )


def _steps_panel(stored: Stored, workers: WorkerMap) -> Component:
    cells = workers.worst(None, MOST_ROWS)
    return figure_panel(
        [f"What the {len(cells):,} slowest workers ", term("costs alone", "cost alone"), ", step by step"],
        in_range(step_workers(workers, cells, viewer().theme), stored.name),
        label=f"What {len(cells):,} workers alone cost of {len(workers.steps):,} steps",
        table=workers.table.head(MOST_ROWS),
        csv=href("/download/by_worker_per_step.csv", job=stored.name),
        id="workers-steps",
        extra=html.Span("a click shows the worker and the step", className="note"),
    )


def _scrubber(job: str, report: Report, workers: WorkerMap, view: WorkerView) -> Component:
    """Chooses the step of the map. The strip above the slider shows what each step loses; position 0 is all steps."""
    count = len(workers.steps)
    slider = scale(
        "workers-step",
        "Step shown on the map; the leftmost position is all steps",
        count,
        0 if view.position is None else view.position + 1,
    )
    marks = [html.Span("all"), html.Span(str(workers.steps[-1]))]
    ends = html.Div(marks, className="ends", **attributes(aria_hidden="true"))
    return html.Div(
        [
            html.Div([_strip(report, count), slider, ends], className="scrub-track"),
            html.Div(_readout(job, report, workers, view), id="workers-readout", className="scrub-readout"),
        ],
        className="scrubber",
    )


def _strip(report: Report, count: int) -> Component:
    shares = np.array([row.lost_share for row in report.by_step])
    top = max(0.1, float(shares.max()))
    block = -(-count // MOST_BARS)
    bars = []
    for first in range(0, count, block):
        height = float(np.clip(shares[first : first + block].max() / top, 0.04, 1))
        middle = (first + (min(first + block, count) - first + 1) / 2) / count
        style = {"left": f"{middle:.3%}", "height": f"{height:.0%}", "width": f"{min(0.7 * block / count, 0.02):.3%}"}
        bars.append(html.I(style=style))
    return html.Div(bars, className="strip", **attributes(aria_hidden="true"))


def _readout(job: str, report: Report, workers: WorkerMap, view: WorkerView) -> list[Any]:
    if view.position is None:
        return [html.B(f"All {len(workers.steps):,} steps"), html.Span("mean over the steps", className="note")]
    number = int(workers.steps[view.position])
    lost_s = report.by_step[view.position].lost_s or 0.0
    moment = viewer().moment(results().step_starts(job).get(number))
    return [html.B(f"Step {number}: {seconds(lost_s)} lost"), html.Span(moment, className="note")]


class Point(TypedDict):
    """A cell of the map: DP rank and stage first; in figures of steps, the step comes first."""

    customdata: list[int | str]


class Clicked(TypedDict):
    """A click on a figure, with the fields in use, or a drag over the map, by columns and rows."""

    points: list[Point]
    box: NotRequired[tuple[tuple[int, int], tuple[int, int]]]


class ViewData(TypedDict):
    """The stored view of the page: `view_state.address`."""

    step: int | None
    worker: str | None
    host: str | None
    dp_rank: str | None
    stage: str | None


@answers(
    Output("workers-said", "children"),
    Input("workers-step", "value"),
    Input("workers-map", "clickData"),
    Input("workers-times", "clickData"),
    Input("workers-steps", "clickData"),
    Input("workers-go", "value"),
    Input({"type": "pick-worker", "value": ALL, "place": ALL}, "n_clicks"),
    Input({"type": "pick-host", "value": ALL, "place": ALL}, "n_clicks"),
    State("workers-job", "data"),
    State("workers-view", "data"),
)
@guarded
def change(
    position: int | str,
    cell: Clicked | None,
    time_click: Clicked | None,
    steps_click: Clicked | None,
    typed: str | None,
    _workers: Any,
    _hosts: Any,
    job: str,
    view_data: ViewData,
) -> Any:
    """Follow the slider, a click on a figure, a worker typed or a button. The parts of the page are set one by one, so
    that an error appears where the page speaks and leaves the rest as it was.
    """
    if not ctx.triggered[0]["value"] and ctx.triggered_id != "workers-step":  # buttons that were just created
        return no_update
    report, workers = results().stored(job).report, results().worker_map(job)
    assert report is not None, "else there were no map"
    before = read_view(workers, view_data)
    clicks = {"workers-map": cell, "workers-times": time_click, "workers-steps": steps_click}
    view = _updated_view(workers, replace(before, said=()), position, clicks.get(str(ctx.triggered_id)), typed)
    if view.said:
        return _messages(view)
    if view.position is not None and ctx.triggered_id in ("workers-times", "workers-steps"):
        set_props("workers-step", {"value": view.position + 1})
    set_props("workers-map", {"figure": drawing(draw(workers, view))})
    set_props("workers-list", {"children": slowest(workers, view.position, _cell(workers, view))})
    set_props("workers-readout", {"children": _readout(job, report, workers, view)})
    set_props("workers-several", {"children": several(job, workers, view)})
    if ctx.triggered_id != "workers-step":
        set_props("workers-detail", {"children": _detail(job, workers, view)})
        set_props("workers-hosts", {"children": hosts(workers, view.host, report)})
    set_props("workers-view", {"data": address(workers, view)})
    return []


def _updated_view(
    workers: WorkerMap, view: WorkerView, position: int | str, clicked: Clicked | None, typed: str | None
) -> WorkerView:
    match ctx.triggered_id:
        case "workers-step":
            number = int(position) if str(position).isdecimal() else 0  # a range field tells digits
            return replace(view, position=min(number, len(workers.steps)) - 1 if number else None)
        case "workers-map" if clicked and "box" in clicked:
            return choose_box(workers, *clicked["box"], view)
        case "workers-map" if clicked and clicked["points"]:
            customdata = clicked["points"][0]["customdata"]
            return choose_worker(workers, ",".join(map(str, customdata[:2])), replace(view, box=None))
        case "workers-times" | "workers-steps" if clicked and clicked["points"]:
            of, customdata = clicked["points"][0]["customdata"][:1], clicked["points"][0]["customdata"][1:]
            view = choose_step(workers, "".join(map(str, of)), view)
            return choose_worker(workers, ",".join(map(str, customdata[:2])), view) if len(customdata) > 1 else view
        case "workers-go" if typed:
            return choose_worker(workers, typed, view)
        case {"type": "pick-worker", "value": str(value)}:
            return choose_worker(workers, value, view)
        case {"type": "pick-host", "value": str(value)}:
            return replace(view, host=None if value == view.host or value not in workers.hosts else value)
    return view


clientside_callback(
    ClientsideFunction("tracekit", "remember"), Input("workers-view", "data"), prevent_initial_call=True
)


def pick(kind: str, value: str, label: str, *, place: str, pressed: bool = False) -> Component:
    """A button that chooses a worker or a host. `place` tells apart buttons for the same one."""
    return html.Button(
        label,
        id={"type": f"pick-{kind}", "value": value, "place": place},
        className="pick",
        **attributes(aria_pressed="true" if pressed else "false"),
    )


def slowest(workers: WorkerMap, position: int | None, chosen: int) -> list[Component]:
    """The slowest workers, over all steps or in one."""
    cells = workers.worst(position, LISTED)
    in_step = None if position is None else workers.per_step[position].ravel()
    in_step_head = [] if in_step is None else ["In the step"]
    heads = ["Rank", "Host", "DP, stage", *in_step_head, term("costs alone", "Costs alone")]
    rows = []
    for cell in cells:
        worker, host = workers.worker(cell), workers.host_name(cell)
        button = pick(
            "worker", comma(worker), workers.label(cell).removeprefix("rank "), place="list", pressed=cell == chosen
        )
        rows.append(
            [
                button,
                html.Td("-" if host is None else short(host), className="host"),
                f"{worker.dp_rank}, {worker.pp_rank}",
                *([] if in_step is None else [cost_alone(in_step[cell])]),
                cost_alone(workers.slowdown.ravel()[cell]),
            ]
        )
    balanced = float(workers.slowdown.max()) < WORTH_NAMING and position is None
    remarks = [note(f"No worker costs {WORTH_NAMING - 1:.0%}: these are only the largest.")] if balanced else []
    places = [place for place, cell in enumerate(cells) if cell == chosen]
    numbers = range(3, len(heads))
    return [*remarks, row_table(heads, rows, "Slowest workers", numbers, style="tight", chosen=places)]


def slowest_steps(stored: Stored) -> Component:
    """The slowest steps, each with the way to its timeline."""
    rows = [
        [
            f"{row['step']}",
            seconds(row["recorded_s"]),
            seconds(row["lost_s"] or 0.0),
            dcc.Link("timeline", href=href("/timeline", job=stored.name, step=row["step"])),
        ]
        for row in stored.table("by_step").top_k(SLOWEST_STEPS, by="recorded_s").iter_rows(named=True)
    ]
    return row_table(["Step", "Recorded", "Lost", "Open"], rows, "Slowest steps", (1, 2), style="tight")


def detail(workers: WorkerMap, cell: int, job: str, position: int | None, *, default: bool) -> list[Component]:
    """One worker: its figures, also over the steps, and where to look next. `default`: the user did not choose it."""
    worker, host = workers.worker(cell), workers.host_name(cell)
    count = workers.slowdown.size
    per_step = workers.per_step.reshape(len(workers.steps), -1)
    slow = int((per_step[:, cell] >= WORTH_NAMING).sum())
    facts = {
        "Costs alone": f"{cost_alone(workers.slowdown.ravel()[cell])} of a step",
        "Place": f"{workers.place(cell):,} of {count:,}, the slowest first",
        "DP, stage": f"{worker.dp_rank}, {worker.pp_rank}",
        "Host": "unknown" if host is None else short(host),
        "Stands out": f"in {slow:,} of {len(workers.steps):,} steps, with {WORTH_NAMING - 1:.0%} or more",
    }
    name, starts = workers.full_name(cell), results().step_starts(job)
    step = None if position is None else int(workers.steps[position])
    links = [
        dcc.Link("Timeline of this worker", href=href("/timeline", job=job, worker=comma(worker), step=step)),
        dcc.Link(
            "What if it were as fast as its peers?", href=href("/whatif", job=job, select=f"worker={comma(worker)}")
        ),
    ]
    table = pl.DataFrame({"step": workers.steps, "slowdown": per_step[:, cell]})
    moments = [viewer().moment(starts.get(int(number))) for number in workers.steps]
    return [
        html.H3([f"{name[:1].upper()}{name[1:]}", html.Span("the slowest" if default else "", className="note")]),
        html.Div(
            [
                facts_table(facts, "plain tight about"),
                html.P([html.Span(link, className="next") for link in links]),
            ]
        ),
        *figure_parts(
            in_range(worker_over_steps(workers, cell, viewer().theme, moments=moments, position=position), job),
            label=f"What {name} alone costs of each step",
            table=table,
            id="workers-history",
        ),
    ]


def several(job: str, workers: WorkerMap, view: WorkerView) -> list[Component]:
    """The joint cost of the workers in the chosen box, with links."""
    if view.box is None:
        return [note("A drag over the map chooses several workers.")]
    values = workers.values(view.position).ravel()
    cells = view.box.cells(workers)
    selected, total = (
        float(np.nansum(np.clip(lost_alone(slowdowns), 0, None))) for slowdowns in (values[cells], values)
    )
    share = f" of {total:.1%}, {selected / total:.0%} of what all workers cost" if total else ""
    where = {"dp_rank": view.box.dp_ranks, "stage": view.box.stages}
    step = None if view.position is None else int(workers.steps[view.position])
    selection = " and ".join(f"{name}={values}" for name, values in where.items())
    links = {
        "Timeline of these workers": href("/timeline", job=job, step=step, **where),
        "What if they were as fast as their peers?": href("/whatif", job=job, select=selection),
    }
    return [
        html.P(
            [
                html.B(f"{len(cells):,} workers, dp {view.box.dp_ranks}, stage {view.box.stages}: "),
                *(term("summed"), f" {selected:.1%}{share}"),
            ]
        ),
        html.P([html.Span(dcc.Link(words, href=address), className="next") for words, address in links.items()]),
    ]


def _label(workers: WorkerMap, worker: Worker) -> str:
    cell = workers.cell(worker)
    return worker.coordinates if cell is None else workers.label(cell)


def hosts(workers: WorkerMap, chosen: str | None, report: Report) -> list[Component]:
    """All known hosts by their slowest worker, and whether to drain one; none of a job on one host."""
    if workers.only_host is not None:
        return [note(f"The job runs on one host, {short(workers.only_host)}.")]
    loads = workers.host_loads()
    verdict = html.P(host_words(report, workers), className="verdict")
    if not loads:
        return [
            verdict,
            note("Traces of `tracekit collect` name them; other formats can carry `hosts` in their metadata."),
        ]
    rows = [
        [
            pick("host", load.name, short(load.name), place="hosts", pressed=load.name == chosen),
            f"{load.workers:,}",
            cost_alone(load.worst_slowdown),
            pick("worker", comma(load.worst), _label(workers, load.worst).removeprefix("rank "), place="hosts"),
            f"{load.summed:.1%}",
        ]
        for load in loads[:HOSTS_LISTED]
    ]
    places = [place for place, load in enumerate(loads) if load.name == chosen]
    heads = ["Host", "Workers", "Slowest", "Rank", term("summed", "Summed")]
    more = len(loads) - HOSTS_LISTED
    rest = f"{more:,} more hosts have no slower worker. " if more > 0 else ""
    return [
        verdict,
        row_table(heads, rows, "Hosts", (1, 2, 4), style="tight", chosen=places),
        note(f"{rest}Choose a host to mark its workers on the map."),
    ]


job_page(__name__, "/workers", build, lambda stored, args: [partial(stored.worker_map, args["job"])])
