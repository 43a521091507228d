"""What a page says, without a browser: its paragraphs, cells and badges as the server sends them.

Code and arrows are written as in the reports that they come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import dash
from dash.development.base_component import Component
from flask.testing import FlaskClient
from plotly.utils import PlotlyJSONEncoder

from tracekit.dashboards.browser.ui.context import EXTENSION, Service
from tracekit.dashboards.browser.web.app import make_app

#: Text of a page is cut where one of these begins.
BLOCKS = {"P", "Div", "Li", "Tr", "Td", "Th", "H1", "H2", "H3", "Button", "Summary", "Paper", "Link", "A"}


class Pages:
    """The pages of one store, and of a study beside it."""

    def __init__(self, store: Path, study: Path | None = None, gpu_hour: float | None = None) -> None:
        self._app = make_app(store, study=study, gpu_hour=gpu_hour)
        self._server = self._app.server
        self.service: Service = self._server.extensions[EXTENSION]

    def page(self, path: str, **state: str) -> Component:
        """The page at an address, as components."""
        (layout,) = (page["layout"] for page in dash.page_registry.values() if page["path"] == path)
        with self._server.test_request_context(path):
            built: Component = layout(**state)
        return built

    def job_rows(self) -> list[dict[str, Any]]:
        """The rows behind the table of all jobs."""
        with self._server.test_request_context("/"):
            rows: list[dict[str, Any]] = _page_of_jobs().job_table().to_dicts()
        return rows

    def job_card(self, name: str) -> str:
        """The text of the card of a job with an open incident."""
        with self._server.test_request_context("/"):
            return " ".join(lines(_page_of_jobs().job_card(self.service.results.stored(name))))

    def answer(self, output: str, changed: str, **values: Any) -> dict[str, Any]:
        """What the server sends a browser in which `changed` has changed: properties by the component that gets them.

        `output`: a property that the callback sets. `changed`: a component, or a button as the JSON of its id.
        `values`: of components, by their ids, with _ for -.
        """
        client = self.client()
        client.get("/")  # with it Dash collects the callbacks
        (name,) = [name for name in self._app.callback_map if output in name.strip(".").split("...")]
        called, button = self._app.callback_map[name], json.loads(changed) if changed.startswith("{") else {}

        def value_of(each: dict[str, str]) -> Any:
            if not each["id"].startswith("{"):
                return {**each, "value": values.get(each["id"].replace("-", "_"))}
            return [{**each, "id": button, "value": 1}] * (button.get("type") == json.loads(each["id"])["type"])

        prop = next((each["property"] for each in called["inputs"] if each["id"] == changed), "n_clicks")
        ids = [dict(zip(("id", "property"), one.rsplit(".", 1), strict=True)) for one in name.strip(".").split("...")]
        asked = {
            "output": name,
            "outputs": ids if name.startswith("..") else ids[0],
            "inputs": [value_of(each) for each in called["inputs"]],
            "state": [value_of(each) for each in called["state"]],
            "changedPropIds": [f"{changed}.{prop}"],
        }
        answered = client.post("/_dash-update-component", json=asked)
        assert answered.status_code in (200, 204), answered.text
        content: dict[str, Any] = answered.get_json(silent=True) or {}
        return {**content.get("response", {}), **content.get("sideUpdate", {})}

    def client(self) -> FlaskClient:
        """What asks for files."""
        return self._server.test_client()

    def lines(self, path: str, **state: str) -> list[str]:
        """What the page says, block by block."""
        return lines(self.page(path, **state))

    def text(self, path: str, **state: str) -> str:
        """All of it."""
        return "\n".join(self.lines(path, **state))


def _page_of_jobs() -> Any:
    """The module, which registers with an app that is there."""
    return import_module("tracekit.dashboards.browser.pages.jobs")


def lines(component: Any) -> list[str]:
    """The text of a component, a line for each block."""
    text = "".join(_parts(component))
    return [" ".join(line.split()) for line in text.split("\n") if line.strip()]


def sent(component: Any) -> str:
    """All that the server sends of a component: also what stands in fields, tables and attributes."""
    return " ".join(map(str, _values(json.loads(json.dumps(component, cls=PlotlyJSONEncoder)))))


def _values(part: Any) -> list[Any]:
    if isinstance(part, dict | list):
        inner = part.values() if isinstance(part, dict) else part
        return [value for one in inner for value in _values(one)]
    return [part]


def found(component: Any, kind: str, style: str = "") -> Iterator[Component]:
    """The components of a kind, such as `Span`, with that word among their classes."""
    if isinstance(component, Component):
        classes = str(getattr(component, "className", "")).split()
        if type(component).__name__ == kind and (not style or style in classes):
            yield component
        yield from found(getattr(component, "children", None), kind, style)
    elif isinstance(component, list | tuple):
        for child in component:
            yield from found(child, kind, style)


def _parts(component: Any) -> Iterator[str]:
    if isinstance(component, Component):
        name = type(component).__name__
        edge = "\n" if name in BLOCKS else {"Span": " ", "Code": "`"}.get(name, "")
        yield edge
        yield from _parts(getattr(component, "children", None))
        yield edge
    elif isinstance(component, list | tuple):
        for child in component:
            yield from _parts(child)
    elif component is not None:
        yield str(component).replace("\u2192", "->")
