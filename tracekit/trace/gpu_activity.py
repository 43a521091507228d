"""What GPUs and calls to them do: the closed sets of a GPU recording.

Nothing flows in or out. Processes that read traces import these without the libraries of the analysis.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

#: Lines of torch's profiler itself, which a job without it does not run.
PROFILER_LINE = re.compile(r"(.*/)?torch/profiler(/|\.py)")


class KernelClass(StrEnum):
    """What a GPU op does."""

    COMMUNICATION = "communication"
    ATTENTION = "attention"
    MATRIX_PRODUCT = "matrix-product"
    ELEMENT_WISE = "element-wise"
    OPTIMIZER = "optimizer"
    MEMORY = "memory"
    OTHER = "other"


class Activity(StrEnum):
    """The profiler's category of a GPU op."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"


class IdleReason(StrEnum):
    """Why a GPU is idle: what the thread that launches its next op does meanwhile; each moment has one reason."""

    LOADER = "loader"  #: it fetches the next batch from a data loader
    GC = "gc"  #: Python collects garbage
    SYNCHRONISE = "synchronise"  #: it waits for the GPU
    ALLOCATION = "allocation"  #: it allocates or frees memory of the GPU
    RUNTIME_CALL = "runtime-call"  #: another call of the runtime
    OPERATOR = "operator"  #: the framework prepares the launch
    PYTHON = "python"  #: Python outside of any operator, or nothing that was recorded
    LAUNCH_CALL = "launch-call"  #: the call that launches
    LAUNCH_LATENCY = "launch-latency"  #: launched, and not yet arrived
    QUEUED = "queued"  #: the op was launched long before, and waits for something else
    UNKNOWN = "unknown"  #: its launch was not recorded
    CHECKPOINT = "checkpoint"  #: it writes a checkpoint


#: Reasons for which the host is not to blame, as far as the recording shows.
NOT_THE_HOST = (IdleReason.LAUNCH_LATENCY, IdleReason.QUEUED, IdleReason.UNKNOWN)


class CallRole(StrEnum):
    """The purpose of a GPU runtime call."""

    LAUNCH = "launch"  #: starts a GPU op of the recording
    SYNCHRONISE = "synchronise"  #: returns once the GPU has done something
    STREAM_WAIT = "stream-wait"  #: makes a stream wait for an event


class LostOps(NamedTuple):
    """The launches of a rank, those of them without a GPU op in the file, and the share of the GPU's time that they
    stand for.
    """

    launches: int
    without_op: int
    share: float
