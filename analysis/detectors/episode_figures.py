"""Figures and time pattern of an episode of slowness: how certain it is, and when it happened.

In: `Episodes`. Out: `Figure`s and a `TimePattern`.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern, TimeShape
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.significance import Episodes, episodes_of
from tracekit.analysis.numeric.arrays import Bools, Floats, number
from tracekit.report.finding import Figure, Unit

NOISE = "what noise alone does to it"


def chance_figures(episodes: Episodes, hit: Bools) -> tuple[Figure, ...]:
    """How unlikely these episodes are by chance, and how large the noise of the run is."""
    members = np.flatnonzero(hit.ravel())
    return (
        Figure("more likely slow than by chance", float(episodes.nats[members].min()), episodes.needed, Unit.NATS),
        Figure(NOISE, float(np.expm1(episodes.error[members].max())), 0.0, Unit.SHARE),
    )


def time_of_episodes(job: PipelineSubject, episodes: Episodes, member: int) -> TimePattern:
    """When a member is slow, as a time pattern."""
    steps = job.replay.graph.steps
    on, since, period = episodes.on[member], int(episodes.since[member]), int(episodes.period[member])
    shape, slow = TimeShape.TRANSIENT, tuple(int(step) for step in steps[on])
    if episodes.rises[member]:
        shape, slow = TimeShape.DRIFTING, ()
    elif on.all():
        shape, slow = TimeShape.PERSISTENT, ()
    elif period:
        shape = TimeShape.PERIODIC
    elif since:
        shape, slow = TimeShape.CHANGED, ()
    return TimePattern(
        shape=shape,
        statistic=number(episodes.nats[member]),
        needed=episodes.needed,
        since_step=int(steps[since]) if since and not period else None,
        period=period or None,
        slow_steps=slow,
    )


def network_time(job: PipelineSubject, series: Floats) -> TimePattern:
    """When the network is slow. `series`: by which factor, 1 if it is not, [steps]."""
    return time_of_episodes(job, episodes_of(np.log(series)[None], 2, fewest=1, remembers=False), 0)


def on_one_host(job: PipelineSubject) -> bool:
    """Whether nothing passes a network: copies within a host are held up by its cores or memory."""
    hosts = job.hosts
    return len(set(hosts.values())) == 1 and len(hosts) == len(job.dp_ranks) * job.stages
