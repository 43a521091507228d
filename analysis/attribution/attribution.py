"""The result of straggler attribution: step times per scenario, from which every ratio follows, and whether to trust
it.

In: the step times that `attribute` got from the replay. Out: S, waste and contributions by kind, stage, DP rank and
worker.
Equations: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.unrecorded import Gap, gaps_text
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.means import ratio_margins
from tracekit.base.text import seconds
from tracekit.trace.model import Worker

#: A loss below this share of the step is not a headline.
SMALLEST_HEADLINE_SHARE = 0.05
#: A job is straggling if S is at least this.
STRAGGLING_SLOWDOWN = 1.1
#: If the replay without launch delays misses the recording by more than this, it explains too little.
LARGEST_DISCREPANCY = 0.05
#: If missing ranks could hide this much more of S, the price of a straggling job is not reliable.
LARGEST_HIDDEN = 1.05
#: Above this share, ops with negative times are more than a few odd recordings.
LARGEST_CLAMPED_SHARE = 0.002
#: A job cannot be faster than without its stragglers; S below this is more than rounding and noise.
SMALLEST_SLOWDOWN = 0.98


class ReplayTrust(Struct, frozen=True):
    """Trust in the figures: how well the replay explains the recording.

    `replay_error` = |T(launch delays kept) - T(recorded)| / T(recorded); `discrepancy` = T(recorded)/T(original) - 1,
    the share of time that launch delays add. `unexplained`: the part of `discrepancy` that no named cause explains.
    """

    replay_error: float
    discrepancy: float
    unexplained: float
    trustworthy: bool
    reasons: tuple[str, ...]


class CostOfOps(Struct, frozen=True):
    """Two estimates of the cost of a set x of ops; mean step times in seconds.

    `added_s` = T(ideal, x as recorded); `removed_s` = T(original, x idealised).
    """

    original_s: float
    ideal_s: float
    added_s: float
    removed_s: float

    @property
    def removal(self) -> float:
        """Share of the straggler loss that goes when x is idealised; nan if nothing is lost."""
        return _share(self.original_s - self.removed_s, self.original_s - self.ideal_s)

    @property
    def addition(self) -> float:
        """Share of the straggler loss that x causes alone; nan if nothing is lost."""
        return _share(self.added_s - self.ideal_s, self.original_s - self.ideal_s)


class CriticalTimes(Struct, frozen=True):
    """Mean seconds of a step on the critical path: by reported kind, by worker, and while nothing on the path ran.

    The values of `by_kind` and `delay_s` add up to the step time, and so do those of `by_worker` and `delay_s`.
    """

    by_kind: Mapping[str, float]
    by_worker: Mapping[Worker, float]
    delay_s: float


class Attribution(Struct, frozen=True, eq=False, dict=True):
    """Step times for every what-if question about one job. Arrays are seconds; `steps` are step numbers, [steps].

    `recorded`, `original`, `ideal`: [steps]. `by_kind`: reported kind -> [steps]; `by_stage`: [steps, stages];
    `by_dp_rank`: [steps, dp_ranks]; `by_worker`: [steps, dp_ranks, stages]: the ideal job with only that set as
    recorded. `removed_by_kind`, `removed_by_stage`, `removed_by_dp_rank`: the original job with only that set
    idealised. `delayed_by_kind`, `delayed_by_stage`, `delayed_by_dp_rank`: the original job with only that set's launch
    delays. `removed_by_dp_rank` and `delayed_by_dp_rank` take a replay for each DP rank; they are None if that is too
    expensive.

    `critical`: the critical path of the recorded, the original and the ideal job. `m_w`, `m_s`: the slowest 3 % of
    workers, the last stage. `correlation`: stage -> r, None if undefined.

    `gaps`: members of collectives that were not recorded; `slowdown_as_recorded`: S without reconstructing them, None
    if nothing was reconstructed. `hidden_slowdown`: S if collectives did nothing but wait for DP ranks that are not in
    the trace, None if none is missing. `incomplete_steps`: the number of steps with missing DP ranks. `ops`: the number
    of ops in the graph. `clock_doubts`: why the measured clock offsets may be wrong. `coarse_starts_s`: the resolution
    of the recorded starts, seconds, if it is too coarse, else None. `one_clock`: all ranks share a clock.
    """

    steps: Int32s
    dp_ranks: tuple[int, ...]
    stages: int
    world_size: int
    recorded: Floats
    original: Floats
    ideal: Floats
    with_delays: Floats
    by_kind: Mapping[str, Floats]
    by_stage: Floats
    by_dp_rank: Floats
    by_worker: Floats
    removed_by_kind: Mapping[str, Floats]
    removed_by_stage: Floats
    removed_by_dp_rank: Floats | None
    delayed_by_kind: Mapping[str, Floats]
    delayed_by_stage: Floats
    delayed_by_dp_rank: Floats | None
    critical: Mapping[str, CriticalTimes]
    m_w: CostOfOps
    m_s: CostOfOps
    slowest_workers: tuple[Worker, ...]
    correlation: Mapping[int, float | None]
    clamped_transfers: int
    clamped_delays: int
    ops: int
    gaps: tuple[Gap, ...]
    slowdown_as_recorded: float | None
    hidden_slowdown: float | None
    incomplete_steps: int
    clock_doubts: tuple[str, ...]
    coarse_starts_s: float | None
    one_clock: bool = False

    @property
    def original_s(self) -> float:
        """T(original), seconds."""
        return float(self.original.mean())

    @property
    def ideal_s(self) -> float:
        """T(ideal), seconds."""
        return float(self.ideal.mean())

    @property
    def recorded_s(self) -> float:
        """T(recorded), seconds."""
        return float(self.recorded.mean())

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal)."""
        return self.original_s / self.ideal_s

    @property
    def waste(self) -> float:
        """Share of the step time lost to stragglers, 1 - 1/S; negative if the ideal is slower than the original."""
        return waste(self.slowdown)

    @property
    def straggling(self) -> bool:
        """S >= 1.1."""
        return self.slowdown >= STRAGGLING_SLOWDOWN

    @property
    def wasted_gpu_hours(self) -> float:
        """GPU-hours lost in the traced steps."""
        return float((self.original - self.ideal).sum()) * self.world_size / 3600

    @property
    def step_slowdown(self) -> Floats:
        """Slowdown of each step, [steps]."""
        return self.original / self.ideal

    @cached_property
    def stage_slowdown(self) -> Floats:
        """S of each stage, [stages]."""
        return self._slowdowns(self.by_stage)

    @cached_property
    def dp_rank_slowdown(self) -> Floats:
        """S of each DP rank, [dp_ranks]."""
        return self._slowdowns(self.by_dp_rank)

    @cached_property
    def worker_slowdown(self) -> Floats:
        """Exact S_w of each worker, [dp_ranks, stages]."""
        return self._slowdowns(self.by_worker)

    @cached_property
    def worker_slowdown_approx(self) -> Floats:
        """The paper's approximation min(S_dp, S_pp), [dp_ranks, stages]."""
        return np.minimum(self.dp_rank_slowdown[:, None], self.stage_slowdown[None, :])

    @property
    def kind_slowdown(self) -> dict[str, float]:
        """S of each reported kind."""
        return {name: float(times.mean()) / self.ideal_s for name, times in self.by_kind.items()}

    def errors(self, times: Floats) -> Floats:
        """Half the width of the 95 % interval of S of scenarios, [steps, scenarios] -> [scenarios], from blocks as long
        as S of the job asks for; nan if the steps are too few.
        """
        return ratio_margins(times, self.ideal, self.original)

    @property
    def discrepancy(self) -> float:
        """T(recorded)/T(original) - 1: the share of time that launch delays add."""
        return self.recorded_s / self.original_s - 1

    @cached_property
    def trust(self) -> ReplayTrust:
        """Trust in the figures, with reasons; as in the published method, no launch delay counts as explained."""
        return self.trust_given(self.discrepancy)

    def trust_given(self, unexplained: float) -> ReplayTrust:
        """As `trust`, if named causes explain all launch delays except `unexplained`, a share of T(original)."""
        error = abs(float(self.with_delays.mean()) - self.recorded_s) / self.recorded_s
        discrepancy = self.discrepancy
        reasons = []
        if unexplained > LARGEST_DISCREPANCY:
            of = "" if unexplained >= discrepancy else f", of {discrepancy:.1%} in all"
            reasons.append(
                f"launch delays add {unexplained:.1%} to the step{of}: host-side time (Python, kernel launch), or"
                " waiting for something that was not recorded"
            )
        if discrepancy < -LARGEST_DISCREPANCY:
            reasons.append(
                f"the replay is {-discrepancy:.1%} slower than the recording: ops overlapped that the graph orders"
            )
        if error > LARGEST_DISCREPANCY:
            reasons.append(f"the replay with launch delays misses the recording by {error:.1%}")
        reasons += self._doubts()
        clamped = self.clamped_transfers + self.clamped_delays
        # On one clock, ops that contradict the graph cost no more than the replay misses.
        many = clamped > LARGEST_CLAMPED_SHARE * self.ops and not self.one_clock
        if many or (reasons and clamped):
            reasons.append(
                f"{clamped} transfers or launch delays lie more than 10 ms below zero (taken as 0): ops overlapped that"
                " the graph orders, or clocks of ranks differ by more than could be taken out"
            )
        return ReplayTrust(error, discrepancy, unexplained, not reasons, tuple(reasons))

    def _doubts(self) -> list[str]:
        """Reasons why a more complete recording could give a different verdict."""
        doubts = list(self.clock_doubts)
        if self.coarse_starts_s is not None:
            doubts.append(
                f"starts are multiples of {seconds(self.coarse_starts_s)} and durations are not: digits of the starts"
                " were lost (a float32 column?); convert them as float64"
            )
        if self.slowdown < SMALLEST_SLOWDOWN:
            doubts.append(
                f"the slowdown is {self.slowdown:.2f}: the job without stragglers is slower than the job itself, so"
                " these ideal durations do not fit it"
            )
        recorded = self.slowdown_as_recorded
        if self.gaps and recorded is None:
            doubts.append(f"{gaps_text(self.gaps)} were not recorded, so that nobody waits for them in the replay")
        if recorded is not None and (recorded >= STRAGGLING_SLOWDOWN) != self.straggling:
            doubts.append(
                f"{gaps_text(self.gaps)} were not recorded: the slowdown is {self.slowdown:.2f} with them reconstructed"
                f" and {recorded:.2f} without"
            )
        hidden = self.hidden_slowdown
        could_be = self.slowdown * LARGEST_HIDDEN if self.straggling else STRAGGLING_SLOWDOWN
        if self.straggling and 0 < self.incomplete_steps < len(self.steps):
            doubts.append(
                f"DP ranks are missing from {self.incomplete_steps} of {len(self.steps)} steps, where waiting for them"
                " counts as communication: leave these steps out with --ignore-steps"
            )
        elif hidden is not None and hidden >= could_be:
            doubts.append(
                "DP ranks are missing from the trace, and collectives may be waiting for them: the slowdown could be up"
                f" to {hidden:.2f}"
            )
        return doubts

    def _slowdowns(self, times: Floats) -> Floats:
        means: Floats = times.mean(axis=0) / self.ideal_s
        return means


def waste(slowdown: float) -> float:
    """1 - 1/S."""
    return 1 - 1 / slowdown


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
