"""A job with other loads of its experts: times fitted against tokens, and a replay with those that the loads give.

In: the ops of a job, with its graph and replay. Out: `ExpertJob`, which prices loads.

The experts of a rank take a + b N seconds for N tokens, in forwards and in backwards; a transfer a' + b' M, with M
the most rows that any rank sends or receives. What an op takes beyond that stays.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.experts.exchanges import MEMBERS, Exchanges, between, find_exchanges, members_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.whatif.interventions import CostOverlay, SetOps, step_times
from tracekit.report.experts import LoadFit

if TYPE_CHECKING:
    from tracekit.analysis.graph.fold import FoldedGraph
    from tracekit.analysis.replay.graph_replay import GraphReplay

#: Tokens hardly vary if their standard deviation is below this share of their mean.
_HARDLY = 0.01
#: A time is an outlier, such as of a process that was stopped, beyond so many standard deviations; times that differ by
#: this share of their mean are the same.
_OUTLIER, _SAME, _PASSES = 4.0, 1e-6, 4
_PASS = ("backward", "forward")
#: A price is a point if two standard errors of the fits are at most this share of the step; else it is an interval.
_LARGEST_ERROR = 0.02


class Line(Struct, frozen=True):
    """Seconds = `base_s` + `slope` x tokens. `slope_error`: the standard error of the slope."""

    base_s: float
    slope: float
    r2: float
    slope_error: float

    @classmethod
    def fitted(cls, tokens: Floats, seconds: Floats) -> Line:
        """The least-squares line without outliers; level, with an unknown slope, if the tokens hardly vary.

        A slow rank has as many outliers as any rank has tokens, so the first guess is the median slope from the smaller
        half of the tokens to the larger one.
        """
        order, half = np.argsort(tokens, kind="stable"), len(tokens) // 2
        more = tokens[order[len(order) - half :]] - tokens[order[:half]]
        longer = seconds[order[len(order) - half :]] - seconds[order[:half]]
        apart = more > _HARDLY * float(tokens.mean())
        slope, found = float(np.median(longer[apart] / more[apart])) if apart.any() else 0.0, cls._of(tokens, seconds)
        for _ in range(_PASSES):
            left = seconds - slope * tokens
            left = np.abs(left - np.median(left))
            usual = 1.4826 * float(np.median(left))
            kept = left <= _OUTLIER * usual + _SAME * float(np.abs(seconds).mean())
            found = cls._of(tokens[kept], seconds[kept])
            slope = found.slope
        return found

    @classmethod
    def _of(cls, tokens: Floats, seconds: Floats) -> Line:
        beyond, count = tokens - tokens.mean(), tokens.size
        varies = float((beyond**2).sum())
        if count < 3 or varies <= (_HARDLY * tokens.mean()) ** 2 * count:
            return cls(float(seconds.mean()), 0.0, 0.0, float("inf"))
        slope = float((beyond * seconds).sum()) / varies
        base_s = float(seconds.mean()) - slope * float(tokens.mean())
        left = float(((seconds - base_s - slope * tokens) ** 2).sum())
        total = float(((seconds - seconds.mean()) ** 2).sum())
        error = (left / (count - 2) / varies) ** 0.5
        return cls(base_s, slope, 1 - left / total if total else 1.0, error)


class Price(Struct, frozen=True):
    """The mean step with other loads, seconds: `low_s` and `high_s` bound it, `step_s` is nan if nothing else is known.

    `error_s`: of the point.
    """

    step_s: float
    low_s: float
    high_s: float
    error_s: float


class ExpertJob(Struct, frozen=True, eq=False, dict=True):
    """A job with experts. `members`: of all-to-alls. `steps`: training steps that a step of `replay` covers.

    `graph`, `replay`: None if only the all-to-alls are known. `experts`: which ops may be of experts, [ops]. `layers`:
    of experts in a forward pass, if known. `rows`: rows that each rank receives in each pair, for each group,
    [pairs, ranks], where the recording has none.
    """

    members: pl.DataFrame = pl.DataFrame(schema=MEMBERS)
    graph: FoldedGraph | None = None
    replay: GraphReplay | None = None
    experts: Bools | None = None
    steps: int = 1
    layers: int | None = None
    rows: tuple[Floats, ...] = ()

    @cached_property
    def exchanges(self) -> list[Exchanges]:
        """The dispatches and combines of each group of ranks."""
        return find_exchanges(self.members, self.layers)

    @classmethod
    def of_ops(cls, ops: pl.DataFrame, graph: FoldedGraph, replay: GraphReplay, steps: int) -> ExpertJob:
        """The job with these ops, in the order of the graph."""
        on_gpu = ops["role"].eq("gpu").to_numpy() if "role" in ops.columns else np.ones(ops.height, np.bool_)
        return cls(members_of(ops), graph, replay, on_gpu & (graph.ops.rendezvous < 0), steps)

    @property
    def runs(self) -> bool:
        """Whether it is known how long the experts took."""
        return any(seconds.any() for seconds in self.expert_s)

    @property
    def _graph(self) -> FoldedGraph:
        assert self.graph is not None
        return self.graph

    @property
    def _replay(self) -> GraphReplay:
        assert self.replay is not None
        return self.replay

    @property
    def known(self) -> bool:
        """Whether it is known how many rows each rank sends and receives."""
        return bool(self.exchanges) and (bool(self.rows) or all(one.known for one in self.exchanges))

    @cached_property
    def cost(self) -> Floats:
        """The own cost of each op, seconds, [ops]."""
        return CostOverlay.recorded(self._replay).cost_of_ops()

    @cached_property
    def step_s(self) -> float:
        """The mean step as replayed with launch delays, seconds."""
        return self._step_s(self.cost)

    @cached_property
    def pair(self) -> Ints:
        """The pair that each op computes the experts of, counted over all groups, -1 for none, [ops]."""
        assert self.experts is not None
        return between(self._graph.ops, self.experts, self.exchanges)

    @cached_property
    def expert_s(self) -> list[Floats]:
        """What the experts of each pair take on each rank, seconds, [pairs, ranks] for each group."""
        if self.graph is None:
            return [np.zeros(one.received.shape) for one in self.exchanges]
        rank, found, first = self.graph.ops.rank, [], 0
        for one in self.exchanges:
            pairs, width = one.received.shape
            inside = (self.pair >= first) & (self.pair < first + pairs) & np.isin(rank, one.ranks)
            cell = (self.pair[inside] - first) * width + np.searchsorted(one.ranks, rank[inside])
            seconds = np.bincount(cell, weights=self.cost[inside], minlength=pairs * width)
            found.append(seconds.reshape(pairs, width).astype(np.float64))
            first += pairs
        return found

    @cached_property
    def tokens(self) -> list[Floats]:
        """The tokens of each rank in each pair, [pairs, ranks] for each group; if unknown, the time of its experts."""
        if self.known:
            return list(self.rows) or [one.received for one in self.exchanges]
        return self.expert_s

    def most(self, tokens: list[Floats], kept: float = 1.0) -> list[Floats]:
        """The most rows that a rank sends or receives in each pair, [pairs] for each group. `kept`: share of tokens."""
        sent = [
            one.sent if np.isfinite(one.sent).all() else own for one, own in zip(self.exchanges, tokens, strict=True)
        ]
        return [
            np.maximum(kept * source.max(axis=1), target.max(axis=1))
            for source, target in zip(sent, tokens, strict=True)
        ]

    @cached_property
    def lines(self) -> dict[str, Line]:
        """The fits: of experts in forwards and backwards, of dispatches and combines."""
        if not self.known:
            return {}
        backward = np.concatenate([np.broadcast_to(one.backward[:, None], one.received.shape).ravel()
                                   for one in self.exchanges])  # fmt: skip
        tokens, seconds = (np.concatenate([each.ravel() for each in values]) for values in (self.tokens, self.expert_s))
        found = {
            name: Line.fitted(tokens[which], seconds[which])
            for name, which in (("experts-forward", ~backward), ("experts-backward", backward))
            if which.any()
        }
        most = np.concatenate(self.most(self.tokens))
        for name in ("dispatch", "combine"):
            spent = np.concatenate([np.median(self.cost[getattr(one, name)], axis=1) for one in self.exchanges])
            line = Line.fitted(most, spent)
            steepest = max(line.slope + line.base_s / (float(most.mean()) or 1.0), 0.0)  # no time without rows
            found[name] = structs.replace(line, slope=min(max(line.slope, 0.0), steepest))
        return found

    @property
    def fits(self) -> list[LoadFit]:
        """The fits as data."""
        return [LoadFit(name, line.base_s, line.slope, line.r2) for name, line in self.lines.items()]

    @cached_property
    def mean_loads(self) -> list[Floats]:
        """The tokens of each pair divided among its ranks equally."""
        return [np.broadcast_to(each.mean(axis=1, keepdims=True), each.shape) for each in self.tokens]

    def price(self, tokens: list[Floats], kept: float = 1.0, volume: float = 1.0) -> Price:
        """The mean step if the ranks had these tokens, [pairs, ranks] for each group.

        `kept`: share of all tokens; `volume`: of the bytes of each.
        """
        experts, most = self._with_experts(tokens), [volume * each for each in self.most(tokens, kept)]
        high_s = self._step_s(experts)
        low_s = self._step_s(self._with_transfers(experts, most, in_proportion=True))
        experts_s, transfers_s = self._errors_s(tokens, most)
        error_s = experts_s + min(transfers_s, abs(high_s - low_s))  # a transfer takes no less than in proportion
        varies = all(np.isfinite(self.lines[name].slope_error) for name in ("dispatch", "combine") if self.known)
        moved = any((new != old).any() for new, old in zip(most, self.most(self.tokens), strict=True))
        if not self.known or (moved and not varies) or not error_s <= _LARGEST_ERROR * self.step_s:
            return Price(float("nan"), min(low_s, high_s), max(low_s, high_s), error_s)
        step_s = self._step_s(self._with_transfers(experts, most))
        return Price(step_s, float("nan"), float("nan"), error_s)

    def in_chunks(self, count: int) -> float:
        """The mean step, seconds, with the tokens of each layer in so many chunks: while the experts compute one, the
        network moves others.

        A chunk has its share of the tokens, but takes as long without tokens as all do. Between the first dispatch and
        the last combine, experts and network both run: the one that takes longer counts.
        """
        cost, first = self.cost.copy(), 0
        factor = np.ones((sum(len(each) for each in self.tokens), int(self._graph.ops.rank.max()) + 1))
        for one, most, spent in zip(self.exchanges, self.most(self.tokens), self.expert_s, strict=True):
            lines = [self.lines[name] for name in ("dispatch", "combine")]
            less = [(line.slope * most * (1 / count - 1))[:, None] for line in lines]
            moves = sum((line.base_s + line.slope * most / count)[:, None] for line in lines)
            for rows, change in zip((one.dispatch, one.combine), less, strict=True):
                cost[rows] = np.maximum(self.cost[rows] + change, 0.0)
            base = np.where(one.backward, *(self.lines.get(f"experts-{name}", lines[0]).base_s for name in _PASS))
            computes = spent + (count - 1) * base[:, None]
            takes = np.maximum(computes, (count - 1) * moves + computes / count)
            factor[first : first + len(most), list(one.ranks)] = np.divide(
                takes, spent, out=np.ones_like(spent), where=spent > 0
            )
            first += len(most)
        experts = self.pair >= 0
        cost[experts] *= factor[self.pair[experts], self._graph.ops.rank[experts]]
        return self._step_s(cost)

    @cached_property
    def balanced_cost(self) -> Floats:
        """The cost of each op if all ranks had the mean load, seconds, [ops]."""
        return self._with_transfers(self._with_experts(self.mean_loads), self.most(self.mean_loads))

    def _with_experts(self, tokens: list[Floats]) -> Floats:
        """The cost of each op with the experts of these tokens, seconds, [ops]."""
        factor = np.ones((sum(len(each) for each in tokens), int(self._graph.ops.rank.max()) + 1))
        first = 0
        for one, new, old, seconds in zip(self.exchanges, tokens, self.tokens, self.expert_s, strict=True):
            names = np.where(one.backward, "experts-backward", "experts-forward")
            slope = np.array([self.lines[name].slope if self.lines else 1.0 for name in names])
            changed = np.maximum(seconds + slope[:, None] * (new - old), 0.0)
            factor[first : first + len(new), list(one.ranks)] = np.divide(
                changed, seconds, out=np.ones_like(seconds), where=seconds > 0
            )
            first += len(new)
        return np.where(self.pair >= 0, self.cost * factor[self.pair, self._graph.ops.rank], self.cost)

    def _with_transfers(self, cost: Floats, most: list[Floats], *, in_proportion: bool = False) -> Floats:
        """These costs with transfers of so many rows, [pairs] for each group: by the fits, or as if a transfer took no
        time without rows.
        """
        cost = cost.copy()
        for one, new, old in zip(self.exchanges, most, self.most(self.tokens), strict=True):
            share = np.divide(new, old, out=np.ones_like(old), where=old > 0) - 1
            for name, rows in (("dispatch", one.dispatch), ("combine", one.combine)):
                line, spent = self.lines.get(name), self.cost[rows]
                if line is not None:
                    spent = (line.base_s + line.slope * old)[:, None]
                added = spent * share[:, None]
                if line is not None and not in_proportion:
                    added = line.slope * (new - old)[:, None]
                cost[rows] = np.maximum(self.cost[rows] + added, 0.0)
        return cost

    def _errors_s(self, tokens: list[Floats], most: list[Floats]) -> tuple[float, float]:
        """Two standard errors of the slopes over all tokens that a step moves, of experts and of transfers, seconds."""
        experts = transfers = 0.0
        for one, new, old, now, was in zip(
            self.exchanges, tokens, self.tokens, most, self.most(self.tokens), strict=True
        ):
            beyond = np.abs(new - old).max(axis=1)
            for name, which in (("experts-forward", ~one.backward), ("experts-backward", one.backward)):
                experts += _times(self.lines.get(name), beyond[which].sum())
            for name in ("dispatch", "combine"):
                transfers += _times(self.lines.get(name), np.abs(now - was).sum())
        steps = max(self.steps * len(self._replay.graph.steps), 1)
        return 2 * experts / steps, 2 * transfers / steps

    def _step_s(self, cost: Floats) -> float:
        return float(step_times(self._replay, [SetOps(cost)]).mean()) / self.steps


def _times(line: Line | None, count: float) -> float:
    """The error of a line over so many tokens; zero times an unknown error is zero."""
    return 0.0 if line is None or not count else line.slope_error * float(count)
