"""What is different about some ops: the labels that have more of their excess time than of that of all others.

In: the ops of traces, and which of them are chosen. Out: a ranked table with both shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS

#: Ops whose time is not that of the ranks they wait for.
_OWN = [str(kind) for kind in KINDS if not kind.is_communication]
#: Ops that should take equally long.
_PEERS = ("kind", "pp_rank", "chunk")
LABELS = ("host", "rank", "GPU model", "stage", "DP rank", "op kind", "microbatch", "chunk")


def labelled_ops(traces: Sequence[Trace]) -> pl.DataFrame:
    """The ops that wait for nobody, [ops]: `trace` (position in `traces`), `step`, LABELS as text, null if unknown.

    `excess_s`: seconds beyond the median of all such ops of that kind, stage and chunk; 0 for those below it.
    """
    frames = []
    for number, trace in enumerate(traces):
        ops = trace.ops.filter(pl.col("kind").is_in(_OWN))
        frames.append(
            ops.select(
                *("step", "duration", *_PEERS),
                trace=pl.lit(number),
                rank=pl.col("rank").cast(pl.String),
                host=_of_rank(trace.hosts),
                **{"GPU model": _of_rank(_models(trace.metadata.get("gpus")))},
                **{"DP rank": pl.col("dp_rank").cast(pl.String), "microbatch": pl.col("microbatch").cast(pl.String)},
            )
        )
    beyond = pl.col("duration") - pl.col("duration").median().over(*_PEERS)
    return pl.concat(frames).select(
        *("trace", "step", "host", "rank", "GPU model", "DP rank", "microbatch"),
        **{"stage": pl.col("pp_rank").cast(pl.String), "op kind": pl.col("kind").cast(pl.String)},
        chunk=pl.col("chunk").cast(pl.String),
        excess_s=beyond.clip(lower_bound=0.0),
    )


def _of_rank(names: Mapping[int, str]) -> pl.Expr:
    return pl.col("rank").replace_strict(names, default=None, return_dtype=pl.String)


def _models(gpus: Any) -> dict[int, str]:
    found = gpus.items() if isinstance(gpus, dict) else ()
    return {int(rank): str(gpu["model"]) for rank, gpu in found if isinstance(gpu, dict) and gpu.get("model")}


def over_represented(ops: pl.DataFrame, chosen: pl.Series) -> pl.DataFrame:
    """The values of labels with a larger share of the excess of the chosen ops than of that of the others.

    `ops`: of `labelled_ops`; `chosen`: which of them, [ops] of booleans. Rows of `label`, `value`, `inside`, `outside`,
    the largest difference first. `inside`: the value's share of the excess of those chosen ops that have the label,
    from 0 to 1, 0 if they have no excess; `outside`: of the others. A label of one value tells nothing and is left out.
    """
    tables = []
    for label in LABELS:
        known = ops.select(value=label, excess_s="excess_s").with_columns(chosen=chosen).drop_nulls("value")
        sums = known.group_by("value").agg(
            inside=pl.col("excess_s").filter("chosen").sum(), outside=pl.col("excess_s").filter(~pl.col("chosen")).sum()
        )
        if sums.height > 1:
            share = [(pl.col(side) / pl.col(side).sum()).fill_nan(0.0) for side in ("inside", "outside")]
            tables.append(sums.select(pl.lit(label).alias("label"), "value", *share))
    if not tables:
        numbers = {"inside": pl.Float64, "outside": pl.Float64}
        return pl.DataFrame(schema={"label": pl.String, "value": pl.String, **numbers})
    found = pl.concat(tables).filter(pl.col("inside") > pl.col("outside"))
    return found.sort(pl.col("outside") - pl.col("inside"), "label", "value")
