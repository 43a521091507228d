"""Labelled synthetic jobs, and how well `causes_of` reads them.

A cause must be found where it alone slows the job by 10 % or more (clock errors and missing ranks: always); where it
does less, naming it is neither right nor wrong. Whatever is named without having been injected is wrong.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Cause as Found
from tracekit.analysis.replay.engine import JobReplay
from tracekit.synth import (
    ClockOffset,
    FlappingNetwork,
    InjectedCause,
    LateDataLoading,
    MissingRanks,
    MissingSteps,
    PythonGc,
    Schedule,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.synth.injected_causes import GPUS_PER_HOST
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

MUST_FIND_SLOWDOWN = 1.1
KIND_OF = {
    "slow-worker": "bad-worker",
    "slow-host": "slow-host",
    "slow-last-stage": "stage-imbalance",
    "sequence-length-imbalance": "sequence-length-imbalance",
    "python-gc": "python-gc",
    "slow-p2p-link": "slow-p2p-link",
    "slow-nic": "slow-nic",
    "flapping-network": "congestion",
    "late-data-loading": "late-data-loading",
    "slow-steps": "slow-steps",
    "clock-offset": "clock-error",
    "missing-ranks": "too-little-trace",
    "missing-steps": "too-little-trace",
}
#: Say nothing about the job, or that nothing is wrong.
VERDICTS = {"healthy", "unexplained"}
ALWAYS = {"clock-error", "too-little-trace"}

#: Three strengths of every cause.
STRENGTHS: tuple[tuple[InjectedCause, ...], ...] = (
    (SlowWorker(factor=1.2), SlowWorker(factor=1.5), SlowWorker(factor=2.5)),
    (SlowHost(factor=1.2), SlowHost(factor=1.5), SlowHost(factor=2.5)),
    (SlowLastStage(factor=1.2), SlowLastStage(factor=1.5), SlowLastStage(factor=2.0)),
    tuple(SequenceLengthImbalance(quadratic_share=share) for share in (0.2, 0.5, 0.9)),
    (PythonGc(pause_s=0.1, rate=0.1), PythonGc(pause_s=0.25, rate=0.1), PythonGc(pause_s=0.5, rate=0.2)),
    (SlowP2pLink(factor=10), SlowP2pLink(factor=40), SlowP2pLink(factor=150)),
    (SlowNic(factor=2), SlowNic(factor=4), SlowNic(factor=12)),
    tuple(FlappingNetwork(rate=rate, factor=factor) for rate, factor in ((0.005, 100), (0.005, 400), (0.02, 400))),
    tuple(LateDataLoading(delay_s=delay) for delay in (0.05, 0.2, 0.6)),
    (SlowSteps(factor=1.2), SlowSteps(factor=1.5, count=2), SlowSteps(factor=2.5, count=1)),
    (ClockOffset(offset_s=0.004), ClockOffset(offset_s=-0.008), ClockOffset(offset_s=0.03)),
    (MissingRanks(count=1), MissingRanks(count=2), MissingSteps(count=2)),
)
#: Strong enough to matter beside another cause.
MAIN: tuple[InjectedCause, ...] = (
    SlowWorker(factor=1.6),
    SlowLastStage(factor=1.5),
    SequenceLengthImbalance(quadratic_share=0.5),
    PythonGc(pause_s=0.3, rate=0.15),
    SlowP2pLink(factor=80),
    SlowNic(factor=8),
    FlappingNetwork(rate=0.01, factor=400),
    LateDataLoading(delay_s=0.3),
    SlowSteps(factor=1.6),
)
SHAPES: tuple[tuple[Layout, Schedule, int], ...] = (
    (Layout(dp=4, pp=4, tp=8), Schedule.ONE_F_ONE_B, 8),
    (Layout(dp=4, pp=4, tp=4), Schedule.ONE_F_ONE_B, 8),
    (Layout(dp=2, pp=4, tp=8), Schedule.ONE_F_ONE_B, 6),
    (Layout(dp=8, pp=2, tp=2), Schedule.ONE_F_ONE_B, 8),
    (Layout(dp=4, pp=4, vpp=2, tp=4), Schedule.INTERLEAVED, 8),
    (Layout(dp=6, pp=2, vpp=3, tp=8), Schedule.INTERLEAVED, 6),
    (Layout(dp=3, pp=3, tp=8), Schedule.GPIPE, 6),
    (Layout(dp=4, pp=8, tp=8), Schedule.ONE_F_ONE_B, 16),
    (Layout(dp=1, pp=4, tp=8), Schedule.ONE_F_ONE_B, 8),
)
NO_PIPELINE = (Layout(dp=8, pp=1, tp=8), Schedule.ONE_F_ONE_B, 6)
NOISE = (0.01, 0.03, 0.05)
WORKER_SPREAD = (0.0, 0.005, 0.01)


@dataclass(frozen=True)
class Case:
    """One job and the causes that must be found in it; others of its causes may be."""

    spec: SynthSpec
    trace: Trace
    must: tuple[str, ...]
    may: frozenset[str]
    slowdowns: tuple[float, ...]


def specs(first_seed: int, repeats: int, healthy: int) -> Iterator[SynthSpec]:
    """Every cause at every strength, every pair of main causes, and healthy jobs, over shapes and noise levels."""
    seeds = itertools.count(first_seed)
    for repeat in range(repeats):
        for number, causes in enumerate(itertools.chain.from_iterable(STRENGTHS)):
            yield _spec(next(seeds), repeat * 5 + number, (causes,))
        for number, pair in enumerate(itertools.combinations(MAIN, 2)):
            yield _spec(next(seeds), repeat * 3 + number, pair)
    for number in range(healthy):
        yield _spec(next(seeds), number, ())


def _spec(seed: int, turn: int, causes: tuple[InjectedCause, ...]) -> SynthSpec:
    pipeline_needed = any(isinstance(cause, SlowP2pLink | FlappingNetwork | SlowLastStage) for cause in causes)
    shapes = SHAPES if pipeline_needed else (*SHAPES, NO_PIPELINE)
    if any(isinstance(cause, SlowNic | MissingRanks | MissingSteps) for cause in causes):
        shapes = tuple(shape for shape in shapes if shape[0].has_dp_collectives)
    if any(isinstance(cause, SlowHost) for cause in causes):
        shapes = tuple(shape for shape in shapes if shape[0].tp < GPUS_PER_HOST or turn % 4 == 0)
    rng = np.random.default_rng(seed)
    layout, schedule, microbatches = shapes[int(rng.integers(len(shapes)))]
    return SynthSpec(
        layout=layout,
        schedule=schedule,
        microbatches=microbatches,
        steps=int(rng.choice((8, 12, 20))),
        overlap_dp=bool(rng.integers(2)),
        seed=seed,
        noise=float(rng.choice(NOISE)),
        worker_spread=float(rng.choice(WORKER_SPREAD)),
        causes=causes,
        record_no_ops=layout.vpp > 1 and bool(rng.integers(2)),
    )


def recorded_s(trace: Trace) -> float:
    """Mean recorded step, seconds."""
    end = (pl.col("start") + pl.col("duration")).max().alias("end")
    return float(trace.ops.group_by("step").agg(end)["end"].mean())


def case_of(spec: SynthSpec) -> Case:
    """Simulate the job, and each of its causes alone, to know which must be found."""
    trace = synthesize(spec)
    healthy_s = recorded_s(synthesize(replace(spec, causes=()))) if spec.causes else 1.0
    must, may, slowdowns = [], set(), []
    for cause, label in zip(spec.causes, trace.metadata["labels"], strict=True):
        kind = expected_kind(label, trace)
        alone = trace if len(spec.causes) == 1 else synthesize(replace(spec, causes=(cause,)))
        slowdown = recorded_s(alone) / healthy_s
        slowdowns.append(slowdown)
        may.add(kind)
        if kind in ALWAYS or slowdown >= MUST_FIND_SLOWDOWN:
            must.append(kind)
    return Case(spec, trace, tuple(must), frozenset(may), tuple(slowdowns))


def expected_kind(label: dict, trace: Trace) -> str:
    """A slow host with one traced worker is a slow worker."""
    kind = KIND_OF[label["cause"]]
    if kind == "slow-host" and len(workers_of_host(label, trace)) == 1:
        return "bad-worker"
    return kind


def workers_of_host(label: dict, trace: Trace) -> set:
    hosts = trace.metadata["hosts"]
    name = f"host-{label['location']['host']:04d}"
    return {worker for worker, rank in trace.worker_ranks().items() if hosts[str(rank)] == name}


def found_in(trace: Trace) -> tuple[Found, ...]:
    replay = JobReplay.from_trace(trace)
    return causes_of(PipelineAssessment(PipelineSubject.of(trace, replay)))


def location_is_right(label: dict, found: Found, trace: Trace) -> bool:
    """Whether a found cause sits exactly where it was injected."""
    place, where = label["location"], found.where
    match label["cause"]:
        case "slow-worker" | "slow-nic" | "clock-offset":
            return [(worker.dp_rank, worker.pp_rank) for worker in where.workers] == [
                (place["dp_rank"], place["pp_rank"])
            ]
        case "slow-host":
            return set(where.workers) == workers_of_host(label, trace)
        case "slow-last-stage":
            return where.pp_ranks == (trace.layout.pp - 1,)
        case "slow-p2p-link":
            return [(link.dp_rank, link.pp_rank) for link in where.links] == [(place["dp_rank"], place["pp_rank"])]
        case "late-data-loading":
            return where.dp_ranks == (place["dp_rank"],)
        case "slow-steps":
            count = label["strength"]["count"]
            return list(where.steps) == trace.steps[place["position"] :][:count].tolist()
        case _:
            return True


@dataclass
class Score:
    """Counts over a corpus."""

    right: Counter = field(default_factory=Counter)
    missed: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    misplaced: Counter = field(default_factory=Counter)
    confusion: Counter = field(default_factory=Counter)
    traces: int = 0
    healthy: int = 0
    healthy_named: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, case: Case, found: tuple[Found, ...]) -> None:
        """Compare what was found in a job with what must and may be."""
        named = [cause for cause in found if cause.kind not in VERDICTS]
        kinds = {cause.kind for cause in named}
        self.traces += 1
        self.healthy += not case.spec.causes
        self.healthy_named += not case.spec.causes and bool(named)
        for kind in case.must:
            (self.right if kind in kinds else self.missed)[kind] += 1
            if kind not in kinds:
                self._note("missed", kind, case, kinds)
        injected = "+".join(sorted(case.may)) or "healthy"
        for kind in kinds:
            if kind not in case.may:
                self.wrong[kind] += 1
                self._note("wrong", kind, case, kinds)
        if len(case.spec.causes) < 2:
            row = injected if case.must or not case.spec.causes else f"{injected} (< 10 %)"
            for kind in kinds or {"healthy"}:
                self.confusion[row, str(kind)] += 1
        for label in case.trace.metadata["labels"]:
            kind = expected_kind(label, case.trace)
            for cause in named:
                sought = cause.kind == kind and kind in case.must
                if sought and not location_is_right(label, cause, case.trace):
                    self.misplaced[kind] += 1
                    self._note(f"misplaced at {cause.where}", kind, case, kinds)

    def _note(self, what: str, kind: str, case: Case, kinds: set[str]) -> None:
        spec = case.spec
        self.notes.append(
            f"{what}: {kind}; seed {spec.seed}, {spec.schedule} dp {spec.layout.dp} pp {spec.layout.pp} vpp"
            f" {spec.layout.vpp}, {spec.steps} steps, noise {spec.noise};"
            f" injected {case.trace.metadata['labels']}, alone"
            f" {np.round(case.slowdowns, 3).tolist()}; found {sorted(kinds)}"
        )

    def recall(self, kind: str) -> float:
        total = self.right[kind] + self.missed[kind]
        return self.right[kind] / total if total else 1.0

    def precision(self, kind: str) -> float:
        total = self.right[kind] + self.wrong[kind]
        return self.right[kind] / total if total else 1.0


def score(first_seed: int, repeats: int, healthy: int) -> Score:
    """Generate a corpus and read it."""
    total = Score()
    for spec in specs(first_seed, repeats, healthy):
        case = case_of(spec)
        total.add(case, found_in(case.trace))
    return total
