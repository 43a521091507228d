"""What GPUs and calls to them do: the closed sets of a GPU recording.

Nothing flows in or out. Processes that read traces import these without the libraries of the analysis.
"""

from __future__ import annotations

from enum import StrEnum


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


class CallRole(StrEnum):
    """The purpose of a GPU runtime call."""

    LAUNCH = "launch"  #: starts a GPU op of the recording
    SYNCHRONISE = "synchronise"  #: returns once the GPU has done something
    STREAM_WAIT = "stream-wait"  #: makes a stream wait for an event
