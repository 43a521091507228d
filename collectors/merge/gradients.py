"""Sizes of gradients and what their reductions take, for `tracekit optimize`.

In: the facts and records of an attempt. Out: metadata that `analysis/plans/from_recording.py` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.merge.collective_ops import all_there_ns
from tracekit.collectors.merge.device_ops import ON_DEVICE
from tracekit.collectors.merge.placement import Placement

#: Buckets of a step that are kept, and cells of the arrays in which their times are added up.
_MOST_BUCKETS, _MOST_CELLS = 64, 1 << 21
#: Reductions that run at once: gloo has two threads, a stream of a GPU has one queue.
_ON_HOST, _ON_STREAM = 2, 1
_Seconds = npt.NDArray[np.float64]


def gradient_figures(
    facts: Mapping[int, Mapping[str, list[Any]]], records: pl.DataFrame, groups: pl.DataFrame, placement: Placement
) -> dict[str, Any]:
    """The metadata, empty if no rank wrote the sizes of its gradients. `facts`: of each rank.

    `layers`, of each pipeline stage, too, if all stages wrote those that a plan can move.
    """
    written = _written(facts, placement)
    sizes = [of_stage.layers or of_stage.wrapped.get("bytes", []) for of_stage in written]
    if not all(sizes):
        return {}
    # All buckets of a reducer on the host are one collective, of which only the end is seen.
    on_host = [sum(of_layers) for of_layers in sizes]
    reductions = (
        records.filter(pl.col("category") == "collective", pl.col("name").str.contains("allreduce|reduce_scatter"))
        .join(groups, on=["rank", "peer"], how="left", maintain_order="left")
        .with_columns(all_there_ns=all_there_ns(), on_device=ON_DEVICE)
        .filter("data_parallel", ~pl.col("extra").is_in(on_host))
        .sort("rank", "step", "start_ns")
        .group_by("rank", "step", maintain_order=True)
        .agg("extra", "all_there_ns", "start_ns", "end_ns", pl.col("on_device").any(), queued_us="chunk")
    )
    each = ["rank", "extra"]  # the buckets of most steps: the first step, and those without some layers, have others
    most = reductions.group_by(each).len().sort("len", "rank", descending=True).unique("rank", maintain_order=True)
    usual = reductions.join(most, on=each, how="semi", maintain_order="left")
    steps = _steps_of_ranks(records)
    timed = [_TimedBuckets.of(alike, steps) for _, alike in usual.group_by("extra", maintain_order=True)]
    rows = [row for buckets in timed for row in buckets.rows()]
    figures = {**written[0].wrapped, "bytes": sizes, "reductions": rows[:_MOST_BUCKETS], **_delay(usual, records)}
    if timed:
        figures["copy_per_mb_s"] = max(buckets.copy_per_mb_s() for buckets in timed)
        figures["at_once"] = timed[0].at_once
    moves = len(written) > 1 and all(of_stage.layers for of_stage in written)
    return {"gradients": figures, **({"layers": list(map(len, sizes))} if moves else {})}


@dataclass(frozen=True)
class _Written:
    """What a rank wrote of its gradients. `wrapped`: of DistributedDataParallel; `layers`: bytes of the layers of its
    pipeline stages, which a plan can move.
    """

    wrapped: Mapping[str, Any]
    layers: list[int]


def _written(facts: Mapping[int, Mapping[str, list[Any]]], placement: Placement) -> list[_Written]:
    """What the first rank of each stage that wrote something wrote, [stages]."""
    of_stage: dict[int, _Written] = {}
    for rank, place in sorted(placement.places.items()):
        of_rank = facts.get(rank, {})
        if (place.tp, place.cp) == (0, 0) and (of_rank.get("gradients") or of_rank.get("layers")):
            layers = [size for stage in of_rank.get("layers", []) for size in stage["bytes"]]
            of_stage.setdefault(place.pp, _Written(of_rank.get("gradients", [{}])[-1], layers))
    return [of_stage.get(stage, _Written({}, [])) for stage in range(placement.layout.pp)]


def _steps_of_ranks(records: pl.DataFrame) -> pl.DataFrame:
    """When the last backward of each step of each rank began and ended, ns."""
    of_step = records.filter(pl.col("name") == "backward-compute").group_by("rank", "step")
    return of_step.agg(backward_ns=pl.col("start_ns").max(), over_ns=pl.col("end_ns").max())


def _delay(reductions: pl.DataFrame, records: pl.DataFrame) -> dict[str, float]:
    """How much reductions delay a backward, `delay_s`, with its standard error `delay_error_s`, by what the kernel
    counted; nothing if it did not.

    Between its first bucket and its last, the training thread runs for a share of the time, waits for a processor for
    the rest. Other programs keep it waiting as well, but not only then.
    """
    in_step = records.filter(pl.col("category") == "step", pl.col("peer") >= 0, pl.col("chunk") >= 0)
    between = reductions.filter(pl.col("queued_us").list.min() >= 0).select(
        "rank",
        "step",
        lasted_us=(pl.col("start_ns").list.last() - pl.col("start_ns").list.first()) / 1e3,
        queued_us=pl.col("queued_us").list.last() - pl.col("queued_us").list.first(),
    )
    steps = between.join(in_step.select("rank", "step", all_us="peer", ran_us="chunk"), on=["rank", "step"])
    steps = steps.filter(pl.col("lasted_us") > pl.col("queued_us"), pl.col("queued_us") >= 0)
    if steps.is_empty():
        return {}
    lasted_us, queued_us, all_us, ran_us = (steps[name].to_numpy().astype(float) for name in steps.columns[2:])
    ran_between_us = lasted_us - queued_us
    apart_us, queued_apart_us = (max(float(each.sum()), 0.0) for each in (ran_us - ran_between_us, all_us - queued_us))
    usual_share = apart_us / max(apart_us + queued_apart_us, 1.0)
    if usual_share == 0:
        return {}
    delay_s = (lasted_us - ran_between_us / usual_share) / 1e6
    error_s = float(delay_s.std() / max(len(delay_s) - 1, 1) ** 0.5)
    return {"delay_s": max(float(delay_s.mean()), 0.0), "delay_error_s": error_s}


@dataclass(frozen=True, eq=False)
class _TimedBuckets:
    """Steps with the same buckets: their bytes, [buckets], and seconds from the start of the last backward until each
    was ready and reduced, [steps, buckets], and until the backward ended, [steps]. `at_once`: that are reduced at once.
    """

    sizes: list[int]
    ready: _Seconds
    end: _Seconds
    over: _Seconds
    at_once: int

    @classmethod
    def of(cls, alike: pl.DataFrame, steps: pl.DataFrame) -> _TimedBuckets:
        """`alike`: the reductions of each step; `steps`: as returned by `_steps_of_ranks`."""
        sizes = alike["extra"][0].to_list()
        begun = alike.join(steps, on=["rank", "step"]).head(max(_MOST_CELLS // (2 * len(sizes) ** 2), 8))
        from_ns = begun["backward_ns"].to_numpy().reshape(-1, 1)
        names = ("all_there_ns", "end_ns")
        ready, end = (np.array(begun[name].to_list()).reshape(-1, len(sizes)) - from_ns for name in names)
        over = begun["over_ns"].to_numpy() - from_ns[:, 0]
        at_once = _ON_STREAM if begun["on_device"].any() else _ON_HOST
        return cls(sizes, ready / 1e9, end / 1e9, over / 1e9, at_once)

    def rows(self) -> list[tuple[int, float, float, float]]:
        """Of each bucket: bytes, seconds of service alone and beside the backward, and until it was ready; medians."""
        if not len(self.ready):
            return []
        figures = (*_service(self.ready, self.end, self.at_once), self.ready)
        return list(zip(self.sizes, *(np.median(each, axis=0).tolist() for each in figures), strict=True))

    def copy_per_mb_s(self) -> float:
        """Seconds that a MiB of reduced gradients takes to be copied; 0 on a GPU.

        The reducer waits for the buckets in turn and copies each; the backward ends with the last copy.
        """
        if not len(self.ready) or self.at_once == _ON_STREAM:
            return 0.0
        reduced = np.maximum(self.end, self.ready.max(axis=1)[:, None])
        behind_mb = np.cumsum(self.sizes[::-1])[::-1] / (1 << 20)
        return max(float(np.median(((self.over[:, None] - reduced) / behind_mb).min(axis=1))), 0.0)


def _service(ready: _Seconds, end: _Seconds, at_once: int) -> tuple[_Seconds, _Seconds]:
    """Seconds in which each bucket was reduced, alone and while a backward computed, [steps, buckets].

    Those under way share the time: the oldest `at_once` of them. The backward ends when the last bucket is ready.
    """
    edges = np.sort(np.concatenate([ready, end], axis=1), axis=1)
    begin, lasts = edges[:, None, :-1], np.diff(edges, axis=1)[:, None]
    under_way = (ready[:, :, None] <= begin) & (end[:, :, None] > begin)
    served = under_way & (np.cumsum(under_way, axis=1) <= at_once)
    took = served * lasts / np.maximum(served.sum(axis=1, keepdims=True), 1)
    beside = begin < ready.max(axis=1)[:, None, None]
    return (took * ~beside).sum(axis=2), (took * beside).sum(axis=2)
