"""The Dash application over one store.

In: the path of a store and how to serve it. Out: a Dash app whose Flask server answers pages, downloads, health checks
and metrics.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from dash import Dash, _callback

from tracekit.dashboards.browser.data.fleet_study import FleetStudy
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.browser.data.replays import Replays
from tracekit.dashboards.browser.ui.context import EXTENSION, Service
from tracekit.dashboards.browser.ui.shell import frame, read_ahead
from tracekit.dashboards.browser.web.access import Access
from tracekit.dashboards.browser.web.serving import harden
from tracekit.dashboards.browser.web.timeline_requests import serve_timeline
from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import LIGHT

_DOCUMENT = """<!DOCTYPE html>
<html lang="en" data-prefix="%prefix%">
<head>{%metas%}<script src="%prefix%assets/theme.js"></script><title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>
"""


#: Scripts of Dash that no page needs: for browsers older than its styles need, and for a table of its own.
_UNUSED = re.compile(r'<script src="[^"]*(deps/polyfill@|/dash_table/)[^"]*"></script>\n')


class _App(Dash):
    """Dash without its unused scripts."""

    def _generate_scripts_html(self) -> str:
        return _UNUSED.sub("", super()._generate_scripts_html())


def make_app(
    store: Path, access: Access | None = None, study: Path | None = None, gpu_hour: float | None = None
) -> Dash:
    """Build the dashboard of the store at `store` with that access; each page reads the store anew.

    `study`: a study of many jobs for the page Fleet. `gpu_hour`: the price of a GPU-hour.
    """
    access = access or Access()
    app = _App(
        __name__,
        use_pages=True,
        pages_folder="",  # pages are modules of this package, registered by importing them
        suppress_callback_exceptions=True,  # else Dash sends every page with the first one
        serve_locally=True,
        title="tracekit",
        update_title="",
        assets_folder=str(Path(__file__).parents[1] / "assets"),
        assets_ignore=r"theme\.js",  # inlined in the document
        requests_pathname_prefix=access.prefix,
        routes_pathname_prefix="/",
        index_string=_DOCUMENT.replace("%prefix%", escape(access.prefix)),
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    results = Results(store)
    fleet = None if study is None else FleetStudy(study)
    app.server.extensions[EXTENSION] = Service(results, Replays(results), access.prefix, fleet, gpu_hour)
    if fleet is not None:
        fleet.read_ahead()
    harden(app, access)
    app.server.before_request(read_ahead)  # after the access check
    serve_timeline(app)
    _give_callbacks(app)
    app.layout = frame
    figure(LIGHT)  # Plotly loads its modules with the first figure: better now than with the first page
    return app


@cache
def _declared() -> tuple[Any, ...]:
    """Import the pages and return the callbacks, functions and scripts that they register with Dash."""
    import_module("tracekit.dashboards.browser.pages")
    registries: tuple[Any, ...] = (
        _callback.GLOBAL_CALLBACK_LIST,
        _callback.GLOBAL_CALLBACK_MAP,
        _callback.GLOBAL_INLINE_SCRIPTS,
    )
    contents = tuple(one.copy() for one in registries)
    for registry in registries:
        registry.clear()
    return contents


def _give_callbacks(app: Dash) -> None:
    """Register the callbacks of the pages with the app: Dash does so only for the first app of a process."""
    callbacks, functions, scripts = _declared()
    app.callback_map.update({name: dict(function) for name, function in functions.items()})
    app._callback_list.extend(callbacks)  # noqa: SLF001 - as Dash does it
    app._inline_scripts.extend(scripts)  # noqa: SLF001 - as Dash does it
