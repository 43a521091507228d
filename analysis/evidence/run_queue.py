"""How long training threads waited for a processor, as the kernel counted it.

In: the metadata of a pipeline. Out: seconds of each worker.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.trace.canonical import RUN_QUEUE
from tracekit.trace.magnitudes import LONGEST_S


@evidence(PipelineSubject)
def run_queue_s(job: PipelineSubject) -> Floats:
    """Seconds per mean step that each worker's training thread waited in the run queue, [stages, dp_ranks].

    0 if the metadata does not give it.
    """
    stated, waits = job.trace.metadata.get(RUN_QUEUE), np.zeros((job.stages, len(job.dp_ranks)))
    known = stated if isinstance(stated, dict) else {}
    for worker, rank in job.worker_ranks.items():
        seconds = known.get(str(rank))
        if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_S and worker.dp_rank in job.dp_index:
            waits[worker.pp_rank, job.dp_index[worker.dp_rank]] = seconds
    return waits
