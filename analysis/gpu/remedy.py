"""What to do first about each cause of a late rank, and its effect on the job: the texts that every output shows.

In: a cause. Out: sentences. They say what to check or change and give no figure: the saving is shown next to the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tracekit.analysis.gpu.culprit import GpuCause
from tracekit.report.verdict import LossKind

#: A cause as a person would put it, after "rank 2".
EFFECTS: Final[Mapping[GpuCause, str]] = {
    GpuCause.SLOW_GPU: "runs the same kernels slower than its peers",
    GpuCause.UNEVEN_WORK: "runs kernels that its peers do not",
    GpuCause.HOST_BOUND: "launches its kernels late: its host thread is busy",
    GpuCause.LATE_INPUT: "waits for its data loader",
    GpuCause.GC: "pauses while Python collects garbage",
    GpuCause.SYNC_CALLS: "waits for its GPU in calls that its peers do not make",
    GpuCause.SLOW_LINK: "transfers slower than its peers once all ranks are there",
    GpuCause.LATE_START: "begins later in the recording than its peers, which wait for it",
}
#: What to do first, in the imperative, without a full stop.
ACTIONS: Final[Mapping[GpuCause, str]] = {
    GpuCause.SLOW_GPU: "Check clocks, temperature and power limit of this GPU, then replace it",
    GpuCause.UNEVEN_WORK: "Give this rank the same work as its peers",
    GpuCause.HOST_BOUND: "Find out what else runs on this rank's CPU cores, and pin its threads",
    GpuCause.LATE_INPUT: "Give this rank's data loader more workers or prefetching, and check its storage",
    GpuCause.GC: "Collect garbage on all ranks at the same steps: call gc.disable(), then gc.collect() every N steps",
    GpuCause.SYNC_CALLS: "Remove the calls that wait for the GPU (.item(), .cpu(), printing of tensors)",
    GpuCause.SLOW_LINK: "Check this rank's network card, cable and switch port",
    GpuCause.LATE_START: "Record more steps: the profiler may only have started later on this rank",
}
#: What to do about time that all ranks lose together; no saving is promised for it.
OF_ALL: Final[Mapping[LossKind, str]] = {
    LossKind.HOST: (
        "Find out what the host does while the GPU is idle (py-spy, a timeline of its threads), then launch fewer and"
        " larger kernels (torch.compile, CUDA graphs) or give the data loader more workers"
    ),
    LossKind.COMMUNICATION: "Overlap communication with compute, or send less (larger buckets, lower precision)",
}
