"""Pipeline: what each stage computes and waits for in one step, and the same work under another schedule."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component
from msgspec import Struct

from tracekit.analysis.bubbles.picture import WAITS_FOR, DrawnSchedule, draw_step, summary, timeline_of
from tracekit.analysis.job.best_plans import PLAN_HEADS, moves_words, optimize_job, plan_row, sentence, settings_words
from tracekit.base.errors import LayoutError, SelectionError, TracekitError
from tracekit.base.text import seconds
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.replays import MOST_OPS
from tracekit.dashboards.browser.ui.components import figure_panel, figure_parts, halves, href, note, panel, row_table
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.shell import job_page
from tracekit.dashboards.figures.charts import plan_front, timeline
from tracekit.report.report import Report

SCHEDULES = ("gpipe", "1f1b", "interleaved:chunks=2", "zb-h1")
#: Steps and DP ranks to choose from.
SLOWEST_STEPS, MOST_LANES = 5, 16
#: A page does not wait longer for plans.
TIME_LIMIT_S = 10.0


def build(
    stored: Stored,
    report: Report,
    step: str | None = None,
    dp: str | None = None,
    schedule: str | None = None,
    plans: str | None = None,
    **_: str,
) -> list[Component]:
    """`step`: its number, by default the slowest; `dp`: its DP rank, by default the one with the longest pipeline;
    `schedule`: what to draw below it; `plans`: whether to search for better plans.
    """
    if (ops := report.job.ops or 0) > MOST_OPS:
        return [note(f"The job has {ops:,} ops, more than the {MOST_OPS:,} that this server loads.")]
    slowest = stored.table("by_step").sort("recorded_s", descending=True)["step"].to_list()
    chosen, lane = _number(step, "step", slowest[0]), _number(dp, "dp", None)
    assert chosen is not None
    timelines, remarks = _timelines(stored.name, chosen, lane, schedule)
    table = pl.DataFrame(
        [
            (line.name, bar.stage, bar.what, bar.start_s, bar.end_s, bar.words)
            for line in timelines
            for bar in line.bars
        ],
        ["schedule", "stage", "what", "start_s", "end_s", "words"],
        orient="row",
    )
    lines, state = summary(timelines), {"step": chosen, "dp": lane, "schedule": schedule}
    ranks = results().replay(stored.name).graph.dp_ranks[:MOST_LANES]
    lanes = [("the longest", state | {"dp": None}), *((str(rank), state | {"dp": int(rank)}) for rank in ranks)]
    links = {
        "Steps, slowest first": [(str(number), state | {"step": number}) for number in slowest[:SLOWEST_STEPS]],
        "DP rank": lanes if len(ranks) > 1 else [],
        "Draw below it": [(name, state | {"schedule": name}) for name in SCHEDULES],
        "Search": [("the best plan", state | {"plans": 1})],
    }
    stages = [_Stage.of(timelines[0], stage) for stage in range(timelines[0].stages)]
    lane_name = "the DP rank with the longest pipeline" if lane is None else f"DP rank {lane}"
    return [
        *(html.Div(note(text), role="status") for text in remarks),
        panel(
            f"Pipeline in step {chosen}, {lane_name}",
            html.P(_sentence(stages, timelines[0].window_s), className="verdict"),
            *(_choices(stored.name, title, choices) for title, choices in links.items() if choices),
            *figure_parts(
                timeline(timeline_of("", timelines, ()), viewer().theme),
                label=f"Computes and bubbles of {timelines[0].stages} stages in step {chosen}. {'; '.join(lines)}",
                table=table,
                id="pipeline-step",
            ),
        ),
        halves(
            panel("Idle stages", _stage_table(stages, timelines[0].window_s)),
            panel("Time and memory", html.Ul([html.Li(line) for line in lines])),
        ),
        *(_best_plans(stored.name, report) if plans else ()),
    ]


class _Stage(Struct, frozen=True):
    """A stage in the recorded pipeline: seconds that it computes, and that it waits for each of `WAITS_FOR`."""

    number: int
    computes_s: float
    waits_s: dict[str, float]

    @classmethod
    def of(cls, picture: DrawnSchedule, number: int) -> _Stage:
        """The sums of the bars of a stage."""
        spent: dict[str, float] = {}
        for bar in picture.bars:
            if bar.stage == number:
                spent[bar.what] = spent.get(bar.what, 0.0) + bar.end_s - bar.start_s
        waits = {reason: spent[reason] for reason in WAITS_FOR if reason in spent}
        return cls(number, sum(spent.values()) - sum(waits.values()), waits)

    @property
    def idle_s(self) -> float:
        """Seconds in which it waits."""
        return sum(self.waits_s.values())


def _sentence(stages: Sequence[_Stage], window_s: float) -> str:
    idle_s = sum(stage.idle_s for stage in stages) / len(stages)
    if not idle_s:
        return "No stage waits."
    idlest = max(stages, key=lambda stage: stage.idle_s)
    reason = max(idlest.waits_s, key=lambda name: idlest.waits_s[name])
    return (
        f"Stages are idle for {idle_s / window_s:.0%} of the {seconds(window_s)} from the first to the last compute;"
        f" most of all stage {idlest.number}, {idlest.idle_s / window_s:.0%}, mostly waiting for {WAITS_FOR[reason]}."
    )


def _stage_table(stages: Sequence[_Stage], window_s: float) -> Component:
    reasons = [reason for reason in WAITS_FOR if any(reason in stage.waits_s for stage in stages)]
    rows = [
        [
            f"stage {stage.number}",
            seconds(stage.computes_s),
            f"{stage.idle_s / window_s:.0%}",
            *(seconds(stage.waits_s.get(reason, 0.0)) for reason in reasons),
        ]
        for stage in stages
    ]
    heads = ["Stage", "Computes", "Idle", *(f"Waits for {WAITS_FOR[reason]}" for reason in reasons)]
    return row_table(heads, rows, "Idle stages", range(1, len(heads)))


def _best_plans(job: str, report: Report) -> list[Component]:
    """The best plans of the job, or why there are none."""
    try:
        optimum = optimize_job(results().job(job), report, time_limit_s=TIME_LIMIT_S)
    except TracekitError as error:
        return [panel("The best plan", note(str(error)))]
    others = [f"Or: {words}" for words in moves_words(optimum)]
    table = pl.DataFrame([plan_row(plan) for plan in optimum.plans], PLAN_HEADS, orient="row")
    return [
        figure_panel(
            "The best plan", plan_front(optimum, viewer().theme), label=sentence(optimum), table=table, id="plans"
        ),
        panel(
            "Plans",
            note(sentence(optimum)),
            html.Ul([html.Li(words) for words in (*settings_words(optimum), *others, *optimum.notes)]),
        ),
    ]


def _number(text: str | None, name: str, default: int | None) -> int | None:
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise SelectionError(f"{name}={text:.20}: expected a number")
    return int(text)


def _timelines(job: str, step: int, dp_rank: int | None, schedule: str | None) -> tuple[list[DrawnSchedule], list[str]]:
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


job_page(__name__, "/pipeline", build)
