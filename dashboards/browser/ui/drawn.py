"""Components that our own assets draw in the browser: figures without Plotly's 1.5 MB, and HTML lists.

In: for a chart, a Plotly figure of bars, lines, points and heat maps. Out: Dash components.
"""

from __future__ import annotations

from typing import Any, ClassVar

import plotly.graph_objects as go
from dash.development.base_component import Component


class _Drawn(Component):
    """A component of `assets/`: its properties are in `_properties`."""

    _namespace = "tracekit"
    _type = "_Drawn"
    _properties: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **values: Any) -> None:
        self._children_props: list[str] = []
        self._base_nodes: list[str] = []
        self._prop_names = self.available_properties = list(self._properties)
        self._valid_wildcard_attributes: list[str] = []
        self.available_wildcard_properties: list[str] = []
        super().__init__(**values)


class Chart(_Drawn):
    """A figure (assets/chart_view.js). `figure`: of `drawing`; `clickData`: the points last clicked."""

    _namespace = "tracekit_chart"
    _type = "Chart"
    _properties = ("id", "figure", "clickData")


class Menu(_Drawn):
    """A select of HTML (assets/forms.js). `options`: `value` and `label` of each."""

    _namespace = "tracekit_forms"
    _type = "Menu"
    _properties = ("id", "options", "value")


class Choice(_Drawn):
    """Radio buttons, or checkboxes if `value` is a list (assets/forms.js). `options`: as of `Menu`."""

    _namespace = "tracekit_forms"
    _type = "Choice"
    _properties = ("id", "options", "value")


class Folded(_Drawn):
    """A `details` of HTML (assets/folded.js). `children`: its summary, then what a browser draws once it is opened."""

    _namespace = "tracekit_folded"
    _type = "Folded"
    _properties = ("children", "className", "open")


class Views(_Drawn):
    """The named views of a table (assets/views.js). `query`: the view that is shown; `name`: that in the address."""

    _namespace = "tracekit_views"
    _type = "Views"
    _properties = ("id", "query", "name")


def drawing(figure: go.Figure) -> dict[str, Any]:
    """Return the traces and layout of a figure for the browser, without the template, which the assets contain."""
    sent: dict[str, Any] = figure.to_plotly_json()
    sent["layout"].pop("template", None)
    return sent
