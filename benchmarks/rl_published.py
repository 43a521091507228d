"""Compare `tracekit rl` with published figures of runs of verl: python -m benchmarks rl-published FILE

FILE: JSON with `rows` of `name`, `timing_s` (means of verl's timers, seconds), `flagged` (whether the phases contradict
the step) and, for a run that was also done with one step of staleness, `what_if` and its step, `measured_s`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import table, tracekit


def main(arguments: list[str]) -> None:
    rows = json.loads(Path(arguments[0]).read_text())["rows"]
    reports = [_report(row) for row in rows]
    print(table(["run", "step", "phases beyond it", "flagged", "expected"], list(map(_identity, rows, reports))))
    prices = [_price(row, report) for row, report in zip(rows, reports, strict=True) if "measured_s" in row]
    print(f"\n{table(['run', 'what if', 'price', 'measured', 'error'], prices)}")
    equal = sum(bool(report["flagged"]) == row["flagged"] for row, report in zip(rows, reports, strict=True))
    sys.exit(f"{equal} of {len(rows)} flagged as expected" if equal < len(rows) else 0)


def _report(row: dict[str, Any]) -> dict[str, Any]:
    line = json.dumps({"step": 1, "data": {f"timing_s/{name}": value for name, value in row["timing_s"].items()}})
    asked = ("--what-if", row["what_if"]) if "what_if" in row else ()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(f"{line}\n")
        file.flush()
        ran = subprocess.run(tracekit("rl", file.name, *asked, "--json"), capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def _identity(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    beyond = sum(phase["seconds"] for phase in report["phases"]) / report["step_s"] - 1
    flags = ["yes" if flagged else "no" for flagged in (report["flagged"], row["flagged"])]
    return [row["name"], f"{report['step_s']:.2f} s", f"{beyond:+.1%}", *flags]


def _price(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    (asked,) = report["what_if"]
    error = asked["step_s"] / row["measured_s"] - 1
    return [row["name"], asked["scenario"], f"{asked['step_s']:.1f} s", f"{row['measured_s']:.1f} s", f"{error:+.1%}"]
