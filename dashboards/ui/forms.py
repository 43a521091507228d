"""Controls of the pages, each with its label.

In: the name under which callbacks know a control (its id), its label, its value. Out: components. Labels are those of
HTML, so that a click on one and a screen reader find the control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.ui.drawn import Choice, Menu


def text_field(
    name: str,
    label: Any,
    value: str,
    *,
    placeholder: str = "",
    wait_s: float | bool = False,
    style: str = "",
    known: Sequence[str] = (),
    sent_as: str = "",
) -> Component:
    """A line to write. `wait_s`: tell the server so long after the last letter; True: with Enter, or when left.

    `known`: what the browser offers; anything else can be written too. `sent_as`: its name in the form around it.
    """
    offered = html.Datalist([html.Option(value=each) for each in known], id=f"{name}-known")
    line = dcc.Input(
        id=name,
        value=value,
        type="text",
        placeholder=placeholder,
        debounce=wait_s,
        autoComplete="off",
        spellCheck=False,
        name=sent_as or None,
        list=f"{name}-known" if known else None,
    )
    parts = [html.Span(label, className="field-label"), line, *([offered] if known else [])]
    return html.Label(parts, className=f"text-field {style}")


def choice(name: str, label: str, options: Mapping[str, str], value: str | Sequence[str]) -> Component:
    """One of a few, all in sight; any of them where `value` is a list. `options`: what each is called, by its value."""
    return html.Fieldset(
        [html.Legend(label, className="field-label"), Choice(options, value, id=name)], className="choice"
    )


def menu(name: str, label: str, options: Mapping[str, str], value: str) -> Component:
    """One of many, in a list that opens."""
    return html.Label([html.Span(label, className="field-label"), Menu(options, value, id=name)], className="menu")


def scale(name: str, label: str, most: int, value: int) -> Component:
    """A number from 0 to `most`, told while it is dragged, as digits. `label`: what a screen reader says."""
    knob = dcc.Input(id=name, type="range", min=0, max=most, step=1, value=value)
    return html.Label([html.Span(label, className="unseen"), knob], className="scale")
