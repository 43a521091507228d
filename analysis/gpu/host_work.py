"""What the host ops of a GPU recording consist of.

In: host ops, and what the threads did at any time. Out: the host ops with lists of what they consist of, so that an op
trace still tells which part of them a repair takes away.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Int32s, Ints
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
    first, last = np.zeros((2, host.height), np.int64)
    lane, of_piece = _lanes(host), _lanes(pieces)
    for low, high in pairwise(np.flatnonzero(np.diff(of_piece, prepend=-1, append=-1)).tolist()):
        mine = np.flatnonzero(lane == of_piece[low])
        first[mine] = low + np.searchsorted(stop[low:high], begin[mine], side="right")
        last[mine] = np.maximum(first[mine], low + np.searchsorted(start[low:high], end[mine], side="left"))
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


def _lanes(table: pl.DataFrame) -> Ints:
    """A number for the thread of each row, the same in every table, [rows]."""
    return np.asarray((table["rank"].to_numpy().astype(np.int64) << 32) + table["thread"].to_numpy())


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    kept = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~kept).unique("reason", maintain_order=True)
    at = np.cumsum(kept) - 1
    of_rest = {reason: int(kept.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(kept), rest]), np.where(kept, at, others)
