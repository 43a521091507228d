"""The Dash application over one store.

In: the path of a store and how to serve it. Out: a Dash app whose Flask server answers pages, downloads, health checks
and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dash import Dash, _callback

from tracekit.dashboards.data.queries import Results
from tracekit.dashboards.data.replays import Replays
from tracekit.dashboards.ui.context import EXTENSION, Service
from tracekit.dashboards.ui.shell import frame, read_ahead
from tracekit.dashboards.web.auth import Auth
from tracekit.dashboards.web.serving import harden
from tracekit.dashboards.web.timeline_requests import serve_timeline
from tracekit.figures.base import figure
from tracekit.figures.theme import LIGHT

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<script src="/assets/theme.js"></script><title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>
"""


def make_app(store: Path, *, auth: Auth | None = None) -> Dash:
    """The dashboard of the store at `store`, for those whom `auth` lets in; the file is first read when a page is."""
    app = Dash(
        __name__,
        use_pages=True,
        pages_folder="",  # pages are modules of this package, registered by importing them
        suppress_callback_exceptions=True,  # else Dash sends every page with the first one
        serve_locally=True,
        title="tracekit",
        update_title="",
        assets_folder=str(Path(__file__).parents[1] / "assets"),
        assets_ignore=r"theme\.js",  # stands in the document itself
        index_string=_DOCUMENT,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    results = Results(store)
    app.server.extensions[EXTENSION] = Service(results, Replays(results))
    harden(app, auth)
    app.server.before_request(read_ahead)  # after who may ask was asked
    serve_timeline(app)
    _give_callbacks(app)
    app.layout = frame
    figure(LIGHT)  # Plotly loads what it needs with the first figure: better now than with the first page
    return app


@dataclass(frozen=True, slots=True)
class _Declared:
    """What the modules of the pages told Dash."""

    callbacks: list[dict[str, Any]]
    functions: dict[str, dict[str, Any]]
    scripts: list[str]


@cache
def _declared() -> _Declared:
    """The callbacks of the pages, which importing these declares."""
    import_module("tracekit.dashboards.pages")
    declared = _Declared(
        list(_callback.GLOBAL_CALLBACK_LIST),
        dict(_callback.GLOBAL_CALLBACK_MAP),
        list(_callback.GLOBAL_INLINE_SCRIPTS),
    )
    _callback.GLOBAL_CALLBACK_LIST.clear()
    _callback.GLOBAL_CALLBACK_MAP.clear()
    _callback.GLOBAL_INLINE_SCRIPTS.clear()
    return declared


def _give_callbacks(app: Dash) -> None:
    """Give the app the callbacks of the pages: by itself Dash does so for the first app of a process only."""
    declared = _declared()
    app.callback_map.update({name: dict(function) for name, function in declared.functions.items()})
    app._callback_list.extend(declared.callbacks)  # noqa: SLF001 - as Dash does it
    app._inline_scripts.extend(declared.scripts)  # noqa: SLF001 - as Dash does it
