"""When the network of a job is slow, and whether it has one."""

from __future__ import annotations

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.detectors.episode_figures import time_of_episodes
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.significance import episodes_of
from tracekit.analysis.numeric.arrays import Floats


def network_time(job: PipelineSubject, series: Floats) -> TimePattern:
    """When the network is slow. `series`: by which factor, 1 if it is not, [steps]."""
    return time_of_episodes(job, episodes_of(np.log(series)[None], 2, fewest=1, remembers=False), 0)


def on_one_host(job: PipelineSubject) -> bool:
    """Whether nothing passes a network: copies within a host are held up by its cores or memory."""
    hosts = job.hosts
    return len(set(hosts.values())) == 1 and len(hosts) == len(job.dp_ranks) * job.stages
