"""What the scheduler of the hosts counted of training threads: waits for a processor, and stops of their processes.

In: a pipeline. Out: seconds of each worker, and the workers and steps with stops.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.off_cpu import off_cpu_s, stops_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.trace.canonical import RUN_QUEUE
from tracekit.trace.magnitudes import LONGEST_S


@evidence(PipelineSubject)
def run_queue_s(job: PipelineSubject) -> Floats:
    """Seconds per mean step that each worker's training thread waited in the run queue, [stages, dp_ranks].

    0 if the metadata does not give it.
    """
    stated, waits = job.trace.metadata.get(RUN_QUEUE), np.zeros((job.stages, len(job.dp_ranks)))
    by_rank = stated if isinstance(stated, dict) else {}
    for worker, rank in job.worker_ranks.items():
        seconds = by_rank.get(str(rank))
        if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_S and worker.dp_rank in job.dp_index:
            waits[worker.pp_rank, job.dp_index[worker.dp_rank]] = seconds
    return waits


@evidence(PipelineSubject)
def _off_cpu_s(job: PipelineSubject) -> Floats:
    """Seconds in which each worker neither ran nor was ready to run in its own ops, [stages, steps, dp_ranks].

    0 for workers of several ranks (see `Lockstep.off_s`).
    """
    off_s = off_cpu_s(job.trace, job.replay.graph)
    return off_s[..., 0] if off_s.shape[3] == 1 else np.zeros(off_s.shape[:3])


@evidence(PipelineSubject)
def process_stops_s(job: PipelineSubject) -> Floats:
    """Time in which the process of each worker is stopped, if it is stopped repeatedly, as the kernel counted it,
    seconds, [stages, steps, dp_ranks].
    """
    if job.table.empty:
        return np.zeros_like(_off_cpu_s(job))
    by_kind_s: Floats = np.nansum(job.table.grid, axis=(2, 3)).transpose(0, 1, 3, 2)
    return stops_of(_off_cpu_s(job).transpose(0, 2, 1), by_kind_s, job.unchanged_s)[0].transpose(0, 2, 1)


@evidence(PipelineSubject)
def stopped_processes(job: PipelineSubject) -> Bools:
    """Workers whose process is stopped in several steps, as the kernel counted it, [stages, dp_ranks]."""
    return np.asarray((process_stops_s(job) > 0).any(axis=1))


@evidence(PipelineSubject)
def steps_with_stops(job: PipelineSubject) -> Bools:
    """Steps with stops of the processes that count as stopped, [steps]."""
    steps = np.asarray((process_stops_s(job) > 0).any(axis=(0, 2)))
    if job.lockstep is not None:
        steps = steps | job.lockstep.stopped(job.unchanged_s)[0].any(axis=(0, 1))
    return steps
