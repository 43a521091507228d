"""What offline pages have in common: one file, no request, every name as text.

In: text and rows. Out: HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from tracekit import report_html
from tracekit.text import printable

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def head(title: str) -> str:
    """The head of a page, with its styles, and a policy that forbids every request. `title`: HTML."""
    return (
        f'<head><meta charset="utf-8"><title>{title}: tracekit</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme"'
        f' content="light dark"><style>{report_html.style()}{_page_style()}</style></head>'
    )


def _page_style() -> str:
    return files("tracekit.documents").joinpath("page.css").read_text(encoding="utf-8")


def html(text: str) -> str:
    """Any text, as a browser shows it and nothing else."""
    return escape(printable(text))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells carry their heads, for narrow screens where rows become blocks."""
    first = "".join(f"<th>{html(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(_cell(name, cell) for name, cell in zip(heads, row, strict=True))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, text: str) -> str:
    return f'<td data-head="{html(name)}">{html(text)}</td>'
