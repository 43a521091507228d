"""What-if: choose ops and what happens to them, replay the job so, and keep the answers side by side.

The address holds everything: `select`, `action` and `factor` of the question, and the `kept` ones. A replay runs in the
background; the page asks for it again until the answer is there, so who leaves or opens the address elsewhere loses
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, ClientsideFunction, Input, Output, State, callback, clientside_callback, ctx, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from tracekit.dashboards.asked import (
    LONGEST_ADDRESS,
    Ask,
    Asked,
    Choice,
    kept_text,
    read_asked,
    read_kept,
    suggestions,
)
from tracekit.dashboards.components import attributes, guarded, href, panel, problem
from tracekit.dashboards.context import replays, results
from tracekit.dashboards.pages.whatif_parts import Seen, answer_panel, kept_panel
from tracekit.dashboards.queries import Stored
from tracekit.dashboards.replays import Refused
from tracekit.dashboards.shell import job_page
from tracekit.errors import SelectionError, TracekitError

#: How often a page asks for answers that are not there yet, and how long the first view waits for them.
POLL_MS = 400
FIRST_WAIT_S = 0.6
TOO_LONG = (
    f"The address would have more than {LONGEST_ADDRESS:,} characters, which is more than can be sent to somebody:"
    " remove a kept scenario, or write a shorter selection."
)

_ACTIONS = {Ask.IDEALISE: "Make them ideal", Ask.SCALE: "Scale them", Ask.KEEP: "Keep only these as recorded"}
_CONTROLS = {
    "stages": "Stages",
    "dp-ranks": "DP ranks",
    "workers": "Workers (dp,pp)",
    "steps": "Steps",
    "microbatches": "Microbatches",
    "slowest": "Slowest %",
}


@dataclass(frozen=True, slots=True)
class View:
    """The state of the page: the texts of the question as they were given, and the kept questions."""

    select: str | None
    action: str | None
    factor: str | None
    kept: str

    @classmethod
    def of(cls, state: dict[str, Any]) -> View:
        """From the texts of the address or of the page's own store."""
        texts = {name: None if state.get(name) in (None, "") else str(state[name]) for name in cls.__slots__}
        return cls(texts["select"], texts["action"], texts["factor"], texts["kept"] or "")

    def to_dict(self) -> dict[str, str | None]:
        """The state as plain data."""
        return {"select": self.select, "action": self.action, "factor": self.factor, "kept": self.kept}

    def asked(self) -> Asked | None:
        """The question; None where none is asked. Raises SelectionError."""
        return None if self.select is None else read_asked(self.select, self.action, self.factor)


def build(stored: Stored, **state: str) -> list[Component]:
    """`select`, `action`, `factor`: the question; `kept`: those kept beside it."""
    assert stored.report is not None
    view = View.of(state)
    seen = _look(stored, view, wait_s=FIRST_WAIT_S)
    return [
        _form(stored.report, view, seen),
        html.Div(answer_panel(stored.report, seen), id="whatif-answer", **attributes(aria_live="polite")),
        html.Div(kept_panel(stored.report, seen), id="whatif-kept"),
        dcc.Store(id="whatif-state", data={"job": stored.name, **view.to_dict()}),
        dcc.Store(id="whatif-seen", data=_signature(seen)),
        dcc.Interval(id="whatif-poll", interval=POLL_MS, disabled=not seen.pending),
    ]


def _look(stored: Stored, view: View, *, wait_s: float = 0.0) -> Seen:
    """Ask for all answers of the view; only the first is waited for."""
    kept, problems = read_kept(view.kept)
    try:
        asked, wrong = view.asked(), None
    except SelectionError as error:
        asked, wrong = None, str(error)
    status = None if asked is None else replays().ask(stored, asked, wait_s=wait_s)
    if isinstance(status, Refused) and status.selection:
        wrong = status.message
    wait_s = wait_s if status is None else 0.0
    beside = tuple((other, replays().ask(stored, other, wait_s=wait_s)) for other in kept)
    return Seen(asked, status, wrong, beside, problems)


def _signature(seen: Seen) -> str:
    """Tells whether anything on the page changed."""
    return repr((seen.asked, seen.status, seen.wrong, seen.kept, seen.kept_problems))


# --- the question ---------------------------------------------------------------------------------------------------


def _form(report: dict[str, Any], view: View, seen: Seen) -> Component:
    chips = [
        html.Button(
            suggestion.title,
            id={"type": "whatif-suggest", "at": at},
            className="chip-button",
            title=str(suggestion.asked),
        )
        for at, suggestion in enumerate(suggestions(report))
    ]
    question = [
        dmc.TextInput(
            id="whatif-select",
            label="Ops",
            value=view.select or "",
            error=seen.wrong,
            placeholder="worker=1,2 and step=100-105",
            className="grow",
        ),
        html.Div(
            [
                html.Div("What happens to them", className="field-label"),
                dmc.SegmentedControl(
                    id="whatif-action",
                    data=[{"value": str(ask), "label": label} for ask, label in _ACTIONS.items()],
                    value=_action(view),
                    **attributes(aria_label="What happens to the selected ops"),
                ),
            ]
        ),
        html.Div(
            dmc.TextInput(id="whatif-factor", label="Factor", value=view.factor or "0.5", w=90),
            id="whatif-factor-field",
            hidden=_action(view) != Ask.SCALE,
        ),
        html.Button("Replay", id="whatif-run", className="primary"),
    ]
    return panel(
        "What if ...",
        html.Div(
            [html.Span("Suggested for this job", className="label"), *chips], className="suggestions", role="group"
        ),
        html.Div(question, className="question"),
        _controls(report, Choice.of(view.select or "")),
    )


def _action(view: View) -> str:
    return view.action if view.action in set(Ask) else str(Ask.IDEALISE)


def _texts(choice: Choice) -> tuple[str, ...]:
    """What the text fields among the controls show, in their order."""
    return choice.stages, choice.dp_ranks, choice.workers, choice.steps, choice.microbatches, choice.slowest


def _controls(report: dict[str, Any], choice: Choice) -> Component:
    """Fields that write the selection."""
    steps, dp_ranks = report["by_step"], report["by_dp_rank"]
    stages = len(report["by_pp_rank"])
    examples = {
        "stages": f"0-{stages - 1}" if stages > 1 else "0",
        "dp-ranks": f"{dp_ranks[0]['dp_rank']}-{dp_ranks[-1]['dp_rank']}",
        "workers": "1,2 3,0",
        "steps": f"{steps[0]['step']}-{steps[-1]['step']}",
        "microbatches": "0,3-5",
        "slowest": "3",
    }
    values = _texts(choice)
    fields = [
        dmc.TextInput(id=f"whatif-{name}", label=label, value=value, placeholder=examples[name])
        for (name, label), value in zip(_CONTROLS.items(), values, strict=True)
    ]
    kinds = dmc.MultiSelect(
        id="whatif-kinds",
        label="Op kinds",
        data=sorted({row["kind"] for row in report["by_kind"]} | set(choice.kinds)),
        value=list(choice.kinds),
        placeholder="all kinds" if not choice.kinds else "",
        clearable=True,
        searchable=True,
    )
    return html.Details(
        [
            html.Summary(
                "Choose ops by hand: this writes the line above; and, or, not, but and brackets combine more there"
            ),
            html.Div([html.Div(kinds, className="whatif-kinds"), *fields], className="choices"),
        ],
        open=True,
        className="by-hand",
    )


# --- what the page does ---------------------------------------------------------------------------------------------


@callback(
    Output("whatif-state", "data"),
    Output("whatif-select", "value"),
    Output("whatif-action", "value"),
    Output("whatif-factor", "value"),
    Input("whatif-run", "n_clicks"),
    Input("whatif-select", "n_submit"),
    Input("whatif-factor", "n_submit"),
    Input({"type": "whatif-suggest", "at": ALL}, "n_clicks"),
    Input({"type": "whatif-keep", "at": ALL}, "n_clicks"),
    Input({"type": "whatif-remove", "at": ALL}, "n_clicks"),
    State("whatif-select", "value"),
    State("whatif-action", "value"),
    State("whatif-factor", "value"),
    State("whatif-state", "data"),
    prevent_initial_call=True,
)
def change(*values: Any) -> Any:
    """A question was asked, kept or removed: the new state, and the fields where a suggestion writes them."""
    if not ctx.triggered or not ctx.triggered[0]["value"]:  # a button that only just appeared
        raise PreventUpdate
    select, action, factor, state = values[-4:]
    view, by = View.of(state), ctx.triggered_id
    fields: tuple[Any, Any, Any] = (no_update, no_update, no_update)
    kept = read_kept(view.kept)[0]
    if isinstance(by, str):
        view = View(" ".join((select or "").split()), action, factor if action == Ask.SCALE else None, view.kept)
    elif by["type"] == "whatif-suggest":
        asked = _suggested(state["job"], by["at"])
        shown = f"{asked.factor:g}" if asked.ask is Ask.SCALE else None
        view = View(asked.selection, str(asked.ask), shown, view.kept)
        fields = (asked.selection, str(asked.ask), shown or no_update)
    elif by["type"] == "whatif-remove":
        view = View(view.select, view.action, view.factor, kept_text((*kept[: by["at"]], *kept[by["at"] + 1 :])))
    else:
        try:
            asked_now = view.asked()
        except SelectionError:  # only an answered question has the button
            raise PreventUpdate from None
        if asked_now is None or asked_now in kept:
            raise PreventUpdate
        view = View(view.select, view.action, view.factor, kept_text((*kept, asked_now)))
    if len(href("/whatif", job=state["job"], **view.to_dict())) > LONGEST_ADDRESS and not _removes(by):
        return {**state, "refused": TOO_LONG}, *fields
    return {"job": state["job"], **view.to_dict()}, *fields


def _removes(by: Any) -> bool:
    """Whether it was a button that takes a kept question away: that shortens any address."""
    return not isinstance(by, str) and by["type"] == "whatif-remove"


def _suggested(job: str, at: int) -> Asked:
    try:
        return suggestions(_report(job))[at].asked
    except IndexError:  # the job was replaced under the page
        raise PreventUpdate from None


def _report(job: str) -> dict[str, Any]:
    """The report of the job; nothing happens where it was removed under the page, which the answer says in words."""
    try:
        report = results().stored(job).report
    except TracekitError:
        raise PreventUpdate from None
    if report is None:
        raise PreventUpdate
    return report


@callback(
    Output("whatif-answer", "children"),
    Output("whatif-kept", "children"),
    Output("whatif-select", "error"),
    Output("whatif-seen", "data"),
    Output("whatif-poll", "disabled"),
    Input("whatif-state", "data"),
    Input("whatif-poll", "n_intervals"),
    State("whatif-seen", "data"),
    prevent_initial_call=True,
)
def show(state: dict[str, Any], _ticks: int | None, before: str) -> Any:
    """What is known by now; nothing is drawn again where nothing changed."""
    try:
        stored = results().stored(state["job"])
    except TracekitError as error:
        return problem(str(error)), [], None, "", True
    if stored.report is None:
        return problem("The job is stored without an analysis by now."), [], None, "", True
    view = View.of(state)
    seen = _look(stored, view, wait_s=FIRST_WAIT_S if ctx.triggered_id == "whatif-state" else 0.0)
    if state.get("refused"):
        seen = replace(seen, kept_problems=(state["refused"], *seen.kept_problems))
    signature = _signature(seen)
    if signature == before:
        return no_update, no_update, no_update, no_update, not seen.pending
    report = stored.report
    return (
        guarded(answer_panel)(report, seen),
        guarded(kept_panel)(report, seen),
        seen.wrong,
        signature,
        not seen.pending,
    )


@callback(
    Output("whatif-kinds", "value"),
    *(Output(f"whatif-{name}", "value") for name in _CONTROLS),
    Input("whatif-state", "data"),
    State("whatif-select", "value"),
    State("whatif-kinds", "value"),
    *(State(f"whatif-{name}", "value") for name in _CONTROLS),
    prevent_initial_call=True,
)
def follow(state: dict[str, Any], select: str | None, kinds: list[str] | None, *texts: str | None) -> Any:
    """The controls follow a selection that was typed or suggested, unless somebody goes on writing it."""
    asked = View.of(state).select or ""
    if " ".join((select or "").split()) != asked:
        raise PreventUpdate
    choice = Choice.of(asked)
    if not set(choice.kinds) <= {row["kind"] for row in _report(state["job"])["by_kind"]}:
        choice = Choice()  # the list of kinds cannot show it
    wanted = (list(choice.kinds), *_texts(choice))
    shown = (list(kinds or []), *(text or "" for text in texts))
    changed = [no_update if new == old else new for new, old in zip(wanted, shown, strict=True)]
    if all(new is no_update for new in changed):
        raise PreventUpdate
    return changed


clientside_callback(
    ClientsideFunction("whatif", "write"),
    Output("whatif-select", "value", allow_duplicate=True),
    Input("whatif-kinds", "value"),
    *(Input(f"whatif-{name}", "value") for name in _CONTROLS),
    State("whatif-select", "value"),
    prevent_initial_call=True,
)

clientside_callback(
    "function (action) { return action !== 'scale'; }",
    Output("whatif-factor-field", "hidden"),
    Input("whatif-action", "value"),
    prevent_initial_call=True,
)

clientside_callback(
    """function (state) {
        window.tracekit.remember({
            job: state.job, select: state.select, action: state.action, factor: state.factor, kept: state.kept,
        });
    }""",
    Input("whatif-state", "data"),
    prevent_initial_call=True,
)

job_page(__name__, "/whatif", "What-if", build)
