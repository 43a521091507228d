"""The common parts of injected causes: a place in the job, a strength, an effect on the cost of ops.

In: the sizes of a job. Out: the base types of the causes in `causes` and `network`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import SelectionError
from tracekit.synth.schedules import PlannedOp
from tracekit.trace.model import Layout, OpKind

Floats = npt.NDArray[np.float64]

GPUS_PER_HOST = 8


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


@dataclass(frozen=True, slots=True)
class Seeded:
    """A job and the random generator of a cause."""

    job: JobShape
    rng: np.random.Generator


class Effect:
    """Effect of a cause on an op in all lanes; none by default.

    `order`: effects that add seconds (1) come after those that multiply (0), regardless of the order of the causes.
    """

    order: ClassVar[int] = 0

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """The op's own cost with the cause, seconds, [lanes]; `cost` is without it."""
        del op
        return cost

    def delay(self, op: PlannedOp, delay: Floats) -> Floats:
        """The op's launch delay with the cause, seconds, [lanes]; `delay` is without it."""
        del op
        return delay


@dataclass(frozen=True, slots=True)
class InjectedCause:
    """One known cause. Fields in `LOCATION` give the place (None: drawn from the seed), all others the strength."""

    NAME: ClassVar[str]
    LOCATION: ClassVar[tuple[str, ...]] = ()

    def located(self, seeded: Seeded) -> Self:
        """The cause with all locations fixed. Raises SelectionError for one outside the job."""
        settled = {}
        for name in self.LOCATION:
            size = self.places(name, seeded.job)
            value = getattr(self, name)
            drawn = int(seeded.rng.integers(size)) if size else 0
            if value is not None and not 0 <= value < size:
                raise SelectionError(f"{self.NAME}: {name} is {value}; the job has {_count(size, name)}")
            if size == 0:
                raise SelectionError(f"{self.NAME}: the job has no {name} to put it on; use a larger layout")
            settled[name] = drawn if value is None else value
        return replace(self, **settled)

    def places(self, name: str, job: JobShape) -> int:
        """The number of values that the location `name` can have in that job."""
        return places(name, job)

    def effect(self, seeded: Seeded) -> Effect:
        """The effect of the (located) cause on each op; nothing if only the recording differs, not the run."""
        del seeded
        return Effect()

    def label(self) -> dict[str, Any]:
        """Name, location and strength as plain data."""
        strength = [field.name for field in fields(self) if field.name not in self.LOCATION]
        return {
            "cause": self.NAME,
            "location": {name: getattr(self, name) for name in self.LOCATION},
            "strength": {name: getattr(self, name) for name in strength},
        }

    def require(self, name: str, *, least: float, most: float = math.inf) -> None:
        """Raise SelectionError if the strength `name` is outside `least` to `most`."""
        value = getattr(self, name)
        if not (math.isfinite(value) and least <= value <= most):
            bound = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise SelectionError(f"{self.NAME}: {name} is {value!r}; expected {bound}")


def places(name: str, job: JobShape) -> int:
    """The number of values that a location of that name has in a job."""
    match name:
        case "dp_rank":
            return job.layout.dp_ranks
        case "pp_rank":
            return job.layout.pp
        case "host":
            return job.host(job.layout.dp_ranks - 1, job.layout.pp - 1) + 1
        case _:
            return job.steps


def _count(size: int, name: str) -> str:
    return f"{size} of them, so {name} must be 0 to {size - 1}" if size else "none"


@dataclass(frozen=True, slots=True)
class Scaled(Effect):
    """Ops of some kinds on some stages cost `factor` times as much in some lanes ([lanes] of bool)."""

    kinds: frozenset[OpKind]
    pp_ranks: frozenset[int]
    lanes: npt.NDArray[np.bool_]
    factor: float

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        if op.kind not in self.kinds or op.pp_rank not in self.pp_ranks or op.no_op:
            return cost
        return np.where(self.lanes, cost * self.factor, cost)
