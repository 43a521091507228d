"""The panels of the page What-if: the answer, its progress, the scenarios side by side. In: the current answers. Out:
Dash components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from tracekit.base.text import cost_alone, seconds, sure, with_error
from tracekit.dashboards.browser.data.replays import (
    MOST_KEPT,
    RANKS,
    GpuQuestion,
    Pending,
    Phase,
    QueryAction,
    Rejected,
    Status,
    WhatifAnswer,
    WhatifQuery,
    kept_text,
    query_of,
    worker_words,
)
from tracekit.dashboards.browser.data.stored_kinds import StoredKind
from tracekit.dashboards.browser.ui.components import (
    GPU_REASONS,
    attributes,
    figure_parts,
    folded,
    inline_csv,
    note,
    panel,
    problem,
    row_table,
    term,
)
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.browser.ui.figures import StepBar, scenario_times
from tracekit.report.report import Report

#: Most workers, places or op kinds listed, and the smallest share of the step that they cost.
MOST_LOSSES, SMALLEST_LOSS = 5, 0.001


@dataclass(frozen=True, slots=True)
class CurrentAnswers:
    """The current answers to the questions of a page."""

    query: WhatifQuery | None
    status: Status | None
    wrong: str | None
    beside: tuple[tuple[WhatifQuery, Status], ...]
    beside_problems: tuple[str, ...]
    on_gpus: tuple[tuple[GpuQuestion, Status], ...] = ()

    @property
    def pending(self) -> bool:
        """Whether an answer is still to come."""
        others = (*(status for _, status in self.beside), *(status for _, status in self.on_gpus))
        return any(isinstance(status, Pending) for status in (self.status, *others))


def fixes_panel(kind: StoredKind, report: Report) -> Component:
    """The fixes that the analysis has priced, each as a question of the same price to change."""
    fixes = [fix for fix in report.fixes if fix.withheld is None]
    if not fixes:
        return panel("Priced fixes", note("The analysis promises no saving for any fix: ask a question of your own."))
    step_s = report.step_time_s.recorded
    rows: dict[bool, list[list[Any]]] = {True: [], False: []}
    for fix in fixes:
        query = query_of(fix)
        button = "" if query is None else ask_button("Edit", query, edit=True)
        bound = "at most " if fix.bound else ""
        confidence = fix.confidence
        title = fix.title if confidence is None else f"{fix.title} ({sure(confidence)})"
        times = f"{seconds(step_s)} to {seconds(fix.new_step_s or 0.0)}"
        cells = [title, times, bound + with_error(fix.saved_s or 0.0, fix.error_s), html.Td(button, className="ask")]
        rows[confidence is not None].append(cells)
    heads = ["Fix", f"{report.job.whole.capitalize()} time", "Saves", html.Th("", className="ask")]
    remark = note(
        "Edit puts a fix into the form above, where it has the same price: change its factors, add ` + SELECTION` or"
        " ` + SELECTION * FACTOR`, and replay."
    )
    title, general = "Priced fixes", f"Fixes that any job could try: {len(rows[False])}"
    cause_table, other_table = (
        row_table(heads, group, label, (1, 2)) for group, label in ((rows[True], title), (rows[False], general))
    )
    return panel(
        title,
        *([cause_table] if rows[True] else []),
        *([remark] if rows[True] and kind.of_ops else []),
        *([folded(general, other_table)] if rows[False] else []),
    )


def gpu_prices(report: Report, seen: CurrentAnswers) -> list[Component]:
    """What makes the GPUs idle, which ranks are late, which ops take long: each with its price, the largest first."""
    groups: dict[str, list[tuple[float, list[Any]]]] = {}
    for question, status in seen.on_gpus:
        saved_s = status.saved_s if isinstance(status, WhatifAnswer) else 0.0
        saves = f"{status.phase} ..." if isinstance(status, Pending) else "nothing"
        if isinstance(status, WhatifAnswer) and status.clear and saved_s >= SMALLEST_LOSS * status.recorded_s:
            saves = f"{seconds(saved_s)} ({saved_s / status.recorded_s:.0%})"
        words = GPU_REASONS.get(question.subject, question.subject)
        words += "" if question.rank is None else f", rank {question.rank}"
        button = html.Td(ask_button("Edit", question.query, edit=True), className="ask")
        groups.setdefault(question.heading, []).append((saved_s, [words, seconds(question.takes_s), saves, button]))
    lists = []
    for heading, rows in groups.items():
        ordered = [cells for _, cells in sorted(rows, key=lambda row: -row[0])]
        takes, saves = "Others wait" if heading == RANKS else "Takes", f"Saved per {report.job.whole}"
        table = row_table([heading, takes, saves, html.Th("", className="ask")], ordered, heading, (1, 2))
        lists.append(html.Div(table, className="half"))
    hint = note("Prices are those of fixes: the job is replayed with launch delays, everything else as recorded.")
    return [html.Div(lists, className="row"), hint] if lists else []


def losses(report: Report) -> list[Component]:
    """The workers, stages and DP ranks, and op kinds that a step loses most to, each with a button that asks what the
    speed of its peers would save; empty if none loses any.
    """
    workers = [
        (worker_words(report, row.worker), cost_alone(row.slowdown), f"worker={row.dp_rank},{row.pp_rank}")
        for row in report.by_worker or ()
        if round(row.slowdown, 2) > 1
    ]
    places = [("by_pp_rank", "pp_rank", "stage"), ("by_dp_rank", "dp_rank", "dp_rank")]
    lost = "Lost a step" if report.job.whole == "step" else "Lost"
    lists = [
        _list("Worker", "Costs alone", workers),
        _list("Stage or DP rank", lost, _loss_rows(report, places)),
        _list("Op kind", lost, _loss_rows(report, [("by_kind", "kind", "kind")])),
    ]
    tables = [html.Div(table, className="third") for table in lists if table is not None]
    explanation = note("Against the average op of the job, each by itself and without launch delays.")
    return [html.Div(tables, className="row"), explanation] if tables else []


def _loss_rows(report: Report, tables: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The losses of the rows of these tables, the largest first. `tables`: each with its column, and the word of a
    selection for it.
    """
    lost = [
        (row.saved_s, f"{word}={getattr(row, column)}")
        for table, column, word in tables
        for row in getattr(report, table) or ()
        if (row.saved_s or 0.0) >= SMALLEST_LOSS * report.step_time_s.recorded
    ]
    return [
        (text.removeprefix("kind=").replace("dp_rank=", "DP rank ").replace("=", " "), seconds(lost_s), text)
        for lost_s, text in sorted(lost, reverse=True)
    ]


def _list(head: str, figure: str, rows: Sequence[tuple[str, str, str]]) -> Component | None:
    """A table of names, figures and the selections to ask about; None without rows."""
    cells = [
        [words, value, html.Td(ask_button("Ask", WhatifQuery(text)), className="ask")]
        for words, value, text in rows[:MOST_LOSSES]
    ]
    return row_table([head, figure, html.Th("", className="ask")], cells, head, (1,)) if cells else None


def ask_button(title: str, query: WhatifQuery, *, edit: bool = False) -> Component:
    """A button that asks a question and puts it into the form, which it opens to `edit` it (assets/whatif.js)."""
    return html.Button(
        title,
        className="chip-button",
        title=str(query),
        **attributes(
            data_whatif="edit" if edit else "suggest",
            data_select=query.selection,
            data_action=query.action,
            data_factor=f"{query.factor:g}" if query.action is QueryAction.SCALE else "",
        ),
    )


def answer_panel(report: Report, seen: CurrentAnswers) -> Component | None:
    """The answer to the question, or its progress; None without a question."""
    match seen.status:
        case None if seen.wrong is None:
            return None
        case None | Rejected(selection=True):
            body: list[Any] = [note("No answer: the selection above needs a correction.")]
        case Rejected(message=message):
            body = [problem(message, title="Not replayed")]
        case Pending(phase=phase):
            body = [_progress(phase)]
        case WhatifAnswer() as answer:
            assert seen.query is not None
            return panel("Answer", *_answer_parts(report, seen.query, answer), extra=_keep_button(seen))
    return panel("Answer", *body)


def _progress(phase: Phase) -> Component:
    phases = list(Phase)
    index = phases.index(phase)
    items = [html.Li([str(name), ""], className="done") for name in phases[:index]]
    items.append(html.Li([str(phase), " ..."], className="now"))
    items += [html.Li([str(name), ""], className="") for name in phases[index + 1 :]]
    return html.Ol(items, className="phases")


def _keep_button(seen: CurrentAnswers) -> Component:
    others = [query for query, _ in seen.beside]
    if seen.query in others:
        return html.Span("Kept for comparison below")
    full = len(others) >= MOST_KEPT
    return html.Button(
        "Keep for comparison" if not full else f"{MOST_KEPT} scenarios are kept: remove one first",
        disabled=full,
        **attributes(data_whatif="keep", data_asked=kept_text([] if seen.query is None else [seen.query])),
    )


def sentence(query: WhatifQuery, answer: WhatifAnswer, whole: str = "a step") -> str:
    """The answer in one sentence. `whole`: what the times are of."""
    if answer.slowdown is not None:
        return (
            f"With {query.selection} alone as recorded and all else ideal, {whole} takes"
            f" {seconds(answer.step_time_s)}: they alone cost {cost_alone(answer.slowdown)} of it."
        )
    condition = f"With {query}" if query.action is QueryAction.PEERS else f"If {query}"
    takes = f"{condition}, {whole} takes {seconds(answer.step_time_s)} instead of {seconds(answer.recorded_s)}"
    if not answer.clear:
        return f"{takes}: a difference within its error, so nothing is promised."
    word = "less" if answer.saved_s > 0 else "more"
    return f"{takes}: {seconds(abs(answer.saved_s))} ({abs(answer.saved_s) / answer.recorded_s:.1%}) {word}."


def _answer_parts(report: Report, query: WhatifQuery, answer: WhatifAnswer) -> list[Any]:
    trust, whole = report.trust, report.job.whole
    figures: list[tuple[str, Any]] = [
        (seconds(answer.step_time_s), f"a {whole}, recorded {seconds(answer.recorded_s)}"),
        (seconds(answer.saved_s), f"saved a {whole}, ± {seconds(answer.error_s)}"),
    ]
    if (hours := answer.saved_gpu_hours_per_day) is not None:
        figures.append((f"{hours:,.1f}", "GPU-hours a day saved"))
    if answer.slowdown is not None:
        figures = [
            (seconds(answer.step_time_s), [f"a {whole} of the ", term("ideal"), " job, with these as recorded"]),
            (cost_alone(answer.slowdown), term("costs alone", "lost to them alone")),
        ]
    of_all = f" of {report.job.ops:,}" if report.job.ops else ""
    figures.append((f"{answer.ops:,}", f"ops selected{of_all}"))
    parts = [
        html.P(sentence(query, answer, "the recording" if whole == "recording" else "a step"), className="verdict")
    ]
    if not trust.trustworthy:
        parts.append(html.P(["Do not trust this figure: ", "; ".join(trust.reasons)], className="warning"))
    cards = [
        html.Div([html.Div(value, className="value"), html.Div(caption, className="caption")], className="figure-card")
        for value, caption in figures
    ]
    scatter = f" and the scatter over {report.job.steps:,} steps (95%)" if len(report.by_step) > 1 else ""
    error = ["The error is the ", term("replay error"), f" ({trust.replay_error or 0.0:.2%}){scatter}. "]
    means = ["Like the price of a ", term("fix"), ": everything else as recorded, launch delays kept."]
    if query.action is QueryAction.KEEP:
        means = ["This is the question of the paper, without launch delays; it is no price of a fix."]
    return [*parts, html.Div(cards, className="figures"), note([*error, *means])]


def kept_panel(report: Report, seen: CurrentAnswers) -> Component | None:
    """The kept scenarios and the one just answered: a table, bars, exact numbers; None if none is kept."""
    rows = list(seen.beside)
    current = (
        isinstance(seen.status, WhatifAnswer)
        and seen.query is not None
        and seen.query not in [question for question, _ in rows]
    )
    if current:
        assert seen.query is not None
        assert seen.status is not None
        rows.append((seen.query, seen.status))
    problems = [html.P(text, className="warning") for text in seen.beside_problems]
    if not seen.beside:
        return panel("Scenarios side by side", *problems) if problems else None
    recorded_s = report.step_time_s.recorded
    bars = [
        StepBar(f"{number}  {query}", status.step_time_s, status.error_s)
        for number, (query, status) in enumerate(rows, 1)
        if isinstance(status, WhatifAnswer) and status.slowdown is None
    ]
    table = _numbers(recorded_s, rows)
    figure = figure_parts(
        scenario_times(recorded_s, bars, viewer().theme, report.job.whole),
        label="Step time of each scenario next to that of the job as it ran",
        table=table,
        csv=inline_csv(table),
        id="whatif-bars",
    )
    return panel(
        "Scenarios side by side",
        *problems,
        html.Div(_lines(rows, report.job.whole, len(seen.beside)), className="scenarios"),
        *figure,
    )


def _numbers(recorded_s: float, rows: Sequence[tuple[WhatifQuery, Status]]) -> pl.DataFrame:
    lines: list[dict[str, Any]] = [{"scenario": "as it ran", "step_time_s": recorded_s, "saved_s": 0.0}]
    for query, answer in rows:
        if not isinstance(answer, WhatifAnswer):
            continue
        line = {"scenario": str(query), "ops": answer.ops, "step_time_s": answer.step_time_s}
        if answer.slowdown is None:
            line |= {
                "saved_s": answer.saved_s,
                "error_s": answer.error_s,
                "saved_gpu_hours_per_day": answer.saved_gpu_hours_per_day,
            }
        else:
            line["slowdown_alone"] = answer.slowdown
        lines.append(line)
    return pl.DataFrame(lines, infer_schema_length=None)


def _lines(rows: Sequence[tuple[WhatifQuery, Status]], whole: str, kept_count: int) -> Component:
    """The scenarios as a table with a button each; what comes after `kept_count` rows is not kept yet."""
    heads: list[Any] = [
        "",
        "Scenario",
        f"{whole.capitalize()} time",
        f"Saved per {whole}",
        "GPU-hours a day",
        "",
    ]
    lines = []
    for number, (query, status) in enumerate(rows, 1):
        if isinstance(status, WhatifAnswer):
            cells: list[Any] = [html.Td(figure, className="number") for figure in _figures(status)]
        else:
            message = status.message if isinstance(status, Rejected) else f"{status.phase} ..."
            cells = [html.Td(message, colSpan=3, className="note")]
        last: Any = (
            html.Button(
                "Remove",
                **attributes(
                    aria_label=f"Remove scenario {number}", data_whatif="remove", data_asked=kept_text([query])
                ),
            )
            if number <= kept_count
            else html.Span("not kept", className="label")
        )
        row = [html.Td(str(number), className="label"), html.Td(str(query)), *cells, html.Td(last, className="number")]
        lines.append(html.Tr(row, className="" if number <= kept_count else "current"))
    return row_table(heads, lines, "Scenarios", range(2, 5))


def _figures(answer: WhatifAnswer) -> tuple[str, str, str]:
    """Step time, what a step saves and GPU-hours a day; for the question of the paper, what these ops alone cost."""
    if answer.slowdown is not None:
        return seconds(answer.step_time_s), f"alone costs {cost_alone(answer.slowdown)}", ""
    saves = with_error(answer.saved_s, answer.error_s)
    saves += f" ({answer.saved_s / answer.recorded_s:+.1%})" if answer.clear else ", within the error"
    hours = answer.saved_gpu_hours_per_day
    return seconds(answer.step_time_s), saves, "" if hours is None else f"{hours:,.1f}"
