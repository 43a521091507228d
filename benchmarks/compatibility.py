"""Which Python, torch and frameworks were tried, into docs/limits.md; rows of others stay.

python -m benchmarks compatibility    run it with the Python of each environment that is to be tried

Each row is a real run of two ranks under `tracekit collect`, or a simulated job; one rank is made slow, and the report
must be trusted and name that rank.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from benchmarks import frameworks
from benchmarks.measure import table, tracekit

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"
#: Rows of benchmarks/frameworks.py; each library in the way in which most people start it.
ROWS = ("ddp", "fsdp2", "pipeline", "accelerate", "hf_trainer", "lightning", "deepspeed_zero1")
#: How much slower rank 1 is in its forward, ms a step: far more than those of a machine with other work vary.
SLOW_MS = 100.0
COLUMNS = ["Python", "torch", "tried with", "ops recorded", "slow rank named", "tracekit", "on"]


def main(arguments: list[str]) -> None:
    """Add or replace the rows of this environment."""
    if arguments:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        for row in _rows(Path(folder)):
            print(" | ".join(row), flush=True)
            of = {tuple(one[:3]): one for one in (*_rows_of(PAGE), row)}
            PAGE.write_text(_with_rows(PAGE.read_text(), [of[key] for key in sorted(of)]))


def _rows(folder: Path) -> Iterator[list[str]]:
    stamp = [metadata.version("tracekit-analysis"), datetime.datetime.now(datetime.UTC).date().isoformat()]
    python = platform.python_version()
    yield [python, "-", "a simulated job", *_simulated(folder), *stamp]
    if find_spec("torch") is None:
        return
    torch = metadata.version("torch")
    present, _ = frameworks.present(ROWS)
    for row, version in present.items():
        library = row if version.startswith("torch ") else version
        tried = frameworks.run(row, "forward", folder, slow_ms=SLOW_MS)
        named = "yes" if tried.right else tried.problem or f"no: {tried.first}"
        yield [python, torch, library, f"{tried.ops:,}", named, *stamp]


def _simulated(folder: Path) -> list[str]:
    """How many ops a simulated job has, and whether the report names its slow worker."""
    trace = folder / "job.parquet"
    slow = ("--dp", "2", "--pp", "2", "--steps", "6", "--cause", "slow-worker:dp=1,pp=1,factor=2")
    subprocess.run(tracekit("synth", "--out", str(trace), *slow), check=True, capture_output=True)
    printed = subprocess.run(tracekit("whatif", str(trace), "--json"), check=True, capture_output=True).stdout
    report = json.loads(printed)
    workers = report["causes"][0]["where"]["workers"] if report["causes"] else []
    named = [(worker["dp_rank"], worker["pp_rank"]) for worker in workers]
    return [f"{report['job']['ops']:,}", "yes" if named == [(1, 1)] else f"no: {named}"]


def _with_rows(page: str, rows: list[list[str]]) -> str:
    """The page with these rows in its last table."""
    before = page.rpartition(f"| {COLUMNS[0]} | {COLUMNS[1]} |")[0]
    return f"{before}{table(COLUMNS, rows)}\n"


def _rows_of(page: Path) -> Iterator[list[str]]:
    """The rows that a page has."""
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[0][:1].isdigit():
            yield cells
