"""Known causes of stragglers, for injection into a synthetic trace.

In: a cause (a frozen dataclass, or its text form `slow-worker:dp=5,pp=2,factor=1.5`) and the sizes of the job. Out: the
same cause with a fixed location, its label as plain data, and its `Effect` on the cost of each op. The random draws of
a cause depend only on the seed, its name and its position among causes of that name: removing one cause from a job
changes nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import SelectionError
from tracekit.synth.job import Effect, Floats, InjectedCause, JobShape, Scaled, Seeded
from tracekit.synth.network import FlappingNetwork, SlowNic, SlowP2pLink
from tracekit.synth.schedules import PlannedOp
from tracekit.trace.model import OpKind

COMPUTE = frozenset({OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE})
#: Token budget of a packed microbatch, and the lengths of its documents: a lognormal with a long tail.
PACKED_TOKENS = 32_768
MEDIAN_LENGTH = 1_000
LENGTH_SIGMA = 1.6


@dataclass(frozen=True, slots=True)
class SlowWorker(InjectedCause):
    """One worker computes `factor` times as long: forwards, backwards and optimizer."""

    NAME = "slow-worker"
    LOCATION = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None
    factor: float = 1.5

    def __post_init__(self) -> None:
        self.require("factor", least=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        lanes = seeded.job.dp_rank_of_lane == self.dp_rank
        return Scaled(COMPUTE | {OpKind.OPTIMIZER}, frozenset({self.pp_rank or 0}), lanes, self.factor)


@dataclass(frozen=True, slots=True)
class SlowHost(InjectedCause):
    """All workers of one host compute `factor` times as long: power, cooling or a busy CPU."""

    NAME = "slow-host"
    LOCATION = ("host",)
    host: int | None = None
    factor: float = 1.5

    def __post_init__(self) -> None:
        self.require("factor", least=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        return _SlowHost(seeded.job, self.host or 0, self.factor)


@dataclass(frozen=True, slots=True)
class _SlowHost(Effect):
    job: JobShape
    host: int
    factor: float

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        if op.kind not in COMPUTE and op.kind is not OpKind.OPTIMIZER:
            return cost
        dp_ranks = range(self.job.layout.dp_ranks)
        here = np.array([self.job.host(dp_rank, op.pp_rank) == self.host for dp_rank in dp_ranks])
        return np.where(np.tile(here, self.job.steps), cost * self.factor, cost)


@dataclass(frozen=True, slots=True)
class SlowLastStage(InjectedCause):
    """The loss layer: the last model chunk costs (factor - 1) average stages more, forward and backward."""

    NAME = "slow-last-stage"
    factor: float = 1.5

    def __post_init__(self) -> None:
        self.require("factor", least=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        return _Loss(seeded.job, self.factor - 1)


@dataclass(frozen=True, slots=True)
class _Loss(Effect):
    job: JobShape
    stages: float

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        at_end = op.pp_rank == self.job.layout.pp - 1 and op.chunk == self.job.layout.vpp - 1
        if op.kind not in COMPUTE or not at_end:
            return cost
        # Scaled rather than added: the loss layer shares the noise of the layers before it.
        return cost * (1 + self.stages / self.job.chunk_work(op.pp_rank))


@dataclass(frozen=True, slots=True)
class SequenceLengthImbalance(InjectedCause):
    """Microbatches of packed documents whose attention costs the sum of squared lengths.

    `quadratic_share`: the share of compute that is attention, 0 to 1. A microbatch costs (1 - share) + share x (its sum
    of squared lengths / the mean one), for forward and backward alike, on all stages of its DP rank.
    """

    NAME = "sequence-length-imbalance"
    quadratic_share: float = 0.5

    def __post_init__(self) -> None:
        self.require("quadratic_share", least=0, most=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        squares = packed_squares(seeded.rng, seeded.job.lanes * seeded.job.microbatches).reshape(
            seeded.job.microbatches, seeded.job.lanes
        )
        factor = 1 - self.quadratic_share + self.quadratic_share * squares / squares.mean()
        return _PerMicrobatch(factor)


def packed_squares(rng: np.random.Generator, microbatches: int) -> Floats:
    """Sum of squared document lengths of microbatches packed to PACKED_TOKENS, [microbatches]."""
    left = np.full(microbatches, float(PACKED_TOKENS))
    squares = np.zeros(microbatches)
    while (open_ := left > 0).any():
        length = np.minimum(rng.lognormal(math.log(MEDIAN_LENGTH), LENGTH_SIGMA, open_.sum()).round() + 1, left[open_])
        squares[open_] += length**2
        left[open_] -= length
    return squares


@dataclass(frozen=True, slots=True)
class _PerMicrobatch(Effect):
    """Cost `factor` per microbatch, [microbatches, lanes]."""

    factor: Floats

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        if op.kind not in COMPUTE or op.microbatch is None:
            return cost
        scaled: Floats = cost * self.factor[op.microbatch]
        return scaled


@dataclass(frozen=True, slots=True)
class PythonGc(InjectedCause):
    """Garbage collection stops a random worker in a random step for `pause_s`, during one forward.

    `rate`: probability per worker and step. `growth`: relative growth of a pause per traced step (a leak). Backwards
    are launched from C++ and do not pause.
    """

    NAME = "python-gc"
    pause_s: float = 0.25
    rate: float = 0.1
    growth: float = 0.0

    def __post_init__(self) -> None:
        self.require("pause_s", least=0)
        self.require("rate", least=0, most=1)
        self.require("growth", least=0)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        shape = (seeded.job.layout.pp, seeded.job.lanes)
        forwards = seeded.job.microbatches * seeded.job.layout.vpp
        paused = np.where(seeded.rng.random(shape) < self.rate, seeded.rng.integers(forwards, size=shape), -1)
        pause = self.pause_s * (1 + self.growth * seeded.job.step_of_lane.astype(np.float64))
        return _Paused(paused, pause)


@dataclass(frozen=True, slots=True)
class _Paused(Effect):
    """Pauses of forwards. `at`: seq of the forward that pauses, -1 for none, [stages, lanes]; `pause_s`: [lanes]."""

    order = 1
    at: npt.NDArray[np.int64]
    pause_s: Floats

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        if op.kind is not OpKind.FORWARD_COMPUTE:
            return cost
        return np.where(self.at[op.pp_rank] == op.seq, cost + self.pause_s, cost)


@dataclass(frozen=True, slots=True)
class LateDataLoading(InjectedCause):
    """The first forward of a step waits `delay_s` (+- a fifth) for its data: a launch delay on the first stage.

    `everywhere`: on all DP ranks, else on one.
    """

    NAME = "late-data-loading"
    LOCATION = ("dp_rank",)
    dp_rank: int | None = None
    delay_s: float = 0.3
    everywhere: bool = False

    def __post_init__(self) -> None:
        self.require("delay_s", least=0)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        lanes = (seeded.job.dp_rank_of_lane == self.dp_rank) | self.everywhere
        return _Late(np.where(lanes, self.delay_s * seeded.rng.uniform(0.8, 1.2, seeded.job.lanes), 0.0))


@dataclass(frozen=True, slots=True)
class _Late(Effect):
    """Delay of the first forward, seconds: `delay_s`, [lanes]."""

    delay_s: Floats

    def delay(self, op: PlannedOp, delay: Floats) -> Floats:
        """See `Effect.delay`."""
        if op.kind is not OpKind.FORWARD_COMPUTE or op.pp_rank or op.seq:
            return delay
        late: Floats = delay + self.delay_s
        return late


@dataclass(frozen=True, slots=True)
class SlowSteps(InjectedCause):
    """All workers compute `factor` times as long in `count` consecutive steps; `position` 0: a slow warm-up.

    `position` counts traced steps from 0.
    """

    NAME = "slow-steps"
    LOCATION = ("position",)
    position: int | None = None
    count: int = 2
    factor: float = 1.5

    def __post_init__(self) -> None:
        self.require("count", least=1)
        self.require("factor", least=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        first = self.position or 0
        lanes = (seeded.job.step_of_lane >= first) & (seeded.job.step_of_lane < first + self.count)
        return Scaled(COMPUTE, frozenset(range(seeded.job.layout.pp)), lanes, self.factor)


@dataclass(frozen=True, slots=True)
class ClockOffset(InjectedCause):
    """The clock of one worker is `offset_s` ahead (below 0: behind); its work is as healthy as before."""

    NAME = "clock-offset"
    LOCATION = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None
    offset_s: float = 0.005

    def __post_init__(self) -> None:
        self.require("offset_s", least=-math.inf)


@dataclass(frozen=True, slots=True)
class MissingRanks(InjectedCause):
    """`count` workers were not recorded: the drawn (or named) one and those after it, by DP rank, then stage."""

    NAME = "missing-ranks"
    LOCATION = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None
    count: int = 1

    def __post_init__(self) -> None:
        self.require("count", least=1)


@dataclass(frozen=True, slots=True)
class MissingSteps(InjectedCause):
    """One worker was not recorded in `count` consecutive steps, from traced step `position` (counted from 0) on."""

    NAME = "missing-steps"
    LOCATION = ("dp_rank", "pp_rank", "position")
    dp_rank: int | None = None
    pp_rank: int | None = None
    position: int | None = None
    count: int = 1

    def __post_init__(self) -> None:
        self.require("count", least=1)


CAUSES: dict[str, type[InjectedCause]] = {
    cause.NAME: cause
    for cause in (
        SlowWorker, SlowHost, SlowLastStage, SequenceLengthImbalance, PythonGc, SlowP2pLink, SlowNic, FlappingNetwork,
        LateDataLoading, SlowSteps, ClockOffset, MissingRanks, MissingSteps,
    )
}  # fmt: skip
#: Short forms of field names in text.
_SHORT = {"dp": "dp_rank", "pp": "pp_rank"}


def parse_cause(text: str) -> InjectedCause:
    """Parse `name` or `name:field=value,field=value`, e.g. `slow-worker:dp=5,pp=2,factor=1.5`.

    Raises SelectionError, which lists the known causes.
    """
    name, _, rest = text.strip().partition(":")
    if name not in CAUSES:
        raise SelectionError(f"unknown cause {name!r}; known: {', '.join(CAUSES)}")
    cause = CAUSES[name]
    known = {field.name: field.type for field in fields(cause)}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        short, equals, value = (part.strip() for part in item.partition("="))
        key = _SHORT.get(short, short)
        if key not in known or not equals:
            raise SelectionError(
                f"{text}: invalid setting {item!r}; {name} takes {', '.join(f'{field}=...' for field in known)}"
            )
        if key in values:
            raise SelectionError(f"{text}: {key} is given twice; keep one")
        values[key] = _parse_value(str(known[key]), value, f"{text}: {key}")
    return cause(**values)


def _parse_value(kind: str, value: str, where: str) -> int | float | bool:
    if kind == "bool":
        if value not in ("true", "false"):
            raise SelectionError(f"{where} is {value!r}; expected true or false")
        return value == "true"
    try:
        return float(value) if kind == "float" else int(value)
    except ValueError:
        wanted = "a number" if kind == "float" else "an integer"
        raise SelectionError(f"{where} is {value!r}; expected {wanted}") from None
