"""Workers that compute slower than their peers: by how much, since when, how certain.

In: `PipelineSubject` and the workers. Out: words, figures and a `Candidate` for detectors of slow machines.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.detectors.episode_figures import NOISE, chance_figures, time_of_episodes
from tracekit.analysis.evidence.cards import clocks_of
from tracekit.analysis.evidence.compute_profile import FORWARD, SMALLEST_FACTOR
from tracekit.analysis.evidence.groups import SlowGroup
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import (
    factor_by_step,
    kind_factors,
    slow_factor,
    slow_kind,
    slow_machines,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.numeric.arrays import Bools
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: Factors within this of each other are one figure in a sentence. No experiment.
_ALIKE = 0.03
ONE_KIND_CHECK = (
    "a profile of that part on this rank and on a peer (py-spy record, torch.profiler): hooks and user code in it, its"
    " input; a machine that is slow is so in forwards and backwards"
)


def slower(job: PipelineSubject, hit: Bools, who: str) -> str:
    """How much slower the workers in `hit` compute than `who`, and how large noise is, in words."""
    alone = slow_kind(job, hit)
    factors = worker_factor(job)[hit] - 1 if alone is None else kind_factors(job, hit)[alone] - 1
    low, high = float(factors.min()), float(factors.max())
    size = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if 0 < high - low < _ALIKE:
        size = f"about {(low + high) / 2:.0%}"
    grows = _growth(job, hit, alone)
    if alone is not None:
        slow, well = ("forwards", "backwards") if alone == FORWARD else ("backwards", "forwards")
        whose = "its" if len(factors) == 1 else "their"
        words = f"{whose} {slow} take {size} longer than those of {who}{grows}, {whose} {well} do not"
    else:
        words = f"compute{'s' if len(factors) == 1 else ''} {size} slower than {who}{grows}"
    noise = next((figure.value for figure in _confidence_figures(job, hit) if figure.name == NOISE), None)
    clocks = clocks_of(job, job.workers_where(hit))
    clocks_text = (
        clocks and f"; its GPU runs at {clocks.own_mhz:,.0f} MHz, those of others at {clocks.peers_mhz:,.0f} MHz"
    )
    return words + ("" if noise is None else f"; noise alone makes {noise:.1%}") + (clocks_text or "")


def _growth(job: PipelineSubject, hit: Bools, kind: int | None) -> str:
    """How the slowness of the workers in `hit` (in one kind, or in both) grows, in words; "" if it does not."""
    profile = job.profile
    if len(job.dp_ranks) < 2 or profile is None or not profile.workers.rises.reshape(hit.shape)[hit].all():
        return ""
    factor = factor_by_step(job) if kind is None else slow_factor(job)[kind]
    by_step = factor.transpose(0, 2, 1)[hit].mean(axis=0)
    slow = by_step[by_step > 1] - 1
    return f", growing step by step from {slow[0]:.0%} to {slow[-1]:.0%}"


def worker_figures(job: PipelineSubject, hit: Bools) -> tuple[Figure, ...]:
    """Return by how much the workers in `hit` are slow, and how certain that is."""
    factor = float(worker_factor(job)[hit].min()) - 1
    exact = job.attribution.worker_slowdown.T[hit]
    return (
        Figure("compute beyond that of its peers", factor, SMALLEST_FACTOR, Unit.SHARE),
        *_confidence_figures(job, hit),
        Figure("added to a step by it alone", float(exact.max()) - 1, 0.0, Unit.SHARE),
    )


def _confidence_figures(job: PipelineSubject, hit: Bools) -> tuple[Figure, ...]:
    """How unlikely the slowness is by chance, and how large the noise of the run is."""
    profile = job.profile
    assert profile is not None
    if len(job.dp_ranks) < 2:
        return ()
    own = profile.slow_workers & hit
    if own.any():
        return chance_figures(profile.workers, own)
    return chance_figures(profile.ranks, slow_machines(job) & hit.any(axis=0))


def time_of(job: PipelineSubject, hit: Bools) -> TimePattern | None:
    """When the workers in `hit` are slow; all of them are slow in the same steps."""
    profile = job.profile
    assert profile is not None
    if len(job.dp_ranks) < 2:
        return None
    own = profile.slow_workers & hit
    if own.any():
        return time_of_episodes(job, profile.workers, int(np.flatnonzero(own.ravel())[0]))
    return time_of_episodes(job, profile.ranks, int(np.flatnonzero(hit.any(axis=0))[0]))


def of_group(kind: str, job: PipelineSubject, group: SlowGroup, where: Place, who: str) -> Candidate:
    """Return the candidate for a group of slow workers; `who`: its peers in words."""
    figures = worker_figures(job, group.hit)
    return Candidate(
        kind,
        where,
        slower(job, group.hit, who),
        figures,
        confidence_from(figures[:2]),
        workers_as_fast_as_peers(job, group.hit),
        worker_series(job, group.hit),
        time_of(job, group.hit),
        excess=figures[0].value,
    )
