"""A report as Markdown, for tickets and chats.

In: a `Report`. Out: text in GitHub's dialect: the answer, causes and fixes as tables. Names are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tracekit.base.atomic_write import Kind, starting_with, write_text
from tracekit.base.text import printable, short
from tracekit.dashboards.figures.characters import lines_of
from tracekit.dashboards.run_words import first_line
from tracekit.dashboards.words import answer_rows, tables
from tracekit.report.report import Report
from tracekit.report.section import Table

#: The first line of a file: a comment, which Markdown viewers do not show.
_BEGINNING = "<!-- tracekit whatif -->\n"
#: The kind of file that `write_markdown` replaces.
MARKDOWN_FILE = Kind("a report that `tracekit whatif --markdown` wrote", starting_with(_BEGINNING.encode()))
#: Characters that Markdown, or HTML in it, treats as markup, to be escaped; an underscore within a word is not markup.
_MARKUP = re.compile(r"[\\`*\[\]|~<&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
#: Characters in a line of a picture.
_WIDE = 80
_ENTITIES = {"<": "&lt;", "&": "&amp;", "@": "&#64;"}


def markdown(report: Report, *, gpu_hour: float | None = None, source: str | None = None) -> str:
    """The whole document. `gpu_hour`, `source`: as for the terminal."""
    _, label, sentence = first_line(report)
    parts = [
        f"## {escaped(short(report.name))}",
        escaped(report.job.sizes),
        f"**{escaped(label)}: {escaped(sentence)}**",
        answer_table(answer_rows(report, gpu_hour)),
    ]
    for section in (*tables(report), *report.parts):
        parts.append(f"### {escaped(section.title)}")
        if not isinstance(section, Table):
            parts.append("\n".join(["```text", *lines_of(section, _WIDE), "```"]))
            continue
        if section.rows:
            parts.append(markdown_table(section.heads, section.rows))
        if section.note:
            parts += [escaped(line) for line in section.note.splitlines()]
    if source is not None:
        parts.append(f"```sh\ntracekit whatif {source} --full\n```")
    return "\n\n".join(parts) + "\n"


def write_markdown(path: Path, text: str) -> None:
    """Write the document to a file. Raises OutputError; a file there is replaced only if this function wrote it."""
    write_text(path, _BEGINNING + text, MARKDOWN_FILE)


def escaped(text: str) -> str:
    """`text` on one line, displayed literally by Markdown: no markup, no HTML, no mentions."""
    return _MARKUP.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(text))


def _named(rows: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Rows, with an empty name if it repeats the one before."""
    last = ""
    for name, words in rows:
        last = name or last
        yield last, words


def answer_table(rows: Iterable[tuple[str, str]]) -> str:
    """The rows of an answer as a table."""
    return markdown_table(("", "Answer"), _named(rows))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with escaped cells."""
    lines = [heads, ["---"] * len(heads), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
