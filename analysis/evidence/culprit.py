"""The rank that the others wait for, beyond what loads of experts may explain.

In: a job of any graph. Out: the rank, how far it is behind in each part of its time, and the job at the pace of peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.uneven_loads import even_where_known
from tracekit.analysis.evidence.unknown_loads import late_rank, unknown_loads
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.whatif.interventions import Intervention, SetSomeOps, Together

if TYPE_CHECKING:  # only jobs of any graph need these modules
    from tracekit.analysis.gpu.behind import BlamedRank
    from tracekit.analysis.gpu.pace import PaceOfPeers


@evidence(GraphSubject)
def even_pace(job: GraphSubject) -> PaceOfPeers:
    """The ranks as they would be without what loads of experts explain, or may explain."""
    pace, unknown = even_where_known(job), unknown_loads(job)
    return pace if unknown is None else pace.at(unknown.cost)


@evidence(GraphSubject)
def culprit_of(job: GraphSubject) -> BlamedRank | None:
    """The rank that the others wait for, None if no rank stands out: beyond what loads of experts may explain."""
    from tracekit.analysis.gpu.behind import find_culprit

    return late_rank(job) if unknown_loads(job) is None else find_culprit(even_pace(job), job.ops, job.waits)


def at_pace(job: GraphSubject, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
    """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

    `freed`: without the calls in which the rank waits for its GPU and its peers do not.
    """
    from tracekit.analysis.gpu.behind import SMALLEST_SHARE

    cost = even_pace(job).costs(rank, ops)
    edit = SetSomeOps(cost != even_pace(job).cost, cost)
    faster = job.pace.freed((rank,), SMALLEST_SHARE * job.pace.recorded_s) if freed else None
    return edit if faster is None else Together((faster, edit))
