"""Workers that compute slower than their peers: by how much, since when, how certain.

In: `Evidence` and the workers. Out: words, figures and a `Candidate` for detectors of slow machines.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.detectors.episode_figures import NOISE, chance_figures, time_of_episodes
from tracekit.analysis.detectors.remedies import LOW_CLOCK, SAMPLED_RANK, THROTTLED_HOST
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD, SMALLEST_FACTOR
from tracekit.analysis.evidence.evidence import THROTTLED_SHARE, Evidence
from tracekit.analysis.evidence.groups import SlowGroup
from tracekit.analysis.evidence.workers import (
    factor_by_step,
    slow_factor,
    slow_machines,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: A worker is slow in one kind only if the excess of the other kind is below this share of it.
OTHER_KIND_SHARE = 0.25
#: Factors within this of each other are one figure in a sentence.
_ALIKE = 0.03
ONE_KIND_CHECK = (
    "a profile of that part on this rank and on a peer (py-spy record, torch.profiler): hooks and user code in it, its"
    " input; a machine that is slow is so in forwards and backwards; then DCGM on its GPUs"
)


def slower(evidence: Evidence, hit: Bools, who: str) -> str:
    """How much slower the workers in `hit` compute than `who`, and how large noise is, in words."""
    alone = slow_kind(evidence, hit)
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
    throttled, clocks = _throttled(evidence, hit), _clocks_mhz(evidence, hit)
    return (
        words
        + ("" if noise is None else f"; noise alone makes {noise:.1%}")
        + (f"; its GPU was throttled in {throttled:.0%} of its samples" if throttled else "")
        + (f"; its GPU runs at {clocks[0]:,.0f} MHz, those of others at {clocks[1]:,.0f} MHz" if clocks else "")
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


def slow_kind(evidence: Evidence, hit: Bools) -> int | None:
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


def _clocks_mhz(evidence: Evidence, hit: Bools) -> tuple[float, float] | None:
    """The median clocks of the GPUs of the workers in `hit` and of the others; None if one of them is unknown."""
    slow, clocks = set(evidence.workers_where(hit)), evidence.clocks_mhz
    own, others = ([clocks[one] for one in clocks if (one in slow) is whose] for whose in (True, False))
    return (median(own), median(others)) if own and others else None


def sampled_remedy(evidence: Evidence, hit: Bools) -> str | None:
    """What to do about the workers in `hit` by what was sampled of their GPUs; None if that says nothing.

    A lower clock is to blame if it explains more than half of what they are slow by: a GPU that computes at half the
    clock takes twice as long, if nothing but computing limits it.
    """
    throttled, clocks = _throttled(evidence, hit), _clocks_mhz(evidence, hit)
    if throttled is None or clocks is None or throttled >= THROTTLED_SHARE:
        return None
    own, others = clocks
    slower_by = float(worker_factor(evidence)[hit].min()) - 1
    return LOW_CLOCK if others / own - 1 > slower_by / 2 else SAMPLED_RANK


def worker_figures(evidence: Evidence, hit: Bools) -> tuple[Figure, ...]:
    """Return by how much the workers in `hit` are slow, and how certain that is."""
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


def time_of(evidence: Evidence, hit: Bools) -> TimePattern | None:
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


def of_group(kind: str, evidence: Evidence, group: SlowGroup, where: Place, who: str) -> Candidate:
    """Return the candidate for a group of slow workers; `who`: its peers in words."""
    figures = worker_figures(evidence, group.hit)
    drained = group.host is not None and evidence.hardware_at_fault(evidence.workers_where(group.hit))
    return Candidate(
        kind,
        where,
        slower(evidence, group.hit, who),
        figures,
        confidence_from(figures[:2]),
        workers_as_fast_as_peers(evidence, group.hit),
        worker_series(evidence, group.hit),
        time_of(evidence, group.hit),
        suggested_fix=THROTTLED_HOST if drained else None,
    )
