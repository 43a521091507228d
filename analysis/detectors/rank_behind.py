"""A rank that takes longer than its peers at one part of its time: what detectors of such ranks share.

In: `OpEvidence`. Out: `Candidate`s, and the figures behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.gpu.noise import LARGEST_CHANCE
from tracekit.analysis.gpu.part import Part
from tracekit.report.finding import Figure, Place, Unit

if TYPE_CHECKING:
    from tracekit.analysis.gpu.behind import Behind


class Spent(NamedTuple):
    """What the rank that stands out spent on a part of its time, and what its peers did, usually: seconds and ops."""

    mine_s: float
    usual_s: float
    mine: int
    usual: int


def spent(evidence: OpEvidence, behind: Behind) -> Spent:
    """Return what the rank that stands out and its peers spent on a part of their time."""
    assert evidence.culprit is not None
    ops = evidence.ops.select("rank", "duration").filter(behind.ops)
    total = ops.group_by("rank").agg(seconds=pl.col("duration").sum(), ops=pl.len())
    mine, theirs = (total.filter(pl.col("rank").eq(evidence.culprit.rank) == here) for here in (True, False))
    usual_s, usual = (
        float(np.median(theirs[name].to_numpy())) if theirs.height else 0.0 for name in ("seconds", "ops")
    )
    return Spent(float(mine["seconds"].sum()), usual_s, int(mine["ops"].sum()), round(usual))


def rank_behind(
    kind: str, evidence: OpEvidence, part: Part, effect: str, *figures: Figure, freed: bool = False
) -> Iterator[Candidate]:
    """Yield the candidate for the rank that stands out: it is behind its peers in a part of its time.

    `freed`: without the calls in which it waits for its GPU and its peers do not.
    """
    culprit, behind = evidence.culprit, evidence.behind(part)
    assert culprit is not None
    assert behind is not None
    share = Figure(
        f"longer than its peers, over the {evidence.whole}", behind.saved_s / evidence.recorded_s, 0.0, Unit.SHARE
    )
    yield Candidate(
        kind,
        Place(ranks=(culprit.rank,)),
        effect,
        (share, *figures),
        1 - LARGEST_CHANCE,
        evidence.at_pace(culprit.rank, behind.ops, freed=freed),
        series=None if evidence.recorded is not None else 1 + behind.saved_each_s / evidence.unchanged_s,
    )
