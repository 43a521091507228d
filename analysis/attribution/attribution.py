"""The result of straggler attribution: step times per scenario, from which every ratio follows, and whether to trust
it; and what S consists of.

In: the step times that `attribute` got from the replay. Out: S, waste and contributions by kind, stage, DP rank and
worker. Equations: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25).

In: a replayed graph. Out: step times of the ideal job with the noise of the run, and `Parts` of S: the part that causes
explain, the part due to the noise of the run, and the unexplained rest. Even in a healthy job, the last of many noisy
workers is later than the mean one, so S exceeds 1. Noise is the difference of an op from the previous one of the same
worker and place: an effect that lasts longer than a step (a slow worker, an uneven stage, a drift) is the same in both
and cancels out. The difference of two such values scatters by the root of 2 more than each of them. Differences far
beyond the usual ones of their kind are events, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, combinations
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, NOTHING, ratio_margins, sample_stride
from tracekit.analysis.replay.kernel import Costs
from tracekit.base.text import seconds
from tracekit.trace.model import OpKind, Worker

if TYPE_CHECKING:
    from tracekit.analysis.graph.dependency_graph import Block
    from tracekit.analysis.graph.op_graph import FoldedGraph, OpGraph
    from tracekit.analysis.graph.unrecorded import Gap
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.analysis.replay.graph_replay import GraphReplay

#: Workers with gaps that a text names.
_MOST_WORKERS = 3
#: Compare about so many ops at a time, so that they stay in the cache.
_NUMBERS_AT_ONCE = 1 << 18


class VerdictThresholds(Struct, frozen=True):
    """When a loss is worth a verdict, and when no figure is to be trusted."""

    #: What costs less than this share of a step is no headline and no first step. Chosen; `eventsim` demands the rest.
    headline_share: float = 0.05
    #: A job is straggling if S is at least this. Definition: the paper's.
    straggling: float = 1.1
    #: A replay that misses the recording by more than this explains too little. Chosen: as much as a headline.
    largest_discrepancy: float = 0.05
    #: Missing ranks may hide this much more of S before prices are not reliable. Chosen: half of a straggler.
    largest_hidden: float = 1.05
    #: Above this share, ops with negative times are more than a few odd recordings. Chosen.
    largest_clamped_share: float = 0.002
    #: A job cannot be faster than without its stragglers; S below this is more than rounding and noise. Chosen.
    smallest_slowdown: float = 0.98
    #: Mention an unexplained loss from this share of the step on ... Chosen: as much as a finding has to cost.
    unexplained: float = 0.02
    #: ... if it is this many standard errors. Statistic: one normal value of 740.
    errors: float = 3.0
    #: So many steps of one rank say what a day costs. Chosen.
    fewest_steps: int = 3
    #: Noise is within this many standard deviations of the usual op. Statistic: 99.7 % of normal values.
    largest_noise: float = 3.0


VERDICT = VerdictThresholds()


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

    `critical`: the critical path of the recorded, the original and the ideal job. `m_w`, `m_s`: the
    share of the straggler loss that goes when the slowest 3 % of workers, or the last stage, are ideal; nan if nothing
    is lost. `correlation`: stage -> r, None if undefined.

    `gaps`: members of collectives that were not recorded; `slowdown_as_recorded`: S without reconstructing them, None
    if nothing was reconstructed. `hidden_slowdown`: S if collectives did nothing but wait for DP ranks that are not in
    the trace, None if none is missing. `incomplete_steps`: the number of steps with missing DP ranks. `ops`: the number
    of ops in the graph. `clock_doubts`: why the measured clock offsets may be wrong. `coarse_starts_s`: the resolution
    of the recorded starts, seconds, if it is too coarse, else None. `one_clock`: all ranks share a clock.
    """

    steps: Int32s
    dp_ranks: tuple[int, ...]
    stages: int
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
    m_w: float
    m_s: float
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
    def straggling(self) -> bool:
        """S >= 1.1."""
        return self.slowdown >= VERDICT.straggling

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
        if unexplained > VERDICT.largest_discrepancy:
            total = "" if unexplained >= discrepancy else f", of {discrepancy:.1%} in all"
            reasons.append(
                f"launch delays add {unexplained:.1%} to the step{total}: host-side time (Python, kernel launch), or"
                " waiting for something that was not recorded"
            )
        if discrepancy < -VERDICT.largest_discrepancy:
            reasons.append(
                f"the replay is {-discrepancy:.1%} slower than the recording: ops overlapped that the graph orders"
            )
        if error > VERDICT.largest_discrepancy:
            reasons.append(f"the replay with launch delays misses the recording by {error:.1%}")
        reasons += self._doubts()
        clamped = self.clamped_transfers + self.clamped_delays
        if self.contradicted or (reasons and clamped):
            reasons.append(
                f"{clamped} transfers or launch delays lie more than 10 ms below zero (taken as 0): ops overlapped that"
                " the graph orders, or clocks of ranks differ by more than could be taken out"
            )
        return ReplayTrust(error, discrepancy, unexplained, not reasons, tuple(reasons))

    @property
    def contradicted(self) -> bool:
        """Whether so many ops contradict the graph that no replay of it says what a change saves."""
        # On one clock, ops that contradict the graph cost no more than the replay misses.
        clamped = self.clamped_transfers + self.clamped_delays
        return clamped > VERDICT.largest_clamped_share * self.ops and not self.one_clock

    def _doubts(self) -> list[str]:
        """Reasons why a more complete recording could give a different verdict."""
        doubts = list(self.clock_doubts)
        if self.coarse_starts_s is not None:
            doubts.append(
                f"starts are multiples of {seconds(self.coarse_starts_s)} and durations are not: digits of the starts"
                " were lost (a float32 column?); convert them as float64"
            )
        if self.slowdown < VERDICT.smallest_slowdown:
            doubts.append(
                f"the slowdown is {self.slowdown:.2f}: the job without stragglers is slower than the job itself, so"
                " these ideal durations do not fit it"
            )
        recorded = self.slowdown_as_recorded
        if self.gaps and recorded is None:
            doubts.append(f"{gaps_text(self.gaps)} were not recorded, so that nobody waits for them in the replay")
        if recorded is not None and (recorded >= VERDICT.straggling) != self.straggling:
            doubts.append(
                f"{gaps_text(self.gaps)} were not recorded: the slowdown is {self.slowdown:.2f} with them reconstructed"
                f" and {recorded:.2f} without"
            )
        hidden = self.hidden_slowdown
        could_be = self.slowdown * VERDICT.largest_hidden if self.straggling else VERDICT.straggling
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


class Parts(Struct, frozen=True):
    """T(original) - T(ideal) and its parts, seconds of the mean step of `step_s`.

    `error_s`: the largest distance of the unexplained part from 0 by chance.
    """

    step_s: float
    lost_s: float
    explained_s: float
    noise_s: float
    error_s: float

    @classmethod
    def of(cls, original: Floats, ideal: Floats, noisy: Floats, explained: Floats | float = 0.0) -> Parts:
        """The parts of step times, seconds, [steps] each. `explained`: the loss recovered by fixing the causes.

        The error is that of a mean over the steps. A single step has none, so noise may then be twice what it seems.
        """
        lost_s, noise_s = (float((times - ideal).mean()) for times in (original, noisy))
        unexplained, steps = original - noisy - explained, len(original)
        error_s = VERDICT.errors * float(unexplained.std(ddof=1)) / math.sqrt(steps) if steps > 1 else max(noise_s, 0.0)
        return cls(float(original.mean()), lost_s, max(float(np.mean(explained)), 0.0), noise_s, error_s)

    @property
    def unexplained_s(self) -> float:
        """Seconds that neither a cause nor noise explains, at least 0."""
        return max(self.lost_s - self.explained_s - max(self.noise_s, 0.0), 0.0)

    @property
    def to_tell(self) -> bool:
        """True if a loss is worth reporting that neither causes nor chance explain."""
        return self.unexplained_s >= max(VERDICT.unexplained * self.step_s, self.error_s)

    @property
    def headline(self) -> bool:
        """True if that loss is large, at any S."""
        return self.to_tell and self.unexplained_s >= VERDICT.headline_share * self.step_s

    def words(self, step_s: float, whole: str = "each step", *, shares: bool = True) -> str | None:
        """Describe the loss without a cause, and whether noise can be the reason; None if it is small. `step_s`: the
        whole for shares, seconds; without `shares`, times are told in seconds.
        """

        def part(time_s: float) -> str:
            return f"{time_s / step_s:.0%}" if shares else seconds(time_s)

        noise_s = min(self.noise_s, self.lost_s - self.explained_s)
        if not self.to_tell:
            big = noise_s >= VERDICT.headline_share * self.step_s
            return f"the noise of the ops costs {part(noise_s)} of {whole}" if big else None
        cost = f"stragglers cost {part(self.lost_s)} of {whole}"
        by_noise = f", and {part(noise_s)} by the noise of the ops" if noise_s >= VERDICT.unexplained * step_s else ""
        if not self.explained_s and not by_noise:
            return f"{cost}, for a reason tracekit does not know"
        return f"{cost} in all, {part(self.unexplained_s)} for reasons tracekit does not know{by_noise}"


def waste(slowdown: float) -> float:
    """The share of the step that is lost to stragglers, 1 - 1/S; negative if the ideal job would be slower."""
    return 1 - 1 / slowdown


def gaps_text(gaps: Sequence[Gap]) -> str:
    """The gaps as a phrase: the ops and their workers, how many, in how many steps."""
    by_kind: dict[OpKind, list[Gap]] = {}
    for gap in gaps:
        by_kind.setdefault(gap.kind, []).append(gap)
    parts = []
    for kind, of_kind in by_kind.items():
        workers = [str(gap.worker) for gap in of_kind]
        more = len(workers) - _MOST_WORKERS
        named = ", ".join(workers[:_MOST_WORKERS]) + (f" and {more} more" if more > 0 else "")
        steps = len({step for gap in of_kind for step in gap.steps})
        ops = sum(gap.ops for gap in of_kind)
        parts.append(f"{ops:,} {kind} of worker{'s' if len(workers) > 1 else ''} {named} in {steps:,} steps")
    return "; ".join(parts)


def noisy_step_times(replay: JobReplay) -> Floats:
    """The step times of a pipeline's ideal job with the noise of the run, seconds, [steps]."""
    blocks = zip(replay.graph.blocks, replay.durations.cost, strict=True)
    return _with_factors(replay, [_factors(block, cost) for block, cost in blocks])


def _factors(block: Block, cost: Floats) -> Floats:
    """The noise of each op of a block as a factor of its usual cost, [rows, lanes]."""
    order = np.lexsort((block.step, block.dp_rank))
    dp_rank, factor = block.dp_rank[order], np.empty_like(cost)
    previous = _previous(order, dp_rank[1:] == dp_rank[:-1])
    batch_size, lanes = max(1, _NUMBERS_AT_ONCE // len(order)), len(order)

    def compare(kind: int) -> None:
        rows = np.flatnonzero(block.template.kind == kind)
        parts = [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
        for part in parts:
            factor[part] = _of_previous(cost[part], previous)
        sample = np.arange(0, len(rows) * lanes, sample_stride(len(rows) * lanes))
        usual = float(np.median(np.abs(factor[rows[sample // lanes], sample % lanes])))
        for part in parts:
            factor[part] = _usual(factor[part], usual)

    parallel.each(compare, np.unique(block.template.kind).tolist(), numbers=cost.size)
    return factor


def noisy_step_times_of_ops(replay: GraphReplay, graph: FoldedGraph) -> Floats:
    """The same for a job of any shape, whose ops are compared with those of their class on the same rank."""
    ops = graph.ops
    logs = _of_previous(replay.cost_of_ops[None], _one_before(ops))[0]
    classes = pl.DataFrame({"peer": ops.peer, "far": np.abs(logs)})
    usual = classes.select(pl.col("far").quantile(0.5, "lower").over("peer")).to_series().to_numpy()
    factor = _usual(logs, usual)
    return _with_factors(replay, [factor[block.op] for block in graph.blocks])


def _one_before(ops: OpGraph) -> Ints:
    """The one before each op among those of its class on its rank, as of `_previous`."""
    code = combinations([ops.peer, ops.rank, ops.step])[1]
    order = np.argsort(ops.start, kind="stable")
    # numpy sorts narrow integers without comparing them.
    order = order[np.argsort(code.astype(np.min_scalar_type(code.max(initial=0)))[order], kind="stable")]
    alike = (ops.peer[order][1:] == ops.peer[order][:-1]) & (ops.rank[order][1:] == ops.rank[order][:-1])
    return _previous(order, alike)


def _previous(order: Ints, alike: Bools) -> Ints:
    """The one before each in `order`; for one that is not `alike` with it, [order - 1], the one after it if alike."""
    previous = np.arange(len(order))
    previous[order[1:][alike]] = order[:-1][alike]
    first = alike & ~np.concatenate([[False], alike[:-1]])
    previous[order[:-1][first]] = order[1:][first]
    return previous


def _of_previous(cost: Floats, previous: Ints) -> Floats:
    """The logarithm of each op over the one before it, scaled to the scatter of one op, [rows, lanes]."""
    before = cost[:, previous]
    positive = (cost > NOTHING) & (before > NOTHING)
    logs: Floats = np.divide(cost, before, out=np.ones_like(cost), where=positive)
    np.log(logs, out=logs)
    logs /= np.sqrt(2)
    return logs


def _usual(logs: Floats, usual: Floats | float) -> Floats:
    """The factors of noise, without those too far from 1 to be noise. `usual`: the median distance of their kind."""
    return np.exp(np.where(np.abs(logs) <= VERDICT.largest_noise * MAD_TO_SIGMA * usual, logs, 0.0))


def _with_factors(replay: GraphReplay, factors: Sequence[Floats]) -> Floats:
    """Step times with the ideal costs times these factors, seconds, [steps]."""
    costs = []
    for block, ideal, factor in zip(replay.graph.blocks, replay.durations.ideal, factors, strict=True):
        work = ~block.template.is_communication
        if work.any():  # whose ideal is the mean
            of_work = factor[work]
            factor[work] = np.divide(of_work, of_work.mean(), out=of_work)
        costs.append(Costs.of_matrix(np.multiply(factor, ideal if ideal.ndim == 2 else ideal[:, None], out=factor)))
    return replay.begun(costs).step_times(costs)
