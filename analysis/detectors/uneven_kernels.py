"""Whether a rank takes longer at the same ops as its peers, or has other ones.

In: `GraphSubject`. Out: `Compared`, for the detectors of slow machines and of uneven work.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from tracekit.analysis.detectors.rank_behind import RankBehind, rank_behind
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.gpu.part import Part


class Compared(NamedTuple):
    """`behind`: the rank. `op`: what its ops are called: "kernel" in a recording. `ratio`: how many times as long it
    takes at the ops that all ranks have. `own`, `own_s`: the number of ops that not all peers have, and the seconds
    that they take; `uneven`: whether these make it late.
    """

    behind: RankBehind
    op: str
    ratio: float
    own: int
    own_s: float
    uneven: bool


@evidence(GraphSubject)
def compared(job: GraphSubject) -> Compared | None:
    """Compare the computes of the rank that stands out with those of its peers; None if it is not behind in them."""
    late = rank_behind(job, Part.COMPUTE)
    if late is None:
        return None
    from tracekit.analysis.evidence.culprit import even_pace  # which a pipeline does not need

    peer = next((name for name in ("peer", "kind", "name") if name in job.ops.columns), "rank")
    ops = job.ops.with_columns(duration=pl.Series(even_pace(job).cost)).filter(late.behind.ops)
    ranks = ops["rank"].n_unique()
    shared = ops.with_columns(on=pl.col("rank").n_unique().over(peer))
    common, own = shared.filter(pl.col("on") == ranks), shared.filter(pl.col("on") < ranks)
    (mine, theirs), (extra, usual) = (_mine_and_usual_s(part, late.rank, ranks) for part in (common, own))
    return Compared(
        behind=late,
        op="op" if job.kept is None else "kernel",
        ratio=mine / theirs if theirs else 1.0,
        own=own.filter(rank=late.rank).height,
        own_s=extra,
        uneven=extra - usual > mine - theirs,
    )


def _mine_and_usual_s(ops: pl.DataFrame, rank: int, ranks: int) -> tuple[float, float]:
    """Return what a rank spent on these ops, and its peers in the mean, seconds."""
    here = pl.col("rank") == rank
    mine, theirs = (float(ops.filter(which)["duration"].sum()) for which in (here, ~here))
    return mine, theirs / max(ranks - 1, 1)
