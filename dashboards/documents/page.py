"""A report as one self-contained HTML page: answer, worker map, steps, causes, fixes, the slowest steps.

In: a `Report`, and the replay of a pipeline. Out: the text of the page. Names are escaped wherever they appear, and a
content security policy forbids all requests.
"""

from __future__ import annotations

import json
from importlib.resources import files

from tracekit.analysis.job.worker_lanes import WorkerLanes
from tracekit.base.atomic_write import Kind, starting_with
from tracekit.base.text import short
from tracekit.dashboards.documents import card as report_html
from tracekit.dashboards.documents.worst_steps import worst_steps
from tracekit.dashboards.words import tables
from tracekit.report.report import Report

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
#: How every page begins.
BEGINNING = "<!doctype html>\n<!-- tracekit whatif -->\n"
#: The kind of file that a page replaces.
PAGE_FILE = Kind("a page that `tracekit whatif --html` wrote", starting_with(BEGINNING.encode()))


def page(report: Report, lanes: WorkerLanes | None = None, *, gpu_hour: float | None = None) -> str:
    """The whole page. `lanes`: of a pipeline, to show its slowest steps op by op. `gpu_hour`: as for the terminal."""
    name = report_html.plain(short(report.name))
    shown, every = report.overview, report.tables_of_sections
    folded = f"<details><summary>All tables</summary>{report_html.sections(every)}</details>" if every != shown else ""
    return (
        f'{BEGINNING}<html lang="en" class="tracekit">{head(name)}<body><main>'
        f"<header><h1><bdi>{name}</bdi></h1><p>{report_html.plain(report.job.sizes)}</p></header>"
        f"{report_html.answer_of(report, gpu_hour=gpu_hour)}{report_html.pair(report) if report.by_worker else ''}"
        f"{report_html.sections((*report.pictures, *tables(report), *shown))}{folded}"
        f"{_FOOTER if lanes is None else _timeline(report, lanes)}</body></html>\n"
    )


def _timeline(report: Report, lanes: WorkerLanes) -> str:
    """The slowest steps, op by op, with the script that draws them; ends the main part of the page."""
    data = json.dumps(worst_steps(report, lanes), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"{_TIMELINE}<footer>Made by tracekit. Link to a rank and a step: <code>#rank=9&amp;step=105</code></footer>"
        f'</main><script type="application/json" id="worst-steps">{data}</script><script>{_asset("page.js")}</script>'
    )


_FOOTER = "<footer>Made by tracekit.</footer></main>"
_TIMELINE = (
    '<section id="timeline"><h2>Slowest steps, marked above</h2><p id="timeline-note" role="status"></p><div'
    ' class="controls" id="timeline-controls"></div><div class="canvas"><canvas id="timeline-canvas" tabindex="0"'
    ' role="img" aria-label="Recorded ops over ideal ones, a row a worker; arrow keys move, plus and minus zoom">'
    '</canvas></div><p id="timeline-op" aria-live="polite"></p><noscript>The timeline needs JavaScript.</noscript>'
    "</section>"
)


def _asset(name: str) -> str:
    return files("tracekit.dashboards.documents").joinpath(name).read_text(encoding="utf-8")


def head(title: str) -> str:
    """The head of a page, with its styles, and a policy that forbids all requests. `title`: HTML."""
    return (
        f'<head><meta charset="utf-8"><title>{title}: tracekit</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme"'
        f' content="light dark"><style>{report_html.style()}{_asset("page.css")}</style></head>'
    )
