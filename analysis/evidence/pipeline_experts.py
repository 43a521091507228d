"""The experts of a pipeline: its all-to-alls as a job of their own, and the pipeline without what their loads explain.

In: a pipeline with all-to-alls. Out: a `GraphSubject`; changes of the pipeline, and the pipeline after them.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.evidence.graph_subject import GraphSubject, GraphTimes, even_pace
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, backwards, forwards
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.graph.op_graph import fold
from tracekit.analysis.graph.op_rules import op_graph
from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations
from tracekit.analysis.whatif.interventions import Intervention, Scale, Together, changed
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind
from tracekit.trace.op import OpTrace
from tracekit.trace.schema import RECEIVED, SENT

#: More ops than this take too long in every report; the last steps that fit are looked at.
_MOST_OPS = 1_000_000
_WORK = "compute"


def _exchange_trace(trace: Trace) -> OpTrace | None:
    """The all-to-alls of a trace and the work between them; None if no step shows them on all ranks equally often.

    The trace has the columns of rows, and one stage (`PipelineSubject.exchanges`). Work has the columns `compute` and
    `seq`: the kind and number of its op in the trace.
    """
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
            *(table.with_columns(pl.col("compute").cast(pl.String), kind=pl.lit(_WORK)) for table in (head, work)),
            met.with_columns(kind=pl.lit(str(OpKind.ALL_TO_ALL))),
        ],
        how="diagonal_relaxed",
    ).with_columns(stream=pl.lit(0))
    hosts = pl.DataFrame(list(trace.hosts.items()), {"rank": ops.schema["rank"], "host": pl.String}, orient="row")
    ops = ops.join(hosts, on="rank", how="left", maintain_order="left") if trace.hosts else ops
    return OpTrace(ops.sort("step", "rank", "start", "peer"), trace.name, rules=("streams",))


def _rows(name: str, ranks: int) -> pl.Expr:
    """The rows to or from all ranks, null if they were not recorded."""
    return pl.when(pl.col(name).list.len() == ranks).then(pl.col(name).list.sum())


@evidence(PipelineSubject)
def exchanges_of(job: PipelineSubject) -> GraphSubject | None:
    """See `Subject.exchanges`."""
    trace = _exchange_trace(job.trace)
    if trace is None:
        return None
    graph = fold(op_graph(trace))
    replay = GraphReplay(graph, measure_op_durations(graph))
    return GraphSubject(trace, graph, replay, GraphTimes.of(graph, replay), expert_loads=job.expert_loads)


@evidence(PipelineSubject)
def even_experts(job: PipelineSubject) -> Intervention | None:
    """The job without what loads of experts explain, or may explain; None if that is nothing."""
    exchanges = job.exchanges
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
    """The job of `even_experts`; None if that is the job as it is."""
    even = even_experts(job)
    if even is None:
        return None
    cost = tuple(block.matrix() for block in changed(job.replay, (even,)).cost)
    replay = structs.replace(job.replay, durations=structs.replace(job.replay.durations, cost=cost))
    return structs.replace(job, replay=replay, computes=structs.replace(job.computes, replay=replay))
