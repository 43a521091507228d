"""What is generated from the code: `python -m tests.outputs` writes it.

In: the types that commands print, and what sources lack. Out: tracekit/commands/outputs.schema.json, with a definition
for each command; tracekit/report/report.schema.json; the table of docs/limits.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from tracekit.analysis.attribution.gate import Gate
from tracekit.analysis.rl.account import RlAccount
from tracekit.bill.bill import BillOutput
from tracekit.collectors.launch.collect import CollectSummary
from tracekit.commands.culprits import CulpritsOutput
from tracekit.commands.doctor import DoctorOutput
from tracekit.commands.experts import ExpertsOutput
from tracekit.commands.hang import HangOutput
from tracekit.fleet.comparison import FleetComparison
from tracekit.fleet.figures import FleetFigures
from tracekit.job.history import History
from tracekit.report.applied import ComparedOutput
from tracekit.report.report import json_schema as report_schema
from tracekit.report.verdict import NEEDS
from tracekit.trace.facts import SOURCES, Fact

SHIPPED = Path(str(files("tracekit.commands").joinpath("outputs.schema.json")))
REPORT = Path(str(files("tracekit.report").joinpath("report.schema.json")))
LIMITS = Path(__file__).parents[1] / "docs" / "limits.md"
#: Around the generated table of that page.
BEGIN, END = "<!-- what sources lack -->", "<!-- end -->"


class RlOutput(RlAccount, frozen=True, kw_only=True):
    """What `tracekit rl --json` prints."""

    headline: str


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
    "hang": HangOutput,
    "rl": RlOutput,
    "sql": list[dict[str, Any]],
}


def json_schema() -> dict[str, Any]:
    """The schema: `#/$defs/COMMAND` is what that command prints."""
    kinds, definitions = msgspec.json.schema_components(
        OUTPUTS.values(), schema_hook=_rows, ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": definitions | dict(zip(OUTPUTS, kinds, strict=True)),
    }


def _rows(kind: type) -> dict[str, Any]:
    if kind is pl.DataFrame:
        return {"type": "array", "items": {"type": "object"}}
    raise NotImplementedError(kind)


def limits() -> str:
    """The table of docs/limits.md: what each kind of source cannot show."""
    forbidden = {fact: [str(kind) for kind, needed in NEEDS.items() if needed is fact] for fact in Fact}
    rows = ["| source | cannot show | so there is no verdict | instead |", "|---|---|---|---|"]
    for source in SOURCES:
        rows += [
            f"| {source.title} | {lack.fact}: {lack.why} | {', '.join(forbidden[lack.fact])} | {lack.instead} |"
            for lack in source.lacks
        ] or [f"| {source.title} | | | |"]
    return "\n".join(rows)


def with_limits(page: str) -> str:
    """The page docs/limits.md with its table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{limits()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    REPORT.write_text(json.dumps(report_schema(), indent=2) + "\n", encoding="utf-8")
    LIMITS.write_text(with_limits(LIMITS.read_text("utf-8")), encoding="utf-8")
    SHIPPED.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
