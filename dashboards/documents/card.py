"""The report as HTML: the card with the answer, tables of causes and fixes, and all of them together for a notebook.

In: a `Report`. Out: markup without a script. Names are escaped wherever they appear. `documents/page.py` builds a whole
page from the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from tracekit.analysis.job.job import Job
from tracekit.base.errors import TraceError
from tracekit.base.text import printable, short
from tracekit.dashboards.documents.svg import picture, step_bars, worker_map
from tracekit.dashboards.figures.theme import DARK, LIGHT, Theme
from tracekit.dashboards.run_words import first_line
from tracekit.dashboards.words import answer_rows, tables
from tracekit.report.report import Report
from tracekit.report.section import BarTimeline, Section, Series, Table
from tracekit.report.verdict import UNNAMED, LossKind

#: A cell of figures: a number with its unit and error, nothing, or that none is known.
_FIGURE = re.compile(r"-?|[-+]?\d[\d.,]*( ?[%\w]+)?( ± .+)?")
_TONES = {LossKind.BALANCED: "good", **dict.fromkeys(UNNAMED, "unsure")}


def card(shown: Report | Job) -> str:
    """A report, or the report on a job, as a notebook shows it: the answer and, if the job loses time, workers, steps,
    causes and fixes.
    """
    try:
        report = shown if isinstance(shown, Report) else shown.report
    except TraceError as error:
        return f"<p>{escape(repr(shown))}<br>{plain(str(error))}</p>"
    drawn = sections(report.pictures)
    drawn = pair(report) + drawn if report.by_worker else drawn + sections(report.overview)
    pictures = drawn + sections(tables(report)) if report.verdict.losses else sections(report.asked)
    return (
        f'<div class="tracekit"><style>{style()}</style><header><b>{plain(short(report.name))}</b>'
        f" <span>{plain(report.job.sizes)}</span></header>{answer_of(report)}{pictures}</div>"
    )


@cache
def style() -> str:
    """The style sheet of everything below an element of class `tracekit`: dark if the system is.

    JupyterLab states its own theme, which takes precedence over the system's.
    """
    sheet = files("tracekit.dashboards.documents").joinpath("card.css").read_text(encoding="utf-8")
    dark = f'.tracekit:not([data-jp-theme-light="true"] *) {{ {_colours(DARK)} }}'
    return f".tracekit {{ {_colours(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{sheet}"


def _colours(theme: Theme) -> str:
    """A theme as variables of a style sheet. `--l0` to `--l5` are the levels of `worker_cells`."""
    colours = {
        "paper": theme.paper,
        "text": theme.text,
        "dim": theme.dimmed,
        "line": theme.grid,
        "good": theme.ideal,
        "bad": theme.bad,
        "unsure": theme.dimmed,
        "bar": theme.recorded,
        "pick": theme.outline,
        **dict(zip(("forward", "backward", "weight", "other"), theme.kinds[:4], strict=True)),
        "communication": theme.wait,
        **{f"l{level}": colour for level, colour in enumerate(theme.slow)},
    }
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def answer_of(report: Report, *, gpu_hour: float | None = None) -> str:
    """The answer: what, who, why, what to do, and whether to believe it. `gpu_hour`: as for the terminal."""
    return answer_card(*first_line(report), answer_rows(report, gpu_hour))


def answer_card(kind: LossKind, label: str, headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """The card of an answer, in the colour of its kind of loss. `label`: the kind in words; `rows`: (name, text)."""
    listed = "".join(f"<dt>{name}</dt><dd>{plain(words)}</dd>" for name, words in rows)
    return (
        f'<section class="card {_TONES.get(kind, "bad")}"><p class="headline"><b>{plain(label)}</b>'
        f" {plain(headline)}</p><dl>{listed}</dl></section>"
    )


def pair(report: Report) -> str:
    """The worker map and the steps, side by side where there is room."""
    return (
        f'<div class="pair"><section><h2>Workers</h2><div class="scroll">{worker_map(report)}</div></section>'
        f"<section><h2>Steps</h2>{step_bars(report)}</section></div>"
    )


def sections(parts: Iterable[Section]) -> str:
    """Tables and pictures with their titles and remarks."""
    return "".join(f"<section><h2>{plain(part.title)}</h2>{_drawn(part)}</section>" for part in parts)


def _drawn(part: Section) -> str:
    """A table or a picture, and the remarks below."""
    if isinstance(part, Table):
        return (table(part.heads, part.rows) if part.rows else "") + _notes(part.note)
    if isinstance(part, BarTimeline):
        return picture(part) + _notes(*part.notes)
    return picture(part) + (_notes(part.note) if isinstance(part, Series) else "")


def _notes(*notes: str | None) -> str:
    return "".join(f"<p>{plain(note)}</p>" for note in notes if note)


def plain(text: str) -> str:
    """Any text, escaped so that a browser shows it literally."""
    return escape(printable(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, figures to the right. Each cell carries its head, because narrow screens show rows as blocks."""
    rows = tuple(rows)
    kinds = [
        ' class="figure"' if number and all(map(_FIGURE.fullmatch, column)) else ""
        for number, column in enumerate(zip(*rows, strict=True))
    ]
    head = "".join(f"<th{kind}>{plain(name)}</th>" for name, kind in zip(heads, kinds, strict=True))
    cells = (
        "".join(
            f'<td{kind} data-head="{plain(name)}">{plain(cell)}</td>'
            for name, kind, cell in zip(heads, kinds, row, strict=True)
        )
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"
