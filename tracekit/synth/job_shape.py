"""The common parts of injected causes: a place in the job, a strength, an effect on the cost of ops.

In: the sizes of a job. Out: the base types of `causes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import SelectionError
from tracekit.synth.schedules import PlannedOp
from tracekit.trace.model import Layout

Floats = npt.NDArray[np.float64]
#: What changes about an op: [lanes] or one number for all of them; None: nothing.
Change = Callable[[PlannedOp], Floats | float | None]

GPUS_PER_HOST = 8
#: Strengths of causes, and what they can be.
_BOUNDS = {
    "factor": (1, math.inf), "count": (1, math.inf), "pause_s": (0, math.inf), "growth": (0, math.inf),
    "delay_s": (0, math.inf), "rate": (0, 1), "quadratic_share": (0, 1), "offset_s": (-math.inf, math.inf),
}  # fmt: skip


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


def _nothing(_op: PlannedOp) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a cause on an op: its own cost is multiplied by `factor`, `pause_s` is then added to it, and `late_s`
    to its launch delay.
    """

    factor: Change = _nothing
    pause_s: Change = _nothing
    late_s: Change = _nothing


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
            drawn = int(rng.integers(size)) if size else 0
            if value is not None and not 0 <= value < size:
                existing = f"{size} of them, so {name} must be 0 to {size - 1}" if size else "none"
                raise SelectionError(f"{self.NAME}: {name} is {value}; the job has {existing}")
            if size == 0:
                raise SelectionError(f"{self.NAME}: the job has no {name} to put it on; use a larger layout")
            settled[name] = drawn if value is None else value
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
    owner: str, name: str, value: object, least: float, most: float, types: type | tuple[type, ...] = (int, float)
) -> None:
    """Raise SelectionError if a setting is not a finite number of these types from `least` to `most`."""
    fits = isinstance(value, types) and not isinstance(value, bool)
    if not (fits and math.isfinite(float(str(value))) and least <= float(str(value)) <= most):
        bound = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise SelectionError(f"{owner}: {name} is {value!r:.40}; expected {bound}")
