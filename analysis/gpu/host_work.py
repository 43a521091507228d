"""What the host ops of a GPU recording consist of.

In: host ops, and what the threads did at any time. Out: the host ops with lists of what they consist of, so that an op
trace still tells which part of them a repair takes away.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.codes import numbered
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.kineto import WHAT_SCHEMA

#: Kinds of host ops that are mostly of one reason.
KINDS = {str(IdleReason.LOADER): "input", str(IdleReason.GC): "gc"}
#: What takes less than this share of all host work goes with the rest of its reason.
_SMALLEST_SHARE = 1e-3
_ROWS_AT_ONCE = 1 << 14
#: Parts are added up in so many turns: the tables for all at once are larger than the parts.
_TURNS = 16
#: Shorter parts of an op are left out, seconds.
_SHORTEST_S = 1e-7


def with_work(host: pl.DataFrame, pieces: pl.DataFrame, whats: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give host ops the columns `did` (rows of the second result), `did_s` (seconds) and `did_n` (in how many pieces).

    Work that is mostly of a reason in KINDS is of that kind. `pieces`: HOST_SCHEMA; time in which nothing was recorded
    is Python without a name.
    """
    if host.is_empty():
        return host, whats.clear()
    begin = host["start"].to_numpy()
    end = begin + host["duration"].to_numpy()
    named = pl.concat(
        [whats, pl.DataFrame([(str(IdleReason.PYTHON), "", "", False, False)], WHAT_SCHEMA, orient="row")]
    )
    found = _parts(host, pieces, begin, end)
    left = end - begin - np.bincount(found["row"], found["did_s"], host.height)
    nothing = {"row": np.arange(host.height), "what": whats.height, "did_s": left, "did_n": 1}
    found = pl.concat([found, pl.DataFrame(nothing, found.schema)])
    host = host.drop("thread")
    for one, kind in KINDS.items():
        of_kind = found.filter((named["reason"] == one).gather(found["what"]))
        inside = np.bincount(of_kind["row"], of_kind["did_s"], host.height)
        mostly = pl.Series((2 * inside > end - begin) & (end > begin)) & (host["kind"] == "host")
        host = host.with_columns(kind=pl.when(mostly).then(pl.lit(kind)).otherwise("kind"))
    kept, renumbered = _longest(named, np.bincount(found["what"], found["did_s"], named.height))
    found = found.select("row", "did_s", "did_n", did=pl.Series(renumbered.astype(np.int32)).gather(found["what"]))
    together = host.height // _TURNS + 1
    parts = pl.concat(
        found.filter(pl.col("row").is_between(first, first + together, closed="left"))
        .group_by("row", "did")
        .agg(pl.col("did_s").sum(), pl.col("did_n").sum())
        .filter(pl.col("did_s") > _SHORTEST_S)
        .sort("row", "did")
        .group_by("row", maintain_order=True)
        .agg("did", "did_s", "did_n")
        for first in range(0, host.height, together)
    )
    numbers = pl.DataFrame({"row": np.arange(host.height, dtype=np.int32)})
    numbers = numbers.join(parts, on="row", how="left", maintain_order="left")
    return host.hstack(numbers.drop("row")), kept


def _parts(host: pl.DataFrame, pieces: pl.DataFrame, begin: Floats, end: Floats) -> pl.DataFrame:
    """What each host op consists of, by `row`: `what`, `did_s`, `did_n`. `begin`, `end`: of the ops, seconds, [ops].

    The pieces of a thread come in order of start. Some ops at a time, so that memory is bounded.
    """
    lanes = (pl.concat([host[name], pieces[name].cast(host[name].dtype)]) for name in ("rank", "thread"))
    lane = numbered(*lanes)
    mine, theirs = lane[: host.height], lane[host.height :]
    start, what = pieces["start"].to_numpy(), pieces["what"].to_numpy()
    stop = start + pieces["duration"].to_numpy()
    found = [pl.DataFrame(schema={"row": pl.Int32, "what": pl.Int32, "did_s": pl.Float64, "did_n": pl.UInt32})]
    edges = np.flatnonzero(np.diff(theirs, prepend=-1, append=-1))
    for low, high in pairwise(edges.tolist()):
        rows = np.flatnonzero(mine == theirs[low])
        first = low + np.searchsorted(stop[low:high], begin[rows], side="right")
        last = low + np.searchsorted(start[low:high], end[rows], side="left")
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            here = slice(at, at + _ROWS_AT_ONCE)
            count = np.maximum(last[here] - first[here], 0)
            row = np.repeat(rows[here], count)
            piece = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first[here], count)
            shared = np.minimum(stop[piece], end[row]) - np.maximum(start[piece], begin[row])
            parts = pl.DataFrame({"row": row.astype(np.int32), "what": what[piece], "did_s": shared})
            found.append(parts.group_by("row", "what").agg(pl.col("did_s").sum(), did_n=pl.len()))
    return pl.concat(found)


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    kept = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~kept).unique("reason", maintain_order=True)
    at = np.cumsum(kept) - 1
    of_rest = {reason: int(kept.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(kept), rest]), np.where(kept, at, others)
