"""The parts of the page Workers beside its map: the slowest workers, one worker, the hosts.

In: a `WorkerMap` and what of it is chosen. Out: Dash components. Buttons that choose a worker or a host have the id
`{"type": "pick-worker", ...}` or `{"type": "pick-host", ...}`, which the page listens to.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import cost_alone, seconds, short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.worker_view import WorkerView, comma
from tracekit.dashboards.browser.ui.components import attributes, figure_parts, href, note, row_table, term
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import host_words
from tracekit.dashboards.browser.ui.time_range import in_range
from tracekit.dashboards.figures.worker_charts import worker_over_steps
from tracekit.dashboards.figures.worker_map import WORTH_NAMING, WorkerMap, lost_alone
from tracekit.report.report import Report
from tracekit.trace.model import Worker

#: Workers, hosts and steps listed.
LISTED = 10
HOSTS_LISTED = 12
SLOWEST_STEPS = 10


def pick(kind: str, value: str, shown: str, *, place: str, pressed: bool = False) -> Component:
    """A button that chooses a worker or a host. `place` tells apart buttons for the same one."""
    return html.Button(
        shown,
        id={"type": f"pick-{kind}", "value": value, "place": place},
        className="pick",
        **attributes(aria_pressed="true" if pressed else "false"),
    )


def slowest(workers: WorkerMap, position: int | None, chosen: int) -> list[Component]:
    """The slowest workers, over all steps or in one."""
    cells = workers.worst(position, LISTED)
    if not cells:
        return [note("No worker was analysed in this step.")]
    in_step = None if position is None else workers.per_step[position].ravel()
    in_step_head = [] if in_step is None else ["In the step"]
    heads = ["Rank", "Host", "DP, stage", *in_step_head, term("costs alone", "Costs alone")]
    rows = []
    for cell in cells:
        worker, host = workers.worker(cell), workers.host_name(cell)
        shown = pick(
            "worker", comma(worker), workers.label(cell).removeprefix("rank "), place="list", pressed=cell == chosen
        )
        rows.append(
            [
                shown,
                html.Td("-" if host is None else short(host), className="host"),
                f"{worker.dp_rank}, {worker.pp_rank}",
                *([] if in_step is None else [cost_alone(in_step[cell])]),
                cost_alone(workers.slowdown.ravel()[cell]),
            ]
        )
    balanced = float(workers.slowdown.max()) < WORTH_NAMING and position is None
    said = [note(f"No worker costs {WORTH_NAMING - 1:.0%}: these are only the largest.")] if balanced else []
    places = [place for place, cell in enumerate(cells) if cell == chosen]
    numbers = range(3, len(heads))
    return [*said, row_table(heads, rows, "Slowest workers", numbers, style="tight", chosen=places)]


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
    """One worker: its figures, also over the steps, and where to look next. `default`: nobody chose it."""
    worker, host = workers.worker(cell), workers.host_name(cell)
    count = workers.slowdown.size
    everyone = workers.per_step.reshape(len(workers.steps), -1)
    slow = int((everyone[:, cell] >= WORTH_NAMING).sum())
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
    table = pl.DataFrame({"step": workers.steps, "slowdown": everyone[:, cell]})
    moments = [viewer().moment(starts.get(int(number))) for number in workers.steps]
    body = [html.Tr([html.Th(name, scope="row"), html.Td(value)]) for name, value in facts.items()]
    return [
        html.H3([f"{name[:1].upper()}{name[1:]}", html.Span("the slowest" if default else "", className="note")]),
        html.Div(
            [
                html.Table(html.Tbody(body), className="plain tight about"),
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
    """What the workers in the chosen box cost together, and where to look next."""
    if view.box is None:
        return [note("A drag over the map chooses several workers.")]
    values = workers.values(view.position).ravel()
    cells = view.box.cells(workers)
    own, whole = (float(np.nansum(np.clip(lost_alone(each), 0, None))) for each in (values[cells], values))
    share = f" of {whole:.1%}, {own / whole:.0%} of what all workers cost" if whole else ""
    where = {"dp_rank": view.box.dp_ranks, "stage": view.box.stages}
    step = None if view.position is None else int(workers.steps[view.position])
    selection = " and ".join(f"{name}={values}" for name, values in where.items())
    ways = {
        "Timeline of these workers": href("/timeline", job=job, step=step, **where),
        "What if they were as fast as their peers?": href("/whatif", job=job, select=selection),
    }
    return [
        html.P(
            [
                html.B(f"{len(cells):,} workers, dp {view.box.dp_ranks}, stage {view.box.stages}: "),
                *(term("summed"), f" {own:.1%}{share}"),
            ]
        ),
        html.P([html.Span(dcc.Link(words, href=to), className="next") for words, to in ways.items()]),
    ]


def _label(workers: WorkerMap, worker: Worker) -> str:
    cell = workers.cell(worker)
    return worker.coordinates if cell is None else workers.label(cell)


def hosts(workers: WorkerMap, chosen: str | None, report: Report) -> list[Component]:
    """All known hosts by their slowest worker, and whether to drain one; none of a job on one host."""
    if workers.only_host is not None:
        return [note(f"The job runs on one host, {short(workers.only_host)}.")]
    loads = workers.host_loads()
    said = html.P(host_words(report, workers), className="verdict")
    if not loads:
        return [
            said,
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
        said,
        row_table(heads, rows, "Hosts", (1, 2, 4), style="tight", chosen=places),
        note(f"{rest}Choose a host to mark its workers on the map."),
    ]
