"""Which workers are slow, by how much, and the job without it.

In: `Evidence`. Out: factors over the peers, which cells of the grid stand out, the hosts they are on, `Change`s that
make them as fast as their peers. Rules name them; fixes plan with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.evidence.changes import Change, Scale, Together
from tracekit.analysis.evidence.compute_profile import (
    FACTOR_ERRORS,
    SMALLEST_FACTOR,
    ComputeProfile,
    is_significant,
    safe,
)
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, median, nan_mean
from tracekit.model import Worker

#: Stages differ by design; this much more than the usual stage is imbalance.
SMALLEST_STAGE_EXCESS = 0.06
#: A slow worker's optimizer exceeds the usual one by this share of what its computes do.
OPTIMIZER_SHARE = 0.6
#: Beside a worker that is slow by some excess, others are named from this share of it on.
WORTH_NAMING_SHARE = 0.1
#: Share of a host's workers that are slow when the host is.
WHOLE_HOST_SHARE = 0.7


def workers_as_fast_as_peers(evidence: Evidence, profile: ComputeProfile, hit: np.ndarray) -> Change:
    """The workers in `hit` [stages, dp_ranks] as fast as their peers, optimizer included."""
    repair = np.where(hit, 1 / np.maximum(worker_factor_by_kind(evidence, profile), 1.0), 1.0)
    changes: list[Change] = [Scale(evidence.table, repair[:, :, None, None, None, :])]
    if not evidence.optimizers.empty:
        cost = median(evidence.optimizers.gather(evidence.replay.durations.own), (1, 2))
        peers = lower_median(cost, axis=1)[:, None] if cost.shape[1] > 1 else lower_median(cost, axis=0)
        ratio = cost / safe(peers)
        slow = hit & (ratio > 1 + SMALLEST_FACTOR)
        changes.append(Scale(evidence.optimizers, 1 / np.where(slow, ratio, 1.0)[:, None, None, :]))
    return Together(tuple(changes))


def as_fast_as_peers(evidence: Evidence, workers: Sequence[Worker]) -> Change:
    """These workers as fast as their peers."""
    assert evidence.profile is not None
    return workers_as_fast_as_peers(evidence, evidence.profile, evidence.cells_of(workers))


def beyond_peers_s(evidence: Evidence, worker: Worker) -> float:
    """Seconds of each forward and backward that a worker takes beyond its peers."""
    assert evidence.profile is not None
    beyond = (worker_factor(evidence, evidence.profile) - 1) * evidence.profile.stage_s.sum(axis=1)[:, None]
    return float(beyond[evidence.cells_of([worker])].sum())


def worker_factor(evidence: Evidence, profile: ComputeProfile) -> Floats:
    """Computes of each worker over those of its peers (with one DP rank: of the usual stage), [stages, dp_ranks]."""
    if len(evidence.dp_ranks) == 1:
        return np.asarray(1 + stage_excess(profile).min(axis=1)[:, None])
    return np.asarray(profile.worker * _slow_ranks(profile))


def worker_factor_by_kind(evidence: Evidence, profile: ComputeProfile) -> Floats:
    """As `worker_factor`, forwards and backwards apart, [kinds, stages, dp_ranks]."""
    if len(evidence.dp_ranks) == 1:
        return np.broadcast_to(worker_factor(evidence, profile), profile.worker_by_kind.shape)
    return np.asarray(profile.worker_by_kind * _slow_ranks(profile))


def _slow_ranks(profile: ComputeProfile) -> Floats:
    """Factors of the DP ranks that stand out, 1 for the others, [dp_ranks]."""
    return np.where(is_significant(profile.dp_rank, profile.dp_rank_error, FACTOR_ERRORS), profile.dp_rank, 1.0)


def slow_workers(evidence: Evidence) -> np.ndarray:
    """Workers whose computes take longer than those of their peers, [stages, dp_ranks] of bool."""
    profile = evidence.profile
    if profile is None:
        return np.zeros((evidence.stages, len(evidence.dp_ranks)), np.bool_)
    if len(evidence.dp_ranks) < 2:
        return _slow_without_peers(evidence, profile)
    by_worker = is_significant(profile.worker, profile.worker_error, FACTOR_ERRORS)
    by_dp_rank = is_significant(profile.dp_rank, profile.dp_rank_error, FACTOR_ERRORS)
    excess = worker_factor(evidence, profile) - 1
    slow = by_worker | by_dp_rank[None, :]
    hit: np.ndarray = slow & (excess >= WORTH_NAMING_SHARE * np.where(slow, excess, 0.0).max())
    return hit


def _slow_without_peers(evidence: Evidence, profile: ComputeProfile) -> np.ndarray:
    """With one DP rank a slow worker looks like a stage with more work; its optimizer, just as slow, gives it away."""
    excess = stage_excess(profile).min(axis=1)
    if evidence.stages < 2 or evidence.optimizers.empty:
        return np.zeros((evidence.stages, 1), np.bool_)
    cost = median(evidence.optimizers.gather(evidence.replay.durations.own), (1, 2))
    optimizer = cost / safe(lower_median(cost, axis=0)) - 1
    slow: np.ndarray = (excess[:, None] > SMALLEST_STAGE_EXCESS) & (optimizer > OPTIMIZER_SHARE * excess[:, None])
    return slow


def stage_excess(profile: ComputeProfile) -> Floats:
    """How much longer each chunk computes than the usual one, [stages, chunks]."""
    excess: Floats = profile.stage_s / safe(lower_median(profile.stage_s.ravel(), -1)) - 1
    return excess


def hosts_that_are_slow(evidence: Evidence) -> dict[str, np.ndarray]:
    """Hosts of at least two traced workers most of which are slow, with those slow workers [stages, dp_ranks]."""
    slow = slow_workers(evidence)
    if slow.sum() < 2:
        return {}
    hosts: dict[str, list[tuple[int, int]]] = {}
    for dp_index, dp_rank in enumerate(evidence.dp_ranks):
        for stage in range(evidence.stages):
            host = evidence.hosts.get(Worker(dp_rank, stage))
            if host is not None:
                hosts.setdefault(host, []).append((stage, dp_index))
    found = {}
    for host, cells in hosts.items():
        hit = np.zeros_like(slow)
        hit[tuple(np.array(cells).T)] = True
        if len(cells) >= 2 and (slow & hit).sum() >= max(2, WHOLE_HOST_SHARE * len(cells)):
            found[host] = slow & hit
    return found


def worker_series(evidence: Evidence, hit: np.ndarray) -> Floats:
    """How slow the workers in `hit` are step by step, relative to their peers, [steps]."""
    grid = evidence.table.grid.sum(axis=0)
    usual = lower_median(median(grid, (1, 2)), axis=-1 if len(evidence.dp_ranks) > 1 else 0)
    mine = median(grid, (1, 2)) / safe(usual[..., None] if len(evidence.dp_ranks) > 1 else usual[None])
    series = nan_mean(mine.transpose(0, 2, 1)[hit], (0,))
    # In steps that lack the workers they are taken to have been as slow as in the others.
    return np.where(np.isfinite(series), series, median(series, (0,)))
