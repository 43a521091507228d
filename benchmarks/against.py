"""This tracekit against another one, such as that of an earlier commit, and against reading and sorting alone.

The commands run in turn, so that whatever else the machine does slows all of them: ratios hold where seconds do not.
TRACEKIT_BEFORE is the `tracekit` of the other environment.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.core import REFERENCE, simulate
from benchmarks.measure import Run, measure, table, tracekit

SAMPLE = Path(__file__).parents[1] / "sample_traces" / "healthy.parquet"
#: Rounds of large traces and of small ones.
FEW, MANY = 2, 5
_BARE = "import sys, polars; polars.read_parquet(sys.argv[1]).sort('step', 'dp_rank', 'pp_rank', 'kind', 'seq')"
_GRAPHS = "import sys, pathlib, benchmarks.graphs as b; b.regular_and_irregular(pathlib.Path(sys.argv[1]))"
_HEADER = ["whatif of", "rounds", "cpu s", "cpu s before", "ratio", "bare cpu s", "ratio", "peak MB", "before"]


def section() -> str | None:
    """The Markdown of this section; None where no other tracekit is named."""
    before = os.environ.get("TRACEKIT_BEFORE")
    if not before:
        print("against: name the tracekit to compare with in TRACEKIT_BEFORE")
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own: memory of this one would count as that of those it starts.
        measure(sys.executable, "-c", _GRAPHS, name, runs=1, warm_up=0)
        regular, irregular = folder / "regular.parquet", folder / "irregular.parquet"
        rows = [_row(before, "`sample_traces/healthy.parquet`", [str(SAMPLE)], MANY)]
        rows.append(_row(before, "dp 32 x pp 4, regular", [str(regular), "--json"], FEW))
        rows.append(_row(before, "the same with collections in random places", [str(irregular), "--json"], FEW))
        for workers in (512, 8192):
            path, _ = simulate(folder, workers)
            rows.append(_row(before, f"{workers:,} workers", [str(path), "--json"], FEW, bare=str(path)))
        if REFERENCE.is_dir():
            layout = ["--layout", str(REFERENCE / "meta-AR.yaml"), "--json"]
            rows.append(_row(before, "published trace AR", [str(REFERENCE / "trace-AR.parquet"), *layout], MANY))
    intro = (
        "Processor seconds, user and system, of whole processes that ran in turn: this one, the one before, and\n"
        "polars that only reads and sorts the file; other work on the same cores slows all of them alike. Ratios are\n"
        "medians over the rounds."
    )
    return f"## Against the version before\n\n{intro}\n\n{table(_HEADER, rows)}"


def _row(before: str, what: str, arguments: Sequence[str], rounds: int, *, bare: str | None = None) -> list[str]:
    commands = {"now": tracekit("whatif", *arguments), "before": (before, "whatif", *arguments)}
    if bare is not None:
        commands["bare"] = (sys.executable, "-c", _BARE, bare)
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(measure(*command, runs=1, warm_up=0))
    cells = [what, str(rounds), _cpu(runs["now"])]
    for other in ("before", "bare"):
        shown = [_cpu(runs[other]), f"{_ratio(runs['now'], runs[other]):.2f}"] if other in runs else ["", ""]
        cells += shown
    return [*cells, *(f"{max(run.peak_mb for run in runs[name]):.0f}" for name in ("now", "before"))]


def _cpu(runs: Sequence[Run]) -> str:
    return f"{statistics.median(run.cpu_s for run in runs):.2f}"


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    return statistics.median(run.cpu_s / other.cpu_s for run, other in zip(runs, others, strict=True))
