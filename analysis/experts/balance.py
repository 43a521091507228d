"""A job with other loads of its experts: times fitted against tokens, and a replay with those that the loads give.

In: the ops of a job, with its graph and replay. Out: `ExpertJob`, which prices loads.

The experts of a rank take a + b N seconds for N tokens, in forwards and in backwards; a transfer a' + b' M, with M
the most rows that any rank sends or receives. What an op takes beyond that stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.analysis.graph.op_rules import SLACK_S
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, numbered
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA
from tracekit.report.questions import LoadFit, Rebalanced
from tracekit.trace.model import OpKind

if TYPE_CHECKING:
    from tracekit.analysis.gpu.pace import PaceOfPeers

#: Members of all-to-alls: `row` of its op, `instance` (equal on all ranks that meet), `rows_sent`, `rows_received` by
#: this rank, null if unknown.
MEMBERS = pl.Schema({
    "group": pl.String, "step": pl.Int64, "rank": pl.Int64, "instance": pl.Int64, "row": pl.Int64,
    "start": pl.Float64, "rows_sent": pl.Int64, "rows_received": pl.Int64,
})  # fmt: skip

_ALL_TO_ALL = str(OpKind.ALL_TO_ALL)
#: Tokens hardly vary if their standard deviation is below this share of their mean. Chosen.
_HARDLY = 0.01
#: A time is an outlier, such as of a process that was stopped, beyond so many standard deviations; times that differ
#: by this share of their mean are the same. Statistic: one normal value of 30,000.
_OUTLIER, _SAME, _PASSES = 4.0, 1e-6, 4
_EXPERTS = _FORWARD, _BACKWARD = "experts-forward", "experts-backward"
#: A price is a point if two standard errors of the fits are at most this share of the step; else it is an interval.
#: Chosen: as much as a finding has to cost.
_LARGEST_ERROR = 0.02


class Exchanges(Struct, frozen=True, eq=False):
    """The pairs of dispatch and combine of a job, by group, then time. The members of a pair are one op of each rank.

    Of pairs: `group`, a number; `step`; `layer`; `first`, whether its tokens go through this layer for the first time;
    `backward`; `begin`, its first member; [pairs]. Of members: `pair`; `rank`; `place`, the position of the rank in its
    group; `sent`, `received`, rows in the dispatch, nan if unknown; `dispatch`, `combine`, rows of the ops; [members].
    """

    group: Ints
    step: Ints
    layer: Ints
    first: Bools
    backward: Bools
    begin: Ints
    pair: Ints
    rank: Ints
    place: Ints
    sent: Floats
    received: Floats
    dispatch: Ints
    combine: Ints

    @property
    def rows_known(self) -> bool:
        """Whether the rows of all ranks are known: as many are received as sent."""
        return bool((self.total(self.received) == self.total(self.sent)).all())  # nan equals nothing

    @property
    def widths(self) -> Ints:
        """The number of members of each pair, [pairs]."""
        return np.bincount(self.pair, minlength=len(self.begin))

    def total(self, values: Floats) -> Floats:
        """The sum over each pair, [pairs], of values of members."""
        return np.asarray(np.add.reduceat(values, self.begin))

    def most(self, values: Floats) -> Floats:
        """The largest of each pair, [pairs], of values of members."""
        return np.asarray(np.maximum.reduceat(values, self.begin))


def find_exchanges(members: pl.DataFrame, layers: int | None = None) -> Exchanges:
    """Find the pairs of each group, of the steps in which all its ranks have equally many. `members`: of MEMBERS.

    `layers`: how many layers of experts a forward pass has, if known.

    Dispatch and combine alternate, and the combine returns what the dispatch sent. Backward passes repeat the exchanges
    of the forward pass in reverse order, with the same rows; so do forward passes computed again.
    """
    of_step, meeting = ("group", "step"), ("group", "step", "instance")
    ordered = (
        members.with_columns(
            width=pl.col("rank").n_unique().over("group"),
            met=pl.len().over(meeting),
            at=pl.col("start").max().over(meeting),
        )
        .filter((pl.col("met") == pl.col("width")).all().over(of_step))
        .filter(pl.len().over(of_step) % (2 * pl.col("width")) == 0)
        .sort("group", "step", "at", "instance", "rank")
        .with_columns(number=pl.int_range(pl.len()).over(of_step))
    )
    dispatches, combines = (ordered.filter(pl.col("number") // pl.col("width") % 2 == odd) for odd in (0, 1))
    place = (dispatches["number"] % dispatches["width"]).to_numpy()
    begin = np.flatnonzero(place == 0)
    sent, received = (
        dispatches[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in ("rows_sent", "rows_received")
    )
    group, step = numbered(dispatches["group"])[begin], dispatches["step"].to_numpy()[begin]
    blocks = np.append(np.flatnonzero(np.diff(numbered(pl.Series(group), pl.Series(step)), prepend=-1)), len(begin))
    ends, of_steps = np.append(begin, len(place)), [(np.empty(0, np.int64), *np.empty((2, 0), np.bool_))]
    for first, last in pairwise(blocks.tolist()):
        inside = slice(ends[first], ends[last])
        rows = np.hstack([values[inside].reshape(last - first, -1) for values in (sent, received)])
        of_steps.append(_layers(rows, layers))
    layer, opens, backward = map(np.concatenate, zip(*of_steps, strict=True))
    return Exchanges(
        group, step, layer, opens, backward, begin, np.cumsum(place == 0) - 1, dispatches["rank"].to_numpy(), place,
        sent, received, dispatches["row"].to_numpy(), combines["row"].to_numpy(),
    )  # fmt: skip


def _layers(rows: Floats, layers: int | None) -> tuple[Ints, Bools, Bools]:
    """The layer of each pair of a step, whether its tokens are there for the first time, and whether it is a backward.

    `rows`: what tells the pairs apart, [pairs, any].
    """
    count, place = len(rows), np.arange(len(rows))
    half = count // 2
    if count % 2 == 0 and np.array_equal(rows, rows[::-1], equal_nan=True) and layers in {None, half}:
        return np.minimum(place, count - 1 - place), place < half, place >= half
    alike = numbered(*(pl.Series(column) for column in np.nan_to_num(rows, nan=-1.0).T))
    opens, last = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    opens[np.unique(alike, return_index=True)[1]] = True
    last[count - 1 - np.unique(alike[::-1], return_index=True)[1]] = True
    in_pass = layers or int(np.flatnonzero(~np.append(opens, False))[0])
    number = (np.cumsum(opens) - 1)[opens]
    layer = np.zeros(int(alike.max(initial=0)) + 1, np.int64)
    layer[alike[opens]] = number % in_pass
    return layer[alike], opens, last & ~opens


def members_of(ops: pl.DataFrame, *, of_whole_groups: bool = True) -> pl.DataFrame:
    """The members of all-to-alls among the ops of an op trace: those of this kind, or with rows, or marked: `exchanges`
    is the size of their group. `of_whole_groups`: only of groups all of whose ranks were recorded.
    """
    stated = dict.fromkeys(("rows_sent", "rows_received", "exchanges"), pl.Int64)
    columns = {"rendezvous": pl.Int64, "group": pl.String, "kind": pl.String, **stated}
    other = [name for name in stated if name in ops.columns and not ops.schema[name].is_integer()]  # other labels
    table = ops.drop(other)
    table = table.with_columns(
        pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in table.columns
    )
    step = next((name for name in ("profiler_step", "step") if name in ops.columns), None)
    exchanges = (  # `GraphSubject.exchanges` asks first whether there may be any
        pl.col("rows_received").is_not_null()
        | pl.col("exchanges").is_not_null()
        | pl.col("kind").cast(pl.String).eq(_ALL_TO_ALL)
    )
    members = table.with_row_index("row").filter(pl.col("rendezvous").is_not_null(), exchanges)
    if of_whole_groups:
        ranks = pl.col("rank").n_unique().over("group")
        members = members.filter(ranks == pl.col("exchanges").fill_null(ranks))
    return members.select(
        pl.col("group").cast(pl.String).fill_null(""), (pl.lit(0) if step is None else pl.col(step)).alias("step"),
        "rank", pl.Series("instance", numbered(members["rendezvous"])), "row", "start", "rows_sent", "rows_received",
    ).cast(MEMBERS, strict=False).drop_nulls("step")  # fmt: skip


def between(graph: OpGraph, wanted: Bools, exchanges: Exchanges) -> Ints:
    """The member whose dispatch each op waits for, and whose combine waits for it; -1 for none, [ops].

    `wanted`: which ops may be experts, [ops]. They run from the end of the dispatch to the start of the combine.
    """
    ends, member = graph.start + graph.duration, np.full(len(wanted), -1, np.int64)
    rows = np.flatnonzero(wanted)
    for group in np.unique(exchanges.group):
        members = np.flatnonzero(exchanges.group[exchanges.pair] == group)
        ops = np.concatenate([exchanges.dispatch[members], rows])
        time = np.concatenate([ends[ops[: len(members)]] - SLACK_S, graph.start[rows]])
        order = np.lexsort((np.arange(len(ops)), time, graph.step[ops], graph.rank[ops]))
        last = np.empty(len(ops), np.int64)  # the dispatch before each op, if any is
        last[order] = order[np.maximum.accumulate(np.where(order < len(members), np.arange(len(ops)), 0))]
        nearest = members[np.minimum(last[len(members) :], len(members) - 1)]
        dispatch = exchanges.dispatch[nearest]
        inside = (graph.rank[dispatch] == graph.rank[rows]) & (graph.step[dispatch] == graph.step[rows])
        inside &= ends[dispatch] - SLACK_S <= graph.start[rows]
        inside &= ends[rows] <= graph.start[exchanges.combine[nearest]] + SLACK_S
        member[rows[inside]] = nearest[inside]
    fed, feeds = np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.bool_)
    member[exchanges.dispatch] = member[exchanges.combine] = np.arange(len(exchanges.pair))
    fed[exchanges.dispatch] = feeds[exchanges.combine] = True
    same_member = (member[graph.before] == member[graph.after]) & (member[graph.before] >= 0)
    before, after = graph.before[same_member], graph.after[same_member]
    fed, feeds = _spread(fed, before, after), _spread(feeds, after, before)
    return np.where(wanted & fed & feeds, member, -1)


def _spread(reached: Bools, source: Ints, target: Ints) -> Bools:
    """Which ops can be reached along edges, [ops]."""
    while True:
        new = np.unique(target[reached[source] & ~reached[target]])
        if not len(new):
            return reached
        reached[new] = True


class FittedLine(Struct, frozen=True):
    """Seconds = `base_s` + `slope` x tokens. `slope_error`: the standard error of the slope."""

    base_s: float
    slope: float
    r2: float
    slope_error: float

    @classmethod
    def fitted(cls, tokens: Floats, seconds: Floats) -> FittedLine:
        """The least-squares line without outliers; level, with an unknown slope, if the tokens hardly vary.

        A slow rank has as many outliers as any rank has tokens, so the first guess is the median slope from the smaller
        half of the tokens to the larger one.
        """
        order, half = np.argsort(tokens, kind="stable"), len(tokens) // 2
        difference = tokens[order[len(order) - half :]] - tokens[order[:half]]
        longer = seconds[order[len(order) - half :]] - seconds[order[:half]]
        differs = difference > _HARDLY * float(tokens.mean())
        slope = float(np.median(longer[differs] / difference[differs])) if differs.any() else 0.0
        line = cls._of(tokens, seconds)
        for _ in range(_PASSES):
            residual = seconds - slope * tokens
            residual = np.abs(residual - np.median(residual))
            usual = MAD_TO_SIGMA * float(np.median(residual))
            inliers = residual <= _OUTLIER * usual + _SAME * float(np.abs(seconds).mean())
            line = cls._of(tokens[inliers], seconds[inliers])
            slope = line.slope
        return line

    @classmethod
    def _of(cls, tokens: Floats, seconds: Floats) -> FittedLine:
        beyond, count = tokens - tokens.mean(), tokens.size
        varies = float((beyond**2).sum())
        if count < 3 or varies <= (_HARDLY * tokens.mean()) ** 2 * count:
            return cls(float(seconds.mean()), 0.0, 0.0, float("inf"))
        slope = float((beyond * seconds).sum()) / varies
        base_s = float(seconds.mean()) - slope * float(tokens.mean())
        residual = float(((seconds - base_s - slope * tokens) ** 2).sum())
        total = float(((seconds - seconds.mean()) ** 2).sum())
        error = (residual / (count - 2) / varies) ** 0.5
        return cls(base_s, slope, 1 - residual / total if total else 1.0, error)


class ExpertJob(Struct, frozen=True, eq=False, dict=True):
    """A job with experts. `members`: of all-to-alls. `steps`: training steps that a step of the replay covers.

    `pace`: the replay, None if only the all-to-alls are known. `computes`: which ops may be of experts, [ops].
    `layers`: of experts in a forward pass, if known. `rows`: that each rank receives, where the recording has none,
    [members].
    """

    members: pl.DataFrame = pl.DataFrame(schema=MEMBERS)
    pace: PaceOfPeers | None = None
    computes: Bools | None = None
    steps: int = 1
    layers: int | None = None
    rows: Floats | None = None

    @classmethod
    def of_ops(cls, ops: pl.DataFrame, pace: PaceOfPeers, steps: int) -> ExpertJob:
        """The job with these ops, in the order of the graph."""
        on_gpu = ops["role"].eq("gpu").to_numpy() if "role" in ops.columns else np.ones(ops.height, np.bool_)
        return cls(members_of(ops), pace, on_gpu & (pace.graph.ops.rendezvous < 0), steps)

    @cached_property
    def exchanges(self) -> Exchanges:
        """The dispatches and combines."""
        return find_exchanges(self.members, self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether all-to-alls of experts were recorded."""
        return len(self.exchanges.step) > 0

    @property
    def runs(self) -> bool:
        """Whether it is known how long the experts took."""
        return bool(self.expert_s.any())

    @property
    def rows_known(self) -> bool:
        """Whether it is known how many rows each rank sends and receives."""
        return self.has_experts and (self.rows is not None or self.exchanges.rows_known)

    @property
    def _pace(self) -> PaceOfPeers:
        assert self.pace is not None
        return self.pace

    @cached_property
    def step_s(self) -> float:
        """The mean step as replayed with launch delays, seconds."""
        return self._step_s(self._pace.cost)

    @cached_property
    def member(self) -> Ints:
        """The member that each op computes the experts of, -1 for none, [ops]."""
        assert self.computes is not None
        return between(self._pace.graph.ops, self.computes, self.exchanges)

    @cached_property
    def expert_s(self) -> Floats:
        """What the experts of each member take, seconds, [members]."""
        count = len(self.exchanges.pair)
        if self.pace is None:
            return np.zeros(count)
        inside = self.member >= 0
        return np.bincount(self.member[inside], self.pace.cost[inside], count).astype(np.float64)

    @cached_property
    def tokens(self) -> Floats:
        """The tokens of each member, [members]; if unknown, the time of its experts."""
        if not self.rows_known:
            return self.expert_s
        return self.exchanges.received if self.rows is None else self.rows

    @cached_property
    def mean_loads(self) -> Floats:
        """The tokens of each pair divided among its ranks equally, [members]."""
        return np.asarray((self.exchanges.total(self.tokens) / self.exchanges.widths)[self.exchanges.pair])

    def most(self, tokens: Floats, kept_share: float = 1.0) -> Floats:
        """The most rows that a rank sends or receives, [pairs], of these tokens, [members]. `kept_share`: of all."""
        sent = np.where(np.isfinite(self.exchanges.sent), self.exchanges.sent, tokens)
        return np.maximum(kept_share * self.exchanges.most(sent), self.exchanges.most(tokens))

    @property
    def _transfers(self) -> tuple[tuple[str, Ints], ...]:
        return ("dispatch", self.exchanges.dispatch), ("combine", self.exchanges.combine)

    @cached_property
    def lines(self) -> dict[str, FittedLine]:
        """The fits: of experts in forwards and backwards, of dispatches and combines."""
        if not self.rows_known:
            return {}
        fits, backward = {}, self.exchanges.backward[self.exchanges.pair]
        for name, mask in zip(_EXPERTS, (~backward, backward), strict=True):
            if mask.any():
                fits[name] = FittedLine.fitted(self.tokens[mask], self.expert_s[mask])
        most = self.most(self.tokens)
        for name, rows in self._transfers:
            spent = np.split(self._pace.cost[rows], self.exchanges.begin[1:])
            line = FittedLine.fitted(most, np.array([np.median(times_s) for times_s in spent]))
            steepest = max(line.slope + line.base_s / (float(most.mean()) or 1.0), 0.0)  # no time without rows
            fits[name] = structs.replace(line, slope=min(max(line.slope, 0.0), steepest))
        return fits

    @property
    def fits(self) -> list[LoadFit]:
        """The fits as data."""
        return [LoadFit(name, line.base_s, line.slope, line.r2) for name, line in self.lines.items()]

    def price(self, plan: str, tokens: Floats, kept_share: float = 1.0, volume: float = 1.0) -> Rebalanced:
        """The mean step with these tokens, [members]. `kept_share`: of all tokens; `volume`: of the bytes of each."""
        experts, most = self._with_experts(tokens), volume * self.most(tokens, kept_share)
        high_s = self._step_s(experts)
        low_s = self._step_s(self._with_transfers(experts, most, in_proportion=True))
        change = self.exchanges.most(np.abs(tokens - self.tokens))
        moved = float(np.abs(most - self.most(self.tokens)).sum())
        backward = self.exchanges.backward
        experts_s = self._error_s(_FORWARD, change[~backward].sum()) + self._error_s(_BACKWARD, change[backward].sum())
        transfers_s = sum(self._error_s(name, moved) for name, _ in self._transfers)
        # A transfer takes no less than in proportion: an unknown slope moves the step within the bounds alone.
        error_s = experts_s + min(transfers_s, abs(high_s - low_s))
        if not self.rows_known or not error_s <= _LARGEST_ERROR * self.step_s:
            return Rebalanced(plan, low_s=min(low_s, high_s), high_s=max(low_s, high_s))
        step_s = self._step_s(self._with_transfers(experts, most))
        return Rebalanced(plan, step_time_s=step_s, saved_s=self.step_s - step_s, error_s=error_s)

    def _error_s(self, name: str, change: float) -> float:
        """Two standard errors of a slope over so many more or fewer tokens in all, seconds a step."""
        if not change or name not in self.lines:
            return 0.0
        return 2 * self.lines[name].slope_error * float(change) / (self.steps * len(self._pace.graph.steps))

    def in_chunks(self, count: int) -> float:
        """The mean step, seconds, with the tokens of each layer in so many chunks: while the experts compute one, the
        network moves others.

        A chunk has its share of the tokens, but takes as long without tokens as all do. Between the first dispatch and
        the last combine, experts and network both run: the one that takes longer counts.
        """
        most, lines = self.most(self.tokens), [self.lines[name] for name, _ in self._transfers]
        moves = np.sum([line.base_s + line.slope * most / count for line in lines], axis=0)[self.exchanges.pair]
        computes = self.expert_s + (count - 1) * self._of_experts(lambda line: line.base_s)
        cost = self._with_expert_s(np.maximum(computes, (count - 1) * moves + computes / count))
        return self._step_s(self._with_transfers(cost, most / count))

    @cached_property
    def balanced_cost(self) -> Floats:
        """The cost of each op if all ranks had the mean load, seconds, [ops]."""
        return self._with_transfers(self._with_experts(self.mean_loads), self.most(self.mean_loads))

    def _of_experts(self, figure: Callable[[FittedLine], float]) -> Floats:
        """A figure of the fit of the experts of each member, [members]."""
        forward, backward = (figure(self.lines[name]) if name in self.lines else 0.0 for name in _EXPERTS)
        return np.where(self.exchanges.backward, backward, forward)[self.exchanges.pair]

    def _with_experts(self, tokens: Floats) -> Floats:
        """The cost of each op with the experts of these tokens, [members], seconds, [ops]."""
        slope = self._of_experts(lambda line: line.slope) if self.lines else 1.0
        return self._with_expert_s(np.maximum(self.expert_s + slope * (tokens - self.tokens), 0.0))

    def _with_expert_s(self, taken_s: Floats) -> Floats:
        """The cost of each op with experts that take so long, seconds, [members]; [ops]."""
        share = np.divide(taken_s, self.expert_s, out=np.ones_like(taken_s), where=self.expert_s > 0)
        return np.where(self.member >= 0, self._pace.cost * share[self.member], self._pace.cost)

    def _with_transfers(self, cost: Floats, most: Floats, *, in_proportion: bool = False) -> Floats:
        """These costs with transfers of so many rows, [pairs]: by the fits, or as if a transfer took no time without
        rows.
        """
        cost, old, pair = cost.copy(), self.most(self.tokens), self.exchanges.pair
        share = np.divide(most, old, out=np.ones_like(old), where=old > 0) - 1
        for name, rows in self._transfers:
            line, spent = self.lines.get(name), self._pace.cost[rows]
            if line is None:
                added = spent * share[pair]
            elif in_proportion:
                added = ((line.base_s + line.slope * old) * share)[pair]
            else:
                added = (line.slope * (most - old))[pair]
            cost[rows] = np.maximum(spent + added, 0.0)
        return cost

    def _step_s(self, cost: Floats) -> float:
        return float(self._pace.times([cost])[0]) / self.steps
