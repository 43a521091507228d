"""What the host ops of a GPU recording consist of.

In: host ops, and what the threads did at any time. Out: the host ops with lists of what they consist of, so that an op
trace still tells which part of them a repair takes away.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.numeric.overlap import overlaps
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

    Work that is mostly of a reason in KINDS is of that kind. `pieces`: HOST_SCHEMA; time in which nothing was recorded
    is Python without a name.
    """
    if host.is_empty():
        return host, whats.clear()
    lane = numbered(
        pl.concat([host["rank"], pieces["rank"]]), pl.concat([host["thread"], pieces["thread"].cast(pl.Int64)])
    )
    begin = host["start"].to_numpy()
    end = begin + host["duration"].to_numpy()
    start, length = pieces["start"].to_numpy(), pieces["duration"].to_numpy()
    op, at, covered = overlaps(begin, end, start, start + length, lane[: host.height], lane[host.height :])
    what = pieces["what"].to_numpy()[at].astype(np.int64)
    left = end - begin - np.bincount(op, weights=covered, minlength=host.height)
    nothing = whats.height
    op = np.concatenate([op, np.arange(host.height)])
    what, covered = np.append(what, np.full(host.height, nothing)), np.append(covered, left)
    named = pl.concat([whats, pl.DataFrame([(str(IdleReason.PYTHON), "", "", False)], WHAT_SCHEMA, orient="row")])
    kept, renumbered = _longest(named, np.bincount(what, weights=covered, minlength=named.height))
    parts = (
        pl.DataFrame({"row": op, "did": renumbered[what].astype(np.int32), "did_s": covered})
        .group_by("row", "did")
        .agg(pl.col("did_s").sum(), did_n=pl.len())
        .filter(pl.col("did_s") > _SHORTEST_S)
        .sort("row", "did")
        .group_by("row", maintain_order=True)
        .agg("did", "did_s", "did_n")
    )
    host = host.drop("thread")
    for one, kind in KINDS.items():
        inside = np.bincount(op, covered * (named["reason"] == one).to_numpy()[what], host.height)
        mostly = pl.Series((2 * inside > end - begin) & (end > begin)) & (host["kind"] == "host")
        host = host.with_columns(kind=pl.when(mostly).then(pl.lit(kind)).otherwise("kind"))
    numbers = pl.DataFrame({"row": np.arange(host.height)}).join(parts, on="row", how="left", maintain_order="left")
    return host.hstack(numbers.drop("row")), kept


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    kept = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~kept).unique("reason", maintain_order=True)
    at = np.cumsum(kept) - 1
    of_rest = {reason: int(kept.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(kept), rest]), np.where(kept, at, others)
