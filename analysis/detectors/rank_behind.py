"""A rank that takes longer than its peers at one part of its time: what detectors of such ranks share.

In: a job of any graph. Out: a `RankBehind`, with its figures and its `Candidate`; `Compared`, whether it takes longer
at the same ops or has other ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.subject import Subject, evidence
from tracekit.analysis.gpu.gpu_times import Part
from tracekit.report.finding import Figure, Place, Unit

if TYPE_CHECKING:
    from tracekit.analysis.gpu.behind import Behind


class RankBehind(Struct, frozen=True, eq=False):
    """A rank, and where it is behind its peers. `spent_s`, `ops`: its seconds and ops in that part of its time;
    `usual_s`, `usual_ops`: the median of its peers.
    """

    job: GraphSubject
    rank: int
    behind: Behind
    spent_s: float
    usual_s: float
    ops: int
    usual_ops: int

    def candidate(self, kind: str, effect: str, *figures: Figure, freed: bool = False) -> Candidate:
        """Return the finding that makes it late. `freed`: without the calls in which it waits for its GPU and its
        peers do not.
        """
        from tracekit.analysis.evidence.exchanges import at_pace
        from tracekit.analysis.gpu.pace import LARGEST_CHANCE

        job, behind = self.job, self.behind
        share = Figure(f"longer than its peers, over the {job.whole}", behind.saved_s / job.recorded_s, 0.0, Unit.SHARE)
        return Candidate(
            kind,
            Place(ranks=(self.rank,)),
            effect,
            (share, *figures),
            1 - LARGEST_CHANCE,
            at_pace(job, self.rank, behind.ops, freed=freed),
            series=None if job.recorded is not None else 1 + behind.saved_each_s / job.unchanged_s,
            excess=self.spent_s / self.usual_s - 1 if self.usual_s else None,
        )


def rank_behind(job: Subject, part: Part) -> RankBehind | None:
    """Return the rank that the others wait for, if it is behind them in this part of its time."""
    ranks = _ranks_behind(job)
    return None if ranks is None else ranks.get(part)


@evidence(GraphSubject)
def _ranks_behind(job: GraphSubject) -> dict[Part, RankBehind]:
    from tracekit.analysis.evidence.exchanges import culprit_of  # which a pipeline does not need

    culprit = culprit_of(job)
    return {} if culprit is None else {behind.part: _of(job, culprit.rank, behind) for behind in culprit.behind}


def _of(job: GraphSubject, rank: int, behind: Behind) -> RankBehind:
    ops = job.ops.select("rank", "duration").filter(behind.ops)
    total = ops.group_by("rank").agg(seconds=pl.col("duration").sum(), ops=pl.len())
    own, peers = (total.filter(pl.col("rank").eq(rank) == itself) for itself in (True, False))
    usual_s, usual = (float(np.median(peers[name].to_numpy())) if peers.height else 0.0 for name in ("seconds", "ops"))
    return RankBehind(job, rank, behind, float(own["seconds"].sum()), usual_s, int(own["ops"].sum()), round(usual))


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
    from tracekit.analysis.evidence.exchanges import even_pace  # which a pipeline does not need

    peer = next((name for name in ("peer", "kind", "name") if name in job.ops.columns), "rank")
    ops = job.ops.with_columns(duration=pl.Series(even_pace(job).cost)).filter(late.behind.ops)
    ranks = ops["rank"].n_unique()
    shared = ops.with_columns(on=pl.col("rank").n_unique().over(peer))
    common, own = shared.filter(pl.col("on") == ranks), shared.filter(pl.col("on") < ranks)
    (own_s, theirs), (extra, usual) = (_mine_and_usual_s(part, late.rank, ranks) for part in (common, own))
    return Compared(
        behind=late,
        op=job.op_noun,
        ratio=own_s / theirs if theirs else 1.0,
        own=own.filter(rank=late.rank).height,
        own_s=extra,
        uneven=extra - usual > own_s - theirs,
    )


def _mine_and_usual_s(ops: pl.DataFrame, rank: int, ranks: int) -> tuple[float, float]:
    """Return what a rank spent on these ops, and its peers in the mean, seconds."""
    itself = pl.col("rank") == rank
    own_s, theirs = (float(ops.filter(which)["duration"].sum()) for which in (itself, ~itself))
    return own_s, theirs / max(ranks - 1, 1)
