"""Description of a simulated job: sizes, machines, launching, recording and causes.

`run.simulate` makes the same run of a `Job` every time. Each random stream has a seed of its own, so that a job without
one of its causes draws the same numbers for everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from judges.eventsim.causes import Cause

GPUS_PER_HOST = 8
FIRST_STEP = 100
#: Of an average stage.
LAYERS_PER_STAGE = 8
#: Absolute start of the first step, seconds since 1970.
EPOCH_S = 1_760_000_000.0

Cell = tuple[int, int]
"""A worker: DP rank and stage."""


class Schedule(StrEnum):
    """Order of a stage's forwards and backwards."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Posting(StrEnum):
    """The time at which a receive is posted, where its recording starts.

    SAME_DIRECTION: after the previous compute of its direction. ANY_DIRECTION: after the previous compute. EARLY:
    after the previous receive, before it is needed. BATCHED: sends and receives that are due together are one batch, as
    Megatron's `batch_isend_irecv`; the host waits for the whole batch.
    """

    SAME_DIRECTION = "same-direction"
    ANY_DIRECTION = "any-direction"
    EARLY = "early"
    BATCHED = "batched"


class Host(StrEnum):
    """AHEAD: the host thread launches without waiting. IN_STEP: it waits for each compute and receive (a CPU job)."""

    AHEAD = "ahead"
    IN_STEP = "in-step"


class Queueing(StrEnum):
    """Sharing of a network card: equal shares, or one transfer between stages after the other."""

    FAIR = "fair"
    FIFO = "fifo"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a job. Ranks are numbered as Megatron does: tensor, then data, then pipeline parallel."""

    dp: int = 2
    pp: int = 2
    vpp: int = 1
    tp: int = 8
    microbatches: int = 8
    steps: int = 10

    @property
    def computes(self) -> int:
        """Forwards of a worker in a step."""
        return self.microbatches * self.vpp

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every worker, DP rank by DP rank."""
        return tuple((dp, pp) for dp in range(self.dp) for pp in range(self.pp))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.host(self.dp - 1, self.pp - 1) + 1

    def rank(self, dp: int, pp: int) -> int:
        """Global rank of a worker's first tensor-parallel rank."""
        return self.tp * (dp + self.dp * pp)

    def host(self, dp: int, pp: int) -> int:
        """Number of the host that a worker runs on."""
        return self.rank(dp, pp) // GPUS_PER_HOST

    def cells_of_host(self, host: int) -> frozenset[Cell]:
        """The workers of a host."""
        return frozenset(cell for cell in self.cells if self.host(*cell) == host)


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Cost of a microbatch, seconds per average stage at one unit of tokens.

    A forward takes forward_s x (constant + linear x tokens + quadratic x attention), where tokens and attention (the
    sum of squared lengths) are 1 on average. The tensor-parallel ranks of a worker meet `meetings` times in each
    compute. `embedding_s` and `loss_s` are added on the first and the last stage.
    """

    forward_s: float = 0.020
    constant: float = 0.1
    linear: float = 0.7
    quadratic: float = 0.2
    backward_ratio: float = 2.0
    embedding_s: float = 0.0
    loss_s: float = 0.0
    optimizer_s: float = 0.008
    meetings: int = 8


@dataclass(frozen=True, slots=True)
class Network:
    """Network cards (one per host, shared by its workers), bytes, latencies. Bandwidths in bytes per second."""

    nic: float = 100e9
    nvlink: float = 300e9
    latency_s: float = 20e-6
    activation_bytes: float = 50e6
    parameter_bytes: float = 2e9
    separate_bytes: float = 20e6
    embedding_bytes: float = 200e6
    queueing: Queueing = Queueing.FAIR


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host time, seconds: one launch, loading a step's data (on the stages that load), between two steps.

    `loads_first`: data is loaded before parameters are gathered.
    """

    mode: Host = Host.AHEAD
    launch_s: float = 60e-6
    data_load_s: float = 1e-3
    all_stages_load: bool = False
    loads_first: bool = False
    between_steps_s: float = 1e-3
    layernorm_s: float = 0.6e-3
    clip_s: float = 0.8e-3


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise without a cause. Standard deviations as shares.

    `tail`: share of computes that take `tail_factor` times as long. `wander`: a slow AR(1) walk of each worker.
    `rank`: of the computes of each tensor-parallel rank between two meetings with its peers; 0: not distinguished.
    """

    op: float = 0.01
    worker: float = 0.004
    transfer: float = 0.03
    wander: float = 0.0
    tail: float = 0.0
    tail_factor: float = 1.5
    rank: float = 0.0


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording of the run. `drift`: of clocks, as a share; offsets in seconds."""

    offset_s: float = 50e-6
    drift: float = 2e-7
    data_load: bool = False
    gc_marker: bool = False
    layers: bool = False
    unrecorded: frozenset[Cell] = frozenset()


@dataclass(frozen=True, slots=True)
class Seeds:
    """One seed per random stream."""

    noise: int = 0
    worker: int = 1
    wander: int = 2
    lengths: int = 3
    network: int = 4
    host: int = 5
    clock: int = 6

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Seeds:
        """Seven new seeds."""
        return cls(*(int(seed) for seed in rng.integers(2**31, size=7)))


@dataclass(frozen=True, slots=True)
class Job:
    """One training job with its causes. `gathers`: gathers parameters before each step.

    `balanced`, `replaced`, `dp_bytes`, `layer_factor`, `extra_step_s` are fixes: microbatches dealt evenly over DP
    ranks; workers exchanged for average ones; the share of bytes that data-parallel collectives still move; layers
    moved between stages (factor per stage, empty: none moved); seconds that a fix itself takes.
    """

    shape: Shape = Shape()
    schedule: Schedule = Schedule.ONE_F_ONE_B
    posting: Posting = Posting.SAME_DIRECTION
    overlap_dp: bool = False
    gathers: bool = True
    compute: ComputeCost = ComputeCost()
    network: Network = Network()
    host: HostCost = HostCost()
    noise: Noise = Noise()
    recording: Recording = Recording()
    seeds: Seeds = Seeds()
    causes: tuple[Cause, ...] = ()
    name: str = "job"
    balanced: bool = False
    replaced: frozenset[Cell] = frozenset()
    dp_bytes: float = 1.0
    layer_factor: tuple[float, ...] = ()
    extra_step_s: float = 0.0

    def __post_init__(self) -> None:
        shape = self.shape
        if (shape.vpp > 1) != (self.schedule is Schedule.INTERLEAVED):
            raise ValueError(f"{self.schedule} with vpp {shape.vpp}; interleaved schedules need 2 or more, others 1")
        if self.schedule is Schedule.INTERLEAVED and shape.microbatches % shape.pp:
            raise ValueError(f"interleaved: {shape.microbatches} microbatches, not a multiple of pp {shape.pp}")

    @property
    def has_collectives(self) -> bool:
        """Whether there are data-parallel collectives."""
        return self.shape.dp > 1
