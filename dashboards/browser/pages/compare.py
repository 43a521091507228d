"""Compare: did the change help? Two jobs, or one job before and after a step.

The address holds everything: `with` names the job before (the one of the page is the one after), or `split` the first
step after a change of the same job.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import polars as pl
from dash import ClientsideFunction, Input, Output, State, clientside_callback, dcc, html
from dash.development.base_component import Component

from tracekit.base.errors import SelectionError
from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import Results, Stored
from tracekit.dashboards.browser.pages.compare_parts import (
    causes_panel,
    cost_panels,
    step_panels,
    verdict_panel,
    worker_panels,
)
from tracekit.dashboards.browser.pages.gpu_parts import gpu_changes
from tracekit.dashboards.browser.ui.components import choice, guarded, href, note, panel, problem, text_field
from tracekit.dashboards.browser.ui.context import results
from tracekit.dashboards.browser.ui.shell import answers, job_page
from tracekit.report.compare import causes_of_jobs, causes_of_parts, first_split, parts, whole
from tracekit.report.report import Report

#: Suggestions listed, and names that the field offers; any other can be written.
MOST_SUGGESTED, MOST_OFFERED = 6, 200
_JOB, _SPLIT = "job", "split"


def build(stored: Stored, report: Report, split: str = "", **state: str) -> list[Component]:
    """`with`: the job before; `split`: the first step after a change of this job."""
    other = state.get("with", "")
    if _SPLIT in stored.kind.compared and not (other or split) and (changed := first_split(report)) is not None:
        split = str(changed)
    return [
        _chooser(stored, report, other, split),
        dcc.Loading(
            html.Div(guarded(_content)(stored, report, other, split), id="compare-content"),
            delay_show=300,
            overlay_style={"visibility": "visible", "opacity": 0.5},
        ),
        dcc.Store(id="compare-job", data=stored.name),
    ]


# --- what is compared -----------------------------------------------------------------------------------------------


def _chooser(stored: Stored, report: Report, other: str, split: str) -> Component:
    """The fields: the job before, or the first step after a change if only `split` is given."""
    by_step_now = bool(split and not other)
    names = [str(name) for name in results().jobs().filter(pl.col("slowdown").is_not_null())["name"]]
    steps = report.by_step
    by_job = [
        text_field(
            "compare-with",
            "Job before",
            other,
            placeholder="Name of a job",
            wait_s=True,
            style="wide",
            suggestions=names[:MOST_OFFERED],
        ),
        html.Div([html.Div("Job after", className="field-label"), html.B(short(stored.name))], className="after-job"),
    ]
    by_step = text_field(
        "compare-split",
        "First step after the change",
        split,
        placeholder=f"{steps[0].step + 1}-{steps[-1].step}",
        wait_s=0.5,
    )
    mode = choice("compare-mode", "Compare with", stored.kind.compared, _SPLIT if by_step_now else _JOB)
    return panel(
        "Compare",
        html.Div(
            [
                mode,
                html.Div(by_job, id="compare-by-job", className="compare-fields", hidden=by_step_now),
                html.Div(by_step, id="compare-by-step", className="compare-fields", hidden=not by_step_now),
            ],
            className="compare-fields",
        ),
    )


def _content(stored: Stored, report: Report, before_name: str, split: str) -> list[Component]:
    """The comparison, or what is missing for one, in words."""
    if split and not before_name:
        return _by_step(stored, report, split)
    if not before_name:
        return [_nothing_chosen(stored, report)]
    other = results().stored(before_name)
    if other.report is None or other.lacking != stored.lacking:
        return [problem(f"{short(other.name)} {other.lacking or 'is a pipeline'}; choose another job.")]
    if other.name == stored.name:
        return [
            panel(
                "Did it help?",
                html.P("No difference: this is the job compared with itself.", className="verdict"),
                note("Choose another job, or compare this one before and after a step."),
            )
        ]
    before, after = (
        whole(side.name, job_report, results().worker_steps(side.name) if job_report.by_worker else None)
        for side, job_report in ((other, other.report), (stored, report))
    )
    reports = {"before": other.report, "after": report}
    swap = dcc.Link("Swap before and after", href=href("/compare", job=other.name, **{"with": stored.name}))
    if not after.workers.size:
        causes = causes_panel(causes_of_jobs(other.report, report), reports, "Staying")
        return [verdict_panel(before, after, swap), *gpu_changes(other.report, report), causes]
    return [
        verdict_panel(before, after, swap),
        cost_panels(other.report, report),
        step_panels(before, after, split=False),
        causes_panel(causes_of_jobs(other.report, report), reports, "Staying"),
        *worker_panels(before, after, reports, split=False),
    ]


def _by_step(stored: Stored, report: Report, split: str) -> list[Component]:
    try:
        step = int(split)
    except ValueError:
        raise SelectionError(f"step {split!r:.40} is not a step number; expected one such as 100") from None
    before, after = parts(stored.name, report, results().worker_steps(stored.name), step)
    remarks = [
        note(
            "Both parts are measured against the ideal of the whole job. What op kinds and stages cost is stored for"
            " whole jobs only, so it is not split here."
        )
    ]
    if report.patterns.time is not None and step == report.patterns.time.since_step:
        remarks.append(
            note("The step was found in these same step times, which makes the interval a little too narrow.")
        )
    reports = {"before": report, "after": report}
    return [
        verdict_panel(before, after, html.Div(remarks)),
        step_panels(before, after, split=True),
        causes_panel(causes_of_parts(report, before, after, step), reports, "Without a date: over the whole job"),
        *worker_panels(before, after, reports, split=True),
    ]


def _nothing_chosen(stored: Stored, report: Report) -> Component:
    """Jobs that suggest themselves: those of the same sizes, the most similar names first."""
    layout = report.job.layout.to_dict() if report.job.layout else {}  # the list of jobs has null for none
    alike = [pl.col(size).eq_missing(pl.lit(layout.get(size))) for size in ("dp", "pp", "tp", "cp", "vpp")]
    names = results().jobs().filter(pl.col("slowdown").is_not_null(), pl.col("name") != stored.name, *alike)["name"]
    close = difflib.get_close_matches(stored.name, names[:MOST_OFFERED].to_list(), n=MOST_SUGGESTED, cutoff=0.0)
    links = [
        dcc.Link(short(name), href=href("/compare", job=stored.name, **{"with": name}), className="chip-button")
        for name in close
    ]
    return panel(
        "Did it help?",
        note(stored.kind.choose),
        html.Div([html.Span(f"Jobs {stored.kind.alike}", className="label"), *links], className="suggestions")
        if links
        else note(f"The store has no other job {stored.kind.alike}."),
    )


# --- what the page does ---------------------------------------------------------------------------------------------


_CHOSEN = (
    *(Input(f"compare-{name}", "value") for name in ("mode", "with", "split")),
    State("compare-job", "data"),
)


@answers(
    Output("compare-content", "children"),
    Output("compare-by-job", "hidden"),
    Output("compare-by-step", "hidden"),
    *_CHOSEN,
)
def choose(mode: str, other: str | None, split: str | None, job: str) -> Any:
    """Another job or step was chosen."""
    by_step = mode == _SPLIT
    return guarded(_chosen)(job, by_step, other, split), by_step, not by_step


def _chosen(job: str, by_step: bool, other: str | None, split: str | None) -> list[Component]:
    stored = results().stored(job)
    if stored.report is None:
        return [problem(f"{short(job)} is stored without an analysis by now.")]
    if not by_step:
        return _content(stored, stored.report, other or "", "")
    split = (split or "").strip()
    if not split:
        steps = stored.report.by_step
        return [note(f"Which step is the first after the change? The job has {steps[0].step} to {steps[-1].step}.")]
    return _content(stored, stored.report, "", split)


clientside_callback(ClientsideFunction("tracekit", "rememberSides"), *_CHOSEN, prevent_initial_call=True)


def _prefetches(stored_results: Results, args: Mapping[str, str]) -> list[Callable[[], object]]:
    """The other job, and the worker slowdowns of both."""
    other = args.get("with")
    names = [args["job"]] if other is None else [args["job"], other]
    more = [] if other is None else [partial(stored_results.stored, other)]
    return [stored_results.jobs, *more, *(partial(stored_results.worker_steps, name) for name in names)]


job_page(__name__, "/compare", build, _prefetches)
