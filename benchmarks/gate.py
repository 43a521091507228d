"""How often `tracekit gate` is wrong: pairs of identical runs, and pairs in which one phase became slower.

In: nothing. Out: how many pairs pass, fail and cannot be told, for noise of several sizes and memories. The runs are
simulated without tracekit: each rank and step computes, meets the others in an all-reduce, and steps the optimizer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl

from benchmarks.measure import table
from tracekit.analysis.attribution.by_label import StepsSpent
from tracekit.analysis.attribution.gate import Gate, Outcome, Runs, judge
from tracekit.analysis.job.gate_jobs import gate
from tracekit.analysis.job.graph import GraphJob
from tracekit.trace.model import ProcessGroup
from tracekit.trace.op import OpTrace

#: Seconds of each kind of op, in the order in which a rank runs them.
KINDS = {"forward": 0.030, "backward": 0.060, "all-reduce": 0.010, "optimizer": 0.005}
RANKS, PAIRS = 4, 200
#: Number of steps, noise of an op, correlation of a step with the one before.
NOISES = (
    (24, 0.01, 0.0),
    (24, 0.02, 0.0),
    (24, 0.02, 0.6),
    (100, 0.02, 0.0),
    (100, 0.02, 0.6),
    (100, 0.05, 0.0),
    (100, 0.05, 0.6),
    (300, 0.05, 0.6),
)
#: Of runs beside several baselines: their number, steps and noise of an op, how far runs are apart.
RUNS = 60
SEVERAL = ((5, 100, 0.02, 0.0025), (10, 100, 0.02, 0.0025), (10, 100, 0.02, 0.01))
QUICK = {"PAIRS": 2, "RUNS": 6, "NOISES": NOISES[:1], "SEVERAL": SEVERAL[:1]}


def simulated(
    seed: int, *, steps: int, noise: float, memory: float, slower: Mapping[str, float] | None = None
) -> OpTrace:
    """A run. `noise`: standard deviation of each op, as a share of it, half of it shared by the ranks of a step.
    `memory`: the correlation of a step with the one before (AR(1)). `slower`: factors of kinds.
    """
    drawn = np.random.default_rng(seed).normal(size=(steps + 100, RANKS + 1, len(KINDS)))
    for step in range(1, len(drawn)):
        drawn[step] = memory * drawn[step - 1] + np.sqrt(1 - memory**2) * drawn[step]
    factor = 1 + noise * np.sqrt(0.5) * (drawn[100:, :RANKS] + drawn[100:, RANKS:])
    mean = np.array([seconds * (slower or {}).get(kind, 1.0) for kind, seconds in KINDS.items()])
    took = np.maximum(factor, 0.1) * mean  # [steps, ranks, kinds]
    start = np.concatenate([np.zeros_like(took[..., :1]), took.cumsum(axis=2)[..., :-1]], axis=2)
    transfer = took[:, :1, 2]  # begins once the last rank is there, and takes as long for all
    last = start[..., 2].max(axis=1, keepdims=True) + transfer
    took[..., 2], start[..., 3] = last - start[..., 2], last
    step, rank, kind = (places.ravel() for places in np.indices(took.shape))
    rows = np.arange(step.size)
    ops = pl.DataFrame(
        {
            "step": step,
            "rank": rank,
            "kind": [list(KINDS)[at] for at in kind],
            "start": start.ravel(),
            "duration": took.ravel(),
            "waits_for": [[row - 1] if row % len(KINDS) else [] for row in rows.tolist()],
            "rendezvous": [at if which == 2 else None for at, which in zip(step.tolist(), kind.tolist(), strict=True)],
            "group": ["dp" if which == 2 else None for which in kind.tolist()],
        }
    )
    return OpTrace(ops, name=f"run {seed}", groups=(ProcessGroup("dp", tuple(range(RANKS))),))


def section() -> str:
    """The Markdown of this section."""
    rows = []
    for (steps, noise, memory), factor in itertools.product(NOISES, (1.0, 1.05)):
        outcomes = Counter(
            _judged(2 * pair, steps=steps, noise=noise, memory=memory, factor=factor) for pair in range(PAIRS)
        )
        counts = [outcomes[outcome] for outcome in Outcome]
        rows.append([str(steps), f"{noise:.0%}", str(memory), f"{factor - 1:+.0%}", *map(str, counts)])
    words = f"`tracekit gate --max-regression 3%` on {PAIRS} pairs of runs of {RANKS} ranks for each row."
    heads = ["steps", "noise of an op", "correlation of neighbouring steps", "backward", *Outcome]
    return f"## Gate\n\n{words}\n\n{table(heads, rows)}\n\n{_of_several()}"


def _of_several() -> str:
    rows = [
        [str(count), str(steps), f"{noise:.0%}", f"{apart:.2%}", f"{factor - 1:+.0%}",
         *several(count, factor, steps=steps, noise=noise, apart=apart)]
        for (count, steps, noise, apart), factor in itertools.product(SEVERAL, (1.0, 1.05))
    ]  # fmt: skip
    words = f"The same beside several baselines, {PAIRS} draws from {RUNS} runs for each row; whole runs differ, too."
    return f"{words}\n\n{table(['baselines', 'steps', 'noise of an op', 'of a run', 'backward', *Outcome], rows)}"


def several(baselines: int, factor: float, *, steps: int, noise: float, apart: float) -> list[str]:
    """How `PAIRS` runs beside so many baselines are judged. `apart`: standard deviation of the speed of a whole run;
    runs and baselines are drawn from RUNS equal ones, and from RUNS with a slower backward.
    """

    def run(seed: int, backward: float) -> StepsSpent:
        speed = 1 + apart * float(np.random.default_rng([seed, 1]).normal())
        slower = {kind: speed * (backward if kind == "backward" else 1.0) for kind in KINDS}
        return StepsSpent(GraphJob(simulated(seed, steps=steps, noise=noise, memory=0.0, slower=slower)).replay)

    equal, runs = ([run(first + seed, times) for seed in range(RUNS)] for first, times in ((0, 1.0), (RUNS, factor)))
    drawn, outcomes, side = np.random.default_rng(0), Counter[str](), Runs("", steps, 1)
    for _ in range(PAIRS):
        before = [equal[at] for at in drawn.permutation(RUNS)[:baselines]]
        rows = judge(before, runs[int(drawn.integers(RUNS))], 0.03)
        outcomes[Gate.of(side, side, rows, limit=0.03, noise=None, notes=()).outcome] += 1
    return [str(outcomes[outcome]) for outcome in Outcome]


def _judged(seed: int, *, steps: int, noise: float, memory: float, factor: float) -> Outcome:
    baseline = simulated(seed, steps=steps, noise=noise, memory=memory)
    run = simulated(seed + 1, steps=steps, noise=noise, memory=memory, slower={"backward": factor})
    return gate(GraphJob(run), [GraphJob(baseline)], 0.03).outcome
