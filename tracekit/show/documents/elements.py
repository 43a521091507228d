"""Common parts of offline pages: one file, no requests, and the styles of a report.

In: a title. Out: HTML.
"""

from __future__ import annotations

from importlib.resources import files

from tracekit.show.card import style

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def head(title: str) -> str:
    """The head of a page, with its styles, and a policy that forbids all requests. `title`: HTML."""
    return (
        f'<head><meta charset="utf-8"><title>{title}: tracekit</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme"'
        f' content="light dark"><style>{style()}{_page_style()}</style></head>'
    )


def _page_style() -> str:
    return files("tracekit.show.documents").joinpath("page.css").read_text(encoding="utf-8")
