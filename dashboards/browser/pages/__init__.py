"""The pages, one module each. Importing this package registers them with Dash."""

from importlib import import_module
from pkgutil import iter_modules

from dash import dcc, html

from tracekit.dashboards.browser.ui.components import href, problem
from tracekit.dashboards.browser.ui.shell import page

for _page in iter_modules(__path__, f"{__name__}."):
    import_module(_page.name)

page(
    f"{__name__}.not_found_404",  # by which Dash knows what to show for an address that names no page
    "/not-found",
    "No such page",
    lambda **_: [
        html.H1("No such page"),
        problem(
            "This address names no page of the dashboard; it may have been cut when it was copied.",
            link=dcc.Link("All jobs", href=href("/")),
        ),
    ],
)
