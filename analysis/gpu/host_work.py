"""What the host ops of a GPU recording consist of.

In: host ops, and what the threads did at any time. Out: the host ops with lists of what they consist of, so that an op
trace still tells which part of them a repair takes away.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.kineto import WHAT_SCHEMA

#: Kinds of host ops that are mostly of one reason.
KINDS = {str(IdleReason.LOADER): "input", str(IdleReason.GC): "gc"}
#: What takes less than this share of all host work goes with the rest of its reason.
_SMALLEST_SHARE = 1e-3
#: Shorter parts of an op are left out, seconds.
_SHORTEST_S = 1e-7


def with_work(host: pl.DataFrame, pieces: pl.DataFrame, whats: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give host ops the columns `did` (rows of the second result), `did_s` (seconds) and `did_n` (in how many pieces).

    Work that is mostly of a reason in KINDS is of that kind. `host`, `pieces` (HOST_SCHEMA): by rank and thread. Time
    in which nothing was recorded is Python without a name.
    """
    if host.is_empty():
        return host, whats.clear()
    begin = host["start"].to_numpy()
    end = begin + host["duration"].to_numpy()
    start, what = pieces["start"].to_numpy(), pieces["what"].to_numpy()
    stop = start + pieces["duration"].to_numpy()
    first, last = _pieces_of(host, pieces, (begin, end), (start, stop))
    room = int((last - first).sum()) + host.height

    def divided(number: Int32s, shortest_s: float) -> pl.DataFrame:
        """The parts of each op, by `row` and `did`, the number of what it did. `number`: of whats and of nothing."""
        bound = np.zeros(host.height + 1, np.int64)
        did, did_s, did_n = np.empty(room, np.int32), np.empty(room), np.empty(room, np.int32)
        numbers = int(number.max()) + 1
        count = native.divide_work(
            begin, end, first, last, start, stop, what, number, numbers, shortest_s, bound, did, did_s, did_n
        )
        row = np.repeat(np.arange(host.height), np.diff(bound))
        return pl.DataFrame({"row": row, "did": did[:count], "did_s": did_s[:count], "did_n": did_n[:count]})

    named = pl.concat(
        [whats, pl.DataFrame([(str(IdleReason.PYTHON), "", "", False, False)], WHAT_SCHEMA, orient="row")]
    )
    found = divided(np.arange(named.height, dtype=np.int32), -np.inf)
    host = host.drop("thread")
    for one, kind in KINDS.items():
        of_kind = found.filter((named["reason"] == one).gather(found["did"]))
        inside = np.bincount(of_kind["row"], of_kind["did_s"], host.height)
        mostly = pl.Series((2 * inside > end - begin) & (end > begin)) & (host["kind"] == "host")
        host = host.with_columns(kind=pl.when(mostly).then(pl.lit(kind)).otherwise("kind"))
    kept, renumbered = _longest(named, np.bincount(found["did"], found["did_s"], named.height))
    del found
    found = divided(renumbered.astype(np.int32), _SHORTEST_S).with_columns(pl.col("row").set_sorted())
    parts = found.group_by("row", maintain_order=True).agg("did", "did_s", "did_n")
    place = np.full(host.height, -1)
    place[parts["row"].to_numpy()] = np.arange(parts.height)
    at = pl.Series(place).set(pl.Series(place < 0), None)
    return host.hstack(parts.select(pl.col("did", "did_s", "did_n").gather(at))), kept


def _pieces_of(
    host: pl.DataFrame, pieces: pl.DataFrame, of_op: tuple[Floats, Floats], of_piece: tuple[Floats, Floats]
) -> tuple[Ints, Ints]:
    """The first piece in each host op and the one behind the last, of its thread, [ops]. `of_op`, `of_piece`: begin and
    end, seconds.
    """
    first, last = np.zeros((2, host.height), np.int64)
    there = _threads(pieces)
    for thread, rows in _threads(host).items():
        mine = there.get(thread, slice(0, 0))
        first[rows] = mine.start + np.searchsorted(of_piece[1][mine], of_op[0][rows], side="right")
        last[rows] = mine.start + np.searchsorted(of_piece[0][mine], of_op[1][rows], side="left")
    return first, np.maximum(first, last)


def _threads(table: pl.DataFrame) -> dict[tuple[int, int], slice]:
    """The rows of each thread, by rank and thread, of a table in that order."""
    rank, thread = table["rank"].to_numpy(), table["thread"].to_numpy()
    begins = np.append(True, (rank[1:] != rank[:-1]) | (thread[1:] != thread[:-1])) if len(rank) else rank
    edges = np.append(np.flatnonzero(begins), len(rank))
    return {(int(rank[low]), int(thread[low])): slice(low, high) for low, high in pairwise(edges.tolist())}


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    kept = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~kept).unique("reason", maintain_order=True)
    at = np.cumsum(kept) - 1
    of_rest = {reason: int(kept.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(kept), rest]), np.where(kept, at, others)
