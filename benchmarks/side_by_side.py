"""The same trainings under tracekit, TraceML and nvidia-resiliency-ext: who is named, for what, at which cost.

python -m benchmarks side-by-side    needs torch, traceml-ai and nvidia-resiliency-ext beside tracekit; prints only

A row is one loop (`side_by_side_train.py`) with rank 1 slow in one part, run once under each tool.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.frameworks import FITTING, PARTS, blamed
from benchmarks.measure import table

SCRIPT = Path(__file__).with_name("side_by_side_train.py")
SLOW_MS = 12.0
#: Width, layers, batch, steps of warm-up and steps of the judged loop, and of loops with steps of about so many ms.
JUDGED = (512, 4, 64, 5, 60)
COSTS = {5: (128, 4, 64, 50, 400), 20: (512, 4, 64, 20, 150), 200: (1024, 8, 160, 5, 20)}
PAIRS = 3
TIMEOUT_S = 300
_PARTS_OF_TRACEML = {"data": "input", "host": "residual"}


def main(arguments: Sequence[str]) -> None:
    """Print both tables."""
    del arguments
    print(" ".join(f"{name} {version(name)}" for name in ("torch", "traceml-ai", "nvidia-resiliency-ext")))
    rows = []
    for part in (part for part in PARTS if part != "pause"):  # which needs a process beside the loop
        rows.append([part or "healthy", *(judge(part).cell(part) for judge in TOOLS.values())])
        print(rows[-1], flush=True)
    print(table(["rank 1 slow in", *TOOLS], rows))
    print(table(["step", "without", *(f"{name} adds" for name in TOOLS)], [_costs(ms) for ms in COSTS]))


def _train(tool: str, sizes: Sequence[int], part: str, launch: Sequence[str], cwd: str) -> dict[str, Any]:
    """The line that the loop prints, launched by these words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW_IN": part, "SLOW_MS": str(SLOW_MS), "TOOL": tool}
    command = [*launch, *map(str, sizes)]
    ran = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"step_ms"')]
    return dict(json.loads(lines[-1]))


def _torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]


def _tracekit(sizes: Sequence[int], part: str, folder: str) -> dict[str, Any]:
    collect = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--out", "trace.parquet", "--"]
    return _train("", sizes, part, [*collect, *_torchrun(str(SCRIPT))], folder)


def _traceml(sizes: Sequence[int], part: str, folder: str) -> dict[str, Any]:
    run = [str(Path(sys.executable).with_name("traceml")), "run", str(SCRIPT), "--nproc-per-node", "2"]
    return _train("traceml", sizes, part, [*run, "--logs-dir", "logs", "--run-name", "run", "--args"], folder)


def _nvrx(sizes: Sequence[int], part: str, folder: str) -> dict[str, Any]:
    return _train("nvrx", sizes, part, _torchrun(str(SCRIPT)), folder)


def _plain(sizes: Sequence[int], part: str, folder: str) -> dict[str, Any]:
    return _train("", sizes, part, _torchrun(str(SCRIPT)), folder)


@dataclass(frozen=True)
class Judgement:
    """What a tool says, empty if it names no rank; whether it names rank 1 alone, and a fitting reason."""

    words: str
    alone: bool
    fits: bool

    def cell(self, part: str) -> str:
        """The judgement on a run with rank 1 slow in `part` (empty: healthy), in a cell of the table."""
        if not self.words:
            return "nobody" if part else "right: nobody"
        if not part:
            return f"wrong: {self.words}"
        rank = "rank" if self.alone else "not the rank alone"
        return f"{rank}, {'reason' if self.fits else 'another reason'} ({self.words})"


def _judge_tracekit(part: str) -> Judgement:
    with tempfile.TemporaryDirectory() as folder:
        _tracekit(JUDGED, part, folder)
        asked = [sys.executable, "-m", "tracekit", "whatif", "trace.parquet", "--json"]
        report = json.loads(subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout)
    placed = [(cause["kind"], ranks) for cause in report["causes"] if (ranks := blamed(cause, report["job"]["layout"]))]
    alone = bool(placed) and all(ranks == {1} for _, ranks in placed)
    fits = bool(placed) and placed[0][0] in FITTING.get(part, frozenset())
    return Judgement(", ".join(f"{kind} of rank {min(ranks)}" for kind, ranks in placed), alone, fits)


def _judge_traceml(part: str) -> Judgement:
    with tempfile.TemporaryDirectory() as folder:
        _traceml(JUDGED, part, folder)
        summary = json.loads(Path(folder, "logs", "run", "final_summary.json").read_text())["primary_diagnosis"]
    evidence = summary.get("evidence") or {}
    rank, phase = (evidence.get("worst") or {}).get("rank"), str(evidence.get("phase") or "")
    named = summary["kind"].endswith("STRAGGLER") and rank is not None
    fits = _PARTS_OF_TRACEML.get(part, part) in f"{phase} {summary['kind']}".lower()
    words = f"{summary['status'].lower()}: {summary['summary']}" if named else ""
    return Judgement(words, rank == 1, fits)


def _judge_nvrx(part: str) -> Judgement:
    with tempfile.TemporaryDirectory() as folder:
        named = _nvrx(JUDGED, part, folder)["named"]
    ranks = {name.rsplit(" ", 1)[1] for name in named}
    return Judgement(", ".join(named), ranks == {"1"}, any(name.startswith(part) for name in named))


TOOLS: dict[str, Callable[[str], Judgement]] = {
    "tracekit": _judge_tracekit,
    "TraceML": _judge_traceml,
    "nvidia-resiliency-ext": _judge_nvrx,
}


def _costs(length_ms: int) -> list[str]:
    """What each tool adds to a step, median of pairs in alternation with bare runs."""
    added: dict[str, list[float]] = {name: [] for name in TOOLS}
    bare = []
    for _ in range(PAIRS):
        for name, run in zip(TOOLS, (_tracekit, _traceml, _nvrx), strict=True):
            steps = []
            for train in (_plain, run):
                with tempfile.TemporaryDirectory() as folder:
                    steps.append(train(COSTS[length_ms], "", folder)["step_ms"])
            bare.append(steps[0])
            added[name].append(steps[1] - steps[0])
    return [
        f"{length_ms} ms",
        f"{statistics.median(bare):.2f} ms",
        *(
            f"{statistics.median(each):+.2f} ms ({', '.join(f'{one:+.2f}' for one in sorted(each))})"
            for each in added.values()
        ),
    ]
