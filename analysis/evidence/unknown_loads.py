"""A rank that is late because its experts take longer, while nothing recorded says how many tokens they get.

In: a job. Out: `UnknownLoads`. A slow GPU takes longer for other kernels, too. Experts that take longer by more
than that have more tokens, or are slow for a reason of their own: only their loads would tell which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.uneven_loads import even_where_known, experts_of
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.numeric.arrays import Bools, Floats

if TYPE_CHECKING:  # only jobs of any graph need this module
    from tracekit.analysis.gpu.behind import BlamedRank


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
    from tracekit.analysis.gpu.behind import find_culprit

    return find_culprit(even_where_known(job), job.ops, job.waits)


@evidence(GraphSubject)
def unknown_loads(job: GraphSubject) -> UnknownLoads | None:
    """The rank that the others wait for, if most of what makes it late is experts whose loads are not known."""
    from tracekit.analysis.experts.exchanges import between, find_exchanges, members_of

    loads, graph = experts_of(job), job.graph.ops
    whole = loads.job.members["group"].unique()
    members = members_of(job.ops, of_whole_groups=False).with_columns(whole=pl.col("group").is_in(whole.implode()))
    unknown = find_exchanges(members.filter(~pl.col("whole") | (not loads.known)), loads.job.layers)
    late = late_rank(job) if len(unknown.step) else None
    computes = None if late is None else next((one.ops for one in late.behind if one.part is Part.COMPUTE), None)
    if late is None or computes is None:
        return None
    experts = computes & (between(graph, computes, unknown) >= 0)
    pace, at = even_where_known(job), job.ranks.index(late.rank)

    def taken_s(ops: Bools) -> tuple[float, float]:
        """How long these ops take on the rank, and usually on its peers."""
        taken = np.bincount(graph.rank[ops], pace.cost[ops], max(job.ranks) + 1)[list(job.ranks)]
        return float(taken[at]), float(np.median(np.delete(taken, at)))

    (mine_s, usual_s), (rest_s, usual_rest_s) = taken_s(experts), taken_s(computes & ~experts)
    slower = max(rest_s / usual_rest_s, 1.0) if usual_rest_s else 1.0
    if not usual_s or mine_s - slower * usual_s <= rest_s - usual_rest_s + (slower - 1) * usual_s:
        return None
    why = "the profiler cut the lists of its loads" if loads.cut else "its loads were not recorded"
    if members.filter("whole", rank=late.rank).is_empty():
        why = "not all ranks of its group were recorded"
    cost = np.minimum.reduce([pace.cost, *(pace.costs(rank, experts) for rank in job.ranks)])
    return UnknownLoads(late.rank, mine_s / usual_s, why, cost, pace.recorded_s - float(pace.times([cost])[0]))
