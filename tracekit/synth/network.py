"""Network causes to inject: a slow link between stages, a slow network card, a flapping network.

In: a job's sizes (`JobShape`). Out: effects on the transfer durations of sends, recvs and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.synth.job import Effect, Floats, InjectedCause, JobShape, Scaled, Seeded, places
from tracekit.synth.schedules import PlannedOp
from tracekit.trace.model import DP_COLLECTIVES, P2P, OpKind


@dataclass(frozen=True, slots=True)
class SlowP2pLink(InjectedCause):
    """Transfers between a stage and the next one of a DP rank, in both directions, take `factor` times as long.

    `pp_rank`: the earlier stage of the link.
    """

    NAME = "slow-p2p-link"
    LOCATION = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None
    factor: float = 40.0

    def __post_init__(self) -> None:
        self.require("factor", least=1)

    def places(self, name: str, job: JobShape) -> int:
        """See `InjectedCause.places`."""
        return job.layout.pp - 1 if name == "pp_rank" else places(name, job)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        return _SlowLink(self.pp_rank or 0, seeded.job.dp_rank_of_lane == self.dp_rank, self.factor)


@dataclass(frozen=True, slots=True)
class _SlowLink(Effect):
    pp_rank: int
    lanes: npt.NDArray[np.bool_]
    factor: float

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        earlier = op.kind in (OpKind.FORWARD_SEND, OpKind.BACKWARD_RECV)
        if op.kind not in P2P or op.no_op or op.pp_rank != self.pp_rank + (not earlier):
            return cost
        return np.where(self.lanes, cost * self.factor, cost)


@dataclass(frozen=True, slots=True)
class SlowNic(InjectedCause):
    """The data-parallel collectives of one worker take `factor` times as long on its side."""

    NAME = "slow-nic"
    LOCATION = ("dp_rank", "pp_rank")
    dp_rank: int | None = None
    pp_rank: int | None = None
    factor: float = 4.0

    def __post_init__(self) -> None:
        self.require("factor", least=1)

    def places(self, name: str, job: JobShape) -> int:
        """See `InjectedCause.places`."""
        return places(name, job) if job.layout.has_dp_collectives else 0

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        lanes = seeded.job.dp_rank_of_lane == self.dp_rank
        return Scaled(frozenset(DP_COLLECTIVES), frozenset({self.pp_rank or 0}), lanes, self.factor)


@dataclass(frozen=True, slots=True)
class FlappingNetwork(InjectedCause):
    """A few transfers between stages, at any place, take `factor` times as long; `rate`: the share of them."""

    NAME = "flapping-network"
    rate: float = 0.005
    factor: float = 400.0

    def __post_init__(self) -> None:
        self.require("rate", least=0, most=1)
        self.require("factor", least=1)

    def effect(self, seeded: Seeded) -> Effect:
        """See `InjectedCause.effect`."""
        return _Flapping(int(seeded.rng.integers(2**32)), self.rate, self.factor)


@dataclass(frozen=True, slots=True)
class _Flapping(Effect):
    """Both sides of a transfer draw from the same seed."""

    seed: int
    rate: float
    factor: float

    def cost(self, op: PlannedOp, cost: Floats) -> Floats:
        """See `Effect.cost`."""
        if op.kind not in P2P or op.no_op:
            return cost
        hit = np.random.default_rng([self.seed, *op.draw_key]).random(len(cost)) < self.rate
        return np.where(hit, cost * self.factor, cost)
