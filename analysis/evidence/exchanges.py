"""The rank that stands out of a job of any graph, and what its experts explain; the same for experts of a pipeline.

In: a job of any graph, or a pipeline with all-to-alls. Out: a `Culprit`, uneven experts, the job without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.evidence.graph_subject import GraphSubject, RecordingSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, backwards, forwards
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.gpu.gpu_times import Part
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.whatif.interventions import Intervention, Scale, SetOps, Together, changed
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind
from tracekit.trace.schema import RECEIVED, SENT

if TYPE_CHECKING:
    from tracekit.analysis.experts.expert_loads import ExpertLoads
    from tracekit.analysis.gpu.behind import BlamedRank
    from tracekit.analysis.gpu.pace import PaceOfPeers
    from tracekit.report.questions import CauseOfImbalance
    from tracekit.trace.op import OpTrace

#: More ops than this take too long in every report; the last steps that fit are looked at.
_MOST_OPS = 1_000_000
_WORK = "compute"


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
    return next(iter(experts_of(job).causes()), None)


@evidence(GraphSubject)
def even_where_known(job: GraphSubject) -> PaceOfPeers:
    """The ranks with equal loads of the experts whose loads are known."""
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
    from tracekit.analysis.gpu.behind import find_culprit

    return find_culprit(even_where_known(job), job.ops, job.waits)


@evidence(GraphSubject)
def unknown_loads(job: GraphSubject) -> UnknownLoads | None:
    """The rank that the others wait for, if most of what makes it late is experts whose loads are not known.

    A slow GPU takes longer for other kernels than those of experts, too. Experts that take longer by more than that
    have more tokens, or are slow for a reason of their own: only their loads would tell which.
    """
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
    from tracekit.analysis.gpu.behind import find_culprit

    return late_rank(job) if unknown_loads(job) is None else find_culprit(even_pace(job), job.ops, job.waits)


def at_pace(job: GraphSubject, rank: int, ops: Bools | None = None, *, freed: bool = False) -> Intervention:
    """Return the job with some ops of a rank as fast as those of its peers. `ops`: which ones, of any rank, [ops].

    `freed`: without the calls in which the rank waits for its GPU and its peers do not.
    """
    cost = even_pace(job).costs(rank, ops)
    edit = SetOps(cost, cost != even_pace(job).cost)
    faster = job.pace.freed((rank,)) if freed else None
    return edit if faster is None else Together((faster, edit))


def exchange_trace(trace: Trace) -> OpTrace | None:
    """The all-to-alls of a trace and the work between them; None if it has none.

    Only of jobs without a pipeline, and of steps in which all ranks have equally many. Work has the columns `compute`
    and `seq`: the kind and number of its op in the trace.
    """
    if SENT not in trace.ops.columns or RECEIVED not in trace.ops.columns or trace.layout.pp > 1:
        return None
    ordered = trace.ops.sort("step", "rank", "start", "duration").with_columns(
        pl.col("kind").shift(-1).over("step", "rank").alias("compute"),
        pl.col("seq").shift(-1).over("step", "rank").alias("next"),
        end=pl.col("start") + pl.col("duration"),
    )
    spans = ordered.group_by("step", "rank").agg(begins=pl.col("start").min(), ends=pl.col("end").max())
    moves = pl.any_horizontal(pl.col(SENT, RECEIVED).is_not_null()).any()  # as some ranks show
    moved = ordered.filter(moves.over("step", "kind", "seq"))
    counts = moved.group_by("step", "rank").len().group_by("step").agg(pl.len(), ops=pl.col("len").n_unique())
    steps = counts.filter(pl.col("ops") == 1, pl.col("len") == trace.ops["rank"].n_unique())["step"].sort()
    if steps.is_empty():
        return None
    moved = moved.filter(pl.col("step").is_in(steps.tail(max(_MOST_OPS * len(steps) // moved.height, 1)).implode()))
    place = ["step", "rank"]
    exchanges = moved.with_columns(
        number=pl.int_range(pl.len()).over(place),
        rows_sent=_rows(SENT, trace.layout.dp),
        rows_received=_rows(RECEIVED, trace.layout.dp),
    ).join(spans, on=place, maintain_order="left")
    until = pl.col("start").shift(-1).over(place).fill_null(pl.col("ends"))
    work = exchanges.select(
        *place, "compute", seq="next", start="end", duration=(until - pl.col("end")).clip(0),
        peer=2 * pl.col("number") + 2,
    )  # fmt: skip
    head = exchanges.filter(number=0).select(
        *place, compute=pl.lit(None, pl.String), seq=pl.lit(None, pl.Int32), start="begins",
        duration=(pl.col("start") - pl.col("begins")).clip(0), peer=pl.lit(0, pl.Int64),
    )  # fmt: skip
    met = exchanges.select(
        *place, "start", "duration", "rows_sent", "rows_received", peer=2 * pl.col("number") + 1,
        rendezvous=pl.struct("step", "number").rank("dense").cast(pl.Int64),
    )  # fmt: skip
    ops = pl.concat(
        [
            *(one.with_columns(pl.col("compute").cast(pl.String), kind=pl.lit(_WORK)) for one in (head, work)),
            met.with_columns(kind=pl.lit(str(OpKind.ALL_TO_ALL))),
        ],
        how="diagonal_relaxed",
    ).with_columns(stream=pl.lit(0))
    from tracekit.trace.op import OpTrace

    hosts = pl.DataFrame(list(trace.hosts.items()), {"rank": ops.schema["rank"], "host": pl.String}, orient="row")
    ops = ops.join(hosts, on="rank", how="left", maintain_order="left") if trace.hosts else ops
    return OpTrace(ops.sort("step", "rank", "start", "peer"), trace.name, rules=("streams",))


def _rows(name: str, ranks: int) -> pl.Expr:
    """The rows to or from all ranks, null if they were not recorded."""
    return pl.when(pl.col(name).list.len() == ranks).then(pl.col(name).list.sum())


@evidence(PipelineSubject)
def exchanges_of(job: PipelineSubject) -> GraphSubject | None:
    """The all-to-alls and the work between them; None if the trace has none."""
    trace = exchange_trace(job.trace)
    if trace is None:  # as most pipelines: they need none of these modules
        return None
    from tracekit.analysis.evidence.graph_subject import GraphTimes
    from tracekit.analysis.graph.op_graph import fold
    from tracekit.analysis.graph.op_rules import op_graph
    from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations

    graph = fold(op_graph(trace))
    replay = GraphReplay(graph, measure_op_durations(graph))
    return GraphSubject(trace, graph, replay, GraphTimes.of(graph, replay), expert_loads=job.expert_loads)


@evidence(PipelineSubject, otherwise=True)
def may_have_experts(job: PipelineSubject) -> bool:
    """Whether a job may have experts: a pipeline only if it has such all-to-alls."""
    return exchanges_of(job) is not None


@evidence(PipelineSubject)
def even_experts(job: PipelineSubject) -> Intervention | None:
    """The job without what loads of experts explain, or may explain; None if that is nothing."""
    exchanges = exchanges_of(job)
    if exchanges is None or even_pace(exchanges) is exchanges.pace:
        return None
    cost, even = exchanges.pace.cost, even_pace(exchanges).cost
    share = pl.Series(np.divide(even, cost, out=np.ones_like(cost), where=cost > 0))
    changed = exchanges.ops.select("step", "rank", "compute", "seq", share=share).drop_nulls(["compute", "seq"])
    changed = changed.filter(pl.col("share") != 1, pl.col("step").is_in(job.steps.tolist()))
    ranks = {rank: worker.dp_rank for worker, rank in job.worker_ranks.items()}
    step = np.searchsorted(job.steps, changed["step"].to_numpy())
    lane = np.array([job.dp_index.get(ranks[rank], -1) for rank in changed["rank"].to_list()], np.int64)
    factors = []
    for kind, grid in ((OpKind.FORWARD_COMPUTE, forwards(job)), (OpKind.BACKWARD_COMPUTE, backwards(job))):
        factor = np.ones(grid.shape)
        rows = ((changed["compute"] == str(kind)) & (changed["seq"] < grid.shape[1])).to_numpy() & (lane >= 0)
        factor[0, changed["seq"].to_numpy()[rows], step[rows], lane[rows]] = changed["share"].to_numpy()[rows]
        factors.append(Scale(grid, factor))
    return Together(tuple(factors))


@evidence(PipelineSubject)
def beyond_experts(job: PipelineSubject) -> PipelineSubject | None:
    """The evidence on the job of `even_experts`; None if that is the job as it is."""
    even = even_experts(job)
    if even is None:
        return None
    cost = tuple(block.matrix() for block in changed(job.replay, (even,)).cost)
    replay = structs.replace(job.replay, durations=structs.replace(job.replay.durations, cost=cost))
    return structs.replace(job, replay=replay, computes=structs.replace(job.computes, replay=replay))
