"""The JSON Schema of what commands print with --json, other than reports: `python -m tests.outputs` writes it.

In: the types that commands print. Out: tracekit/commands/outputs.schema.json, with a definition for each command.
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

SHIPPED = Path(str(files("tracekit.commands").joinpath("outputs.schema.json")))


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


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
