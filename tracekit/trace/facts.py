"""Facts about a recording: what its source cannot show, which workers it covers, what the training loop logged.

In: the kind of a source, the layout, free metadata. Out: `SourceKind` with what it lacks, `TraceCoverage`, tokens
and loss by step. A conclusion that needs a fact which its source lacks is not drawn, and the report says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Struct

from tracekit.base.limits import Count, Ordinal
from tracekit.base.text import encodable
from tracekit.trace.model import Layout, Worker

if TYPE_CHECKING:
    import numpy as np

#: Name at most this many workers that were not traced.
MOST_MISSING = 1000
#: The key of the metadata that has values of steps: name -> step -> value.
STEP_VALUES = "step_values"
NAMES = ("tokens", "loss")
#: Key: sampled while a job was recorded: metric -> machine -> `ranks` on it, `time`, seconds since 1970, and `value`.
SAMPLED = "sampled"
#: The metrics that are: a clock of GPUs, and the time that processes waited, all of a host or of a container.
SM_CLOCK = "DCGM_FI_DEV_SM_CLOCK"
WAITED_FOR_CPU = "node_pressure_cpu_waiting_seconds_total"
WAITED_FOR_MEMORY = "node_pressure_memory_waiting_seconds_total"
WAITED_FOR_IO = "node_pressure_io_waiting_seconds_total"
THROTTLED = "tracekit_cpu_throttled_seconds_total"
#: The `format` in the metadata of traces from our own collectors.
COLLECTED = "collected"
#: Of a step; a float of 64 bits counts no further.
MOST_TOKENS = 1 << 53
StepValues = Mapping[str, Mapping[int, float]]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Fact(StrEnum):
    """A fact that a conclusion can need."""

    COMPUTE = "compute"
    GPUS = "gpus"
    RANKS = "ranks"
    REQUESTS = "requests"
    BEFORE = "before"


class Lack(Struct, frozen=True):
    """A fact that is missing."""

    fact: Fact  #: what is missing: `compute`, `gpus`, `ranks`, `requests` or `before`
    why: str  #: what that means for the report
    instead: str  #: what would show it

    @property
    def sentence(self) -> str:
        """Both, without a full stop."""
        return f"{self.why}; {self.instead}"


class SourceKind(Struct, frozen=True):
    """A kind of source, with what it lacks. `title`: for people.

    Detectors, verdict, trust, bill and documentation read this one table. What a single file lacks is found when it is
    read.
    """

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


class TraceCoverage(Struct, frozen=True):
    """How much of the job the trace covers."""

    workers_expected: Count  #: workers of the layout
    workers_traced: Count  #: workers with at least one op
    worker_steps_expected: Count  #: workers of the layout x steps traced
    worker_steps_traced: Count  #: pairs of worker and step with at least one op
    missing_workers: tuple[Worker, ...]  #: workers without any op, at most the first 1,000

    @classmethod
    def of(
        cls, layout: Layout, dp_rank: np.ndarray, pp_rank: np.ndarray, steps: int, worker_steps: int
    ) -> TraceCoverage:
        """`dp_rank`, `pp_rank`: of the traced workers, repeated or not, in any order. `worker_steps`: those traced."""
        import numpy as np  # commands that only recognise a path do without

        workers = traced_dp_ranks(layout, dp_rank) * layout.pp
        traced = np.zeros((max(workers // layout.pp, int(dp_rank.max()) + 1), layout.pp), dtype=bool)
        traced[dp_rank, pp_rank] = True
        missing = np.flatnonzero(~traced.ravel()[:workers])[:MOST_MISSING]
        return cls(
            workers_expected=workers,
            workers_traced=int(traced.sum()),
            worker_steps_expected=steps * workers,
            worker_steps_traced=worker_steps,
            missing_workers=tuple(Worker(*divmod(cell, layout.pp)) for cell in missing.tolist()),
        )

    @property
    def complete(self) -> bool:
        """True if every worker of the layout is in every traced step."""
        return self.worker_steps_traced == self.worker_steps_expected


@dataclass(frozen=True, slots=True)
class MissingMembers:
    """A rendezvous with missing members: its name, and the ranks that were not recorded."""

    rendezvous: int  #: the rendezvous
    group: str  #: its process group
    missing: tuple[Ordinal, ...]  #: ranks without an op in it


def traced_dp_ranks(layout: Layout, dp_rank: np.ndarray) -> int:
    """The number of dp_rank values in a complete trace: with dsp > 1 some recorders number dp only, some dp x dsp."""
    return layout.dp if int(dp_rank.max()) < layout.dp else layout.dp_ranks


def gpu_uuids(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Rank, as text, -> UUID of its GPU, as far as the free metadata says."""
    gpus = metadata.get("gpus")
    stated = gpus.items() if isinstance(gpus, dict) else ()
    uuids = {rank: gpu.get("uuid") for rank, gpu in stated if isinstance(gpu, dict)}
    return {rank: encodable(uuid) for rank, uuid in uuids.items() if isinstance(uuid, str) and uuid}


def step_values(metadata: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The values of each step by name, without those that are impossible; a name without any, or with anything that is
    no number, is left out.
    """
    stated = metadata.get(STEP_VALUES)
    possible_by_name = {}
    for name in NAMES:
        try:
            by_step = stated.get(name) if isinstance(stated, dict) else None
            values = msgspec.convert(by_step or {}, dict[_Step, float], strict=False, str_keys=True)
        except msgspec.ValidationError:
            continue
        low, high = (0, MOST_TOKENS) if name == "tokens" else (-sys.float_info.max, sys.float_info.max)
        if possible := {step: value for step, value in values.items() if low <= value <= high}:
            possible_by_name[name] = possible
    return possible_by_name


def tokens_per_s(steps: Iterable[tuple[object, float]]) -> float | None:
    """Tokens a second over steps, each with its tokens (no number if it logs none) and seconds; None without any."""
    logged = [(tokens, took_s) for tokens, took_s in steps if isinstance(tokens, int | float)]
    time_s = sum(took_s for _, took_s in logged)
    return sum(tokens for tokens, _ in logged) / time_s if time_s > 0 else None
