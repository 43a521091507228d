"""Slow workers that have something in common: a host, or a range of DP ranks.

In: a pipeline. Out: disjoint `SlowGroup`s, each with the label that explains it best and one price. A label explains
workers if it covers exactly these. Of several labels, the one with the fewest parts wins, since one old rack is
likelier than four bad hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import one_factor, slow_factor, slow_workers, worker_factor
from tracekit.analysis.numeric.arrays import Bools
from tracekit.trace.model import Worker

#: A host is slow if this share of its workers is slow.
WHOLE_HOST_SHARE = 0.7
#: If at least this share of the DP ranks is slow, they are a different kind of machine, not bad workers.
GROUP_SHARE = 0.25


class SlowGroup(Struct, frozen=True, eq=False):
    """Slow workers [stages, dp_ranks] with one label: a host, or DP ranks."""

    hit: Bools
    host: str | None = None
    dp_ranks: tuple[int, ...] = ()


def slow_groups(job: PipelineSubject) -> tuple[list[SlowGroup], Bools]:
    """The groups, and the slow workers [stages, dp_ranks] outside of any group."""
    ungrouped = slow_workers(job)
    groups = []
    if len(job.dp_ranks) > 1 and ungrouped.sum() > 1:
        for find in (_ranks, _hosts):
            for group in find(job, ungrouped):
                groups.append(group)
                ungrouped = ungrouped & ~group.hit
    return groups, ungrouped


def _ranks(job: PipelineSubject, slow: Bools) -> Iterator[SlowGroup]:
    """DP ranks slow on all stages, by one factor and at the same time: so many that their kind of machine explains
    them. Either neighbours, or half of all DP ranks wherever they are: every other host, or as a scheduler mixed them.
    """
    whole: Bools = np.asarray(slow.all(axis=0))
    hosts = {job.hosts.get(worker) for worker in job.workers_where(slow & whole)}
    if job.stages == 1 and len(hosts) == 1 and None not in hosts:
        return  # a single host is the better label
    if whole.sum() < 2 and (job.stages == 1 or not whole.any()):
        return
    if job.stages == 1 and whole.sum() < max(2, GROUP_SHARE * len(whole)):
        return
    hit, indices = slow & whole, np.flatnonzero(whole)
    neighbours = indices[-1] - indices[0] == len(indices) - 1  # as the ranks on one kind of machine are
    if _one_factor(job, hit) and (neighbours or 2 * whole.sum() >= len(whole) - 1):
        yield SlowGroup(hit, dp_ranks=tuple(job.dp_ranks[one] for one in indices.tolist()))


def _one_factor(job: PipelineSubject, hit: Bools) -> bool:
    profile = job.profile
    assert profile is not None
    error = profile.workers.error if job.stages == 1 else profile.ranks.error
    on = np.asarray((slow_factor(job) > 1).any(axis=0)).transpose(0, 2, 1)[hit]
    return one_factor(worker_factor(job)[hit] - 1, error[hit.any(axis=0)], on)


def _hosts(job: PipelineSubject, slow: Bools) -> Iterator[SlowGroup]:
    """Hosts with at least two traced workers, most of them slow. A job's only host has no peers, so it is not one."""
    hosts: dict[str, list[tuple[int, int]]] = {}
    for dp_index, dp_rank in enumerate(job.dp_ranks):
        for stage in range(job.stages):
            host = job.hosts.get(Worker(dp_rank, stage))
            if host is not None:
                hosts.setdefault(host, []).append((stage, dp_index))
    for host, cells in hosts.items():
        hit = np.zeros_like(slow)
        hit[tuple(np.array(cells).T)] = True
        if len(cells) >= 2 and not hit.all() and (slow & hit).sum() >= max(2, WHOLE_HOST_SHARE * len(cells)):
            yield SlowGroup(slow & hit, host=host)
