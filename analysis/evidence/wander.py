"""Workers whose speed wanders: by how much, and the job in which they do not.

In: a pipeline. Out: a `Wander`. A worker whose speed wanders resembles its own recent past: neighbouring microbatches
(without a pipeline) or steps of a worker differ less from each other than from the rest of its trace.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import ComputeProfile, uneven_lengths
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.workload import remembers
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import MEDIAN_ERROR, nan_mean, safe

#: Steps of a worker vary this many times as much as the scatter of its ops explains.
VARIANCE_RATIO = 2.0


class Wander(Struct, frozen=True, eq=False):
    """`spread`: standard deviation of workers from step to step, relative. `even`: factor on computes that makes each
    worker's steps alike, broadcasts to the table. `in_workload`: it shows as differing microbatches.
    """

    spread: float
    shows: bool
    in_workload: bool
    even: Floats


def wander_of(job: PipelineSubject) -> Wander:
    """Measure the wandering of a job's workers."""
    profile = job.profile
    if profile is None or len(job.dp_ranks) < 2:
        return Wander(0.0, False, False, np.ones((1,) * 6))
    if job.stages == 1:
        return _of_workload(profile)
    return _of_workers(job, profile)


def _of_workload(profile: ComputeProfile) -> Wander:
    work = profile.microbatch
    over_run, within = remembers(work)
    shows = over_run and (within or not uneven_lengths(profile.length_correlation, profile.length_spread))
    level = nan_mean(work, (0,))
    even = 1 / safe(level / np.nanmean(level))
    return Wander(float(np.nanstd(level)), shows, shows, np.nan_to_num(even, nan=1.0)[None, None, None, None])


def _of_workers(job: PipelineSubject, profile: ComputeProfile) -> Wander:
    level = profile.worker_by_step / profile.slow_worker
    seconds = profile.base_s.sum(axis=2)[:, :, None, None]
    both = (level * seconds).sum(axis=0) / safe(seconds.sum(axis=0))
    own = np.log(safe(both))
    own = own - nan_mean(own, (1,))[:, None]
    ops = 2 * job.table.shape[2] * job.table.shape[3]
    expected = MEDIAN_ERROR**2 * profile.op_scatter**2 / ops
    seen = float(np.nanmean(own**2))
    shows = seen > VARIANCE_RATIO * expected
    even = 1 / np.exp(np.nan_to_num(own))
    return Wander(float(np.sqrt(seen)), bool(shows), False, even[None, :, None, None])
