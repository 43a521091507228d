"""A report as one HTML page that needs no network: answer, worker map, steps, causes, fixes, the slowest steps.

In: a `Report` and its replay. Out: the text of the page, or a file. Names are escaped wherever they appear, and a
content security policy forbids every request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.verdict import LossKind
from tracekit.atomic_write import Kind, replacing, starting_with
from tracekit.documents.elements import asset, head, html, html_table
from tracekit.documents.svg import step_bars, worker_map
from tracekit.documents.worst_steps import worst_steps
from tracekit.report import Report
from tracekit.report_words import CAUSE_HEADS, FIX_HEADS, answer_rows, cause_rows, fix_rows, job_sizes
from tracekit.text import short

if TYPE_CHECKING:
    from tracekit.analysis.replay.engine import JobReplay

_BEGINNING = "<!doctype html>\n<!-- tracekit whatif -->\n"
#: What `write_page` replaces.
PAGE_FILE = Kind("a page that `tracekit whatif --html` wrote", starting_with(_BEGINNING.encode()))
_TONES = {LossKind.BALANCED: "good", LossKind.CONTRADICTION: "unsure"}


def page(report: Report, replay: JobReplay, *, gpu_hour: float | None = None) -> str:
    """The whole page. `gpu_hour`: as for the terminal."""
    name = html(short(report.name))
    data = json.dumps(worst_steps(report, replay), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'{_BEGINNING}<html lang="en">{head(name)}<body><main>'
        f"<header><h1><bdi>{name}</bdi></h1><p>{html(job_sizes(report))}</p></header>"
        f"{card(report, gpu_hour=gpu_hour)}"
        f'<div class="pair"><section><h2>Workers</h2><div class="scroll">{worker_map(report)}</div></section>'
        f"<section><h2>Steps</h2>{step_bars(report)}</section></div>"
        f"<section><h2>Causes</h2>{html_table(CAUSE_HEADS, cause_rows(report))}</section>"
        f"<section><h2>Fixes</h2>{_fixes(report)}</section>{_TIMELINE}"
        f"<footer>Made by tracekit. Link to a rank and a step: <code>#rank=9&amp;step=105</code></footer></main>"
        f'<script type="application/json" id="worst-steps">{data}</script><script>{asset("report.js")}</script>'
        "</body></html>\n"
    )


def card(report: Report, *, gpu_hour: float | None = None) -> str:
    """The answer: what, who, why, what to do, and whether to believe it."""
    verdict = report.diagnosis.verdict
    tone = _TONES.get(verdict.kind, "bad")
    rows = "".join(f"<dt>{name}</dt><dd>{html(words)}</dd>" for name, words in answer_rows(report, gpu_hour))
    return (
        f'<section class="card {tone}"><p class="headline"><b>{html(str(verdict.kind).upper())}</b>'
        f" {html(report.diagnosis.answer.headline)}</p><dl>{rows}</dl></section>"
    )


def write_page(path: Path, text: str) -> None:
    """Write the page to a file. Raises OutputError; a file there is replaced only if this function wrote it."""
    with replacing(path, PAGE_FILE) as temporary:
        temporary.write_text(text, encoding="utf-8")


_TIMELINE = (
    '<section id="timeline"><h2>Slowest steps</h2><p id="timeline-note" role="status"></p><div class="controls"'
    ' id="timeline-controls"></div><div class="canvas"><canvas id="timeline-canvas" tabindex="0" role="img"'
    ' aria-label="Recorded ops over ideal ones, a row a worker; arrow keys move, plus and minus zoom"></canvas></div>'
    '<p id="timeline-op" aria-live="polite"></p><noscript>The timeline needs JavaScript.</noscript></section>'
)


def _fixes(report: Report) -> str:
    if not report.diagnosis.fixes:
        return "<p>None that would save 1 % of the step.</p>"
    note = f"<p>{html(report.rate_assumption)}. Steps as recorded, with launch delays.</p>"
    return html_table(FIX_HEADS, fix_rows(report)) + note
