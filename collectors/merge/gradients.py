"""Sizes of gradients and what their reductions take, for `tracekit optimize`.

In: the facts and collectives of an attempt. Out: metadata that `analysis/plans/from_recording.py` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from tracekit.collectors.merge.collective_ops import all_there_ns
from tracekit.collectors.merge.placement import Placement

#: Sizes of buckets that are kept, those reduced most often.
_MOST_SIZES = 64


def gradient_figures(
    facts: Mapping[int, Mapping[str, list[Any]]], records: pl.DataFrame, groups: pl.DataFrame, placement: Placement
) -> dict[str, Any]:
    """The metadata, empty if no rank wrote the sizes of its gradients. `facts`: of each rank."""
    of_stage: dict[int, dict[str, Any]] = {}
    for rank, place in sorted(placement.places.items()):
        written = facts.get(rank, {}).get("gradients", [])
        if written and (place.tp, place.cp) == (0, 0):
            of_stage.setdefault(place.pp, written[-1])
    if len(of_stage) != placement.layout.pp:
        return {}
    sizes = [of_stage[stage]["bytes"] for stage in sorted(of_stage)]
    # All buckets of a reducer on the host are one collective, of which only the end is seen.
    on_host = [sum(of_layers) for of_layers in sizes]
    reductions = (
        records.filter(pl.col("category") == "collective", pl.col("name").str.contains("allreduce|reduce_scatter"))
        .join(groups, on=["rank", "peer"], how="left", maintain_order="left")
        .with_columns(all_there_ns=all_there_ns())
        .filter("data_parallel", ~pl.col("extra").is_in(on_host))
        .sort("rank", "start_ns")  # a bucket waits for the one before
        .with_columns(pl.max_horizontal("all_there_ns", pl.col("end_ns").shift(1).over("rank")))
        .group_by("extra")
        .agg(taken_s=(pl.col("end_ns") - pl.col("all_there_ns")).median() / 1e9, count=pl.len())
        .sort("count", "extra", descending=True)
        .head(_MOST_SIZES)
    )
    rows = reductions.select("extra", "taken_s").rows()
    return {"gradients": {**of_stage[0], "bytes": sizes, "reductions": rows}}
