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
from msgspec import Struct

from tracekit.analysis.experts.exchanges import Exchanges, between, find_exchanges, members_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import CostOverlay, SetOps, step_times
from tracekit.report.experts import LoadFit

if TYPE_CHECKING:
    from tracekit.analysis.graph.fold import FoldedGraph

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
        """The least-squares line; level, with an unknown slope, if the tokens do not vary."""
        beyond, count = tokens - tokens.mean(), tokens.size
        varies = float((beyond**2).sum())
        if count < 3 or varies <= (1e-9 * tokens.mean()) ** 2 * count:
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

    members: pl.DataFrame
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
        ops, wanted = self._graph.ops, self.experts
        assert wanted is not None
        return between(ops.before, ops.after, ops.rank.astype(np.int64), wanted, self.exchanges)

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
            spent = [np.median(self.cost[getattr(one, name)], axis=1) for one in self.exchanges]
            found[name] = Line.fitted(most, np.concatenate(spent))
        return found

    @property
    def fits(self) -> list[LoadFit]:
        """The fits as data."""
        return [LoadFit(name, line.base_s, line.slope, line.r2) for name, line in self.lines.items()]

    @cached_property
    def mean_loads(self) -> list[Floats]:
        """The tokens of each pair divided among its ranks equally."""
        return [np.broadcast_to(each.mean(axis=1, keepdims=True), each.shape) for each in self.tokens]

    def price(self, tokens: list[Floats], kept: float = 1.0) -> Price:
        """The mean step if the ranks had these tokens, [pairs, ranks] for each group. `kept`: share of tokens."""
        experts, most = self._with_experts(tokens), self.most(tokens, kept)
        high_s = self._step_s(experts)
        share = [np.divide(new, old, out=np.ones_like(old), where=old > 0)
                 for new, old in zip(most, self.most(self.tokens), strict=True)]  # fmt: skip
        low_s = self._step_s(self._with_transfers(experts, [each - 1 for each in share], relative=True))
        error_s = self._error_s(tokens, most)
        if not self.known or not error_s <= _LARGEST_ERROR * self.step_s:
            return Price(float("nan"), min(low_s, high_s), max(low_s, high_s), error_s)
        more = [new - old for new, old in zip(most, self.most(self.tokens), strict=True)]
        step_s = self._step_s(self._with_transfers(experts, more))
        return Price(step_s, float("nan"), float("nan"), error_s)

    @cached_property
    def balanced_cost(self) -> Floats:
        """The cost of each op if all ranks had the mean load, seconds, [ops]."""
        more = [new - old for new, old in zip(self.most(self.mean_loads), self.most(self.tokens), strict=True)]
        return self._with_transfers(self._with_experts(self.mean_loads), more)

    @cached_property
    def balanced_replay(self) -> GraphReplay:
        """The replay of the job if all ranks had the mean load."""
        recorded = self._replay.durations
        cost = tuple(self.balanced_cost[block.op] for block in self._graph.blocks)
        return GraphReplay(self._graph, Durations(cost, recorded.launch_delay, cost, 0, 0))

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

    def _with_transfers(self, cost: Floats, more: list[Floats], *, relative: bool = False) -> Floats:
        """These costs with longer transfers: by `more` rows, or by that share of their time; [pairs] for each group."""
        cost = cost.copy()
        for one, each in zip(self.exchanges, more, strict=True):
            for name, rows in (("dispatch", one.dispatch), ("combine", one.combine)):
                added = self.cost[rows] * each[:, None] if relative else self.lines[name].slope * each[:, None]
                cost[rows] = np.maximum(self.cost[rows] + added, 0.0)
        return cost

    def _error_s(self, tokens: list[Floats], most: list[Floats]) -> float:
        """Two standard errors of the slopes, over all the tokens that a step moves, seconds of the mean step."""
        if not self.known:
            return float("nan")
        error = 0.0
        for one, new, old, now, was in zip(
            self.exchanges, tokens, self.tokens, most, self.most(self.tokens), strict=True
        ):
            beyond = np.abs(new - old).max(axis=1)
            for name, which in (("experts-forward", ~one.backward), ("experts-backward", one.backward)):
                error += _times(self.lines[name].slope_error, beyond[which].sum()) if which.any() else 0.0
            for name in ("dispatch", "combine"):
                error += _times(self.lines[name].slope_error, np.abs(now - was).sum())
        return 2 * error / max(self.steps * len(self._replay.graph.steps), 1)

    def _step_s(self, cost: Floats) -> float:
        return float(step_times(self._replay, [SetOps(cost)]).mean()) / self.steps


def _times(error: float, count: float) -> float:
    """Zero times an unknown error is zero."""
    return error * count if count else 0.0
