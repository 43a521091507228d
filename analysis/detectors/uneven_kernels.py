"""Whether a rank takes longer at the same ops as its peers, or has other ones.

In: `OpEvidence`. Out: `Compared`, for the detectors of slow machines and of uneven work.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.gpu.part import Part


class Compared(NamedTuple):
    """`ratio`: how many times as long the rank takes at the ops that all ranks have. `own`, `own_s`: the number of ops
    that not all peers have, and the seconds that they take; `uneven`: whether these make it late.
    """

    ratio: float
    own: int
    own_s: float
    uneven: bool


def compared(evidence: OpEvidence) -> Compared | None:
    """Compare the computes of the rank that stands out with those of its peers; None if it is not behind in them."""
    behind, culprit = evidence.behind(Part.COMPUTE), evidence.culprit
    if behind is None or culprit is None:
        return None
    peer = next((name for name in ("peer", "kind", "name") if name in evidence.ops.columns), "rank")
    ops = evidence.ops.with_columns(duration=pl.Series(evidence.even.cost)).filter(behind.ops)
    ranks = ops["rank"].n_unique()
    shared = ops.with_columns(on=pl.col("rank").n_unique().over(peer))
    common, own = shared.filter(pl.col("on") == ranks), shared.filter(pl.col("on") < ranks)
    (mine, theirs), (extra, usual) = (_mine_and_usual_s(part, culprit.rank, ranks) for part in (common, own))
    return Compared(
        ratio=mine / theirs if theirs else 1.0,
        own=own.filter(rank=culprit.rank).height,
        own_s=extra,
        uneven=extra - usual > mine - theirs,
    )


def _mine_and_usual_s(ops: pl.DataFrame, rank: int, ranks: int) -> tuple[float, float]:
    """Return what a rank spent on these ops, and its peers in the mean, seconds."""
    here = pl.col("rank") == rank
    mine, theirs = (float(ops.filter(which)["duration"].sum()) for which in (here, ~here))
    return mine, theirs / max(ranks - 1, 1)
