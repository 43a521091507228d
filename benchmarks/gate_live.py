"""How often `tracekit gate` is wrong on real runs: equal ones, and ones in which one phase became slower.

python -m benchmarks gate-live record FOLDER ROUNDS    records rounds of three equal runs and a slower one of each kind
python -m benchmarks gate-live judge FOLDER            judges the runs in FOLDER, and prints tables

The job is `tests/collectors/scripts/dp2_pp2.py` on 4 ranks. Whatever else the machine does meanwhile is the noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import table, tracekit
from tracekit.analysis.attribution import gate
from tracekit.analysis.attribution.by_label import SpentPart, StepsSpent
from tracekit.analysis.attribution.gate import GATE, Gate, Outcome, Runs
from tracekit.sources.load import load

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "collectors" / "scripts" / "dp2_pp2.py"
FORWARD_MS, STEPS = 5.0, 60
#: The backward of each kind of run, relative to that of the baselines; the kinds of a round.
FACTORS = {"equal": 1.0, "slower-5": 1.05, "slower-25": 1.25, "slower-100": 2.0}
ROUND = ("equal", "equal", "equal", *tuple(FACTORS)[1:])
LIMIT, VERDICTS, LEARNT_FROM = 0.03, 200, 10
#: What the slower runs spend more on.
SLOWED = "backward-compute"
#: How many baselines, what is judged, and whether the noise is learnt from others and given.
SETTINGS: tuple[tuple[int, tuple[str, ...], bool], ...] = (
    (1, (), False),
    (1, (), True),
    (5, (), False),
    (10, (), False),
    (10, (SLOWED,), False),
)
SIDE = Runs("", STEPS, 1)


def record(folder: Path, rounds: int) -> None:
    """Record `rounds` rounds into `folder`, each in an order of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.glob("*.parquet")))
    for number in range(rounds):
        for place, kind in enumerate(np.random.default_rng(first + number).permutation(ROUND)):
            backward_ms = 2 * FORWARD_MS * FACTORS[kind]
            settings = {"STEPS": STEPS, "DEVICE_MS": FORWARD_MS, "BACKWARD_MS": backward_ms, "OMP_NUM_THREADS": 1}
            out = folder / f"{first + number * len(ROUND) + place:04}-{kind}.parquet"
            torchrun = str(Path(sys.executable).with_name("torchrun"))
            command = [*tracekit("collect", "--out", str(out)), "--", torchrun, "--nproc-per-node", "4", str(SCRIPT)]
            environment = os.environ | {name: str(value) for name, value in settings.items()}
            done = subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, text=True)
            print(out.name, done.returncode, flush=True)


def judge(folder: Path) -> str:
    """A table of how often each kind of run passes, for one baseline and for several."""
    sides = {
        kind: [StepsSpent(load(path).replay) for path in sorted(folder.glob(f"*-{kind}.parquet"))] for kind in FACTORS
    }
    equal, rows = sides["equal"], []
    for kind, runs in sides.items():
        for baselines, parts, learnt in SETTINGS:
            drawn = np.random.default_rng(0)
            outcomes: Counter[str] = Counter()
            for _ in range(VERDICTS if kind == "equal" else VERDICTS // 2):
                run = runs[int(drawn.integers(len(runs)))]
                others = [equal[at] for at in drawn.permutation(len(equal)) if equal[at] is not run]
                noise = _noise(others[baselines:][:LEARNT_FROM]) if learnt else None
                judged = gate.judge(others[:baselines], run, LIMIT, parts, noise)
                outcomes[Gate.of(SIDE, SIDE, judged, limit=LIMIT, noise=noise, notes=()).outcome] += 1
            what = f"{baselines}, and the noise of {LEARNT_FROM} others" if learnt else str(baselines)
            counts = [str(outcomes[outcome]) for outcome in Outcome]
            rows.append([f"{FACTORS[kind] - 1:+.0%}", what, ", ".join(parts) or "all", *counts])
    heads = ["backward", "baselines", "parts", *Outcome]
    counts = ", ".join(f"{len(runs)} with {FACTORS[kind] - 1:+.0%}" for kind, runs in sides.items())
    spread = ", ".join(f"{name} {share:.1%}" for name, share in _spread(equal).items())
    words = f"Runs: {counts}; {STEPS} steps each. Means of equal runs scatter (standard deviation): {spread}."
    return f"{words}\n\n{table(heads, rows)}"


def _times(spent: StepsSpent) -> dict[str, float]:
    """Mean seconds a step of the step and of the part that is slowed."""
    return {"step": float(spent.step_s.mean()), SLOWED: float(spent.parts[SpentPart("kind", SLOWED)].mean())}


def _spread(runs: Sequence[StepsSpent]) -> dict[str, float]:
    """Standard deviation of the means of runs, as a share of their mean."""
    each = [_times(run) for run in runs]
    columns = {name: np.array([times[name] for times in each]) for name in each[0]}
    return {name: float(values.std(ddof=1) / values.mean()) for name, values in columns.items()}


def _noise(runs: Sequence[StepsSpent]) -> float:
    """How far identical runs differ, as a gate on the last of them shows: the largest margin of any figure."""
    rows = gate.judge(runs[:-1], runs[-1], LIMIT)
    return max((row.margin_s or 0.0) / max(row.before_s, GATE.smallest_whole * rows[0].before_s) for row in rows)


def main(arguments: list[str]) -> None:
    """Record or judge."""
    what, folder, *rounds = arguments
    if what == "record":
        record(Path(folder), int(rounds[0]))
    else:
        print(judge(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
