"""The parts of S: the part that causes explain, the part due to the noise of the run, and the unexplained rest.

In: a replayed graph. Out: step times of the ideal job with the noise of the run; `Parts` of S.

Even in a healthy job, the last of many noisy workers is later than the mean one, so S exceeds 1. Noise is the
difference of an op from the previous one of the same worker and place: an effect that lasts longer than a step (a slow
worker, an uneven stage, a drift) is the same in both and cancels out. The difference of two such values scatters by the
root of 2 more than each of them. Differences far beyond the usual ones of their kind are events, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, combinations
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, NOTHING, sample_stride
from tracekit.analysis.replay.kernel import Costs
from tracekit.base.text import seconds

if TYPE_CHECKING:
    from tracekit.analysis.graph.dependency_graph import Block
    from tracekit.analysis.graph.op_graph import FoldedGraph, OpGraph
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.analysis.replay.graph_replay import GraphReplay

#: Mention an unexplained loss if it is at least this share of the step and this many standard errors; make it the
#: headline from the larger share on.
SMALLEST_UNEXPLAINED, HEADLINE_UNEXPLAINED = 0.02, 0.05
ERRORS = 3.0
#: Noise is within this many standard deviations of the usual op.
LARGEST_NOISE = 3.0
#: Compare about so many ops at a time, so that they stay in the cache.
_NUMBERS_AT_ONCE = 1 << 18


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
        error_s = ERRORS * float(unexplained.std(ddof=1)) / math.sqrt(steps) if steps > 1 else max(noise_s, 0.0)
        return cls(float(original.mean()), lost_s, max(float(np.mean(explained)), 0.0), noise_s, error_s)

    @property
    def unexplained_s(self) -> float:
        """Seconds that neither a cause nor noise explains, at least 0."""
        return max(self.lost_s - self.explained_s - max(self.noise_s, 0.0), 0.0)

    @property
    def to_tell(self) -> bool:
        """True if a loss is worth reporting that neither causes nor chance explain."""
        return self.unexplained_s >= max(SMALLEST_UNEXPLAINED * self.step_s, self.error_s)

    @property
    def headline(self) -> bool:
        """True if that loss is large, at any S."""
        return self.to_tell and self.unexplained_s >= HEADLINE_UNEXPLAINED * self.step_s

    def words(self, step_s: float, whole: str = "each step", *, shares: bool = True) -> str | None:
        """Describe the loss without a cause, and whether noise can be the reason; None if it is small. `step_s`: the
        whole for shares, seconds; without `shares`, times are told in seconds.
        """

        def part(time_s: float) -> str:
            return f"{time_s / step_s:.0%}" if shares else seconds(time_s)

        noise_s = min(self.noise_s, self.lost_s - self.explained_s)
        if not self.to_tell:
            big = noise_s >= HEADLINE_UNEXPLAINED * self.step_s
            return f"the noise of its ops costs {part(noise_s)} of {whole}" if big else None
        cost = f"stragglers cost {part(self.lost_s)} of {whole}"
        by_noise = f", and {part(noise_s)} by the noise of its ops" if noise_s >= SMALLEST_UNEXPLAINED * step_s else ""
        if not self.explained_s and not by_noise:
            return f"{cost}, for a reason tracekit does not know"
        return f"{cost} in all, {part(self.unexplained_s)} for reasons tracekit does not know{by_noise}"


def noisy_step_times(replay: JobReplay) -> Floats:
    """The step times of a pipeline's ideal job with the noise of the run, seconds, [steps]."""
    blocks = zip(replay.graph.blocks, replay.durations.cost, strict=True)
    return _with_factors(replay, [_factors(block, cost) for block, cost in blocks])


def _factors(block: Block, cost: Floats) -> Floats:
    """The noise of each op of a block as a factor of its usual cost, [rows, lanes]."""
    order = np.lexsort((block.step, block.dp_rank))
    dp_rank, factor = block.dp_rank[order], np.empty_like(cost)
    previous = _previous(order, dp_rank[1:] == dp_rank[:-1])
    together, lanes = max(1, _NUMBERS_AT_ONCE // len(order)), len(order)

    def compare(kind: int) -> None:
        rows = np.flatnonzero(block.template.kind == kind)
        parts = [rows[first : first + together] for first in range(0, len(rows), together)]
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
    return np.exp(np.where(np.abs(logs) <= LARGEST_NOISE * MAD_TO_SIGMA * usual, logs, 0.0))


def _with_factors(replay: GraphReplay, factors: Sequence[Floats]) -> Floats:
    """Step times with the ideal costs times these factors, seconds, [steps]."""
    costs = []
    for block, ideal, factor in zip(replay.graph.blocks, replay.durations.ideal, factors, strict=True):
        work = ~block.template.is_communication
        if work.any():  # whose ideal is the mean
            of_work = factor[work]
            factor[work] = np.divide(of_work, of_work.mean(), out=of_work)
        costs.append(Costs.of_matrix(np.multiply(factor, ideal if ideal.ndim == 2 else ideal[:, None], out=factor)))
    return replay.step_times(costs)
