"""The all-to-alls of experts: which pairs of dispatch and combine a job has, of which layer, and what they move.

In: members of all-to-alls. Out: `Exchanges`. Dispatch and combine alternate, and the combine returns what the dispatch
sent. Backward passes repeat the exchanges of the forward pass in reverse order, with the same rows; so do forward
passes that are computed again.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.analysis.graph.rules.kineto import SLACK_S
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.trace.model import OpKind

#: Members of all-to-alls: `row` of its op, `instance` (equal on all ranks that meet), `rows_sent`, `rows_received` by
#: this rank, null if unknown.
MEMBERS = pl.Schema({
    "group": pl.String, "step": pl.Int64, "rank": pl.Int64, "instance": pl.Int64, "row": pl.Int64,
    "start": pl.Float64, "rows_sent": pl.Int64, "rows_received": pl.Int64,
})  # fmt: skip

_ALL_TO_ALL = str(OpKind.ALL_TO_ALL)


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
    def known(self) -> bool:
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
    exchanges = (
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
    near = (member[graph.before] == member[graph.after]) & (member[graph.before] >= 0)
    before, after = graph.before[near], graph.after[near]
    fed, feeds = _spread(fed, before, after), _spread(feeds, after, before)
    return np.where(wanted & fed & feeds, member, -1)


def _spread(reached: Bools, source: Ints, target: Ints) -> Bools:
    """Which ops can be reached along edges, [ops]."""
    while True:
        new = np.unique(target[reached[source] & ~reached[target]])
        if not len(new):
            return reached
        reached[new] = True
