"""Controls of the pages, each with its label.

In: the id of a control, its label, its value. Out: components. Labels are HTML labels, so that clicks and screen
readers find the control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.browser.ui.drawn import Choice, Menu


def text_field(
    name: str,
    label: Any,
    value: str,
    *,
    placeholder: str = "",
    wait_s: float | bool = False,
    style: str = "",
    suggestions: Sequence[str] = (),
    sent_as: str = "",
) -> Component:
    """A text field. `wait_s`: delay from the last key to sending; True: send on Enter or on leaving the field.

    `suggestions`: those of the browser; any other text is allowed too. `sent_as`: its name in the form around it.
    """
    offered = html.Datalist([html.Option(value=each) for each in suggestions], id=f"{name}-known")
    line = dcc.Input(
        id=name,
        value=value,
        type="text",
        placeholder=placeholder,
        debounce=wait_s,
        autoComplete="off",
        spellCheck=False,
        name=sent_as or None,
        list=f"{name}-known" if suggestions else None,
    )
    parts = [html.Span(label, className="field-label"), line, *([offered] if suggestions else [])]
    return html.Label(parts, className=f"text-field {style}")


def choice(name: str, label: str, options: Mapping[str, str], value: str | Sequence[str]) -> Component:
    """Radio buttons; checkboxes if `value` is a list. `options`: label by value."""
    buttons = Choice(id=name, options=_items(options), value=value)
    return html.Fieldset([html.Legend(label, className="field-label"), buttons], className="choice")


def menu(name: str, label: str, options: Mapping[str, str], value: str) -> Component:
    """A drop-down list."""
    select = Menu(id=name, options=_items(options), value=value)
    return html.Label([html.Span(label, className="field-label"), select], className="menu")


def _items(options: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "label": label} for value, label in options.items()]


def scale(name: str, label: str, most: int, value: int) -> Component:
    """A slider from 0 to `most` that sends its value while dragged. `label`: text for screen readers."""
    knob = dcc.Input(id=name, type="range", min=0, max=most, step=1, value=value)
    return html.Label([html.Span(label, className="unseen"), knob], className="scale")
