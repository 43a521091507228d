"""Why a job is slow: every cause whose signature shows and that costs time.

In: a `Trace`, its `JobReplay` and `Attribution`. Out: `Cause`s, costliest first. Several causes may be true at the same
time and hide behind each other. So each candidate is priced by two replays: with only this cause gone (what fixing it
first saves), and with all others gone (what it still costs).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.patterns import TimePattern, pattern_of_series
from tracekit.analysis.causes.model import Candidate, Cause, CauseKind, Figure, Unit, Where, as_confidence
from tracekit.analysis.causes.naming import Names
from tracekit.analysis.causes.remedies import remedy_for
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.causes.rules_checkpoints import Checkpoints, Evaluations
from tracekit.analysis.causes.rules_compute import DataSkew, SlowSteps, StageImbalance
from tracekit.analysis.causes.rules_host import (
    BusyCores,
    HostBound,
    LateData,
    SlowHostCode,
    SlowOptimizer,
    without_run_queue,
)
from tracekit.analysis.causes.rules_lockstep import LockstepJitter, SlowRankOfWorker
from tracekit.analysis.causes.rules_outside import (
    ClockError,
    Congestion,
    SharedCard,
    SlowLink,
    SlowNic,
    TooLittleTrace,
    UnrecordedWorkerLate,
)
from tracekit.analysis.causes.rules_pauses import ProcessPauses, PythonGc
from tracekit.analysis.causes.rules_variation import PositionEffect, RandomVariation, SequenceLengthImbalance
from tracekit.analysis.causes.rules_workers import BadWorker, SlowHost, SlowRankGroup
from tracekit.analysis.evidence.changes import Change, step_times_with
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import MOST_OF_EXCESS, as_fast_as_peers, beyond_peers_s, undecided
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import NOTHING
from tracekit.analysis.replay.engine import JobReplay
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Worker

#: Drop causes that cost less than this share of the step, gone alone or with all others gone.
SMALLEST_COST_SHARE = 0.02
#: A time pattern holds only if its steps have at least this share of what the cause costs.
SMALLEST_SHARE_IN_TIME = 0.5
RULES: tuple[Rule, ...] = (
    BadWorker(),
    SlowHost(),
    SlowRankGroup(),
    SlowRankOfWorker(),
    LockstepJitter(),
    DataSkew(),
    StageImbalance(),
    SequenceLengthImbalance(),
    PositionEffect(),
    RandomVariation(),
    PythonGc(),
    ProcessPauses(),
    Checkpoints(),
    Evaluations(),
    SlowSteps(),
    SlowLink(),
    SlowNic(),
    Congestion(),
    SharedCard(),
    UnrecordedWorkerLate(),
    LateData(),
    SlowOptimizer(),
    SlowHostCode(),
    HostBound(),
    BusyCores(),
    ClockError(),
    TooLittleTrace(),
)
_RULE_OF: Mapping[CauseKind, Rule] = {rule.kind: rule for rule in RULES}


def find_causes(trace: Trace, replay: JobReplay, attribution: Attribution) -> tuple[Cause, ...]:
    """The causes of the job's slowness, costliest first; one of kind `healthy` or `unexplained` if there is none."""
    return causes_of(Evidence.of(trace, replay, attribution))


def causes_of(evidence: Evidence) -> tuple[Cause, ...]:
    """As `find_causes`, from evidence already gathered."""
    candidates = _without_trifles(evidence, [candidate for rule in RULES for candidate in rule.candidates(evidence)])
    candidates = _beside_busy_cores(evidence, candidates)
    least_s = SMALLEST_COST_SHARE * evidence.unchanged_s
    named = [
        cause
        for cause in _priced(evidence, candidates)
        if cause.change is None or max(cause.saved_s, cause.alone_s) >= least_s
    ]
    # Causes that save time in the job as it is come before those that save time only once others are gone.
    named.sort(key=lambda cause: (-cause.saved_s if cause.saved_s >= least_s else 0.0, -cause.alone_s))
    if not any(cause.change for cause in named):
        named.append(_verdict(evidence))
    return tuple(named)


def _without_trifles(evidence: Evidence, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates without slow workers whose marginal cost is negligible once all other causes are gone."""
    kept = _one_for_each(evidence, candidates)
    candidates = list(kept)
    for at, candidate in enumerate(candidates):
        if candidate.kind is CauseKind.BAD_WORKER and len(candidate.where.workers) > 1:
            others = [other.change for other in candidates if other is not candidate and other.change is not None]
            kept[at] = BadWorker.of_workers(evidence, _costly_workers(evidence, candidate.where.workers, others))
    return kept


def _one_for_each(evidence: Evidence, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates without workers that are slow because their processes are stopped: one problem, one cause."""
    stopped = {
        worker
        for candidate in candidates
        if candidate.kind is CauseKind.PROCESS_PAUSES
        for worker in candidate.where.workers
    }
    kept = []
    for candidate in candidates:
        workers = candidate.where.workers
        if candidate.kind is CauseKind.BAD_WORKER and stopped & set(workers):
            slow = tuple(worker for worker in workers if worker not in stopped)
            kept += [BadWorker.of_workers(evidence, slow)] if slow else []
        else:
            kept.append(candidate)
    return kept


def _beside_busy_cores(evidence: Evidence, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, less sure by the share of their price that goes with the waits for a processor.

    A thread without a processor is slow at whatever it does. A candidate gives way to busy cores if they explain most.
    """
    if not evidence.run_queue_s.any():
        return candidates
    free = without_run_queue(evidence, np.ones(evidence.run_queue_s.shape, np.bool_))
    free_s = float(step_times_with(evidence.replay, (free,)).mean())
    busy = any(candidate.kind is CauseKind.BUSY_CORES for candidate in candidates)
    kept = []
    for candidate in candidates:
        explained = 0.0
        if candidate.change is not None and candidate.kind is not CauseKind.BUSY_CORES:
            saved_s = evidence.unchanged_s - float(step_times_with(evidence.replay, (candidate.change,)).mean())
            left_s = free_s - float(step_times_with(evidence.replay, (free, candidate.change)).mean())
            explained = 1 - min(max(left_s / saved_s, 0.0), 1.0) if saved_s > NOTHING else 0.0
        if not busy or explained < MOST_OF_EXCESS:
            figure = Figure("explained by waits for a processor", explained, 0.0, Unit.SHARE)
            figures = (*candidate.evidence, figure) if round(explained, 2) else candidate.evidence
            sure = candidate.confidence * (1 - explained)
            kept.append(structs.replace(candidate, evidence=figures, confidence=sure))
    return kept


def _costly_workers(evidence: Evidence, workers: tuple[Worker, ...], others: Sequence[Change]) -> tuple[Worker, ...]:
    """The workers that each cost as much as a cause must. All of them, if they do so only together.

    The longer a worker computes beyond its peers, the more it costs, so bisection finds where it begins to matter.
    """

    def step_s(slow: Worker | None) -> float:
        repaired = as_fast_as_peers(evidence, [worker for worker in workers if worker != slow])
        return float(step_times_with(evidence.replay, (*others, repaired)).mean())

    ranked = sorted(workers, key=lambda worker: beyond_peers_s(evidence, worker))
    least_s = step_s(None) + SMALLEST_COST_SHARE * evidence.unchanged_s
    return tuple(sorted(ranked[bisect_left(ranked, least_s, key=step_s) :])) or workers


def _priced(evidence: Evidence, candidates: Sequence[Candidate]) -> list[Cause]:
    """Price each candidate."""
    costly = [candidate for candidate in candidates if candidate.change is not None]
    changes = [candidate.change for candidate in costly if candidate.change is not None]
    floor_s = float(step_times_with(evidence.replay, changes).mean()) if len(changes) > 1 else 0.0
    causes = []
    for candidate in candidates:
        saved_s = alone_s = 0.0
        without = None
        if candidate.change is not None:
            without = step_times_with(evidence.replay, (candidate.change,))
            saved_s = evidence.unchanged_s - float(without.mean())
            others = [change for change in changes if change is not candidate.change]
            alone_s = float(step_times_with(evidence.replay, others).mean()) - floor_s if others else saved_s
        cause = replace(_cause(evidence, candidate), saved_s=saved_s, alone_s=alone_s, without_s=without)
        cause = replace(cause, time=_when_it_costs(evidence, cause))
        causes.append(replace(cause, saved_when_acting_s=_saved_when_acting_s(evidence, cause)))
    return causes


def _when_it_costs(evidence: Evidence, cause: Cause) -> TimePattern | None:
    """The time of a cause; None if most of what it costs lies in other steps, as where a few are only the longest."""
    acts = acting(evidence, cause)
    if acts is None or cause.without_s is None:
        return cause.time
    saved_s = (evidence.unchanged - cause.without_s).clip(min=0)
    return cause.time if saved_s[acts].sum() >= SMALLEST_SHARE_IN_TIME * saved_s.sum() else None


def _saved_when_acting_s(evidence: Evidence, cause: Cause) -> float | None:
    """Seconds saved per step in which the cause acts; None if it acts in all steps."""
    acts = acting(evidence, cause)
    if acts is None or cause.without_s is None:
        return None
    return float((evidence.unchanged - cause.without_s)[acts].mean())


def acting(evidence: Evidence, cause: Cause) -> Bools | None:
    """The steps in which a cause acts, [steps]; None if that is all of them, or if it has no time pattern."""
    if cause.time is None:
        return None
    steps = np.asarray(evidence.replay.graph.steps)
    since = cause.time.since_step
    acts: Bools = np.isin(steps, cause.time.slow_steps) if since is None else steps >= since
    return None if not acts.any() or acts.all() else acts


def _cause(evidence: Evidence, candidate: Candidate) -> Cause:
    rule = _RULE_OF[candidate.kind]
    steps = [int(step) for step in evidence.replay.graph.steps]
    return Cause(
        kind=candidate.kind,
        where=candidate.where,
        title=candidate.title or rule.title,
        signature=rule.signature,
        effect=candidate.effect,
        evidence=candidate.evidence,
        confidence=as_confidence(candidate.confidence),
        saved_s=0.0,
        alone_s=0.0,
        refuted_by=rule.refuted_by,
        next_check=candidate.next_check or rule.next_check,
        suggested_fix=remedy_for(
            candidate.suggested_fix or rule.suggested_fix,
            Names.of(evidence),
            candidate.where,
            on_cpus=evidence.trace.on_cpus,
        ),
        time=candidate.time or (None if candidate.series is None else _time_of(candidate.series, steps)),
        bound=candidate.bound,
        every_step=candidate.every_step,
        change=candidate.change,
    )


def _time_of(series: Floats, steps: list[int]) -> TimePattern:
    """When a cause of this strength acts; one that becomes weaker at some step does not act since then."""
    pattern = pattern_of_series(series, steps)
    if pattern.since_step is None:
        return pattern
    at = steps.index(pattern.since_step)
    before, after = float(series[:at].mean()), float(series[at:].mean())
    if after > before:
        return pattern
    strong = tuple(steps[position] for position in np.flatnonzero(series > (before + after) / 2).tolist())
    return structs.replace(pattern, since_step=None, slow_steps=strong)


def _undecided(evidence: Evidence) -> str:
    """Who looks slow, but no more so than chance explains, and what would decide it; "" if nobody does."""
    found = undecided(evidence)
    if found is None:
        return ""
    return (
        f"worker {found.worker} computes {found.excess:.0%} slower, where noise alone makes {found.noise:.0%}: about"
        f" {found.steps} steps would tell"
    )


def _verdict(evidence: Evidence) -> Cause:
    """The cause to report if none was found: healthy or unexplained."""
    attribution, more = evidence.attribution, _undecided(evidence)
    lost_s = attribution.original_s - attribution.ideal_s
    figures = (Figure("S", attribution.slowdown, 1.1),)
    if attribution.straggling or evidence.noise.headline:
        return Cause(
            kind=CauseKind.UNEXPLAINED,
            where=Where(),
            title="Slow for a reason tracekit does not know",
            signature="S of at least 1.1, or more than noise makes of it, and none of the known signatures",
            effect=f"stragglers cost {attribution.waste:.1%} of the step and show none of the known signatures",
            evidence=figures,
            confidence=0.0,
            saved_s=lost_s,
            alone_s=lost_s,
            refuted_by="",
            next_check=more or "by_kind and the worker map; a timeline of the slowest step (`tracekit export`)",
            suggested_fix="",
        )
    return Cause(
        kind=CauseKind.HEALTHY,
        where=Where(),
        title="No straggler",
        signature="S below 1.1, hardly more than noise makes of it, and none of the known signatures",
        effect=f"ops that last longer than their ideal cost {max(attribution.waste, 0.0):.1%} of the step",
        evidence=figures,
        confidence=1.0,
        saved_s=0.0,
        alone_s=0.0,
        refuted_by="S of at least 1.1 in another trace of the job",
        next_check=more,
        suggested_fix="",
    )
