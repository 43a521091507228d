"""Known causes of stragglers, for injection into a synthetic trace.

In: a cause (a frozen dataclass, or its text form `slow-worker:dp=5,pp=2,factor=1.5`) and the sizes of the job. Out: the
same cause with a fixed location, its label as plain data, and its `Effect` on the cost of each op. The random draws of
a cause depend only on the seed, its name and its position among causes of that name: removing one cause from a job
changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import SelectionError
from tracekit.base.text import did_you_mean
from tracekit.synth.schedules import PlannedOp
from tracekit.trace.model import DP_COLLECTIVES, P2P, Layout, OpKind

Floats = npt.NDArray[np.float64]
#: What changes about an op: [lanes] or one number for all of them; None: nothing.
Change = Callable[[PlannedOp], Floats | float | None]

GPUS_PER_HOST = 8
#: Nothing in a job is stronger, or lasts for longer, seconds.
_MOST = 1e6
#: Strengths of causes, and what they can be.
_BOUNDS = {
    "factor": (1, _MOST), "count": (1, _MOST), "pause_s": (0, _MOST), "growth": (0, _MOST),
    "delay_s": (0, _MOST), "rate": (0, 1), "quadratic_share": (0, 1), "offset_s": (-_MOST, _MOST),
}  # fmt: skip

COMPUTE = frozenset({OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE})
WORK = COMPUTE | {OpKind.OPTIMIZER}
#: Token budget of a packed microbatch, and the lengths of its documents: a lognormal with a long tail.
PACKED_TOKENS = 32_768
MEDIAN_LENGTH = 1_000
LENGTH_SIGMA = 1.6


@dataclass(frozen=True, slots=True)
class JobShape:
    """The sizes that a cause can use. A lane is (step, dp_rank); lanes are ordered by step, then DP rank.

    `layers`: transformer layers per stage, [pp].
    """

    layout: Layout
    steps: int
    microbatches: int
    layers: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """The number of lanes in the job."""
        return self.steps * self.layout.dp_ranks

    @property
    def step_of_lane(self) -> npt.NDArray[np.int64]:
        """Position of each lane's step, [lanes]."""
        return np.repeat(np.arange(self.steps), self.layout.dp_ranks)

    @property
    def dp_rank_of_lane(self) -> npt.NDArray[np.int64]:
        """DP rank of each lane, [lanes]."""
        return np.tile(np.arange(self.layout.dp_ranks), self.steps)

    def chunk_work(self, pp_rank: int) -> float:
        """Layers of one model chunk of a stage, as a share of those of an average whole stage."""
        return self.layers[pp_rank] * self.layout.pp / sum(self.layers) / self.layout.vpp

    def rank(self, dp_rank: int, pp_rank: int) -> int:
        """Global rank of a worker's first tensor- and context-parallel rank (Megatron-LM's order: tp, cp, dp, pp)."""
        return self.layout.tp * self.layout.cp * (dp_rank + self.layout.dp_ranks * pp_rank)

    def host(self, dp_rank: int, pp_rank: int) -> int:
        """Number of the host that holds the worker's rank."""
        return self.rank(dp_rank, pp_rank) // GPUS_PER_HOST

    def places(self, name: str) -> int:
        """The number of values that a location of that name can have."""
        hosts = self.host(self.layout.dp_ranks - 1, self.layout.pp - 1) + 1
        sizes = {"dp_rank": self.layout.dp_ranks, "pp_rank": self.layout.pp, "host": hosts, "position": self.steps}
        return sizes[name]


def _no_effect(_op: PlannedOp) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a cause on an op: its own cost is multiplied by `factor`, `pause_s` is then added to it, and `late_s`
    to its launch delay.
    """

    factor: Change = _no_effect
    pause_s: Change = _no_effect
    late_s: Change = _no_effect


@dataclass(frozen=True, slots=True)
class InjectedCause:
    """One known cause. Fields in `LOCATION` give the place (None: drawn from the seed), all others the strength."""

    NAME: ClassVar[str]
    LOCATION: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _BOUNDS:
                require(self.NAME, field.name, getattr(self, field.name), *_BOUNDS[field.name])

    def located(self, job: JobShape, rng: np.random.Generator) -> Self:
        """The cause with all locations fixed. Raises SelectionError for one outside the job."""
        settled = {}
        for name in self.LOCATION:
            size = self.places(name, job)
            value = getattr(self, name)
            index = int(rng.integers(size)) if size else 0
            if value is not None and not 0 <= value < size:
                existing = f"{size} of them, so {name} must be 0 to {size - 1}" if size else "none"
                raise SelectionError(f"{self.NAME}: {name} is {value}; the job has {existing}")
            if size == 0:
                raise SelectionError(f"{self.NAME}: the job has no {name} to put it on; use a larger layout")
            settled[name] = index if value is None else value
        return replace(self, **settled)

    def places(self, name: str, job: JobShape) -> int:
        """The number of values that the location `name` can have in that job."""
        return job.places(name)

    def effect(self, _job: JobShape, _rng: np.random.Generator, /) -> Effect:
        """The effect of the (located) cause on each op; nothing if only the recording differs, not the run."""
        return Effect()

    def label(self) -> dict[str, Any]:
        """Name, location and strength as plain data."""
        strength = [field.name for field in fields(self) if field.name not in self.LOCATION]
        return {
            "cause": self.NAME,
            "location": {name: getattr(self, name) for name in self.LOCATION},
            "strength": {name: getattr(self, name) for name in strength},
        }


def require(
    owner: str, name: str, value: object, low: float, high: float, types: type | tuple[type, ...] = (int, float)
) -> None:
    """Raise SelectionError if a setting is not a finite number of these types from `low` to `high`."""
    fits = isinstance(value, types) and not isinstance(value, bool)
    if not (fits and math.isfinite(float(str(value))) and low <= float(str(value)) <= high):
        bound = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
        raise SelectionError(f"{owner}: {name} is {value!r:.40}; expected {bound}")


@dataclass(frozen=True, slots=True)
class OnWorker(InjectedCause):
    """A cause at one worker."""

    LOCATION: ClassVar[tuple[str, ...]] = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class SlowWorker(OnWorker):
    """One worker computes `factor` times as long: forwards, backwards and optimizer."""

    NAME = "slow-worker"
    factor: float = 1.5

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        return _scaled(WORK, {self.pp_rank: job.dp_rank_of_lane == self.dp_rank}, self.factor)


@dataclass(frozen=True, slots=True)
class SlowHost(InjectedCause):
    """All workers of one host compute `factor` times as long: power, cooling or a busy CPU."""

    NAME = "slow-host"
    LOCATION = ("host",)
    host: int | None = None
    factor: float = 1.5

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        on_host: dict[int | None, npt.NDArray[np.bool_]] = {
            stage: np.tile([job.host(dp_rank, stage) == self.host for dp_rank in range(job.layout.dp_ranks)], job.steps)
            for stage in range(job.layout.pp)
        }
        return _scaled(WORK, on_host, self.factor)


@dataclass(frozen=True, slots=True)
class SlowLastStage(InjectedCause):
    """The loss layer: the last model chunk costs (factor - 1) average stages more, forward and backward."""

    NAME = "slow-last-stage"
    factor: float = 1.5

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        last = job.layout.pp - 1, job.layout.vpp - 1
        # Scaled rather than added: the loss layer shares the noise of the layers before it.
        factor = 1 + (self.factor - 1) / job.chunk_work(last[0])
        return Effect(factor=lambda op: factor if op.kind in COMPUTE and (op.pp_rank, op.chunk) == last else None)


@dataclass(frozen=True, slots=True)
class SequenceLengthImbalance(InjectedCause):
    """Microbatches of packed documents whose attention costs the sum of squared lengths.

    `quadratic_share`: the share of compute that is attention, 0 to 1. A microbatch costs (1 - share) + share x (its sum
    of squared lengths / the mean one), for forward and backward alike, on all stages of its DP rank.
    """

    NAME = "sequence-length-imbalance"
    quadratic_share: float = 0.5

    def effect(self, job: JobShape, rng: np.random.Generator) -> Effect:
        factor = self.factor(job, rng)
        return Effect(factor=lambda op: factor[op.microbatch] if op.kind in COMPUTE else None)

    def factor(self, job: JobShape, rng: np.random.Generator) -> Floats:
        """The relative cost of each microbatch, [microbatches, lanes]; 1 is the mean."""
        squares = packed_squares(rng, job.lanes * job.microbatches).reshape(job.microbatches, job.lanes)
        factor: Floats = 1 - self.quadratic_share + self.quadratic_share * squares / squares.mean()
        return factor


def packed_squares(rng: np.random.Generator, microbatches: int) -> Floats:
    """Sum of squared document lengths of microbatches packed to PACKED_TOKENS, [microbatches]."""
    remaining = np.full(microbatches, float(PACKED_TOKENS))
    squares = np.zeros(microbatches)
    while (open_ := remaining > 0).any():
        length = np.minimum(
            rng.lognormal(math.log(MEDIAN_LENGTH), LENGTH_SIGMA, open_.sum()).round() + 1, remaining[open_]
        )
        squares[open_] += length**2
        remaining[open_] -= length
    return squares


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

    def effect(self, job: JobShape, rng: np.random.Generator) -> Effect:
        shape = (job.layout.pp, job.lanes)
        forwards = job.microbatches * job.layout.vpp
        paused = np.where(rng.random(shape) < self.rate, rng.integers(forwards, size=shape), -1)
        pause = self.pause_s * (1 + self.growth * job.step_of_lane.astype(np.float64))
        return Effect(
            pause_s=lambda op: (
                np.where(paused[op.pp_rank] == op.seq, pause, 0.0) if op.kind is OpKind.FORWARD_COMPUTE else None
            )
        )


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

    def effect(self, job: JobShape, rng: np.random.Generator) -> Effect:
        lanes = (job.dp_rank_of_lane == self.dp_rank) | self.everywhere
        late = np.where(lanes, self.delay_s * rng.uniform(0.8, 1.2, job.lanes), 0.0)
        first = OpKind.FORWARD_COMPUTE, 0, 0
        return Effect(late_s=lambda op: late if (op.kind, op.pp_rank, op.seq) == first else None)


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

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        first = self.position or 0
        lanes = (job.step_of_lane >= first) & (job.step_of_lane < first + self.count)
        return _scaled(COMPUTE, dict.fromkeys(range(job.layout.pp), lanes), self.factor)


@dataclass(frozen=True, slots=True)
class SlowP2pLink(OnWorker):
    """Transfers between a stage and the next one of a DP rank, in both directions, take `factor` times as long.

    `pp_rank`: the earlier stage of the link.
    """

    NAME = "slow-p2p-link"
    factor: float = 40.0

    def places(self, name: str, job: JobShape) -> int:
        return job.places(name) - (name == "pp_rank")

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        factor = np.where(job.dp_rank_of_lane == self.dp_rank, self.factor, 1.0)
        earlier = self.pp_rank or 0
        stages = {
            OpKind.FORWARD_SEND: earlier, OpKind.BACKWARD_RECV: earlier, OpKind.FORWARD_RECV: earlier + 1,
            OpKind.BACKWARD_SEND: earlier + 1,
        }  # fmt: skip
        return Effect(factor=lambda op: factor if stages.get(op.kind) == op.pp_rank else None)


@dataclass(frozen=True, slots=True)
class SlowNic(OnWorker):
    """The data-parallel collectives of one worker take `factor` times as long on its side."""

    NAME = "slow-nic"
    factor: float = 4.0

    def places(self, name: str, job: JobShape) -> int:
        return job.places(name) if job.layout.has_dp_collectives else 0

    def effect(self, job: JobShape, _rng: np.random.Generator) -> Effect:
        return _scaled(DP_COLLECTIVES, {self.pp_rank: job.dp_rank_of_lane == self.dp_rank}, self.factor)


@dataclass(frozen=True, slots=True)
class FlappingNetwork(InjectedCause):
    """A few transfers between stages, at any place, take `factor` times as long; `rate`: the share of them."""

    NAME = "flapping-network"
    rate: float = 0.005
    factor: float = 400.0

    def effect(self, job: JobShape, rng: np.random.Generator) -> Effect:
        seed = int(rng.integers(2**32))

        def factor(op: PlannedOp) -> Floats | None:
            if op.kind not in P2P:
                return None
            # Both sides of a transfer draw from the same seed.
            hit = np.random.default_rng([seed, *op.draw_key]).random(job.lanes) < self.rate
            return np.where(hit, self.factor, 1.0)

        return Effect(factor=factor)


def _scaled(kinds: frozenset[OpKind], lanes_of: Mapping[int | None, npt.NDArray[np.bool_]], factor: float) -> Effect:
    """Ops of some kinds cost `factor` times as much in the lanes of their stage, [lanes] of bool."""
    factors = {stage: np.where(lanes, factor, 1.0) for stage, lanes in lanes_of.items()}
    return Effect(factor=lambda op: factors.get(op.pp_rank) if op.kind in kinds else None)


@dataclass(frozen=True, slots=True)
class ClockOffset(OnWorker):
    """The clock of one worker is `offset_s` ahead (below 0: behind); its work is as healthy as before."""

    NAME = "clock-offset"
    offset_s: float = 0.005


@dataclass(frozen=True, slots=True)
class MissingRanks(OnWorker):
    """`count` workers were not recorded: the drawn (or named) one and those after it, by DP rank, then stage."""

    NAME = "missing-ranks"
    count: int = 1


@dataclass(frozen=True, slots=True)
class MissingSteps(OnWorker):
    """One worker was not recorded in `count` consecutive steps, from traced step `position` (counted from 0) on."""

    NAME = "missing-steps"
    LOCATION = ("dp_rank", "pp_rank", "position")
    position: int | None = None
    count: int = 1


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
        raise SelectionError(f"unknown cause {name!r}; known: {', '.join(CAUSES)}{did_you_mean(name, CAUSES)}")
    cause = CAUSES[name]
    settings = {field.name: field.type for field in fields(cause)}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        short, equals, value = (part.strip() for part in item.partition("="))
        key = _SHORT.get(short, short)
        if key not in settings or not equals:
            raise SelectionError(
                f"{text}: invalid setting {item!r}; {name} takes {', '.join(f'{field}=...' for field in settings)}"
            )
        if key in values:
            raise SelectionError(f"{text}: {key} is given twice; keep one")
        values[key] = _parse_value(str(settings[key]), value, f"{text}: {key}")
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
