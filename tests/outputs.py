"""What is generated from the code: `python -m tests.outputs` writes it.

In: the types that commands print, and the registry of sources. Out: tracekit/commands/outputs.schema.json, with a
definition for each command; tracekit/report/report.schema.json; the tables of docs/limits.md and docs/traces.md; keys,
types, meanings and kinds of findings in docs/report-schema.md. What a key means is the comment `#:` of its field.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from tracekit.analysis.attribution.gate import Gate
from tracekit.analysis.detectors.detector import own_detectors
from tracekit.analysis.evidence.subject import JobKind
from tracekit.analysis.hang.hang_report import HangReport
from tracekit.analysis.job.history import History
from tracekit.bill.ledger import BillOutput
from tracekit.collectors.launch.collect import CollectSummary
from tracekit.commands.metrics_command import DoctorOfMetricsOutput, ScanOutput
from tracekit.commands.optimize import ExpertsOutput
from tracekit.commands.record import DoctorOutput
from tracekit.commands.scripts import CulpritsOutput
from tracekit.fleet.figures import FleetFigures
from tracekit.fleet.study_comparison import FleetComparison
from tracekit.report.comparison import ComparedOutput
from tracekit.report.finding import NEEDS
from tracekit.report.hardware import MetricsInReport
from tracekit.report.questions import Optimum, RunLine
from tracekit.report.report import Report
from tracekit.sources.registry import FORMATS, SOURCES
from tracekit.trace.facts import Fact

SHIPPED = Path(str(files("tracekit.commands").joinpath("outputs.schema.json")))
REPORT = Path(str(files("tracekit.report").joinpath("report.schema.json")))
DOCS = Path(__file__).parents[1] / "docs"
#: Where the classes of the outputs are.
PACKAGES = [DOCS.parent / name for name in ("tracekit", "analysis")]
SCHEMA_PAGE = DOCS / "report-schema.md"
#: Kinds of jobs, as the table of findings names them.
JOBS = {
    JobKind.PIPELINE: "pipelines",
    JobKind.GRAPH: "op traces, recordings",
    JobKind.RECORDING: "recordings",
    JobKind.POST_TRAINING: "post-training",
}
#: Before the generated table of a page, by its name, and after it.
BEGINNINGS, END = {"limits.md": "<!-- what sources lack -->", "traces.md": "<!-- formats -->"}, "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReportOutput(FleetFigures):
    """What `tracekit fleet report --json` prints."""

    confidence: float
    culprits: pl.DataFrame


#: The type of what each command prints.
OUTPUTS: dict[str, Any] = {
    "collect": CollectSummary,
    "bill": BillOutput,
    "compare": ComparedOutput,
    "culprits": CulpritsOutput,
    "culprits --history": History,
    "doctor": DoctorOutput,
    "experts": ExpertsOutput,
    "fleet compare": FleetComparison,
    "fleet report": FleetReportOutput,
    "gate": Gate,
    "optimize": Optimum,
    "optimize --runs": RunLine,
    "metrics doctor": DoctorOfMetricsOutput,
    "metrics scan": ScanOutput,
    "metrics test": MetricsInReport,
    "hang": HangReport,
    "store sql": list[dict[str, Any]],
}


def report_schema() -> dict[str, Any]:
    """The schema of a report, which is shipped as report.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Report)}
    _describe(schema["$defs"])
    return schema


def json_schema() -> dict[str, Any]:
    """The schema: `#/$defs/COMMAND` is what that command prints."""
    kinds, definitions = msgspec.json.schema_components(
        OUTPUTS.values(), schema_hook=_rows, ref_template="#/$defs/{name}"
    )
    _describe(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": definitions | dict(zip(OUTPUTS, kinds, strict=True)),
    }


def _describe(definitions: dict[str, Any]) -> None:
    """Add what each key means to its schema; what tells kinds of objects apart means what the object is."""
    for name, shape in definitions.items():
        meanings = _meanings(name)
        for key, kind in shape.get("properties", {}).items():
            if key in meanings:
                kind["description"] = meanings[key]
            elif len(kind.get("enum", ())) == 1:
                sentence = shape["description"].partition(".")[0]
                kind["description"] = f"`{kind['enum'][0]}`: {sentence[0].lower()}{sentence[1:]}"


def _meanings(name: str) -> dict[str, str]:
    """What the keys of a class mean, by the comments of its fields and of those that it inherits."""
    bases, own = _classes().get(name, ([], {}))
    return {key: meaning for base in bases for key, meaning in _meanings(base).items()} | own


@cache
def _classes() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name of each class (no two have the same) -> names of its bases, and the comments of its fields by key."""
    classes = {}
    for path in (path for folder in PACKAGES for path in folder.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and "#: " in source:
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = bases, dict(_commented(node, source))
    return classes


def _commented(node: ast.ClassDef, source: str) -> Iterator[tuple[str, str]]:
    """The key of each field of a class, and its comment: on its own line, else on the lines above."""
    lines = source.splitlines()
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = takewhile(lambda line: line.lstrip().startswith("#: "), reversed(lines[: field.lineno - 1]))
            _, mark, words = lines[field.lineno - 1].partition("  #: ")
            comment = words if mark else " ".join(line.lstrip()[3:] for line in reversed([*above]))
            keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
            names = [ast.literal_eval(each.value) for each in keywords if each.arg == "name"]
            if comment:
                yield [*names, field.target.id][0], comment


def _rows(kind: type) -> dict[str, Any]:
    if kind is pl.DataFrame:
        return {"type": "array", "items": {"type": "object"}}
    raise NotImplementedError(kind)


def limits() -> str:
    """The table of docs/limits.md: what each kind of source cannot show."""
    forbidden = {fact: [str(kind) for kind, needed in NEEDS.items() if needed is fact] for fact in Fact}
    rows = ["| source | cannot show | so there is no verdict | instead |", "|---|---|---|---|"]
    for kind in dict.fromkeys(kind for source in SOURCES for kind in source.kinds):
        rows += [
            f"| {kind.title} | {lack.fact}: {lack.why} | {', '.join(forbidden[lack.fact])} | {lack.instead} |"
            for lack in kind.lacks
        ] or [f"| {kind.title} | | | |"]
    return "\n".join(rows)


def formats() -> str:
    """The table of docs/traces.md: every format that tracekit reads."""
    rows = ["| format | what it is | |", "|---|---|---|"]
    for source in FORMATS.values():
        page, mark, anchor = source.page.partition("#")
        title = page.removeprefix("../").removesuffix(".md")
        link = f"[{title}]({source.page})"
        if page == "traces.md":  # the page that has the table
            link = f"[below](#{anchor})" if mark else ""
        escaped = re.sub(r"([*<])", r"\\\1", source.description)
        rows.append(f"| `{source.name}` | {escaped} | {link} |")
    return "\n".join(rows)


def with_table(name: str, page: str) -> str:
    """A page of the documentation with its generated table as it is now."""
    before, _, rest = page.partition(BEGINNINGS[name])
    table = limits() if name == "limits.md" else formats()
    return f"{before}{BEGINNINGS[name]}\n{table}\n{END}{rest.partition(END)[2]}"


def schema_page(page: str) -> str:
    """docs/report-schema.md with the keys of the code, their types and meanings."""
    definitions = report_schema()["$defs"]
    keyed = {f"## `{name}`\n": shape for name, shape in definitions.items() if "properties" in shape}
    first, *parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    sections = {part[: part.index("\n") + 1]: part for part in parts}
    for heading in [heading for heading in sections if heading.startswith("## `") and heading not in keyed]:
        del sections[heading]
    for heading, shape in keyed.items():
        section = sections.setdefault(heading, f"\n{heading}\n| key | type | meaning |\n")
        sections[heading] = _with_rows("| key | type | meaning |", _rows_of_keys(shape, definitions), section)
    kinds = "## Kinds of findings\n"
    sections[kinds] = _with_rows("| kind | title | looked for in | part | loss |", _rows_of_findings(), sections[kinds])
    return first + "".join(sections.values())


def _with_rows(header: str, rows: Iterable[str], section: str) -> str:
    """A section with these rows below the header of its table."""
    before, _, rest = section.partition(f"{header}\n")
    behind = re.sub(r"\A(\|.*\n)*", "", rest)
    return "\n".join([f"{before}{header}", f"|{'---|' * (header.count('|') - 1)}", *rows, behind])


def _rows_of_keys(shape: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    for key, kind in shape["properties"].items():
        optional = "" if key in shape["required"] else ", optional"
        meaning = kind.get("description", "").replace("|", r"\|")
        yield f"| `{key}` | {_words_of(kind, definitions)}{optional} | {meaning} |"


def _words_of(kind: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A type of the schema as the page writes it."""
    if "anyOf" in kind:
        return " or ".join(_words_of(each, definitions) for each in kind["anyOf"])
    if kind.get("type") == "array":
        return f"list of {_words_of(kind['items'], definitions)}"
    if isinstance(values := kind.get("additionalProperties"), dict):
        return f"object of {_words_of(values, definitions)}"
    name = kind.get("$ref", "").removeprefix("#/$defs/")
    if "enum" in kind or "enum" in definitions.get(name, {}):
        return "string"
    return f"`{name}`" if name else str(kind["type"])


def _rows_of_findings() -> Iterator[str]:
    for detector in own_detectors():
        jobs = ", ".join(words for kind, words in JOBS.items() if detector in own_detectors(kind)) or "all"
        part = "" if detector.part is None else f"`{detector.part}`"
        yield f"| `{detector.kind}` | {detector.title} | {jobs} | {part} | `{detector.loss}` |"


if __name__ == "__main__":
    REPORT.write_text(json.dumps(report_schema(), indent=2) + "\n", encoding="utf-8")
    SCHEMA_PAGE.write_text(schema_page(SCHEMA_PAGE.read_text("utf-8")), encoding="utf-8")
    for name in BEGINNINGS:
        (DOCS / name).write_text(with_table(name, (DOCS / name).read_text("utf-8")), encoding="utf-8")
    SHIPPED.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
