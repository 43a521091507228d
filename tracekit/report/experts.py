"""What hiding communication costs, and what uneven experts cost: plain data for JSON and all renderers.

In: what `analysis/experts/` found. Out: `Overlap` and `Experts`. docs/plans.md explains the figures.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

WaitBasis = Literal["peers", "minimum"]
LoadSource = Literal["splits", "loads", "kernel-times"]
#: Pairs of expert and rank.
Placement = list[list[int]]
ExpertCause = Literal["hot-expert", "hot-rank", "rotating", "skew", "late-peer", "one-launch-queue"]


class OverlapOfRank(Struct, frozen=True):
    """One rank, seconds of the recording.

    `both_s`: compute and communication at once; `exposed_s`: communication alone. `hidden_share`: of the communication;
    `efficiency`: of what could be hidden. `wait_s`: inside collectives, until the last member began (`peers`), or
    beyond the shortest kernel of that name, an upper bound (`minimum`). `sm_tax_at_most_s`: how much longer compute may
    have taken on the SMs that communication left it; null if the number of SMs is unknown.
    """

    rank: int
    compute_s: float
    communication_s: float
    both_s: float
    exposed_s: float
    hidden_share: float
    efficiency: float
    wait_s: float
    wait_basis: WaitBasis
    sm_tax_at_most_s: float | None


class OverlapOfCollective(Struct, frozen=True):
    """The communication kernels of one name, all ranks together."""

    name: str
    ops: int
    seconds: float
    exposed_s: float
    wait_s: float


class PhaseOps(Struct, frozen=True):
    """The GPU ops launched inside annotations of one name, such as "attn(F)", all ranks together."""

    phase: str
    ops: int
    seconds: float


class PhasePair(Struct, frozen=True):
    """How long communication of one phase ran while compute of another did, all ranks together."""

    communication: str
    compute: str
    seconds: float


class Overlap(Struct, frozen=True):
    """Communication and compute at once. `assigned_ops`: of `gpu_ops`, those launched inside an annotation."""

    ranks: list[OverlapOfRank]
    collectives: list[OverlapOfCollective]
    phases: list[PhaseOps]
    pairs: list[PhasePair]
    gpu_ops: int
    assigned_ops: int


class LayerLoads(Struct, frozen=True):
    """One layer of experts, mean over the steps. `tokens_by_rank`: that each rank computes, ranks ascending.

    `max_over_mean`: of the ranks. `deviation`: of `max_over_mean` over the steps.
    """

    layer: int
    tokens_by_rank: list[float]
    tokens_by_expert: list[float] | None
    max_over_mean: float
    deviation: float


class LoadFit(Struct, frozen=True):
    """Seconds = `base_s` + `per_token_s` x tokens, of the experts of a rank or of a transfer (most tokens of any rank).

    `r2`: the share of the variance that this explains.
    """

    phase: str
    base_s: float
    per_token_s: float
    r2: float


class Rebalanced(Struct, frozen=True):
    """A plan and its price, seconds a step; null where it is not known, `unknown` says why.

    `low_s`, `high_s`: bounds of the step. `placement`: for each layer, pairs of expert and rank. `chunks`: the best
    number.
    """

    plan: str
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    saved_s: float | None = None
    error_s: float | None = None
    dropped_share: float | None = None
    placement: list[Placement] | None = None
    chunks: int | None = None
    unknown: str | None = None


class CauseOfImbalance(Struct, frozen=True):
    """Why ranks wait for each other in all-to-alls. `saved_s`: a step, with equal loads or without the late peer."""

    cause: ExpertCause
    rank: int | None
    expert: int | None
    layers: list[int]
    saved_s: float


class Experts(Struct, frozen=True):
    """Loads of experts. `source`: where they were read, null if nowhere; `cut`: the profiler cut the lists of a group.

    `notes`: what to know about the loads, a sentence each.
    """

    source: LoadSource | None
    cut: bool
    layers: list[LayerLoads]
    fits: list[LoadFit]
    rebalance: list[Rebalanced]
    causes: list[CauseOfImbalance]
    notes: list[str]


class PlacedLayer(Struct, frozen=True):
    """The experts of one layer on ranks: `placement`, pairs of expert and rank."""

    layer: int
    placement: Placement
    max_over_mean: float
