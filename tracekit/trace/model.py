"""The vocabulary of tracekit: op kinds, the parallel layout, workers.

Nothing flows in or out; every other module uses these types. Closed sets are StrEnums, identities are frozen
dataclasses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..base.errors import LayoutError, TraceError
from ..base.text import quoted

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # where training may run
    from enum import Enum

    class StrEnum(str, Enum):
        """An enum whose members are strings and print as such."""

        __str__ = str.__str__


#: First key of `otherData` in a timeline that tracekit exported; its value is the version of the content.
TIMELINE_MARK = "tracekit_timeline"


class OpKind(StrEnum):
    """The kind of an op. The order of the members defines their codes in columns.

    The first fourteen, forward-compute to gc, are those of a Megatron step trace. `all-reduce` is a gradient reduction
    over the data-parallel ranks of a stage, as in DistributedDataParallel; `all-to-all`, `data-load`, `checkpoint` and
    `host-delay` take a worker's time between its computes. `forward-collectives` is all waiting in the middle of a
    forward for collectives over the data-parallel ranks, such as FSDP's gathering of parameters; `backward-collectives`
    likewise. `loss` is what a loop without a pipeline does between a forward and its backward: the loss and anything
    else there. `evaluation` is the time between `model.eval()` and the return to training. `backward-weight` is the
    part of a backward that zero-bubble schedules defer: the gradients of the weights, which no other stage waits for;
    `backward-compute` is then the part that the previous stage waits for.
    """

    FORWARD_COMPUTE = "forward-compute"
    BACKWARD_COMPUTE = "backward-compute"
    FORWARD_SEND = "forward-send"
    FORWARD_RECV = "forward-recv"
    BACKWARD_SEND = "backward-send"
    BACKWARD_RECV = "backward-recv"
    PARAMS_ALL_GATHER = "params-all-gather"
    GRADS_REDUCE_SCATTER = "grads-reduce-scatter"
    SEPARATE_GRADS_ALL_REDUCE = "separate-grads-all-reduce"
    LAYERNORM_GRADS_ALL_REDUCE = "layernorm-grads-all-reduce"
    EMBEDDING_GRADS_ALL_REDUCE = "embedding-grads-all-reduce"
    OPTIMIZER_CLIP_MAIN_GRAD = "optimizer-clip-main-grad"
    OPTIMIZER = "optimizer"
    GC = "gc"
    DATA_LOAD = "data-load"
    CHECKPOINT = "checkpoint"
    HOST_DELAY = "host-delay"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    FORWARD_COLLECTIVES = "forward-collectives"
    BACKWARD_COLLECTIVES = "backward-collectives"
    LOSS = "loss"
    EVALUATION = "evaluation"
    BACKWARD_WEIGHT = "backward-weight"

    @property
    def code(self) -> int:
        """Index in the enum: the integer code of the kind in arrays."""
        return _CODES[self]

    @property
    def is_communication(self) -> bool:
        """True if the op waits for peers, so that its own cost is its transfer duration."""
        return self in COMMUNICATION

    @property
    def is_p2p(self) -> bool:
        """True for the four kinds between neighbouring pipeline stages."""
        return self in P2P


KINDS: tuple[OpKind, ...] = tuple(OpKind)
_CODES = {kind: code for code, kind in enumerate(KINDS)}

P2P = frozenset({OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV})
#: Collectives over all data-parallel ranks of one stage.
DP_COLLECTIVES = frozenset(
    {
        OpKind.PARAMS_ALL_GATHER,
        OpKind.GRADS_REDUCE_SCATTER,
        OpKind.SEPARATE_GRADS_ALL_REDUCE,
        OpKind.ALL_REDUCE,
        OpKind.FORWARD_COLLECTIVES,
        OpKind.BACKWARD_COLLECTIVES,
    }
)
COMMUNICATION = (
    P2P
    | DP_COLLECTIVES
    | {
        OpKind.LAYERNORM_GRADS_ALL_REDUCE,
        OpKind.EMBEDDING_GRADS_ALL_REDUCE,
        OpKind.OPTIMIZER_CLIP_MAIN_GRAD,
        OpKind.ALL_TO_ALL,
    }
)


class TimeUnit(StrEnum):
    """The unit of input times; a trace holds seconds."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def per_second(self) -> int:
        """Units per second."""
        return {TimeUnit.S: 1, TimeUnit.MS: 10**3, TimeUnit.US: 10**6, TimeUnit.NS: 10**9}[self]

    @property
    def word(self) -> str:
        """Its name in sentences."""
        return {
            TimeUnit.S: "seconds",
            TimeUnit.MS: "milliseconds",
            TimeUnit.US: "microseconds",
            TimeUnit.NS: "nanoseconds",
        }[self]


def unit_of_time(value: str) -> TimeUnit:
    """The unit of that name; raises TraceError, which lists the known units."""
    try:
        return TimeUnit(value)
    except ValueError:
        raise TraceError(f"unknown unit {value!r:.40}; expected one of {', '.join(TimeUnit)}") from None


class ReportedKind(StrEnum):
    """Kinds that exist only in reports: a send and its recv cost one transfer, so they count together."""

    FORWARD_PP_COMM = "forward-pp-comm"
    BACKWARD_PP_COMM = "backward-pp-comm"


def kind_groups(kinds: Iterable[OpKind]) -> dict[str, tuple[OpKind, ...]]:
    """Reported kind -> the op kinds it stands for: itself, or send and recv of a direction merged."""
    merged = {
        OpKind.FORWARD_SEND: ReportedKind.FORWARD_PP_COMM,
        OpKind.FORWARD_RECV: ReportedKind.FORWARD_PP_COMM,
        OpKind.BACKWARD_SEND: ReportedKind.BACKWARD_PP_COMM,
        OpKind.BACKWARD_RECV: ReportedKind.BACKWARD_PP_COMM,
    }
    groups: dict[str, tuple[OpKind, ...]] = {}
    for kind in sorted(set(kinds), key=lambda kind: kind.code):
        name = str(merged.get(kind, kind))
        groups[name] = (*groups.get(name, ()), kind)
    return groups


@dataclass(frozen=True, order=True)
class Worker:
    """One cell of a job: the data-parallel replica `dp_rank`, 0-based, in the pipeline stage `pp_rank`.

    Its tensor- and context-parallel ranks run in lockstep.
    """

    dp_rank: int  #: data-parallel rank
    pp_rank: int  #: pipeline stage

    def __str__(self) -> str:
        return f"({self.dp_rank},{self.pp_rank})"

    @property
    def coordinates(self) -> str:
        """Where it is, in words: `dp 1, stage 2`."""
        return f"dp {self.dp_rank}, stage {self.pp_rank}"


class TraceKind(StrEnum):
    """The schema of a trace: a pipeline (version 1), or ops of any shape (version 2)."""

    PIPELINE = "pipeline"
    OPS = "ops"

    @property
    def in_batches(self) -> bool:
        """Whether its steps can be analysed in batches."""
        return self is TraceKind.PIPELINE


@dataclass(frozen=True)
class ProcessGroup:
    """The global `ranks` that communicate under this `name`, in ascending order."""

    name: str
    ranks: tuple[int, ...]


def numbered_hosts(hosts: Mapping[int, str]) -> dict[int, str]:
    """Hosts of ranks without their names: numbered in order of the ranks."""
    numbers: dict[str, str] = {}
    return {rank: numbers.setdefault(host, f"host-{len(numbers) + 1}") for rank, host in sorted(hosts.items())}


#: Values between these, seconds since 1970, count as clock times: 2001 to 2100.
EARLIEST_S, LATEST_S = 1e9, 4.1e9
#: No op and no step takes this long, seconds.
LONGEST_S = 1e8
#: No job has this many GPUs; a larger size is a mistake that would use up all memory.
LARGEST_SIZE = 2**20


def is_size(value: object) -> bool:
    """True for an integer from 1 to LARGEST_SIZE."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a job: `dp` data-parallel replicas, `pp` pipeline stages, and `vpp` model chunks on each stage.

    `tp`, `cp`, `ep`: tensor-, context- and expert-parallel size. `world_size`: GPUs, by default the product of dp, pp,
    tp and cp. `dsp` is an additional degree of the published traces, similar to data parallelism: data-parallel
    collectives exist if dp x dsp > 1. `ep` ranks are part of the data-parallel ranks and do not multiply the world
    size. Raises LayoutError if a size is not an integer from 1 to LARGEST_SIZE, or the world size is not a multiple of
    dp x pp x tp x cp.
    """

    dp: int = 1  #: data-parallel size
    pp: int = 1  #: pipeline stages
    tp: int = 1  #: tensor-parallel size
    cp: int = 1  #: context-parallel size
    ep: int = 1  #: expert-parallel size
    vpp: int = 1  #: model chunks per stage
    dsp: int = 1  #: a further data-parallel degree, in published traces
    world_size: int = 0  #: GPUs

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "world_size" and size == 0:
                continue
            if not is_size(size):
                raise LayoutError(f"layout: {field.name} is {size!r:.40}; expected an integer from 1 to {LARGEST_SIZE}")
        product = self.dp * self.pp * self.tp * self.cp
        if self.world_size == 0:
            object.__setattr__(self, "world_size", product * self.dsp)
        if max(self.world_size, self.workers) > LARGEST_SIZE:
            largest = max(self.world_size, self.workers)
            raise LayoutError(f"layout: {largest} workers or GPUs; expected at most {LARGEST_SIZE}, correct the sizes")
        if self.world_size % product:
            raise LayoutError(
                f"layout: world_size {self.world_size} is not a multiple of dp {self.dp} x pp {self.pp} x tp {self.tp}"
                f" x cp {self.cp} = {product}; correct the sizes"
            )

    @property
    def dp_ranks(self) -> int:
        """The number of possible dp_rank values."""
        return self.dp * self.dsp

    @property
    def workers(self) -> int:
        """The number of dp_rank x pp_rank cells of a step."""
        return self.dp_ranks * self.pp

    @property
    def has_dp_collectives(self) -> bool:
        """False if data-parallel collectives have one member and are not part of the graph."""
        return self.dp * self.dsp > 1

    def to_dict(self) -> dict[str, int]:
        """The sizes as plain data, for metadata and JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> Layout:
        """The inverse of `to_dict`; raises LayoutError on unknown names."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(sizes) - names):
            raise LayoutError(f"layout: unknown size {quoted(unknown[0])}; known: {', '.join(sorted(names))}")
        return cls(**sizes)


class Format(StrEnum):
    """Who wrote a log of RL post-training."""

    VERL = "verl"
    OPENRLHF = "openrlhf"
    SLIME = "slime"
    NEMO_RL = "nemo-rl"
    SKYRL = "skyrl"
    OPEN_INSTRUCT = "open-instruct"
    TRAJECTORIES = "trajectories"
