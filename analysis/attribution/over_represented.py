"""What is different about some ops: the labels that have more of their excess time than of that of all others.

In: the ops of traces, and which of them are chosen. Out: a ranked table with both shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.timeline import costs_frame
from tracekit.trace.canonical import Trace
from tracekit.trace.step_values import step_values

#: Ops that should take equally long.
_PEERS = ("kind", "pp_rank", "chunk")
LABELS = ("host", "rank", "GPU model", "stage", "DP rank", "op kind", "microbatch", "chunk", "tokens of the step")
#: Ranges of tokens, each with as many ops.
_RANGES_OF_TOKENS = 4


def labelled_ops(traces: Sequence[Trace]) -> pl.DataFrame:
    """The ops of steps that can be replayed, [ops]: `trace` (position in `traces`), `step`, LABELS, null if unknown.

    `excess_s`: seconds of an op's own cost, transfers without their wait for peers, beyond the median of all ops of
    that kind, stage and chunk; 0 for those below it. Raises GraphError if the ops of a trace contradict each other.
    """
    frames = []
    for number, trace in enumerate(traces):
        replay = JobReplay.from_trace(trace)
        ranks = [(at.dp_rank, at.pp_rank, rank) for at, rank in trace.worker_ranks().items()]
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
            shares = [(pl.col(side) / of).fill_nan(0.0) for side, of in whole.items()]
            tables.append(sums.select(pl.lit(label).alias("label"), pl.col("value").cast(pl.String), *shares))
    if not tables:
        numbers = {"inside": pl.Float64, "outside": pl.Float64}
        return pl.DataFrame(schema={"label": pl.String, "value": pl.String, **numbers})
    larger_inside = pl.concat(tables).filter(pl.col("inside") > pl.col("outside"))
    return larger_inside.sort(pl.col("outside") - pl.col("inside"), "label", "value")
