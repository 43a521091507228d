"""A gate's verdict as Markdown, for a pull request, and as JUnit XML, for the test results of a CI system.

In: a `Gate`. Out: text. Names are escaped.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tracekit.analysis.attribution.gate import Gate, Outcome, percent
from tracekit.base.atomic_write import Kind, starting_with, write_text
from tracekit.base.text import printable, seconds, short
from tracekit.dashboards.documents.markdown import escaped, markdown_table
from tracekit.report.section import Table

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
            what = "failure" if row.outcome is Outcome.REGRESSION else "error"
            ElementTree.SubElement(test, what, message=printable(row.sentence), type=str(row.outcome))
    write_text(path, _JUNIT + ElementTree.tostring(suite, "unicode") + "\n", GATE_JUNIT)
