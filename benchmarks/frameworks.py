"""Real training code under `tracekit collect`: healthy, and with rank 1 slowed in each part in turn.

Each run is one process group of two ranks (`frameworks_train.py`). A diagnosis is right if the trace is trusted and, on
a healthy run, no rank is blamed; on a slowed run, the first cause names rank 1 for a fitting reason and no cause names
another rank. Needs two quiet cores and the extra `frameworks`. Rows whose framework is not installed are listed.

python -m benchmarks frameworks --rows ddp,fsdp2 --parts ,gc    prints chosen runs; the empty part is the healthy run
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import table

SCRIPT = Path(__file__).with_name("frameworks_train.py")
#: Row -> the distribution that it needs in addition to torch.
ROWS = {
    **dict.fromkeys(
        (
            *("ddp", "accumulation", "activation_checkpointing", "grad_scaler", "compiled", "saving", "fsdp1", "fsdp2"),
            *("tensor_parallel", "sequence_parallel", "context_parallel", "expert_parallel"),
            *("pipeline", "gpipe", "interleaved", "zero_bubble"),
        ),
        "torch",
    ),
    "accelerate": "accelerate",
    "hf_trainer": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
    **dict.fromkeys(("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"), "deepspeed"),
}
#: Kinds that name a slow compute. A pipeline stage with one worker has no peer, so it may count as imbalanced.
_COMPUTES = frozenset({"bad-worker", "slow-rank-of-worker", "stage-imbalance"})
#: Part that is slow -> kinds of causes that name it.
FITTING: Mapping[str, frozenset[str]] = {
    "forward": _COMPUTES,
    "backward": _COMPUTES,
    "optimizer": frozenset({"slow-optimizer"}),
    "data": frozenset({"late-data-loading"}),
    "host": frozenset({"slow-host-code"}),
    "gc": frozenset({"python-gc"}),
    "pause": frozenset({"process-pauses"}),
}
#: Lightning runs the step's forward in the optimizer's closure, so that slowness before it is host code.
FITTING_IN = {("lightning", "optimizer"): FITTING["host"]}
PARTS = ("", *FITTING)
SLOW_MS = 12.0
QUICK = {"ROWS": {"ddp": "torch"}, "PARTS": ("",)}
TIMEOUT_S = 300


@dataclass(frozen=True)
class Trial:
    """The judged diagnosis of one run. `problem`: why there is none, else None. `ops`: how many were recorded.

    `first`: the kind of the first cause, of ranks or of all.
    """

    row: str
    part: str
    right: bool
    slowdown: float
    discrepancy: float
    trusted: bool
    saved_s: float
    causes: tuple[str, ...]
    problem: str | None = None
    ops: int = 0
    first: str = ""


def blamed(cause: Mapping[str, Any], layout: Mapping[str, int]) -> frozenset[int]:
    """Ranks that a cause names, in a job with one axis; empty if it names all of them."""
    where = cause.get("where") or {}
    axis = "pp_rank" if layout.get("pp", 1) > 1 else "dp_rank"
    ranks = {worker.get("rank", worker[axis]) for worker in where.get("workers", ())}
    return frozenset(ranks | set(where.get(f"{axis}s", ())) | set(where.get("ranks", ())))


def judge(row: str, part: str, report: Mapping[str, Any]) -> Trial:
    """Judge the report of a run with rank 1 slow in `part` (empty: healthy)."""
    causes = report.get("causes", [])
    placed = [(cause, ranks) for cause in causes if (ranks := blamed(cause, report["job"]["layout"]))]
    trusted = bool(report["trust"]["trustworthy"])
    if part:
        fits = bool(placed) and placed[0][0]["kind"] in FITTING_IN.get((row, part), FITTING[part])
        right = trusted and fits and all(ranks == {1} for _, ranks in placed)
    else:
        right = trusted and not placed
    names = tuple(f"{cause['kind']}{sorted(ranks)}" for cause, ranks in placed[:3])
    saved_s = float(placed[0][0].get("saved_s") or 0.0) if placed else 0.0
    discrepancy = float(report["trust"]["discrepancy"])
    ops = report["job"].get("ops", 0)
    first = causes[0]["kind"] if causes else "nothing"
    return Trial(row, part, right, float(report["slowdown"]), discrepancy, trusted, saved_s, names, None, ops, first)


def run(row: str, part: str, folder: Path, *, ranks: int = 2, slow_ms: float = SLOW_MS) -> Trial:
    """Train under `tracekit collect` and judge the diagnosis of `whatif`."""
    out = folder / f"{row}-{part or 'healthy'}.parquet"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW_IN": part, "SLOW_MS": str(slow_ms), "OUT": str(folder)}
    train = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(SCRIPT),
        row,
    ]
    collect = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--out", str(out), "--", *train]
    nothing = Trial(row, part, False, 0.0, 0.0, False, 0.0, ())
    try:
        ran = subprocess.run(collect, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return replace(nothing, problem=f"no end within {TIMEOUT_S} s")
    if not out.exists():
        return replace(nothing, problem=(ran.stderr.strip().splitlines() or ["no output"])[-1])
    asked = [sys.executable, "-m", "tracekit", "whatif", str(out), "--json"]
    return judge(row, part, json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout))


def present(rows: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Rows that can run here with the version of their distribution, and rows that cannot."""
    versions = {row: f"{ROWS[row]} {metadata.version(ROWS[row])}" for row in rows if find_spec(ROWS[row]) is not None}
    return versions, [row for row in rows if row not in versions]


def section() -> str:
    """The Markdown of this section."""
    return _section(tuple(ROWS), PARTS, SLOW_MS)


def _section(rows: Sequence[str], parts: Sequence[str], slow_ms: float) -> str:
    versions, missing = present(rows)
    outcomes: dict[tuple[str, str], Trial] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in versions:
            for part in parts:
                outcomes[row, part] = outcome = run(row, part, Path(folder), slow_ms=slow_ms)
                print(f"{row:16s} {part or 'healthy':10s} {cell(outcome)}", flush=True)
    body = [[row, versions[row], *(cell(outcomes[row, part]) for part in parts)] for row in versions]
    right = sum(outcome.right for outcome in outcomes.values())
    lines = [
        "## Frameworks",
        f"Two ranks on gloo, rank 1 {slow_ms:.0f} ms a step slower in one part. {right} of {len(outcomes)} right.",
        table(["row", "version", *(part or "healthy" for part in parts)], body),
    ]
    if missing:
        lines.append(f"Not installed: {', '.join(missing)} (extra `frameworks`).")
    return "\n\n".join(lines)


def cell(outcome: Trial) -> str:
    """An outcome in a few words."""
    if outcome.problem is not None:
        return f"no report: {outcome.problem:.60}"
    words = "right" if outcome.right else "wrong"
    trust = "" if outcome.trusted else ", untrusted"
    causes = ", ".join(outcome.causes) or "no rank named"
    return f"{words}: S {outcome.slowdown:.2f}, {outcome.discrepancy:+.1%}{trust}; {causes}"


def main(arguments: Sequence[str]) -> None:
    """Print chosen runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks frameworks")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts in which rank 1 is slow; empty: healthy")
    parser.add_argument("--ms", type=float, default=SLOW_MS, help="how much slower rank 1 is, ms a step")
    chosen = parser.parse_args(arguments)
    print(_section(chosen.rows.split(","), chosen.parts.split(","), chosen.ms))
