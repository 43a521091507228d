"""Ops of replays as tables: when each would have run, and what is different about those that cost more.

In: `JobReplay`s and changes to them. Out: polars frames with one row per op; a ranked table of the labels that have
more of the excess time of some ops than of that of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.lanes import NONE
from tracekit.analysis.numeric.arrays import Bools, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Timeline
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, Intervention, timelines
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import step_values
from tracekit.trace.model import OpKind
from tracekit.trace.schema import KIND_TYPE

_COMPUTES_AND_TRANSFERS = (
    (OpKind.FORWARD_COMPUTE, OpKind.FORWARD_SEND, OpKind.FORWARD_RECV),
    (OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV),
)
#: Ops that should take equally long.
_PEERS = ("kind", "pp_rank", "chunk")
LABELS = ("host", "rank", "GPU model", "stage", "DP rank", "op kind", "microbatch", "chunk", "tokens of the step")
#: Ranges of tokens, each with as many ops.
_RANGES_OF_TOKENS = 4


def timeline_frame(replay: JobReplay, changes: Sequence[Intervention]) -> pl.DataFrame:
    """One row per op of the graph: step, dp_rank, pp_rank, kind, seq, microbatch, chunk, start, duration.

    `start` (from the start of the step) and `duration` are seconds. As in a recording, the duration of a communication
    op includes its wait for peers.
    """
    return _frame(replay, timelines(replay, changes))


def recorded_frame(replay: JobReplay) -> pl.DataFrame:
    """The recorded ops of the graph, in the same columns."""
    return _frame(replay, [Timeline(block.start, block.start + block.duration) for block in replay.graph.blocks])


def costs_frame(replay: JobReplay) -> pl.DataFrame:
    """The same with `cost`, seconds: the op's own cost, for communication the transfer duration. Sends and receives
    have the `microbatch` of their compute.
    """
    blocks, present = replay.graph.blocks, _present(replay)
    return recorded_frame(replay).with_columns(
        cost=np.concatenate([cost.ravel() for cost in replay.durations.cost])[present],
        microbatch=pl.Series(np.concatenate([_microbatches(block) for block in blocks])[present]).replace(NONE, None),
    )


def compared_frame(replay: JobReplay) -> pl.DataFrame:
    """One row per op of the graph, as recorded and as replayed, side by side.

    The columns of `costs_frame`, but instead of `start` and `duration`, in seconds: `<replay>_start` and
    `<replay>_duration` for recorded, original and ideal; `ideal_cost`, the cost in the ideal replay; and
    `launch_delay`. `transfer`: a number that a send and its receive share, else -1.
    """
    recorded = costs_frame(replay)
    blocks, durations = replay.graph.blocks, replay.durations
    times = {"recorded": recorded, "original": timeline_frame(replay, ORIGINAL), "ideal": timeline_frame(replay, IDEAL)}
    ideal = [
        np.repeat(costs, block.lanes) if costs.ndim == 1 else costs.ravel()
        for block, costs in zip(blocks, durations.ideal, strict=True)
    ]
    present = _present(replay)
    firsts = np.cumsum([0, *(block.start.size for block in blocks[:-1])]).tolist()
    return recorded.drop("start", "duration").with_columns(
        *(frame[column].alias(f"{name}_{column}") for name, frame in times.items() for column in ("start", "duration")),
        ideal_cost=np.concatenate(ideal)[present],
        launch_delay=np.concatenate([delay.ravel() for delay in durations.launch_delay])[present],
        transfer=np.concatenate([_transfers(block, first) for block, first in zip(blocks, firsts, strict=True)])[
            present
        ],
    )


def _present(replay: JobReplay) -> Bools:
    """Mask of the ops that exist, in order of block, row and lane."""
    blocks = replay.graph.blocks
    return np.concatenate(
        [np.ones(block.start.size, np.bool_) if block.present is None else block.present.ravel() for block in blocks]
    )


def _microbatches(block: Block) -> Int32s:
    """The microbatch of each op, in order of (row, lane): sends and receives have that of their compute."""
    template, row = block.template, np.arange(block.template.rows)
    after, before = np.repeat(row, np.diff(template.first_wait)), template.waits_for
    of_row = row.copy()
    for compute, send, receive in _COMPUTES_AND_TRANSFERS:
        computes = template.kind == compute.code
        sent = computes[before] & (template.kind[after] == send.code)
        received = computes[after] & (template.kind[before] == receive.code)
        of_row[after[sent]] = before[sent]
        of_row[before[received]] = after[received]
    return np.broadcast_to(block.microbatch[of_row], block.start.shape).ravel()


def _transfers(block: Block, first: int) -> Ints:
    """The transfer of each op, in order of (row, lane), numbered from `first`: the pairs that meet within a lane."""
    template, members = block.template, np.diff(block.template.first_of_group)
    pairs = np.where((members == 2) & (template.rendezvous < 0), np.arange(len(members)), -1)
    of_row = np.empty(template.rows, np.int64)
    of_row[template.order] = np.repeat(pairs, members)
    numbers = first + of_row[:, None] * block.lanes + np.arange(block.lanes)
    return np.where(of_row[:, None] >= 0, numbers, -1).ravel()


def _frame(replay: JobReplay, replayed: Sequence[Timeline]) -> pl.DataFrame:
    frames = []
    for block, timeline in zip(replay.graph.blocks, replayed, strict=True):
        template, shape = block.template, block.start.shape

        def flat(values: npt.NDArray[Any], shape: tuple[int, ...] = shape) -> npt.NDArray[Any]:
            """Flatten `values`, which broadcast to [rows, lanes], to one column in order of (row, lane)."""
            return np.broadcast_to(values, shape).ravel()

        frame = pl.DataFrame(
            {
                "step": flat(replay.graph.steps[block.step]),
                "dp_rank": flat(block.dp_rank),
                "pp_rank": flat(template.pp_rank[:, None]),
                "kind": pl.Series(flat(template.kind[:, None])).cat.to(KIND_TYPE),
                "seq": flat(block.seq),
                "microbatch": flat(block.microbatch),
                "chunk": flat(template.chunk[:, None]),
                "start": timeline.start.ravel(),
                "duration": (timeline.end - timeline.start).ravel(),
            }
        )
        frames.append(frame if block.present is None else frame.filter(pl.Series(block.present.ravel())))
    return pl.concat(frames).with_columns(
        pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in ("microbatch", "chunk")
    )


def labelled_ops(traces: Sequence[Trace]) -> pl.DataFrame:
    """The ops of steps that can be replayed, [ops]: `trace` (position in `traces`), `step`, LABELS, null if unknown.

    `excess_s`: seconds of an op's own cost, transfers without their wait for peers, beyond the median of all ops of
    that kind, stage and chunk; 0 for those below it. Raises GraphError if the ops of a trace contradict each other.
    """
    frames = []
    for number, trace in enumerate(traces):
        replay = JobReplay.from_trace(trace)
        ranks = [(worker.dp_rank, worker.pp_rank, rank) for worker, rank in trace.worker_ranks().items()]
        workers = pl.DataFrame(ranks, {"dp_rank": pl.Int32, "pp_rank": pl.Int16, "rank": pl.Int32}, orient="row")
        workers = workers.with_columns(
            host=_of_rank(trace.hosts), **{"GPU model": _of_rank(_models(trace.metadata.get("gpus")))}
        )
        logged = step_values(trace.metadata).get("tokens", {})
        ops = costs_frame(replay.as_recorded or replay).cast({"dp_rank": pl.Int32, "pp_rank": pl.Int16})
        frames.append(
            ops.join(workers, on=["dp_rank", "pp_rank"], how="left", maintain_order="left").with_columns(
                pl.lit(number).alias("trace"),
                pl.col("step").replace_strict(logged, default=None, return_dtype=pl.Float64).alias("tokens"),
            )
        )
    beyond = pl.col("cost") - pl.col("cost").median().over(*_PEERS)
    tokens = pl.col("tokens").cast(pl.Int64, strict=False)
    part = (tokens.rank("min") - 1) * _RANGES_OF_TOKENS // tokens.count()
    least, most = tokens.min().over(part), tokens.max().over(part)
    of_step = pl.when(least == most).then(least.cast(pl.String)).otherwise(pl.format("{} to {}", least, most))
    return pl.concat(frames).select(
        *("trace", "step", "host", "rank", "GPU model", "microbatch", "chunk"),
        of_step.alias("tokens of the step"),
        **{"stage": "pp_rank", "DP rank": "dp_rank", "op kind": "kind"},
        excess_s=beyond.clip(lower_bound=0.0),
    )


def _of_rank(names: Mapping[int, str]) -> pl.Expr:
    return pl.col("rank").replace_strict(names, default=None, return_dtype=pl.String)


def _models(gpus: Any) -> dict[int, str]:
    by_rank = gpus.items() if isinstance(gpus, dict) else ()
    return {int(rank): str(gpu["model"]) for rank, gpu in by_rank if isinstance(gpu, dict) and gpu.get("model")}


def over_represented(ops: pl.DataFrame, chosen: pl.Series) -> pl.DataFrame:
    """The values of labels with a larger share of the excess of the chosen ops than of that of the others.

    `ops`: of `labelled_ops`; `chosen`: which of them, [ops] of booleans. Rows of `label`, `value`, `inside`, `outside`,
    the largest difference first. `inside`: the value's share of the excess of all chosen ops, from 0 to 1, 0 if they
    have no excess; `outside`: of the others. A label of one value tells nothing and is left out.
    """
    tables = []
    sides = ops.with_columns(inside=pl.col("excess_s") * chosen, outside=pl.col("excess_s") * ~chosen)
    whole = {side: float(sides[side].sum()) for side in ("inside", "outside")}
    for label in LABELS:
        sums = sides.group_by(pl.col(label).alias("value")).agg(pl.col(*whole).sum()).drop_nulls("value")
        if sums.height > 1:
            shares = [(pl.col(side) / total).fill_nan(0.0) for side, total in whole.items()]
            tables.append(sums.select(pl.lit(label).alias("label"), pl.col("value").cast(pl.String), *shares))
    if not tables:
        numbers = {"inside": pl.Float64, "outside": pl.Float64}
        return pl.DataFrame(schema={"label": pl.String, "value": pl.String, **numbers})
    larger_inside = pl.concat(tables).filter(pl.col("inside") > pl.col("outside"))
    return larger_inside.sort(pl.col("outside") - pl.col("inside"), "label", "value")
