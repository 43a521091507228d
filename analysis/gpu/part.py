"""The parts of a rank's time; in a module of its own, as every detector names them and few jobs need the rest."""

from enum import StrEnum


class Part(StrEnum):
    """The parts of a rank's time that are compared with those of its peers."""

    COMPUTE = "compute"
    HOST = "host"  #: between the calls of its host threads
    INPUT = "input"  #: waiting for its data loader
    GC = "gc"
    SYNC_CALLS = "sync-calls"  #: calls in which its host waits for the GPU
    TRANSFERS = "transfers"  #: once all ranks are there
