"""A report as text for others: Markdown for tickets, messages for chats, verdicts of a gate for a pull request and for
CI, and the forms of other distributions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tracekit.analysis.attribution.gate import Gate, Outcome, percent
from tracekit.base.atomic_write import Kind, starting_with, write_text
from tracekit.base.errors import OutputError, SelectionError
from tracekit.base.plug_ins import plug_ins, tell
from tracekit.base.text import encodable, printable, seconds, short
from tracekit.dashboards.words import (
    answer_rows,
    core_rows,
    first_line,
    lines_of,
    run_rows,
    since_words,
    tables,
    trust_row,
)
from tracekit.report.report import Report
from tracekit.report.tables import Table

#: The first line of a file: a comment, which Markdown viewers do not show.
_BEGINNING = "<!-- tracekit whatif -->\n"
#: The kind of file that `write_markdown` replaces.
MARKDOWN_FILE = Kind("a report that `tracekit whatif --markdown` wrote", starting_with(_BEGINNING.encode()))
#: Characters that Markdown, or HTML in it, treats as markup, to be escaped; an underscore within a word is not markup.
_MARKUP = re.compile(r"[\\`*\[\]|~<&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
#: Characters in a line of a picture.
_WIDE = 80
_ENTITIES = {"<": "&lt;", "&": "&amp;", "@": "&#64;"}

Row = tuple[str, str]
#: Escaped by a backslash in Jira, where these characters are markup, the last ones only at the edge of a word.
_JIRA_MARKUP = re.compile(r"[\\{}\[\]|*]|(?<![A-Za-z0-9])[-_^~+!]|[-_^~+!](?![A-Za-z0-9])")
#: The forms for which tracekit has options.
OWN = frozenset({"csv", "html", "json", "markdown", "parquet", "terminal"})


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
            lines = [line.replace("```", "'''") for line in lines_of(section, _WIDE)]  # a name cannot end the block
            parts.append("\n".join(["```text", *lines, "```"]))
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


def _without_repeats(rows: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Rows, with an empty name if it repeats the one before."""
    last = ""
    for name, words in rows:
        last = name or last
        yield last, words


def answer_table(rows: Iterable[tuple[str, str]]) -> str:
    """The rows of an answer as a table."""
    return markdown_table(("", "Answer"), _without_repeats(rows))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with escaped cells."""
    lines = [heads, ["---"] * len(heads), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown(name: str, headline: str, rows: list[Row], address: str) -> str:
    return f"**[{escaped(name)}]({address}): {escaped(headline)}**\n\n{answer_table(rows)}\n"


def _slack(name: str, headline: str, rows: list[Row], address: str) -> str:
    lines = [f"*{name}: {headline}*", *(f"\u2022 *{about}:* {words}" for about, words in rows)]
    return "\n".join(printable(line).replace("@", "@\u200b") for line in lines) + f"\n{address}\n"  # no mentions


def _jira(name: str, headline: str, rows: list[Row], address: str) -> str:
    def literal(text: str) -> str:
        return _JIRA_MARKUP.sub(r"\\\g<0>", printable(text))

    lines = [f"h3. [{literal(name)}|{address}]", f"*{literal(headline)}*"]
    return "\n".join([*lines, *(f"||{about}|{literal(words)}|" for about, words in rows)]) + "\n"


_FORMS: Final[dict[str, Callable[[str, str, list[Row], str], str]]] = {
    "Markdown": _markdown,
    "Slack": _slack,
    "Jira": _jira,
}


def messages(report: Report, address: str) -> dict[str, str]:
    """The message in each form, by its name. `address`: of the page that shows the report."""
    name, answer = short(report.name), report.answer
    _, _, sentence = first_line(report)
    rows = [
        *run_rows(report),
        *core_rows(answer, since=since_words(report)),
        trust_row(answer.trust, trustworthy=report.trust.trustworthy),
    ]
    return {form: write(name, sentence, rows, address) for form, write in _FORMS.items()}


_MARKDOWN = "<!-- tracekit gate -->\n"
_JUNIT = '<?xml version="1.0" encoding="UTF-8"?>\n<!-- tracekit gate -->\n'
#: The kinds of files that are replaced.
GATE_MARKDOWN = Kind("a verdict that `tracekit gate --markdown` wrote", starting_with(_MARKDOWN.encode()))
GATE_JUNIT = Kind("a verdict that `tracekit gate --junit` wrote", starting_with(_JUNIT.encode()))


def gate_table(gate: Gate, names: int | None = None) -> Table:
    """Every figure that was judged. `names`: cut longer names."""
    rows = [
        (
            row.name if names is None else short(row.name, names),
            seconds(row.before_s),
            seconds(row.after_s),
            row.change,
            f"{row.allowed_s / row.before_s:+.1%}" if row.before_s else seconds(row.allowed_s),
            str(row.outcome),
        )
        for row in gate.rows
    ]
    return Table("Parts", ("a step's", "baseline", "run", "change", "limit", "verdict"), tuple(rows))


def write_gate_markdown(path: Path, gate: Gate) -> None:
    """Write the verdict as Markdown. Raises OutputError."""
    table = gate_table(gate)
    baselines = f"Baseline {escaped(gate.baseline.name)}, {gate.baseline.steps} steps"
    parts = [
        f"**{str(gate.outcome).upper()}** (limit {percent(gate.limit)}): {escaped(gate.sentence)}",
        f"{baselines}; run {escaped(gate.run.name)}, {gate.run.steps} steps",
        markdown_table(table.heads, table.rows),
        *map(escaped, gate.notes),
    ]
    write_text(path, _MARKDOWN + "\n\n".join(parts) + "\n", GATE_MARKDOWN)


def write_gate_junit(path: Path, gate: Gate) -> None:
    """Write the verdict as JUnit XML: a test per figure, a regression as a failure, what cannot be told as an error.

    Raises OutputError.
    """
    counts = {outcome: sum(row.outcome is outcome for row in gate.rows) for outcome in Outcome}
    suite = ElementTree.Element(
        "testsuite",
        name="tracekit gate",
        tests=str(len(gate.rows)),
        failures=str(counts[Outcome.REGRESSION]),
        errors=str(counts[Outcome.SLOWER] + counts[Outcome.CANNOT_TELL]),
    )
    for row in gate.rows:
        test = ElementTree.SubElement(suite, "testcase", classname=printable(gate.run.name), name=printable(row.name))
        if row.outcome is not Outcome.PASSED:
            element = "failure" if row.outcome is Outcome.REGRESSION else "error"
            ElementTree.SubElement(test, element, message=printable(row.sentence), type=str(row.outcome))
    write_text(path, _JUNIT + ElementTree.tostring(suite, "unicode") + "\n", GATE_JUNIT)


def renderer(name: str) -> Callable[[object], str]:
    """The renderer of that name, whose failures raise OutputError. Raises SelectionError if there is none."""
    renderers, problems = plug_ins("renderers", OWN)
    if name not in renderers:
        installed = ", ".join(renderers) or "none, as no plug-in brings one (docs/extending.md)"
        raise SelectionError("; ".join((f"--as: renderer {name!r:.40} is unknown; known: {installed}", *problems)))
    tell(problems)
    plug_in = renderers[name]

    def render(report: object) -> str:
        with plug_in.guarded(OutputError):
            text = plug_in.value(report)
            if not isinstance(text, str):
                raise TypeError(f"it returned a {type(text).__name__}; expected a str")
            return encodable(text)

    return render
