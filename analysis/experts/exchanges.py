"""The all-to-alls of experts: which pairs of dispatch and combine a job has, of which layer, and what they move.

In: members of all-to-alls. Out: `Exchanges`. Dispatch and combine alternate, and the combine returns what the dispatch
sent. Backward passes repeat the exchanges of the forward pass in reverse order, with the same rows; so do forward
passes that are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.analysis.graph.rules.kineto import SLACK_S
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
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
    """The pairs of dispatch and combine of one group of ranks, in order of time.

    `step`, `layer`, `first`: the first time that its tokens go through this layer, [pairs]. `backward`, [pairs].
    `sent`, `received`: rows of each rank in the dispatch, nan if unknown; `dispatch`, `combine`: rows of the ops;
    [pairs, ranks].
    """

    group: str
    ranks: tuple[int, ...]
    step: Ints
    layer: Ints
    first: Bools
    backward: Bools
    sent: Floats
    received: Floats
    dispatch: Ints
    combine: Ints

    @property
    def known(self) -> bool:
        """Whether the rows of all ranks are known: as many are received as sent."""
        return bool((self.received.sum(axis=1) == self.sent.sum(axis=1)).all())  # nan equals nothing


def find_exchanges(members: pl.DataFrame, layers: int | None = None) -> list[Exchanges]:
    """Find the pairs of each group, of the steps in which all its ranks have equally many. `members`: of MEMBERS.

    `layers`: how many layers of experts a forward pass has, if known.
    """
    found = []
    for (group,), some in members.sort("group", "rank").group_by("group", maintain_order=True):
        ranks = tuple(some["rank"].unique().sort().to_list())
        one = _of_group(str(group), ranks, some, layers)
        if one is not None:
            found.append(one)
    return found


def _of_group(group: str, ranks: tuple[int, ...], members: pl.DataFrame, layers: int | None) -> Exchanges | None:
    met = pl.len().over("step", "instance") == len(ranks)
    ordered = members.with_columns(met=met, at=pl.col("start").max().over("step", "instance")).sort(
        "step", "at", "instance", "rank"
    )
    step, kept = [], []
    places: tuple[list[np.ndarray], ...] = ([], [], [])
    for (number,), some in ordered.group_by("step", maintain_order=True):
        if not some["met"].all() or some.height % (2 * len(ranks)):
            continue
        received = _pairs(some["rows_received"], len(ranks))[:, 0]
        place = _layers(np.hstack([_pairs(some["rows_sent"], len(ranks))[:, 0], received]), layers)
        kept.append(some)
        step.append(np.full(len(received), number))
        for values, each in zip(places, place, strict=True):
            values.append(each)
    if not kept:
        return None
    every = pl.concat(kept)
    row = _pairs(every["row"], len(ranks)).astype(np.int64)
    layer, first, backward = map(np.concatenate, places)
    return Exchanges(
        group, ranks, np.concatenate(step), layer, first, backward,
        sent=_pairs(every["rows_sent"], len(ranks))[:, 0], received=_pairs(every["rows_received"], len(ranks))[:, 0],
        dispatch=row[:, 0], combine=row[:, 1],
    )  # fmt: skip


def _pairs(column: pl.Series, ranks: int) -> Floats:
    """A column of members in order as [pairs, dispatch or combine, ranks], nan for null."""
    return column.cast(pl.Float64).fill_null(np.nan).to_numpy().reshape(-1, 2, ranks)


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
    found = table.with_row_index("row").filter(pl.col("rendezvous").is_not_null(), exchanges)
    if of_whole_groups:
        ranks = pl.col("rank").n_unique().over("group")
        found = found.filter(ranks == pl.col("exchanges").fill_null(ranks))
    return found.select(
        pl.col("group").cast(pl.String).fill_null(""), (pl.lit(0) if step is None else pl.col(step)).alias("step"),
        "rank", pl.Series("instance", numbered(found["rendezvous"])), "row", "start", "rows_sent", "rows_received",
    ).cast(MEMBERS, strict=False).drop_nulls("step")  # fmt: skip


def between(graph: OpGraph, wanted: Bools, exchanges: Sequence[Exchanges]) -> Ints:
    """The pair whose dispatch each op waits for, and whose combine waits for it, counted over all groups; -1 for none;
    [ops].

    `wanted`: which ops may be experts, [ops]. They run from the end of the dispatch to the start of the combine.
    """
    ends, place = graph.start + graph.duration, np.full(len(wanted), -1, np.int64)
    first, fed, feeds = 0, np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.bool_)
    for one in exchanges:
        for column, rank in enumerate(one.ranks):
            mine = np.flatnonzero(wanted & (graph.rank == rank))
            dispatch, combine = one.dispatch[:, column], one.combine[:, column]
            order = np.lexsort((ends[dispatch], graph.step[dispatch]))
            key = _times(graph.step[dispatch[order]], ends[dispatch[order]] - SLACK_S, ends)
            at = np.searchsorted(key, _times(graph.step[mine], graph.start[mine], ends), side="right") - 1
            pair = order[np.maximum(at, 0)]
            inside = (at >= 0) & (graph.step[dispatch[pair]] == graph.step[mine])
            inside &= ends[mine] <= graph.start[combine[pair]] + SLACK_S
            place[mine[inside]] = first + pair[inside]
            place[dispatch] = place[combine] = first + np.arange(len(dispatch))
            fed[dispatch] = feeds[combine] = True
        first += len(one.step)
    near = place[graph.before] == place[graph.after]
    near &= (place[graph.before] >= 0) & (graph.rank[graph.before] == graph.rank[graph.after])
    before, after = graph.before[near], graph.after[near]
    fed, feeds = _spread(fed, before, after), _spread(feeds, after, before)
    return np.where(wanted & fed & feeds, place, -1)


def _times(step: Int32s, time: Floats, every: Floats) -> Floats:
    """Numbers that sort by step, then time."""
    return np.asarray(step * (2 * float(np.abs(every).max(initial=0.0)) + 1) + time)


def _spread(reached: Bools, source: Ints, target: Ints) -> Bools:
    """Which ops can be reached along edges, [ops]."""
    while True:
        new = np.unique(target[reached[source] & ~reached[target]])
        if not len(new):
            return reached
        reached[new] = True
