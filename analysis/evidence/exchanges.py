"""The rank that stands out of a job of any graph, and what its experts explain.

In: a job of any graph. Out: a `BlamedRank`, uneven experts, the job without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.graph_subject import GraphSubject, RecordingSubject
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.gpu.pace import BlamedRank, PaceOfPeers, Part, find_culprit
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.whatif.interventions import Intervention, SetOps, Together

if TYPE_CHECKING:
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.analysis.gpu.pace import BlamedRank, PaceOfPeers
    from tracekit.report.questions import CauseOfImbalance


@evidence(GraphSubject)
def experts_of(job: GraphSubject) -> ExpertLoads:
    """The loads of experts. Raises FormatError if those that the job logged are of another job."""
    from tracekit.analysis.experts.balance import ExpertJob, members_of
    from tracekit.analysis.experts.expert_loads import ExpertLoads

    experts = ExpertJob.of_ops(job.ops, job.pace, job.steps_in_whole)
    loads = ExpertLoads(experts, job.expert_loads, bool(_lists_cut(job)))
    if job.expert_loads is not None:
        if "exchanges" not in job.ops.columns and members_of(job.ops).is_empty():
            raise job.expert_loads.without_experts(job.trace.name)
        _ = loads.notes
    return loads


@evidence(RecordingSubject)
def _lists_cut(job: RecordingSubject) -> bool:
    """Whether the profiler cut lists of loads."""
    return job.recorded is not None and bool(job.recorded.recording.gpu_ops["received"].cat.ends_with("...]").any())


@evidence(GraphSubject)
def uneven_experts(job: GraphSubject) -> CauseOfImbalance | None:
    """Why ranks have unequal loads of experts, if the ops show it and it costs something."""
    return None if job.exchanges is None else next(iter(experts_of(job).causes()), None)


@evidence(GraphSubject)
def even_where_known(job: GraphSubject) -> PaceOfPeers:
    """The ranks with equal loads of the experts whose loads are known."""
    if job.exchanges is None:  # as of most jobs: they need no module of experts
        return job.pace
    return job.pace.at(experts_of(job).job.balanced_cost) if experts_of(job).explain else job.pace


class UnknownLoads(Struct, frozen=True, eq=False):
    """`rank`: whose experts take `factor` times as long as those of its peers. `why`: its loads are not known.

    `cost`: of each op if no rank took longer for such experts than its peers, seconds, [ops]; `saved_s`: what that
    saves.
    """

    rank: int
    factor: float
    why: str
    cost: Floats
    saved_s: float


@evidence(GraphSubject)
def late_rank(job: GraphSubject) -> BlamedRank | None:
    """The rank that the others wait for beyond what known loads of experts explain."""
    return find_culprit(even_where_known(job), job.ops, job.waits)


@evidence(GraphSubject)
def unknown_loads(job: GraphSubject) -> UnknownLoads | None:
    """The rank that the others wait for, if most of what makes it late is experts whose loads are not known.

    A slow GPU takes longer for other kernels than those of experts, too. Experts that take longer by more than that
    have more tokens, or are slow for a reason of their own: only their loads would tell which.
    """
    if job.exchanges is None:
        return None
    from tracekit.analysis.experts.balance import between, find_exchanges, members_of

    loads, graph = experts_of(job), job.graph.ops
    whole = loads.job.members["group"].unique()
    members = members_of(job.ops, of_whole_groups=False).with_columns(whole=pl.col("group").is_in(whole.implode()))
    unknown = find_exchanges(members.filter(~pl.col("whole") | (not loads.known)), loads.job.layers)
    late = late_rank(job) if len(unknown.step) else None
    computes = None if late is None else next((one.ops for one in late.behind if one.part is Part.COMPUTE), None)
    if late is None or computes is None:
        return None
    experts = computes & (between(graph, computes, unknown) >= 0)
    pace, index = even_where_known(job), job.ranks.index(late.rank)

    def taken_s(ops: Bools) -> tuple[float, float]:
        """How long these ops take on the rank, and usually on its peers."""
        by_rank = np.bincount(graph.rank[ops], pace.cost[ops], max(job.ranks) + 1)[list(job.ranks)]
        return float(by_rank[index]), float(np.median(np.delete(by_rank, index)))

    (mine_s, usual_s), (rest_s, usual_rest_s) = taken_s(experts), taken_s(computes & ~experts)
    slower = max(rest_s / usual_rest_s, 1.0) if usual_rest_s else 1.0
    if not usual_s or mine_s - slower * usual_s <= rest_s - usual_rest_s + (slower - 1) * usual_s:
        return None
    why = "the profiler cut the lists of its loads" if loads.cut else "its loads were not recorded"
    if members.filter("whole", rank=late.rank).is_empty():
        why = "not all ranks of its group were recorded"
    cost = np.minimum.reduce([pace.cost, *(pace.costs(rank, experts) for rank in job.ranks)])
    return UnknownLoads(late.rank, mine_s / usual_s, why, cost, pace.recorded_s - float(pace.times([cost])[0]))


@evidence(GraphSubject)
def even_pace(job: GraphSubject) -> PaceOfPeers:
    """The ranks as they would be without what loads of experts explain, or may explain."""
    pace, unknown = even_where_known(job), unknown_loads(job)
    return pace if unknown is None else pace.at(unknown.cost)


@evidence(GraphSubject)
def culprit_of(job: GraphSubject) -> BlamedRank | None:
    """The `rank` that the others wait for, beyond what loads of experts may explain; None if no rank stands out."""
    return late_rank(job) if unknown_loads(job) is None else find_culprit(even_pace(job), job.ops, job.waits)


def at_pace(job: GraphSubject, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
    """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

    `freed`: without the calls in which the rank waits for its GPU and its peers do not.
    """
    cost = even_pace(job).costs(rank, ops)
    edit = SetOps(cost, cost != even_pace(job).cost)
    faster = job.pace.freed((rank,)) if freed else None
    return edit if faster is None else Together((faster, edit))
