"""S of traces recorded with wrong clocks, against S of the same traces with right ones.

python -m benchmarks clocks                     writes the table of RESULTS.md
python -m benchmarks clocks --seed 1 --count 5  prints other draws, and each failure with its clocks

Takes the sample traces and jobs of both simulators. Moves the starts of one to four workers by an offset, a drift or a
jump in mid-trace. Clocks change nothing in the job, so S must stay within 0.5 %, or the report must be untrusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.measure import table
from judges.eventsim import CASES, draw_job, simulate
from tracekit import Layout, Trace, load
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import TracekitError
from tracekit.synth import Schedule, SlowNic, SlowP2pLink, SlowWorker, SynthSpec, synthesize
from tracekit.synth.injected_causes import InjectedCause
from tracekit.trace.model import OpKind

SAMPLES = Path(__file__).parents[1] / "sample_traces"
#: Published figures come from these seeds, so develop the estimate on other ones.
SEED, COUNT = 63_000, 1
QUICK = {"EVENT_CASES": ("healthy",), "SYNTH_LAYOUTS": (Layout(dp=2),)}
#: S may differ by this share.
TOLERANCE = 0.005
#: Offsets and jumps, seconds, and drifts, seconds a second.
OFFSET_S, DRIFT = (2e-3, 0.5), (2e-5, 1e-3)
MOST_WORKERS = 4
#: Jobs of the independent simulator: one for each of these and each round.
EVENT_CASES = (
    "healthy", "healthy-noisy", "bad-worker", "slow-nic", "slow-link", "sequences", "P4-all", "P5", "P9", "P11", "P13",
    "P19",
)  # fmt: skip
SYNTH_LAYOUTS = (
    Layout(dp=2), Layout(dp=6), Layout(pp=4), Layout(dp=2, pp=2), Layout(dp=4, pp=4), Layout(dp=3, pp=8),
    Layout(dp=2, pp=2, vpp=2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wrong:
    """The clock error of a worker. `jump_at`: the first step after the jump; -1: no jump."""

    worker: tuple[int, int]
    offset_s: float = 0.0
    drift: float = 0.0
    jump_s: float = 0.0
    jump_at: int = -1

    def __str__(self) -> str:
        parts = [f"{self.offset_s * 1e3:+.1f} ms"] if self.offset_s else []
        parts += [f"{self.drift * 1e6:+.0f} ppm"] if self.drift else []
        parts += [f"{self.jump_s * 1e3:+.1f} ms from step {self.jump_at} on"] if self.jump_s else []
        return f"({self.worker[0]},{self.worker[1]}) {' and '.join(parts)}"


@dataclass(frozen=True, slots=True)
class ClockOutcome:
    """One trace recorded with wrong clocks. `slowdown`: S; `expected`: S with right clocks."""

    job: str
    disturbance: str
    clocks: tuple[Wrong, ...]
    expected: float
    slowdown: float
    trusted: bool
    trusted_before: bool

    @property
    def right(self) -> bool:
        return abs(self.slowdown / self.expected - 1) <= TOLERANCE

    @property
    def misled(self) -> bool:
        """S is wrong and the report is trusted."""
        return not self.right and self.trusted


def section() -> str:
    """The Markdown of this section."""
    outcomes = list(corpus(SEED, COUNT))
    intro = (
        f"Seeds from {SEED} on: {COUNT} draw(s) of each disturbance for each of the sample traces and"
        f" {COUNT * (len(EVENT_CASES) + len(SYNTH_LAYOUTS))} simulated jobs.\nOffsets and jumps of"
        f" {OFFSET_S[0] * 1e3:.0f} to {OFFSET_S[1] * 1e3:.0f} ms, drifts of {DRIFT[0] * 1e6:.0f} to"
        f" {DRIFT[1] * 1e6:.0f} ppm, either sign, on one to {MOST_WORKERS} workers. S must be within"
        f" {TOLERANCE:.1%} of that of the\nunchanged trace, or the report must be untrusted."
    )
    return "\n\n".join(["## Wrong clocks", intro, report(outcomes)])


def main(arguments: Sequence[str]) -> None:
    """Print the table for chosen draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks clocks", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the first draw")
    parser.add_argument("--count", type=int, default=COUNT, help="draws of each disturbance per job")
    parser.add_argument("--job", action="append", help="prefix of job names; repeat it for several")
    chosen = parser.parse_args(arguments)
    print(report(list(corpus(chosen.seed, chosen.count, tuple(chosen.job or ("",))))))


def corpus(seed: int, count: int, only: tuple[str, ...] = ("",)) -> Iterator[ClockOutcome]:
    """Each job with each disturbance; sample traces `count` times, simulated jobs once for each of `count` seeds."""
    for name, trace, draws in jobs(seed, count, only):
        before = attribute(JobReplay.from_trace(trace))
        for kind in DISTURBANCES:
            for draw in draws:
                rng = np.random.default_rng([draw, *name.encode(), *kind.encode()])
                yield _outcome(name, kind, trace, before, rng)


def jobs(seed: int, count: int, only: tuple[str, ...]) -> Iterator[tuple[str, Trace, range]]:
    """Name, trace and the seeds of its disturbances."""
    draws = range(seed, seed + count)
    for path in sorted(SAMPLES.glob("*.parquet")):
        if path.stem.startswith(only):
            yield path.stem, load(path).trace, draws
    for draw in draws:
        for case in EVENT_CASES:
            assert case in CASES
            if f"eventsim {case}".startswith(only):
                yield f"eventsim {case}-{draw}", simulate(draw_job(draw, case)).trace, range(draw, draw + 1)
        for layout in SYNTH_LAYOUTS:
            name = f"synth dp {layout.dp} pp {layout.pp} vpp {layout.vpp}"
            if name.startswith(only):
                yield f"{name}-{draw}", _synthetic(layout, draw), range(draw, draw + 1)


def _synthetic(layout: Layout, seed: int) -> Trace:
    """A simulated job with one cause or none."""
    rng = np.random.default_rng([seed, layout.dp, layout.pp, layout.vpp])
    cell = {"dp_rank": int(rng.integers(layout.dp)), "pp_rank": int(rng.integers(layout.pp))}
    causes: list[tuple[InjectedCause, ...]] = [(), (SlowWorker(**cell, factor=1.8),)]
    if layout.dp > 1:
        causes.append((SlowNic(**cell, factor=4.0),))
    if layout.pp > 1:
        causes.append((SlowP2pLink(dp_rank=cell["dp_rank"], pp_rank=int(rng.integers(layout.pp - 1)), factor=40.0),))
    spec = SynthSpec(
        layout,
        steps=int(rng.choice([1, 2, 6, 16, 40])),
        seed=seed,
        noise=float(rng.choice([0.01, 0.05])),
        causes=causes[int(rng.integers(len(causes)))],
        schedule=Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B,
    )
    return synthesize(spec)


def _outcome(name: str, kind: str, trace: Trace, before: Attribution, rng: np.random.Generator) -> ClockOutcome:
    clocks = DISTURBANCES[kind](rng, trace)
    wrong = recorded_with(trace, clocks)
    expected = before.slowdown
    if kind == "offset and a gap":
        gap = _without_a_member(trace, clocks)
        before = attribute(JobReplay.from_trace(gap))
        wrong, expected = recorded_with(gap, clocks), before.slowdown
    trusted_before = before.trust.trustworthy
    try:
        attribution = attribute(JobReplay.from_trace(wrong))
    except TracekitError:  # no report at all
        return ClockOutcome(name, kind, clocks, expected, np.nan, trusted=False, trusted_before=trusted_before)
    return ClockOutcome(
        name, kind, clocks, expected, attribution.slowdown, attribution.trust.trustworthy, trusted_before
    )


def recorded_with(trace: Trace, clocks: Sequence[Wrong]) -> Trace:
    """The trace that workers with these clocks would record."""
    zero = min(trace.step_starts.values(), default=0.0)
    since = {int(step): trace.step_starts.get(int(step), zero) - zero for step in trace.steps}
    ops = trace.ops
    step, start = ops["step"].to_numpy(), ops["start"].to_numpy().copy()
    time = pl.Series(step).cast(pl.Int64).replace_strict(since, return_dtype=pl.Float64).to_numpy() + start
    for clock in clocks:
        of_worker = (ops["dp_rank"].to_numpy() == clock.worker[0]) & (ops["pp_rank"].to_numpy() == clock.worker[1])
        ahead = (
            clock.offset_s
            + clock.drift * time
            + np.where((clock.jump_at >= 0) & (step >= clock.jump_at), clock.jump_s, 0.0)
        )
        start[of_worker] += ahead[of_worker]
    return replace(trace, ops=ops.with_columns(start=start))


def _without_a_member(trace: Trace, clocks: Sequence[Wrong]) -> Trace:
    """The trace with one kind of collective missing on the first of the workers."""
    dp_rank, pp_rank = clocks[0].worker
    of_worker = (pl.col("dp_rank") == dp_rank) & (pl.col("pp_rank") == pp_rank)
    kinds = {str(kind) for kind in trace.ops["kind"].unique()} & {
        OpKind.GRADS_REDUCE_SCATTER,
        OpKind.PARAMS_ALL_GATHER,
        OpKind.OPTIMIZER_CLIP_MAIN_GRAD,
        OpKind.ALL_REDUCE,
    }
    if not kinds:
        return trace
    return replace(trace, ops=trace.ops.filter(~(of_worker & (pl.col("kind") == min(kinds)))))


def _workers(rng: np.random.Generator, trace: Trace) -> list[tuple[int, int]]:
    cells = [(dp, pp) for dp in range(trace.layout.dp) for pp in range(trace.layout.pp)]
    count = min(int(rng.integers(1, MOST_WORKERS + 1)), len(cells))
    return [cells[at] for at in rng.choice(len(cells), count, replace=False)]


def _size(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    """A size of either sign, log-uniform."""
    return float(rng.choice([-1, 1]) * np.exp(rng.uniform(*np.log(bounds))))


def _offsets(rng: np.random.Generator, trace: Trace) -> tuple[Wrong, ...]:
    return tuple(Wrong(worker, _size(rng, OFFSET_S)) for worker in _workers(rng, trace))


def _drifts(rng: np.random.Generator, trace: Trace) -> tuple[Wrong, ...]:
    return tuple(Wrong(worker, _size(rng, OFFSET_S), _size(rng, DRIFT)) for worker in _workers(rng, trace))


def _jump(rng: np.random.Generator, trace: Trace) -> tuple[Wrong, ...]:
    steps = trace.steps
    step = int(steps[rng.integers(len(steps) // 4, max(len(steps) * 3 // 4, len(steps) // 4 + 1))])
    return (Wrong(_workers(rng, trace)[0], jump_s=_size(rng, OFFSET_S), jump_at=step),)


DISTURBANCES = {"offset": _offsets, "drift": _drifts, "jump": _jump, "offset and a gap": _offsets}


def report(outcomes: Sequence[ClockOutcome]) -> str:
    """A table by source of jobs and disturbance, and a list of the misleading reports."""
    sources = dict.fromkeys(one.job.split()[0] if " " in one.job else "samples" for one in outcomes)
    rows = []
    for source in sources:
        for kind in DISTURBANCES:
            these = [
                one
                for one in outcomes
                if one.disturbance == kind and (one.job.split()[0] if " " in one.job else "samples") == source
            ]
            rows.append([source, kind, *_counts(these)])
    rows.append(["all", "", *_counts(outcomes)])
    header = [
        "traces",
        "disturbance",
        "draws",
        "S right",
        "wrong, untrusted",
        "**wrong, trusted**",
        "right, no longer trusted",
    ]
    parts = [table(header, rows)]
    if misled := [one for one in outcomes if one.misled]:
        lines = [
            f"- {one.job}: {', '.join(map(str, one.clocks))}: S {one.slowdown:.4f}, was {one.expected:.4f}"
            for one in misled
        ]
        parts.append("Misleading:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _counts(outcomes: Sequence[ClockOutcome]) -> list[str]:
    right = sum(one.right for one in outcomes)
    misled = sum(one.misled for one in outcomes)
    doubted = sum(one.right and one.trusted_before and not one.trusted for one in outcomes)
    return [str(len(outcomes)), str(right), str(len(outcomes) - right - misled), str(misled), str(doubted)]
