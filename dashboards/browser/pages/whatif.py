"""What-if: choose ops and what happens to them, replay the job so, and keep the answers side by side.

The address holds everything: `select`, `action` and `factor` of the question, and the `kept` ones. What a person does
changes this state in the browser at once (assets/whatif.js); the server is only asked what to show of it. A replay runs
in the background; the page asks for it again until the answer is there, so who leaves or opens the address elsewhere
loses nothing.
"""

from __future__ import annotations

from typing import Any, TypedDict

from dash import ClientsideFunction, Input, Output, State, clientside_callback, ctx, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from tracekit.base.errors import SelectionError, StoreError, TracekitError
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.replays import (
    LONGEST_ADDRESS,
    ChosenOps,
    QueryAction,
    Rejected,
    gpu_questions,
    kept_text,
    read_kept,
    read_query,
    suggestions,
)
from tracekit.dashboards.browser.data.stored_kinds import StoredKind
from tracekit.dashboards.browser.pages.whatif_parts import (
    CurrentAnswers,
    answer_panel,
    ask_button,
    fixes_panel,
    gpu_prices,
    kept_panel,
    losses,
)
from tracekit.dashboards.browser.ui.components import attributes, choice, error_message, note, panel, text_field
from tracekit.dashboards.browser.ui.context import results, service
from tracekit.dashboards.browser.ui.shell import answers, job_page
from tracekit.report.report import Report

#: How long the first view waits for answers that are not there yet; then the page asks again (assets/whatif.js).
FIRST_WAIT_S = 0.6
TOO_LONG = (
    f"The address would have more than {LONGEST_ADDRESS:,} characters, which is more than can be sent to somebody:"
    " remove a kept scenario, or write a shorter selection."
)

_ACTIONS = {
    QueryAction.PEERS: "Make them as fast as their peers",
    QueryAction.SCALE: "Scale them",
    QueryAction.KEEP: "Keep only these as recorded (the paper's question)",
}
#: The field of `ChosenOps` behind each text field, and its label.
_CONTROLS = {
    "stages": "Stages",
    "dp_ranks": "DP ranks",
    "workers": "Workers (dp,stage)",
    "steps": "Steps",
    "microbatches": "Microbatches",
    "slowest": "Slowest %",
}
_FIELDS = [f"whatif-{name.replace('_', '-')}" for name in _CONTROLS]


class Asking(TypedDict):
    """The state of the page as the browser has it. `beside`: the questions kept beside this one. `remarks`: about
    invalid parts of the address or of a click.
    """

    job: str
    select: str | None
    action: str | None
    factor: str | None
    beside: str
    remarks: list[str]


class Signatures(TypedDict):
    """Signatures of the live parts of the page, so that none is drawn again without a change."""

    answer: str
    beside: str
    losses: str


class PollState(TypedDict):
    """The last poll of the page that was answered, and whether a replay is still running."""

    asked: int
    pending: bool


def build(stored: Stored, report: Report, **state: str) -> list[Component]:
    """`select`, `action`, `factor`: the question; `kept`: earlier questions to compare with."""
    select, action, factor = (state.get(name) or None for name in ("select", "action", "factor"))
    others, remarks = read_kept(state.get("kept", ""))
    asking = Asking(
        job=stored.name, select=select, action=action, factor=factor, beside=kept_text(others), remarks=list(remarks)
    )
    seen = _ask_all(stored, report, asking, wait_s=FIRST_WAIT_S)
    lists = gpu_prices(report, seen) or losses(report)
    form = _form(stored.kind, report, asking, seen)
    if lists:
        form = [html.Details([html.Summary("Ask your own question"), *form], id="whatif-own", open=bool(seen.wrong))]
    return [
        html.Div(answer_panel(report, seen), id="whatif-answer", **attributes(aria_live="polite")),
        panel(
            "Without which would the job be faster?" if lists else "What if ...",
            html.Div(lists, id="whatif-losses"),
            *form,
        ),
        html.Div(kept_panel(report, seen), id="whatif-kept"),
        fixes_panel(stored.kind, report),
        dcc.Store(id="whatif-state", data=dict(asking)),
        dcc.Store(id="whatif-limit", data={"characters": LONGEST_ADDRESS, "said": TOO_LONG}),
        dcc.Store(id="whatif-drawn", data=dict(_signatures(seen))),
        dcc.Store(id="whatif-asked", data=0),
        dcc.Store(id="whatif-answered", data=dict(PollState(asked=0, pending=seen.pending))),
    ]


def _ask_all(stored: Stored, report: Report, state: Asking, *, wait_s: float = 0.0) -> CurrentAnswers:
    """Ask for all answers of the page; waits only for the first."""
    others, remarks = read_kept(state["beside"])
    try:
        query = read_query(state["select"], state["action"], state["factor"]) if state["select"] else None
        wrong = None
    except SelectionError as error:
        query, wrong = None, str(error)
    status = None if query is None else service().replays.ask(stored, query, wait_s=wait_s)
    if isinstance(status, Rejected) and status.selection:
        wrong = status.message
    wait_s = wait_s if status is None else 0.0
    kept_answers = tuple((other, service().replays.ask(stored, other, wait_s=wait_s)) for other in others)
    on_gpus = tuple((question, service().replays.ask(stored, question.query)) for question in gpu_questions(report))
    return CurrentAnswers(query, status, wrong, kept_answers, (*state["remarks"], *remarks), on_gpus)


def _signatures(seen: CurrentAnswers) -> Signatures:
    question = (seen.query, seen.status, seen.wrong)
    return Signatures(
        answer=repr((*question, [query for query, _ in seen.beside])),
        beside=repr((*question, seen.beside, seen.beside_problems)),
        losses=repr(seen.on_gpus),
    )


# --- the question ---------------------------------------------------------------------------------------------------


def _form(kind: StoredKind, report: Report, state: Asking, seen: CurrentAnswers) -> list[Component]:
    action = str(state["action"]) if state["action"] in set(QueryAction) else str(QueryAction.PEERS)
    chips = [ask_button(suggestion.title, suggestion.query) for suggestion in suggestions(report)]
    question = [
        html.Div(
            [
                text_field("whatif-select", kind.question, state["select"] or "", placeholder=kind.example),
                html.Div(seen.wrong, id="whatif-wrong", className="wrong", role="alert"),
            ],
            className="grow",
        ),
        html.Div(choice("whatif-action", "What happens to them", _ACTIONS, action), hidden=not kind.of_ops),
        html.Div(
            text_field("whatif-factor", "Factor", state["factor"] or "0.5", style="narrow"),
            id="whatif-factor-field",
            hidden=action != QueryAction.SCALE,
        ),
        html.Button("Replay", id="whatif-run", className="primary", **attributes(data_whatif="run")),
    ]
    return [
        html.Div([html.Span("Examples", className="label"), *chips], className="suggestions", role="group"),
        html.Div(question, className="question"),
        html.Div(_controls(report, ChosenOps.of(state["select"] or "")), hidden=not kind.of_ops),
    ]


def _controls(report: Report, chosen: ChosenOps) -> Component:
    steps, dp_ranks = report.by_step, [row.dp_rank for row in report.by_dp_rank or ()] or [0]
    stages = len(report.by_pp_rank or ())
    examples = {
        "stages": f"0-{stages - 1}" if stages > 1 else "0",
        "dp_ranks": f"{dp_ranks[0]}-{dp_ranks[-1]}",
        "workers": "1,2 3,0",
        "steps": f"{steps[0].step}-{steps[-1].step}",
        "microbatches": "0,3-5",
        "slowest": "3",
    }
    fields = [
        text_field(field, label, getattr(chosen, name), placeholder=examples[name])
        for field, (name, label) in zip(_FIELDS, _CONTROLS.items(), strict=True)
    ]
    kinds_of_job = sorted({str(row.kind) for row in report.by_kind} | set(chosen.kinds))
    kinds = choice("whatif-kinds", "Op kinds (none: all)", {kind: kind for kind in kinds_of_job}, list(chosen.kinds))
    hint = "These fields write the line above; and, or, not, but and brackets combine more there."
    return html.Div([note(hint), kinds, html.Div(fields, className="choices", hidden=not stages)])


# --- what the page does ---------------------------------------------------------------------------------------------


def _report(job: str) -> Report:
    """The report of the job; nothing happens where it was removed under the page, which the answer says in words."""
    try:
        report = results().stored(job).report
    except TracekitError:
        raise PreventUpdate from None
    if report is None:
        raise PreventUpdate
    return report


def _error_parts(error: Exception) -> list[Any]:
    """An error in place of the answers; the page stops polling until another question."""
    unknown, ended = Signatures(answer="", beside="", losses=""), PollState(asked=0, pending=False)
    return [error_message(error), [], no_update, None, unknown, ended]


@answers(
    Output("whatif-answer", "children"),
    Output("whatif-kept", "children"),
    Output("whatif-losses", "children"),
    Output("whatif-wrong", "children"),
    Output("whatif-drawn", "data"),
    Output("whatif-answered", "data"),
    Input("whatif-state", "data"),
    Input("whatif-asked", "data"),
    State("whatif-drawn", "data"),
    on_error=_error_parts,
)
def show(state: Asking, asked: int, before: Signatures) -> Any:
    """The current answers; parts without a change are not drawn again."""
    stored = results().stored(state["job"])
    if stored.report is None:
        raise StoreError("The job is stored without an analysis by now.")
    seen = _ask_all(stored, stored.report, state, wait_s=FIRST_WAIT_S if ctx.triggered_id == "whatif-state" else 0.0)
    drawn = _signatures(seen)
    same_answer = drawn["answer"] == before["answer"]
    return (
        no_update if same_answer else answer_panel(stored.report, seen),
        no_update if drawn["beside"] == before["beside"] else kept_panel(stored.report, seen),
        no_update if drawn["losses"] == before["losses"] else gpu_prices(stored.report, seen),
        no_update if same_answer else seen.wrong,
        no_update if drawn == before else drawn,
        PollState(asked=asked, pending=seen.pending),
    )


@answers(
    Output("whatif-kinds", "value"),
    *(Output(field, "value") for field in _FIELDS),
    Input("whatif-state", "data"),
    State("whatif-select", "value"),
    State("whatif-kinds", "value"),
    *(State(field, "value") for field in _FIELDS),
)
def follow(state: Asking, select: str | None, kinds: list[str] | None, *texts: str | None) -> Any:
    """Set the controls to a selection that was typed or suggested, unless the user is still typing."""
    query = state["select"] or ""
    if " ".join((select or "").split()) != query:
        raise PreventUpdate
    chosen = ChosenOps.of(query)
    if not set(chosen.kinds) <= {row.kind for row in _report(state["job"]).by_kind}:
        chosen = ChosenOps()  # the list of kinds cannot show it
    wanted = (list(chosen.kinds), *(getattr(chosen, name) for name in _CONTROLS))
    current = (list(kinds or []), *(text or "" for text in texts))
    changed = [no_update if new == old else new for new, old in zip(wanted, current, strict=True)]
    if all(new is no_update for new in changed):
        raise PreventUpdate
    return changed


clientside_callback(
    ClientsideFunction("whatif", "write"),
    Output("whatif-select", "value", allow_duplicate=True),
    Input("whatif-kinds", "value"),
    *(Input(field, "value") for field in _FIELDS),
    State("whatif-select", "value"),
    prevent_initial_call=True,
)

clientside_callback(ClientsideFunction("whatif", "markInvalid"), Input("whatif-wrong", "children"))

clientside_callback(
    ClientsideFunction("whatif", "askAgain"),
    Input("whatif-answered", "modified_timestamp"),  # it is set as the page opens, too
    State("whatif-answered", "data"),
)

clientside_callback(
    ClientsideFunction("whatif", "needsNoFactor"),
    Output("whatif-factor-field", "hidden"),
    Input("whatif-action", "value"),
    prevent_initial_call=True,
)

clientside_callback(ClientsideFunction("whatif", "remember"), Input("whatif-state", "data"), prevent_initial_call=True)

job_page(__name__, "/whatif", build)
