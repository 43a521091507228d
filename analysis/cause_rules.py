"""Rules for causes that sit in the computes: workers, hosts, stages, sequence lengths, garbage collection, steps.

In: `Facts`. Out: `Candidate`s, each with its evidence and the change that undoes it. A rule looks for a signature
only; whether a candidate costs anything is asked of the replay afterwards, in `causes`.

The thresholds named "paper" are those of "Understanding Stragglers in Large Model Training" (OSDI'25).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.analysis.cause_model import Candidate, CauseKind, Evidence, Where, sureness
from tracekit.analysis.changes import Change, RemovePauses, Scale, Together
from tracekit.analysis.compute_profile import (
    BACKWARD,
    FACTOR_ERRORS,
    FORWARD,
    SMALLEST_FACTOR,
    STEP_ERRORS,
    ComputeProfile,
    lower_median,
    median,
    stands_out,
)
from tracekit.analysis.facts import Facts
from tracekit.analysis.structure import Floats
from tracekit.model import Worker

#: Stages differ by design; this much more than the usual stage is imbalance.
SMALLEST_STAGE_EXCESS = 0.06
#: A slow worker's optimizer exceeds the usual one by this share of what its computes do.
OPTIMIZER_SHARE = 0.6
#: Beside a worker that is slow by some excess, others are named from this share of it on.
WORTH_NAMING_SHARE = 0.1
#: Share of a host's workers that are slow when the host is.
WHOLE_HOST_SHARE = 0.7
SMALLEST_CORRELATION = 0.6
SMALLEST_LENGTH_SPREAD = 0.04
FEWEST_PAUSES = 3


class Rule(ABC):
    """One kind of cause: how it shows, what would refute it, what to look at next, what to do."""

    kind: ClassVar[CauseKind]
    title: ClassVar[str]
    signature: ClassVar[str]
    refuted_by: ClassVar[str]
    next_check: ClassVar[str]
    suggested_fix: ClassVar[str]

    @abstractmethod
    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """Every place in the job where the signature shows."""


def workers_as_fast_as_peers(facts: Facts, profile: ComputeProfile, hit: np.ndarray) -> Change:
    """The workers in `hit` [stages, dp_ranks] as fast as their peers, optimizer included."""
    healed = np.where(hit, 1 / worker_factor(facts, profile), 1.0)
    changes: list[Change] = [Scale(facts.table, healed[None, :, None, None, None, :])]
    if not facts.optimizers.empty:
        cost = median(facts.optimizers.gather(facts.replay.durations.own), (1, 2))
        ratio = cost / lower_median(cost, axis=1)[:, None] if cost.shape[1] > 1 else cost / lower_median(cost, axis=0)
        slow = hit & (ratio > 1 + SMALLEST_FACTOR)
        changes.append(Scale(facts.optimizers, np.where(slow, 1 / ratio, 1.0)[:, None, None, :]))
    return Together(tuple(changes))


def worker_factor(facts: Facts, profile: ComputeProfile) -> Floats:
    """Computes of each worker over those of its peers (with one DP rank: of the usual stage), [stages, dp_ranks]."""
    if len(facts.dp_ranks) == 1:
        return np.asarray(1 + stage_excess(profile).min(axis=1)[:, None])
    return profile.worker * profile.dp_rank


def slow_workers(facts: Facts) -> np.ndarray:
    """Workers whose computes take longer than those of their peers, [stages, dp_ranks] of bool."""
    profile = facts.profile
    if profile is None:
        return np.zeros((facts.stages, len(facts.dp_ranks)), np.bool_)
    if len(facts.dp_ranks) < 2:
        return _slow_without_peers(facts, profile)
    by_worker = stands_out(profile.worker, profile.worker_error, FACTOR_ERRORS)
    by_dp_rank = stands_out(profile.dp_rank, profile.dp_rank_error, FACTOR_ERRORS)
    excess = worker_factor(facts, profile) - 1
    slow = by_worker | by_dp_rank[None, :]
    hit: np.ndarray = slow & (excess >= WORTH_NAMING_SHARE * np.where(slow, excess, 0.0).max())
    return hit


def _slow_without_peers(facts: Facts, profile: ComputeProfile) -> np.ndarray:
    """With one DP rank a slow worker looks like a stage with more work; its optimizer, just as slow, gives it away."""
    excess = stage_excess(profile).min(axis=1)
    if facts.stages < 2 or facts.optimizers.empty:
        return np.zeros((facts.stages, 1), np.bool_)
    cost = median(facts.optimizers.gather(facts.replay.durations.own), (1, 2))
    optimizer = cost / lower_median(cost, axis=0) - 1
    slow: np.ndarray = (excess[:, None] > SMALLEST_STAGE_EXCESS) & (optimizer > OPTIMIZER_SHARE * excess[:, None])
    return slow


def stage_excess(profile: ComputeProfile) -> Floats:
    """How much longer each chunk computes than the usual one, [stages, chunks]."""
    excess: Floats = profile.stage_s / lower_median(profile.stage_s.ravel(), -1) - 1
    return excess


def hosts_that_are_slow(facts: Facts) -> dict[str, np.ndarray]:
    """Hosts of at least two traced workers most of which are slow, with those slow workers [stages, dp_ranks]."""
    slow = slow_workers(facts)
    if slow.sum() < 2:
        return {}
    hosts: dict[str, list[tuple[int, int]]] = {}
    for dp_index, dp_rank in enumerate(facts.dp_ranks):
        for stage in range(facts.stages):
            host = facts.hosts.get(Worker(dp_rank, stage))
            if host is not None:
                hosts.setdefault(host, []).append((stage, dp_index))
    found = {}
    for host, cells in hosts.items():
        hit = np.zeros_like(slow)
        hit[tuple(np.array(cells).T)] = True
        if len(cells) >= 2 and (slow & hit).sum() >= max(2, WHOLE_HOST_SHARE * len(cells)):
            found[host] = slow & hit
    return found


def _worker_series(facts: Facts, hit: np.ndarray) -> Floats:
    """How slow the workers in `hit` are step by step, relative to their peers, [steps]."""
    grid = facts.table.grid.sum(axis=0)
    usual = lower_median(median(grid, (1, 2)), axis=-1 if len(facts.dp_ranks) > 1 else 0)
    mine = median(grid, (1, 2)) / (usual[..., None] if len(facts.dp_ranks) > 1 else usual[None])
    series: Floats = np.nanmean(mine.transpose(0, 2, 1)[hit], axis=0)
    return series


def _worker_evidence(facts: Facts, profile: ComputeProfile, hit: np.ndarray) -> tuple[Evidence, ...]:
    factor = float(worker_factor(facts, profile)[hit].min()) - 1
    error = float(np.maximum(profile.worker_error, profile.dp_rank_error[None, :] * (facts.stages == 1))[hit].max())
    exact = facts.attribution.worker_slowdown.T[hit]
    return (
        Evidence("compute beyond that of its peers", factor, SMALLEST_FACTOR),
        Evidence("the same in standard errors", factor / max(error, 1e-9), FACTOR_ERRORS, "sigma"),
        Evidence("exact S_w", float(exact.max()), 0.0),
        Evidence("M_W", facts.attribution.m_w.removal, 0.0),
    )


class BadWorker(Rule):
    """A worker that computes slower than its peers of the same stage.

    Paper: found by M_W, the share of the loss that idealising the slowest 3 % of the workers (by min(S_dp, S_pp))
    gives back. tracekit names the workers themselves, from the median ratio of their forwards and backwards to those
    of the same stage and microbatch, at least 4 % and six standard errors; the price comes from a replay in which
    they run like their peers. M_W is shown beside it: it cannot tell one worker of a DP rank that is slow as a whole.
    """

    kind = CauseKind.BAD_WORKER
    title = "Worker computes slower than its peers"
    signature = "forwards and backwards of one worker take longer by one factor, in all steps, on all microbatches"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = (
        "DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host: PSI,"
        " steal, run queue"
    )
    suggested_fix = "drain and replace the worker"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        if profile is None:
            return
        hit = slow_workers(facts)
        for members in hosts_that_are_slow(facts).values():
            hit = hit & ~members
        if not hit.any():
            return
        evidence = _worker_evidence(facts, profile, hit)
        yield Candidate(
            self.kind,
            Where(workers=facts.workers_where(hit)),
            evidence,
            sureness(evidence[:2]),
            workers_as_fast_as_peers(facts, profile, hit),
            _worker_series(facts, hit),
        )


class SlowHost(Rule):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host their rank
    runs on, because the check and the repair differ; it needs two traced workers on the host, most of them slow.
    """

    kind = CauseKind.SLOW_HOST
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = (
        "host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet temperature"
        " of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs"
    )
    suggested_fix = "drain the host"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        for host, hit in hosts_that_are_slow(facts).items() if profile is not None else ():
            assert profile is not None
            evidence = _worker_evidence(facts, profile, hit)
            yield Candidate(
                self.kind,
                Where(workers=facts.workers_where(hit), host=host),
                evidence,
                sureness(evidence[:2]),
                workers_as_fast_as_peers(facts, profile, hit),
                _worker_series(facts, hit),
            )


class StageImbalance(Rule):
    """A stage (most often the last, with the loss layer) has more work than the others.

    Paper: M_S, the share of the loss that idealising the last stage gives back; above 0.5 the last stage explains
    most of it. tracekit does not clamp M_S (idealising also lengthens the faster stages, so it can exceed 1), looks
    at every stage, not only the last, and compares medians over DP ranks, so that one slow worker moves no stage.
    """

    kind = CauseKind.STAGE_IMBALANCE
    title = "Stage has more work than the others"
    signature = "forwards and backwards of one stage take longer on all DP ranks"
    refuted_by = "the stage's DP ranks differ (then it is a worker), or all of them sit on one host"
    next_check = "layers per stage, vocabulary size and loss on the last stage, embedding on the first"
    suggested_fix = "give the stage fewer layers"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        if profile is None or facts.stages < 2:
            return
        excess = stage_excess(profile)
        if len(facts.dp_ranks) == 1:
            excess[slow_workers(facts)[:, 0]] = 0.0
        for stage in np.flatnonzero((excess > SMALLEST_STAGE_EXCESS).any(axis=1)):
            chunks = excess[stage] > SMALLEST_STAGE_EXCESS
            factor = np.ones((facts.stages, profile.stage_s.shape[1]))
            factor[stage, chunks] = 1 / (1 + excess[stage, chunks])
            evidence = (
                Evidence("compute beyond that of the usual stage", float(excess[stage].max()), SMALLEST_STAGE_EXCESS),
                Evidence("S of the stage", float(facts.attribution.stage_slowdown[stage]), 0.0),
                Evidence("M_S", facts.attribution.m_s.removal, 0.0),
            )
            yield Candidate(
                self.kind,
                Where(pp_ranks=(int(stage),)),
                evidence,
                sureness(evidence[:1]),
                Scale(facts.table, factor[None, :, :, None, None, None]),
            )


class SequenceLengthImbalance(Rule):
    """Microbatches differ in cost because attention grows with the square of sequence lengths.

    Paper: Pearson correlation of forward and backward durations of the same microbatch >= 0.9. On its published job
    AR that is 0.999 although one bad worker is the cause. tracekit correlates within a DP rank and step, after stage,
    worker and step factors are out, where only the microbatch is left to vary; there noise correlates with nothing,
    so 0.6 is proof enough; and the microbatches must differ by more than 4 %.
    """

    kind = CauseKind.SEQUENCE_LENGTH_IMBALANCE
    title = "Microbatches differ in cost: sequence lengths"
    signature = "forward and backward of the same microbatch vary together, on all stages of its DP rank"
    refuted_by = "microbatches of equal sum of squared lengths differ as well"
    next_check = "the lengths of the packed documents per microbatch: cost against the sum of their squares"
    suggested_fix = "balance sequences over DP ranks by cost, not by token count"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        if profile is None:
            return
        r, spread = profile.length_correlation, profile.length_spread
        if r < SMALLEST_CORRELATION or spread < SMALLEST_LENGTH_SPREAD:
            return
        evidence = (
            Evidence("correlation within DP rank and step", r, SMALLEST_CORRELATION),
            Evidence("spread of microbatches", spread, SMALLEST_LENGTH_SPREAD),
        )
        even = 1 / profile.microbatch
        yield Candidate(
            self.kind,
            Where(),
            evidence,
            sureness(evidence[1:]) * min(1.0, r),
            Scale(facts.table, even[None, None, None]),
        )


class PythonGc(Rule):
    """Python's garbage collector stops a worker during a forward.

    Paper: pauses hit forwards only (backwards are launched from C++), on different workers at different steps, and
    can lengthen over time; found by hand. tracekit looks for single forwards that exceed what stage, worker, step and
    microbatch (taken from the backward) explain by half or more, without like pauses in backwards.
    """

    kind = CauseKind.PYTHON_GC
    title = "Python garbage collection pauses forwards"
    signature = "single forwards, on other workers and steps each time, are long; their backwards are not"
    refuted_by = "pauses also in backwards, or at the same microbatch on all workers"
    next_check = "gc.callbacks with a timer, or gc.freeze() and gc.disable() for a hundred steps: do the pauses go?"
    suggested_fix = "plan garbage collection: all ranks together, once every N steps"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        if profile is None:
            return
        paused = profile.pause_s > 0
        forwards, backwards = int(paused[FORWARD].sum()), int(paused[BACKWARD].sum())
        if forwards < FEWEST_PAUSES or backwards > 0.2 * forwards:
            return
        pause = np.where(paused, profile.pause_s, 0.0)
        pause[BACKWARD] = 0.0
        evidence = (
            Evidence("paused forwards", forwards, FEWEST_PAUSES),
            Evidence("longest pause", float(pause.max()), 0.0, "s"),
            Evidence("paused backwards", backwards, 0.0),
        )
        workers = paused[FORWARD].any(axis=(1, 2, 3))
        where = Where(workers=facts.workers_where(workers)) if workers.sum() == 1 else Where()
        # The usual pause of each step, so that a leak shows as a drift whatever the number of pauses.
        count = paused[FORWARD].sum(axis=(0, 1, 2, 4))
        total = pause.sum(axis=(0, 1, 2, 3, 5))
        usual = np.where(count > 0, total / np.maximum(count, 1), total.sum() / count.sum())
        series = 1 + usual / facts.unchanged_s
        yield Candidate(self.kind, where, evidence, sureness(evidence[:1]), RemovePauses(facts.table, pause), series)


class SlowSteps(Rule):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the
    median compute of each step with that of the usual step: 4 % and five standard errors.
    """

    kind = CauseKind.SLOW_STEPS
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = "cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps"
    suggested_fix = "find what all workers share in those steps; leave warm-up steps out of the trace"

    def candidates(self, facts: Facts) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = facts.profile
        if profile is None or len(profile.step) < 4:
            return
        slow = stands_out(profile.step, profile.step_error, STEP_ERRORS)
        if not slow.any() or slow.mean() > 0.5:
            return
        evidence = (
            Evidence("compute beyond that of the usual step", float(profile.step[slow].max()) - 1, SMALLEST_FACTOR),
            Evidence(
                "the same in standard errors",
                float(((profile.step - 1) / np.maximum(profile.step_error, 1e-9))[slow].max()),
                STEP_ERRORS,
                "sigma",
            ),
        )
        factor = np.where(slow, 1 / profile.step, 1.0)
        steps = tuple(int(step) for step in facts.replay.graph.steps[slow])
        change = Scale(facts.table, factor[None, None, None, None, :, None])
        yield Candidate(self.kind, Where(steps=steps), evidence, sureness(evidence), change, profile.step)
