"""Pipeline: what each stage computes and waits for in one step, and the same work under another schedule."""

from __future__ import annotations

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.analysis.bubbles.picture import draw_step
from tracekit.analysis.job.bubbles_words import summary
from tracekit.analysis.job.plan_words import PLAN_HEADS, plan_row, sentence, settings_words
from tracekit.analysis.job.plans import optimize_job
from tracekit.base.errors import LayoutError, SelectionError, TracekitError
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.replays import MOST_OPS
from tracekit.dashboards.browser.ui.components import figure_panel, href, note, panel
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.shell import job_page
from tracekit.dashboards.figures.plans import plan_front
from tracekit.dashboards.figures.stage_bars import pipeline_step
from tracekit.report.pictures import Picture

SCHEDULES = ("gpipe", "1f1b", "interleaved:chunks=2", "zb-h1")
SLOWEST_STEPS = 5


def build(
    stored: Stored,
    step: str | None = None,
    dp: str | None = None,
    schedule: str | None = None,
    plans: str | None = None,
    **_: str,
) -> list[Component]:
    """`step`: its number, by default the slowest; `dp`: its DP rank, by default the one with the longest pipeline;
    `schedule`: what to draw below it; `plans`: whether to search for better plans.
    """
    assert stored.report is not None
    if (ops := stored.report.job.ops or 0) > MOST_OPS:
        return [note(f"The job has {ops:,} ops, more than the {MOST_OPS:,} that this server loads.")]
    slowest = stored.table("by_step").sort("recorded_s", descending=True)["step"].to_list()
    chosen, lane = _number(step, "step", slowest[0]), _number(dp, "dp", None)
    assert chosen is not None
    drawn, remarks = _drawn(stored.name, chosen, lane, schedule)
    table = pl.DataFrame(
        [(one.name, bar.stage, bar.what, bar.start_s, bar.end_s, bar.words) for one in drawn for bar in one.bars],
        ["schedule", "stage", "what", "start_s", "end_s", "words"],
        orient="row",
    )
    lines = summary(drawn)
    links = {
        "Steps": [(str(number), {"step": number, "schedule": schedule}) for number in slowest[:SLOWEST_STEPS]],
        "Draw below it": [(name, {"step": chosen, "schedule": name}) for name in SCHEDULES],
        "Search": [("the best plan", {"step": chosen, "schedule": schedule, "plans": 1})],
    }
    return [
        *(html.Div(note(text), role="status") for text in remarks),
        figure_panel(
            f"Pipeline in step {chosen}",
            pipeline_step(drawn, viewer().theme),
            label=f"Computes and bubbles of {drawn[0].stages} stages in step {chosen}. {'; '.join(lines)}",
            table=table,
            id="pipeline-step",
        ),
        panel("Time and memory", html.Ul([html.Li(line) for line in lines])),
        *(_best_plans(stored) if plans else ()),
        panel("Show", *(_choices(stored.name, title, of) for title, of in links.items())),
    ]


def _best_plans(stored: Stored) -> list[Component]:
    """The best plans of the job, or why there are none."""
    assert stored.report is not None
    try:
        optimum = optimize_job(results().job(stored.name), stored.report)
    except TracekitError as error:
        return [panel("The best plan", note(str(error)))]
    table = pl.DataFrame([plan_row(plan) for plan in optimum.plans], PLAN_HEADS, orient="row")
    return [
        figure_panel(
            "The best plan", plan_front(optimum, viewer().theme), label=sentence(optimum), table=table, id="plans"
        ),
        panel(
            "Plans",
            note(sentence(optimum)),
            html.Ul([html.Li(words) for words in (*settings_words(optimum), *optimum.notes)]),
        ),
    ]


def _number(text: str | None, name: str, default: int | None) -> int | None:
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise SelectionError(f"{name}={text:.20}: expected a number")
    return int(text)


def _drawn(job: str, step: int, dp_rank: int | None, schedule: str | None) -> tuple[list[Picture], list[str]]:
    """The pictures, and why the schedule is not among them."""
    replay = results().replay(job)
    if schedule is None:
        return draw_step(replay, step, dp_rank), []
    try:
        return draw_step(replay, step, dp_rank, (schedule,)), []
    except (LayoutError, SelectionError) as error:
        return draw_step(replay, step, dp_rank), [str(error)]


def _choices(job: str, title: str, choices: list[tuple[str, dict[str, object]]]) -> Component:
    links = [dcc.Link(words, href=href("/pipeline", job=job, **state)) for words, state in choices]
    return html.P([f"{title}: ", *(part for link in links for part in (link, " "))])


job_page(__name__, "/pipeline", "Pipeline", build)
