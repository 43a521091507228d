"""What ranks said of their steps with `tracekit.log`, as values of the job.

In: records on one clock. Out: metadata of the trace: `tokens` summed over data-parallel replicas, `loss` the mean over
ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import polars as pl

from tracekit.collectors.merge.placement import Placement
from tracekit.trace.step_values import STEP_VALUES


def logged_values(records: pl.DataFrame, placement: Placement, steps: Collection[int]) -> dict[str, Any]:
    """The values of these steps, for `tracekit.trace.step_values`; empty if nobody logged any.

    The last value of a rank in a step counts. Ranks of a replica say the same of its tokens, so the most counts; a step
    in which fewer replicas say it than in others has no sum.
    """
    logged = records.filter((pl.col("category") == "value") & pl.col("step").is_in(list(steps)))
    if logged.is_empty():
        return {}
    replicas = {rank: place.dp for rank, place in placement.places.items()}
    by_rank = (
        logged.with_columns(value=pl.Series(logged["extra"].to_numpy().view(np.float64)))
        .filter(pl.col("value").is_finite())
        .with_columns(replica=pl.col("rank").replace_strict(replicas, return_dtype=pl.Int32))
        .sort("number")
        .group_by("name", "step", "replica", "rank", maintain_order=True)
        .agg(pl.col("value").last())
    )
    tokens = by_rank.filter(name="tokens").group_by("step", "replica").agg(pl.col("value").max())
    sums = tokens.group_by("step").agg(pl.col("value").sum(), replicas=pl.len())
    whole = sums.filter(pl.col("replicas") == pl.col("replicas").max())
    loss = by_rank.filter(name="loss").group_by("step").agg(pl.col("value").mean())
    rows = {"tokens": whole.sort("step"), "loss": loss.sort("step")}
    return {
        STEP_VALUES: {name: dict(zip(one["step"].cast(str), one["value"], strict=True)) for name, one in rows.items()}
    }
