"""Names shared by the launcher, the ranks and the reader of NCCL's events. Standard library only: ranks import it."""

from __future__ import annotations

from enum import IntFlag

#: Where the compiled plugin is, for the rank that sets its step; unset if NCCL loads another plugin or none.
ENV_PLUGIN = "TRACEKIT_NCCL_PLUGIN"
#: The events to record, for the plugin; a number as C reads it.
ENV_MASK = "TRACEKIT_NCCL_MASK"
#: The variable that NCCL itself reads: the plugin to load.
ENV_NCCL_PLUGIN = "NCCL_PROFILER_PLUGIN"

RING_SUFFIX = ".ring"
#: Slots read from a ring while the job ran.
LOG_SUFFIX = ".slots"


class NcclEvent(IntFlag):
    """Events NCCL can report, as bits of its activation mask. Events inside an operation also activate it."""

    COLL = 1 << 1
    P2P = 1 << 2
    PROXY_OP = 1 << 3
    PROXY_STEP = 1 << 4
    KERNEL_CH = 1 << 6


#: Operations with the GPU times of their channels.
DEFAULT_MASK = NcclEvent.COLL | NcclEvent.P2P | NcclEvent.KERNEL_CH
