"""Rules for workers that compute slower than their peers: single ones, whole hosts, groups of DP ranks.

In: `Evidence`. Out: `Candidate`s. See `rule`.

The thresholds named "paper" are those of "Understanding Stragglers in Large Model Training" (OSDI'25).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.causes.episode_figures import NOISE, chance_figures, time_of_episodes
from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.remedies import SLOW_KIND, SLOW_RANK, THROTTLED_HOST, THROTTLED_RANK
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD, SMALLEST_FACTOR
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.groups import SlowGroup, slow_groups
from tracekit.analysis.evidence.workers import (
    factor_by_step,
    slow_factor,
    slow_machines,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.trace.model import Worker

#: A worker is slow in one kind only if the excess of the other kind is below this share of it.
OTHER_KIND_SHARE = 0.25
#: Factors within this of each other are one figure in a sentence.
_ALIKE = 0.03
ONE_KIND_CHECK = (
    "a profile of that part on this rank and on a peer (py-spy record, torch.profiler): hooks and user code in it, its"
    " input; a machine that is slow is so in forwards and backwards; then DCGM on its GPUs"
)


def _slower(evidence: Evidence, hit: Bools, who: str) -> str:
    """How much slower the workers in `hit` compute than `who`, and how large noise is, in words."""
    alone = _slow_kind(evidence, hit)
    factors = worker_factor(evidence)[hit] - 1 if alone is None else _kind_factors(evidence, hit)[alone] - 1
    low, high = float(factors.min()), float(factors.max())
    size = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if 0 < high - low < _ALIKE:
        size = f"about {(low + high) / 2:.0%}"
    grows = _growth(evidence, hit, alone)
    if alone is not None:
        slow, well = ("forwards", "backwards") if alone == FORWARD else ("backwards", "forwards")
        whose = "its" if len(factors) == 1 else "their"
        words = f"{whose} {slow} take {size} longer than those of {who}{grows}, {whose} {well} do not"
    else:
        words = f"compute{'s' if len(factors) == 1 else ''} {size} slower than {who}{grows}"
    noise = next((figure.value for figure in _confidence_figures(evidence, hit) if figure.name == NOISE), None)
    throttled = _throttled(evidence, hit)
    return (
        words
        + ("" if noise is None else f"; noise alone makes {noise:.1%}")
        + (f"; its GPU was throttled in {throttled:.0%} of its samples" if throttled else "")
    )


def _growth(evidence: Evidence, hit: Bools, kind: int | None) -> str:
    """How the slowness of the workers in `hit` (in one kind, or in both) grows, in words; "" if it does not."""
    profile = evidence.profile
    if len(evidence.dp_ranks) < 2 or profile is None or not profile.workers.rises.reshape(hit.shape)[hit].all():
        return ""
    factor = factor_by_step(evidence) if kind is None else slow_factor(evidence)[kind]
    by_step = factor.transpose(0, 2, 1)[hit].mean(axis=0)
    slow = by_step[by_step > 1] - 1
    return f", growing step by step from {slow[0]:.0%} to {slow[-1]:.0%}"


def _slow_kind(evidence: Evidence, hit: Bools) -> int | None:
    """`FORWARD` or `BACKWARD` if the workers in `hit` are slow in that kind only; None if they are slow in both."""
    if len(evidence.dp_ranks) < 2 or not hit.any():
        return None
    beyond = _kind_factors(evidence, hit) - 1
    for kind, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
        if (beyond[other] < OTHER_KIND_SHARE * beyond[kind]).all():
            return kind
    return None


def _kind_factors(evidence: Evidence, hit: Bools) -> Floats:
    """How slow the forwards and the backwards of the workers in `hit` are relative to their peers', [kinds, workers].

    The mean over the steps in which they are slow.
    """
    factor = slow_factor(evidence).transpose(0, 1, 3, 2)[:, hit]  # [kinds, workers, steps]
    slow = (factor > 1).any(axis=0)
    return np.asarray(1 + ((factor - 1) * slow).sum(axis=2) / np.maximum(slow.sum(axis=1), 1))


def _throttled(evidence: Evidence, hit: Bools) -> float | None:
    """The share of samples in which the GPU of the worst worker in `hit` was throttled; None if unknown."""
    shares = [evidence.throttled[worker] for worker in evidence.workers_where(hit) if worker in evidence.throttled]
    return max(shares, default=None)


def _worker_figures(evidence: Evidence, hit: Bools) -> tuple[Figure, ...]:
    factor = float(worker_factor(evidence)[hit].min()) - 1
    exact = evidence.attribution.worker_slowdown.T[hit]
    throttled = _throttled(evidence, hit)
    return (
        Figure("compute beyond that of its peers", factor, SMALLEST_FACTOR, Unit.SHARE),
        *_confidence_figures(evidence, hit),
        Figure("slowdown from it alone", float(exact.max()), 0.0),
        Figure("loss gone if the slowest 3% of workers were ideal", evidence.attribution.m_w.removal, 0.0, Unit.SHARE),
        *([] if throttled is None else [Figure("share of samples with its GPU throttled", throttled, 0.0, Unit.SHARE)]),
    )


def _confidence_figures(evidence: Evidence, hit: Bools) -> tuple[Figure, ...]:
    """How unlikely the slowness is by chance, and how large the noise of the run is."""
    profile = evidence.profile
    assert profile is not None
    if len(evidence.dp_ranks) < 2:
        return ()
    own = profile.slow_workers & hit
    if own.any():
        return chance_figures(profile.workers, own)
    return chance_figures(profile.ranks, slow_machines(evidence) & hit.any(axis=0))


def _time_of(evidence: Evidence, hit: Bools) -> TimePattern | None:
    """When the workers in `hit` are slow; all of them are slow in the same steps."""
    profile = evidence.profile
    assert profile is not None
    if len(evidence.dp_ranks) < 2:
        return None
    series = worker_series(evidence, hit)
    own = profile.slow_workers & hit
    if own.any():
        return time_of_episodes(evidence, profile.workers, int(np.flatnonzero(own.ravel())[0]), series)
    return time_of_episodes(evidence, profile.ranks, int(np.flatnonzero(hit.any(axis=0))[0]), series)


class BadWorker(Rule):
    """A worker that computes slower than its peers of the same stage, always or at times.

    Paper: finds it by M_W, the share of the loss saved by idealising the slowest 3 % of the workers (by min(S_dp,
    S_pp)). tracekit names the workers themselves, from the median ratio of their forwards, and of their backwards, to
    those of the same stage and microbatch in each step. 4 %: half the effect of an idle neighbour or a warmer rack on a
    GPU, ten times the differences between healthy ones. Chance: a log-likelihood ratio that noise reaches in one
    healthy job of a thousand, for any number of workers and step patterns; the noise is that of the run, with its
    memory from step to step (see `significance`). The price comes from a replay in which the worker runs like its peers
    in the steps in which it is slow. M_W is shown next to it; it cannot single out one worker of a DP rank that is slow
    as a whole.
    """

    kind = CauseKind.BAD_WORKER
    title = "Worker computes slower than its peers"
    signature = "forwards, backwards or both of one worker take longer, on all microbatches of the steps it is slow in"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = (
        "DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host: PSI,"
        " steal, run queue"
    )
    suggested_fix = SLOW_RANK

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        _, hit = slow_groups(evidence)
        if not hit.any():
            return
        at_times = np.zeros_like(hit)
        if len(evidence.dp_ranks) > 1:
            assert evidence.profile is not None
            at_times = hit & ~evidence.profile.on.all(axis=1)
        if (hit & ~at_times).any():
            yield self.of_workers(evidence, evidence.workers_where(hit & ~at_times))
        for worker in evidence.workers_where(at_times):
            yield self.of_workers(evidence, (worker,))

    @classmethod
    def of_workers(cls, evidence: Evidence, workers: Sequence[Worker]) -> Candidate:
        """The candidate that names `workers`, which are slow in the same steps."""
        hit = evidence.cells_of(workers)
        figures, one_kind = _worker_figures(evidence, hit), _slow_kind(evidence, hit) is not None
        remedy = SLOW_KIND if one_kind else None
        return Candidate(
            cls.kind,
            Where(workers=tuple(workers)),
            _slower(evidence, hit, "its peers" if len(workers) == 1 else "their peers"),
            figures,
            confidence_from(figures[:2]),
            workers_as_fast_as_peers(evidence, hit),
            worker_series(evidence, hit),
            _time_of(evidence, hit),
            next_check=ONE_KIND_CHECK if one_kind else None,
            suggested_fix=THROTTLED_RANK if evidence.hardware_at_fault(workers) else remedy,
        )


class SlowHost(Rule):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host of their
    rank, because the check and the repair differ. It needs two traced workers on the host, 70 % of them slow: of eight,
    one may not be busy enough to show it.
    """

    kind = CauseKind.SLOW_HOST
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = (
        "host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet temperature"
        " of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs"
    )
    suggested_fix = (
        "on {hosts}, check clocks and power (nvidia-smi -q -d PERFORMANCE), busy cores (cat /proc/pressure/cpu),"
        " other jobs: stop what should not run there; drain {hosts} if the GPUs are throttled"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        for group in slow_groups(evidence)[0]:
            if group.host is not None:
                where = Where(workers=evidence.workers_where(group.hit), host=group.host)
                yield _of_group(self.kind, evidence, group, where, "their peers on other hosts")


class SlowRankGroup(Rule):
    """Several DP ranks compute slower than the others by one factor: older GPUs, a lower power cap, a warmer rack.

    Paper: no signature. tracekit groups slow DP ranks that are adjacent or half of all DP ranks, are slow on all
    stages, in the same steps, by factors that differ by less than a quarter of their excess and what chance adds, and
    make up a quarter of the DP ranks (or, with a pipeline, have slow optimizers too). Independent faults agree in
    neither factor nor time.
    """

    kind = CauseKind.SLOW_RANK_GROUP
    title = "A group of DP ranks computes slower than the others"
    signature = "forwards and backwards of several DP ranks take longer by one factor, on all stages, in the same steps"
    refuted_by = "the factors differ within the group, or follow the tokens of its microbatches"
    next_check = "what the group has in common: GPU model, power cap, driver, rack, inlet temperature"
    suggested_fix = (
        "compare GPU model, power cap and driver of {ranks} with the others (nvidia-smi -q): make them alike, or give"
        " {it} fewer microbatches"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        for group in slow_groups(evidence)[0]:
            if group.dp_ranks:
                yield _of_group(self.kind, evidence, group, Where(dp_ranks=group.dp_ranks), "the other DP ranks")


def _of_group(kind: CauseKind, evidence: Evidence, group: SlowGroup, where: Where, who: str) -> Candidate:
    figures = _worker_figures(evidence, group.hit)
    drained = group.host is not None and evidence.hardware_at_fault(evidence.workers_where(group.hit))
    return Candidate(
        kind,
        where,
        _slower(evidence, group.hit, who),
        figures,
        confidence_from(figures[:2]),
        workers_as_fast_as_peers(evidence, group.hit),
        worker_series(evidence, group.hit),
        _time_of(evidence, group.hit),
        suggested_fix=THROTTLED_HOST if drained else None,
    )
