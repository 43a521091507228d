"""Rules for causes that sit in the computes: workers, hosts, stages, sequence lengths, garbage collection, steps.

In: `Evidence`. Out: `Candidate`s. See `rule`.

The thresholds named "paper" are those of "Understanding Stragglers in Large Model Training" (OSDI'25).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale
from tracekit.analysis.evidence.compute_profile import (
    FACTOR_ERRORS,
    SMALLEST_FACTOR,
    STEP_ERRORS,
    ComputeProfile,
    is_significant,
    safe,
)
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import (
    SMALLEST_STAGE_EXCESS,
    hosts_that_are_slow,
    slow_workers,
    stage_excess,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.model import Worker

SMALLEST_CORRELATION = 0.6
SMALLEST_LENGTH_SPREAD = 0.04


def _worker_figures(evidence: Evidence, profile: ComputeProfile, hit: np.ndarray) -> tuple[Figure, ...]:
    factor = float(worker_factor(evidence, profile)[hit].min()) - 1
    error = float(np.maximum(profile.worker_error, profile.dp_rank_error[None, :] * (evidence.stages == 1))[hit].max())
    exact = evidence.attribution.worker_slowdown.T[hit]
    throttled = [evidence.throttled[worker] for worker in evidence.workers_where(hit) if worker in evidence.throttled]
    return (
        Figure("compute beyond that of its peers", factor, SMALLEST_FACTOR),
        Figure("the same in standard errors", factor / max(error, 1e-9), FACTOR_ERRORS, "sigma"),
        Figure("exact S_w", float(exact.max()), 0.0),
        Figure("M_W", evidence.attribution.m_w.removal, 0.0),
        *([Figure("share of samples with its GPU throttled", max(throttled), 0.0)] if throttled else []),
    )


class BadWorker(Rule):
    """A worker that computes slower than its peers of the same stage.

    Paper: found by M_W, the share of the loss that idealising the slowest 3 % of the workers (by min(S_dp, S_pp))
    gives back. tracekit names the workers themselves, from the median ratio of their forwards, and of their backwards,
    to those of the same stage and microbatch, together at least 4 % and six standard errors; the price comes from a
    replay in which they run like their peers. M_W is shown beside it: it cannot tell one worker of a DP rank that is
    slow as a whole.
    """

    kind = CauseKind.BAD_WORKER
    title = "Worker computes slower than its peers"
    signature = "forwards, backwards or both of one worker take longer, in all steps, on all microbatches"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = (
        "DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host: PSI,"
        " steal, run queue"
    )
    suggested_fix = "find out by the next check whether it is the machine or what runs on it"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        hit = slow_workers(evidence)
        for members in hosts_that_are_slow(evidence).values():
            hit = hit & ~members
        if hit.any():
            yield self.of_workers(evidence, evidence.workers_where(hit))

    @classmethod
    def of_workers(cls, evidence: Evidence, workers: Sequence[Worker]) -> Candidate:
        """The candidate that names `workers`."""
        assert evidence.profile is not None
        hit = evidence.cells_of(workers)
        figures = _worker_figures(evidence, evidence.profile, hit)
        return Candidate(
            cls.kind,
            Where(workers=tuple(workers)),
            figures,
            confidence_from(figures[:2]),
            workers_as_fast_as_peers(evidence, evidence.profile, hit),
            worker_series(evidence, hit),
            suggested_fix="drain and replace the worker" if evidence.hardware_at_fault(workers) else None,
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
    suggested_fix = "find out by the next check whether it is the machine or what runs on it"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        for host, hit in hosts_that_are_slow(evidence).items() if profile is not None else ():
            assert profile is not None
            figures = _worker_figures(evidence, profile, hit)
            yield Candidate(
                self.kind,
                Where(workers=evidence.workers_where(hit), host=host),
                figures,
                confidence_from(figures[:2]),
                workers_as_fast_as_peers(evidence, profile, hit),
                worker_series(evidence, hit),
                suggested_fix="drain the host" if evidence.hardware_at_fault(evidence.workers_where(hit)) else None,
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

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or evidence.stages < 2:
            return
        excess = stage_excess(profile)
        if len(evidence.dp_ranks) == 1:
            excess[slow_workers(evidence)[:, 0]] = 0.0
        for stage in np.flatnonzero((excess > SMALLEST_STAGE_EXCESS).any(axis=1)):
            chunks = excess[stage] > SMALLEST_STAGE_EXCESS
            factor = np.ones((evidence.stages, profile.stage_s.shape[1]))
            factor[stage, chunks] = 1 / (1 + excess[stage, chunks])
            figures = (
                Figure("compute beyond that of the usual stage", float(excess[stage].max()), SMALLEST_STAGE_EXCESS),
                Figure("S of the stage", float(evidence.attribution.stage_slowdown[stage]), 0.0),
                Figure("M_S", evidence.attribution.m_s.removal, 0.0),
            )
            yield Candidate(
                self.kind,
                Where(pp_ranks=(int(stage),)),
                figures,
                confidence_from(figures[:1]),
                Scale(evidence.table, factor[None, :, :, None, None, None]),
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

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None:
            return
        r, spread = profile.length_correlation, profile.length_spread
        if r < SMALLEST_CORRELATION or spread < SMALLEST_LENGTH_SPREAD:
            return
        figures = (
            Figure("correlation within DP rank and step", r, SMALLEST_CORRELATION),
            Figure("spread of microbatches", spread, SMALLEST_LENGTH_SPREAD),
        )
        even = 1 / safe(profile.microbatch)
        yield Candidate(
            self.kind,
            Where(),
            figures,
            confidence_from(figures[1:]) * min(1.0, r),
            Scale(evidence.table, even[None, None, None]),
        )


class SlowSteps(Rule):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the
    median compute of each step with that of the usual step: 4 % and six standard errors.
    """

    kind = CauseKind.SLOW_STEPS
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = "cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps"
    suggested_fix = "find what all workers share in those steps; leave warm-up steps out of the trace"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or len(profile.step) < 4:
            return
        slow = is_significant(profile.step, profile.step_error, STEP_ERRORS)
        if not slow.any() or slow.mean() > 0.5:
            return
        figures = (
            Figure("compute beyond that of the usual step", float(profile.step[slow].max()) - 1, SMALLEST_FACTOR),
            Figure(
                "the same in standard errors",
                float(((profile.step - 1) / np.maximum(profile.step_error, 1e-9))[slow].max()),
                STEP_ERRORS,
                "sigma",
            ),
        )
        factor = 1 / np.where(slow, profile.step, 1.0)
        steps = tuple(int(step) for step in evidence.replay.graph.steps[slow])
        change = Scale(evidence.table, factor[None, None, None, None, :, None])
        yield Candidate(self.kind, Where(steps=steps), figures, confidence_from(figures), change, profile.step)
