"""The first screen of the page Job: the answer in a card, and the pictures beside it.

In: a report. Out: components. Sentences come from the report's `answer` and `verdict` (analysis/answer.py) alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import main_clause, seconds, short
from tracekit.dashboards.ui.charts import Level, steps_picture, worker_cells
from tracekit.dashboards.ui.components import attributes, href, note, panel, term
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.sentences import Headline, Tone, first_action, headline, node_words, why_no_advice

#: A label, its sentence, and the link to where its figures can be seen.
AnswerRow = tuple[str, str | None, Component | None]


def hero(report: dict[str, Any], name: str) -> Component:
    """What, who, why, what to do first, what that saves, and whether to believe it: each with the way to see it."""
    return answer_card(headline(report), _action(report, name), _rows(report, name), report["trust"], _coverage(report))


def answer_card(
    verdict: Headline,
    action: Component | None,
    rows: Sequence[AnswerRow],
    trust: Mapping[str, Any],
    more: Sequence[Component] = (),
) -> Component:
    """The first card of a job of any shape; rows without words are left out."""
    answer = [part for label, words, way in rows if words for part in (html.Dt(label), html.Dd([words, " ", way]))]
    parts: list[Any] = [
        html.P(verdict.sentence, className="verdict"),
        action,
        html.Dl(answer, className="answer"),
        *more,
    ]
    if not trust["trustworthy"]:
        reasons = "; ".join(map(short, trust["reasons"]))
        parts.append(html.P(["Do not trust the slowdown and what follows from it: ", reasons], className="warning"))
    return html.Section(
        parts, className=f"panel hero {tone_class(verdict.tone)}", **attributes(aria_label="The answer")
    )


def do_first(what: str, *then: Component | str | None) -> Component:
    """The line that tells what to do, and what that gives back."""
    first = html.P([html.Span("Do this first: ", className="label"), html.B(what)])
    sentences = [f"{words.rstrip('.')}." if isinstance(words, str) else words for words in then]
    parts = [part for words in sentences for part in (words, " ")]  # where a line may break
    return html.Div([first, html.P(parts)], className="action")


def _action(report: dict[str, Any], name: str) -> Component:
    """What to do first, and what that gives back; or why nothing is advised."""
    action = first_action(report)
    if action is None:
        healthy = headline(report).tone is Tone.GOOD
        said = "Nothing to do." if healthy else f"No advice: {why_no_advice(report)}."
        return html.Div(html.P(said), className="action")
    return do_first(action[0], action[1], node_words(report), _way("price other fixes", "/whatif", job=name))


def tone_class(tone: Tone) -> str:
    """The class that gives a card the colour of its verdict."""
    return {Tone.GOOD: "fine", Tone.BAD: "slow", Tone.UNSURE: "unsure"}[tone]


def _rows(report: dict[str, Any], name: str) -> list[AnswerRow]:
    """Label, sentence, and the link to where its figures can be seen. Reports of older stores lack some sentences."""
    answer, worker = report.get("answer") or {}, culprit(report)
    slowest = max(report["by_step"], key=lambda row: row["slowdown"])["step"]
    trusted = report["trust"]["trustworthy"]
    others = answer.get("others") or []
    path = _way("critical path of the slowest step", "/timeline", job=name, step=slowest, critical="yes")
    why = answer.get("why")
    if why and main_clause(why) in answer["headline"]:
        why = None
    return [
        ("Who", answer.get("who"), _way("worker map", "/workers", job=name, worker=worker)),
        ("Why", why, path),
        ("Costs", answer.get("cost"), path if why is None else _way("steps", "/time", job=name)),
        ("More to check", answer.get("check"), None),
        ("Also", f"{len(others)} more: {'; '.join(others)}" if others else None, None),
        ("Trust", f"{'yes' if trusted else 'NO'}: {answer['trust']}" if answer else None, _of_times(name)),
    ]


def _way(words: str, path: str, **state: object) -> Component:
    return dcc.Link(words, href=href(path, **state), className="way")


def _of_times(name: str) -> Component:
    return _way("recorded and replayed", "/attribution", job=name)


def culprit(report: dict[str, Any]) -> str | None:
    """The worker of the costliest cause that sits on one, as addresses write it."""
    culprits = (report.get("answer") or {}).get("culprits") or []
    return f"{culprits[0]['dp_rank']},{culprits[0]['pp_rank']}" if culprits else None


def _coverage(report: dict[str, Any]) -> list[Component]:
    coverage = report["coverage"]
    missing = coverage["workers_expected"] - coverage["workers_traced"]
    if not missing and not coverage["dropped"]:
        return []
    return [
        note(
            f"{coverage['workers_traced']:,} of {coverage['workers_expected']:,} workers traced;"
            f" {len(coverage['dropped']):,} DP ranks left out of a step."
        )
    ]


def pictures(report: dict[str, Any], name: str) -> Component:
    """The worker map and the steps, small."""
    found = results().worker_map(name)
    parts = [panel("Steps", steps_picture(report["by_step"], name))]
    if found.slowdown.size > 1:
        parts.insert(0, panel("Workers", worker_cells(found, name)))
    return html.Div(parts, className="pictures")


def numbers(report: dict[str, Any]) -> list[Any]:
    """The figures behind the trust, and the paper's."""
    trust = report["trust"]
    shares = [
        [", ", term(name), f" {'-' if report[key] is None else format(report[key], '.0%')}"]
        for name, key in (("M_W", "m_w"), ("M_S", "m_s"))
    ]
    return [
        term("replay error"),
        f" {trust['replay_error']:.2%}, ",
        term("launch delays"),
        f" add {trust['discrepancy']:.1%}",
        *shares[0],
        *shares[1],
    ]


def fix_levels(report: dict[str, Any], name: str) -> list[Level]:
    """Recorded, each fix of the best combination on top of those before it, what is left, and ideal."""
    times, theme = report["step_time_s"], viewer().theme
    at = times["recorded"]
    levels = [Level("Recorded", 0, at, theme.recorded, seconds(at), href("/time", job=name))]
    for title, saved_s in _sequence(report):
        where = href("/whatif", job=name)
        levels.append(Level(title, at, at - saved_s, theme.changed, f"-{seconds(saved_s)}", where))
        at -= saved_s
    if len(levels) > 1:
        levels.append(Level("With these fixes", 0, at, theme.changed, seconds(at), href("/whatif", job=name)))
    ideal = times["ideal"]
    levels.append(Level("Ideal", 0, ideal, theme.ideal, seconds(ideal), href("/attribution", job=name)))
    return levels


def _sequence(report: dict[str, Any]) -> list[tuple[str, float]]:
    """Title and saving of the fixes that save most together, in their order; else of the one that saves most."""
    promised = [fix for fix in report["fixes"] if fix["withheld"] is None]
    for fix in promised:
        if fix["kind"] == "combination":
            return [(one["title"], one["marginal_saved_s"]) for one in fix["details"]["sequence"]]
    best = max(promised, key=lambda fix: fix["saved_s"], default=None)
    return [] if best is None else [(best["title"], best["saved_s"])]
