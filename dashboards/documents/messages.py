"""The answer of a report as a message: Markdown for tickets, and the markup of Slack and Jira.

In: a report. Out: text to paste, with a link back. Names are displayed literally.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tracekit.base.text import printable, short
from tracekit.dashboards.documents.markdown import answer_table, escaped
from tracekit.dashboards.run_words import first_line, run_rows, since_words
from tracekit.dashboards.words import core_rows, trust_row
from tracekit.report.report import Report

Row = tuple[str, str]
#: Escaped by a backslash in Jira, where these characters are markup, the last ones only at the edge of a word.
_JIRA_MARKUP = re.compile(r"[\\{}\[\]|*]|(?<![A-Za-z0-9])[-_^~+!]|[-_^~+!](?![A-Za-z0-9])")


def _markdown(name: str, headline: str, rows: list[Row], address: str) -> str:
    return f"**[{escaped(name)}]({address}): {escaped(headline)}**\n\n{answer_table(rows)}\n"


def _slack(name: str, headline: str, rows: list[Row], address: str) -> str:
    lines = [f"*{name}: {headline}*", *(f"\u2022 *{about}:* {words}" for about, words in rows)]
    return "\n".join(printable(line).replace("@", "@\u200b") for line in lines) + f"\n{address}\n"  # mentions nobody


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
