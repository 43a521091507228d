"""Hangs: dumps of 4,096 simulated ranks, and small jobs of every fault and layout."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.measure import measure, table, tracekit
from judges.hangsim import Fault, HangJob, draw_faults, dumps, run, write

LARGE = (8, 8, 64)
SMALL = ((2, 2, 2), (4, 2, 2), (1, 4, 2), (2, 4, 2), (2, 2, 4), (8, 2, 1))
SEEDS = 20
QUICK = {"LARGE": (2, 2, 4), "SEEDS": 2}


def section() -> str:
    """The Markdown of this section."""
    return "\n\n".join(["## Hangs", _large(), _small()])


def _large() -> str:
    job, chance, rows = HangJob(*LARGE, microbatches=4), random.Random(1), []
    for kind in ("host", "gone", "gpu-error"):
        for count in (1, 3):
            faults = draw_faults(job, kind, count, chance)
            outcome = run(job, faults)
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder), dumps(job, faults, outcome, cut=30, timing=kind == "gpu-sleep"))
                command = tracekit("hang", folder, "--json")
                cost = measure(*command, runs=1, warm_up=0, code=4)  # a hang was found
                report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
            truth = sorted(fault.rank for fault in outcome.struck)
            named = [one["rank"] for one in report["culprits"]]
            rows.append([kind, str(count), str(truth), str(named), f"{cost.wall_s:.1f}", f"{cost.peak_mb:.0f}"])
    head = ["fault", "drawn", "broken", "named", "s", "MB"]
    sizes = f"tp {job.tp}, pp {job.pp}, dp {job.dp}"
    intro = f"`tracekit hang` on dumps of {job.world:,} ranks ({sizes}), groups cut at 30 members."
    return f"{intro}\n\n{table(head, rows)}"


def _small() -> str:
    rows = []
    for kind in ("host", "gone", "gpu-error", "gpu-sleep", "size", "skip", "partner"):
        counts: Counter[str] = Counter()
        for seed in range(SEEDS):
            counts[_judge(kind, seed)] += 1
        rows.append([kind, *(str(counts[name]) for name in ("exact", "cannot tell", "missed", "wrong", "no hang"))])
    intro = (
        f"{SEEDS} drawn jobs per fault, 8 to 16 ranks, one or two broken; with and without group status, start times"
        " and cut groups."
    )
    return f"{intro}\n\n{table(['fault', 'exact', 'cannot tell', 'missed', 'wrong', 'no hang'], rows)}"


def _judge(kind: str, seed: int) -> str:
    from tracekit.analysis.hang.hang_culprits import find_hang
    from tracekit.collectors.importers.flight_recorder import read_flight_records

    chance = random.Random(f"{kind} {seed}")
    job = HangJob(*chance.choice(SMALL))
    faults: list[Fault] = draw_faults(job, kind, chance.choice([1, 1, 2]), chance)
    outcome = run(job, faults)
    last_gone = kind == "gone" and any(fault.rank >= job.world - 2 for fault in faults)
    content = dumps(
        job,
        faults,
        outcome,
        version=chance.choice(["2.1", "2.4", "2.9", "2.10"]),
        status=chance.random() < 0.7,
        timing=chance.random() < 0.5,
        cut=None if last_gone else chance.choice([None, 3]),
    )
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), content, as_json=chance.random() < 0.3)
        report = find_hang(read_flight_records(Path(folder)))
    if not outcome.hangs():
        return "no hang"
    broken = {fault.rank for fault in faults}
    truth, named = {fault.rank for fault in outcome.struck}, {one.rank for one in report.culprits}
    open_ranks = {rank for one in report.undecided for rank in one.ranks}
    if named - broken:
        return "wrong"
    if truth <= named:
        return "exact"
    return "cannot tell" if truth <= named | open_ranks else "missed"
