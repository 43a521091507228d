"""Slow workers that have something in common: a host, some DP ranks.

In: `Evidence`. Out: `SlowGroup`s, which share no worker, each with the label that explains it best and one price.
A label explains workers that it covers exactly; of several the one with fewest parts is taken, since one old rack is
likelier than four bad hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.significance import Bools
from tracekit.analysis.evidence.workers import ONE_FACTOR_SHARE, slow_factor, slow_workers, worker_factor
from tracekit.model import Worker

#: Share of a host's workers that are slow when the host is.
WHOLE_HOST_SHARE = 0.7
#: Slow workers are a kind of machine, not bad ones, where they are at least this share of the DP ranks.
GROUP_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class SlowGroup:
    """Slow workers [stages, dp_ranks] with one label: a host, or DP ranks."""

    hit: Bools
    host: str | None = None
    dp_ranks: tuple[int, ...] = ()


def slow_groups(evidence: Evidence) -> tuple[list[SlowGroup], Bools]:
    """Groups, and the slow workers [stages, dp_ranks] that belong to none."""
    left = slow_workers(evidence)
    groups = []
    if len(evidence.dp_ranks) > 1 and left.sum() > 1:
        for find in (_ranks, _hosts):
            for group in find(evidence, left):
                groups.append(group)
                left = left & ~group.hit
    return groups, left


def _ranks(evidence: Evidence, slow: Bools) -> Iterator[SlowGroup]:
    """DP ranks that are slow on all stages, by one factor and at the same time: so many that it is their kind."""
    whole: Bools = np.asarray(slow.all(axis=0))
    hosts = set(_hosts_of(evidence, slow & whole))
    if evidence.stages == 1 and len(hosts) == 1 and None not in hosts:
        return  # one host says more
    if whole.sum() < 2 and (evidence.stages == 1 or not whole.any()):
        return
    if evidence.stages == 1 and whole.sum() < max(2, GROUP_SHARE * len(whole)):
        return
    hit = slow & whole
    if not _one_factor(evidence, hit) or not _neighbours(whole):
        return
    yield SlowGroup(hit, dp_ranks=tuple(evidence.dp_ranks[int(at)] for at in np.flatnonzero(whole)))


def _neighbours(whole: Bools) -> bool:
    """DP ranks of one kind of machine were placed one after the other."""
    at = np.flatnonzero(whole)
    return bool(at[-1] - at[0] == len(at) - 1)


def _one_factor(evidence: Evidence, hit: Bools) -> bool:
    """Whether workers are slow by one factor in the same steps."""
    excess = worker_factor(evidence)[hit] - 1
    on = np.asarray((slow_factor(evidence) > 1).any(axis=0)).transpose(0, 2, 1)[hit]
    return bool(np.ptp(excess) <= ONE_FACTOR_SHARE * excess.max()) and bool((on == on[0]).all())


def _hosts(evidence: Evidence, slow: Bools) -> Iterator[SlowGroup]:
    """Hosts of at least two traced workers most of which are slow, beside others: a job's only host has no peers."""
    hosts: dict[str, list[tuple[int, int]]] = {}
    for dp_index, dp_rank in enumerate(evidence.dp_ranks):
        for stage in range(evidence.stages):
            host = evidence.hosts.get(Worker(dp_rank, stage))
            if host is not None:
                hosts.setdefault(host, []).append((stage, dp_index))
    for host, cells in hosts.items():
        hit = np.zeros_like(slow)
        hit[tuple(np.array(cells).T)] = True
        if len(cells) >= 2 and not hit.all() and (slow & hit).sum() >= max(2, WHOLE_HOST_SHARE * len(cells)):
            yield SlowGroup(slow & hit, host=host)


def _hosts_of(evidence: Evidence, hit: Bools) -> list[str | None]:
    return [evidence.hosts.get(worker) for worker in evidence.workers_where(hit)]
