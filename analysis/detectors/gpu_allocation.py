"""Calls that allocate or free memory of the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, on_each, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.evidence.launches import waiting_calls, without_waits
from tracekit.analysis.whatif.interventions import Together
from tracekit.base.text import code_name
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason


class GpuAllocation(Detector):
    """The host allocates or frees memory of the GPU, which torch's caching allocator avoids once it is warm.

    Paper: not seen, because host calls are not traced. tracekit replays the recording without the calls, which neither
    take time nor wait for the GPU then. What only the first of them takes longer is warm-up.
    """

    kind = "gpu-allocation"
    title = "The host allocates memory of the GPU"
    signature = "calls such as cudaMalloc and cudaFree between launches"
    refuted_by = "the calls go after a few steps of warm-up"
    next_check = "torch.cuda.memory_stats(): num_alloc_retries, segments allocated and freed in steady state"
    suggested_fix = (
        "keep memory in torch's cache: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fixed shapes, the largest ones"
        " first, no torch.cuda.empty_cache() in the loop"
    )
    loss = LossKind.HOST
    repair = Repair("no-allocation", "Allocate memory once, before the loop")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        waiting = waiting_calls(job, allocates=True)
        work = host_time(job)
        parts = np.flatnonzero(work.mask(IdleReason.ALLOCATION))
        once_s = np.bincount(work.op, work.first_excess_s, job.ops.height).astype(np.float64)
        taken_s = max(float((waiting.waited_s - once_s[waiting.rows]).sum()), float(work.steady_s[parts].sum()))
        named = list(work.by_name(IdleReason.ALLOCATION))
        names = tuple(dict.fromkeys(name for part in named for name in part.names)) or tuple(waiting.names)
        if not names or share_of(job, taken_s) < SMALLEST_SHARE:
            return
        where = named[0].where if named else ""
        others_s = np.where(work.mask(IdleReason.ALLOCATION) & ~waiting.calls[work.op], work.steady_s, 0.0)
        change = Together((without_waits(job, waiting.calls, once_s), work.less_s(others_s)))
        more = f" and {len(names) - 1} more take" if len(names) > 1 else " takes"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.ALLOCATION, names[0], where, names, max(len(waiting.rows), len(parts)), taken_s),
            f"{code_name(names[0])}{more} {on_each(job, taken_s)}: memory of the GPU is allocated in the loop",
            change,
        )
