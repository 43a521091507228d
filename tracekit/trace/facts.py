"""What each source of data cannot show. Detectors, verdict, trust, bill and documentation read this one table.

In: a trace. Out: its `SourceKind`, with what that lacks. A conclusion that needs a fact which its source lacks is not
drawn, and the report says what to record instead. What a single file lacks is found when it is read.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Fact(StrEnum):
    """What a conclusion can rest on."""

    COMPUTE = "compute"
    GPUS = "gpus"
    RANKS = "ranks"
    REQUESTS = "requests"
    BEFORE = "before"


class Lack(Struct, frozen=True):
    """A fact that is missing. `why`: what that means for the report, a clause; `instead`: what would show it."""

    fact: Fact
    why: str
    instead: str

    @property
    def sentence(self) -> str:
        """Both, without a full stop."""
        return f"{self.why}; {self.instead}"


class SourceKind(Struct, frozen=True):
    """A kind of source, with what it lacks. `title`: for people."""

    title: str
    lacks: tuple[Lack, ...] = ()


_ONE_RANK = Lack(
    Fact.RANKS, "one rank was recorded, so nobody is seen to wait for another", "give the files of all ranks"
)

COLLECT = SourceKind("`tracekit collect` on GPUs")
COLLECT_CPU = SourceKind(
    "`tracekit collect` on CPUs",
    (Lack(Fact.GPUS, "ops were timed on the host, so nothing is known of GPUs", "record the job on GPUs"),),
)
TABLE = SourceKind("tables of ops: published, of MegaScan or NDTimeline, your own")
OP_TRACE = SourceKind("op traces")
RECORDING = SourceKind("torch.profiler and Nsight Systems, several ranks")
RECORDING_OF_ONE = SourceKind("torch.profiler and Nsight Systems, one rank", (_ONE_RANK,))
INSPECTOR = SourceKind(
    "logs of NCCL's Inspector",
    (
        Lack(
            Fact.COMPUTE,
            "the log holds no compute: what lies between collectives may be compute, launches or waiting, so nothing is"
            " a share of the step",
            "record with `tracekit collect` or torch.profiler",
        ),
    ),
)
RL_LOG = SourceKind(
    "logs of post-training",
    (
        Lack(
            Fact.REQUESTS,
            "the log holds sums of phases, so no single request or engine is seen",
            "record trajectories with `tracekit.rl`",
        ),
    ),
)
TRAJECTORIES = SourceKind("trajectories of post-training")
DUMPS = SourceKind(
    "dumps of the flight recorder",
    (Lack(Fact.COMPUTE, "dumps hold collectives only: who hangs, not who is slow", "record with `tracekit collect`"),),
)
WINDOW = SourceKind(
    "one window of a running job",
    (Lack(Fact.BEFORE, "what its first step shows may have begun earlier", "see the page Time of the job"),),
)
