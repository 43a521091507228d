"""From the segments of an attempt to a canonical trace.

In: an `AttemptRecording`. Out: a `Trace` of the steps every rank finished, and a `MergeReport` of what was left out.
The records are host times; the rules that turn them into ops of the dependency graph are in `ops.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from tracekit.collectors.clock import ClockFit
from tracekit.collectors.mesh import LayoutOptions, Place, Placement, RankFacts, place_ranks
from tracekit.collectors.ops import OpReport, build_ops
from tracekit.collectors.runtime.words import Category, Flag
from tracekit.collectors.segments import AttemptRecording, RankRecording
from tracekit.collectors.stepcut import cut_steps
from tracekit.errors import TraceError
from tracekit.trace import Trace

_CATEGORIES = {int(category): category.name.lower() for category in Category}


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank recorded. `failures`: hook -> how often it failed; `off`: why its recorder stopped, if it did."""

    rank: int
    host: str
    steps: int
    records: int
    dropped: int
    unfinished: int
    torn_bytes: int
    failures: Mapping[str, int]
    off: str | None
    closed: bool


@dataclass(frozen=True, slots=True)
class MergedAttempt:
    """The trace of one attempt with what is known about its making."""

    trace: Trace
    ranks: tuple[RankReport, ...]
    missing_ranks: tuple[int, ...]
    placement: Placement
    ops: OpReport


def merge_attempt(
    recording: AttemptRecording,
    *,
    name: str,
    first_step: int = 1,
    options: LayoutOptions | None = None,
    clocks: Mapping[str, ClockFit] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> MergedAttempt:
    """Merge the ranks of one attempt. Raises LayoutError where ranks disagree, TraceError where no step is whole."""
    records = _records(recording, clocks or {})
    groups = _groups(recording)
    placement = place_ranks([_facts(one, records, groups[one.rank]) for one in recording.ranks.values()], options)
    steps = _whole_steps(records, first_step)
    if steps.is_empty():
        raise TraceError(
            f"{recording.directory}: no rank finished a recorded step after step {first_step - 1}; a step ends with an"
            " optimizer step: run longer, choose --steps that the run reaches, or call tracekit.collectors.set_step"
        )
    kept = _placed(records, placement).join(steps, on=["rank", "step"], how="semi")
    ops, report = build_ops(kept, placement.layout, _group_table(groups, placement))
    cut = cut_steps(ops)
    process = recording.ranks[min(recording.ranks)].facts["process"][0]
    epoch_ns = int(process["time_ns"]) - int(process["monotonic_ns"])
    ranks = tuple(rank_report(one) for one in recording.ranks.values())
    trace = Trace.from_frame(
        cut.ops,
        placement.layout,
        name=name,
        step_starts={step: (start + epoch_ns) / 1e9 for step, start in cut.step_starts_ns.items()},
        metadata={
            "format": "collected",
            "framework": "torch",
            "hosts": sorted({one.host for one in ranks}),
            "attempt": recording.attempt,
            "layout_source": placement.source,
            "missing_ranks": list(recording.missing_ranks),
            "dropped_records": sum(one.dropped for one in ranks),
            "collect": asdict(report),
            "clocks": {host: asdict(fit) for host, fit in (clocks or {}).items()},
            **(metadata or {}),
        },
        source=str(recording.directory),
    )
    return MergedAttempt(trace, ranks, recording.missing_ranks, placement, report)


def rank_report(recording: RankRecording) -> RankReport:
    """The counters of one rank; a killed one left no summary, so its steps are counted from its records."""
    summary = recording.summary or {}
    return RankReport(
        rank=recording.rank,
        host=str(recording.facts["process"][0]["host"]),
        steps=int((recording.records["category"] == Category.STEP).sum()),
        records=len(recording.records),
        dropped=int(summary.get("dropped", 0)),
        unfinished=int(summary.get("unfinished", 0)),
        torn_bytes=recording.torn_bytes,
        failures=summary.get("failures", {}),
        off=summary.get("off"),
        closed=recording.summary is not None,
    )


def _records(recording: AttemptRecording, clocks: Mapping[str, ClockFit]) -> pl.DataFrame:
    """All records, times on the reference clock in ns, names and categories as text."""
    frames = []
    for one in recording.ranks.values():
        names = pl.Series([one.names.get(number, "?") for number in range(1 + max(one.names, default=0))])
        frame = pl.DataFrame({field: one.records[field] for field in one.records.dtype.names or ()}).with_columns(
            rank=pl.lit(one.rank, pl.Int32),
            name=names.gather(one.records["name"].astype(np.uint32)),
            category=pl.col("category").replace_strict(_CATEGORIES, return_dtype=pl.String),
        )
        fit = clocks.get(str(one.facts["process"][0]["host"]))
        if fit is not None:
            frame = frame.with_columns(
                pl.Series(column, fit.to_reference(frame[column].to_numpy())) for column in ("start_ns", "end_ns")
            )
        frames.append(frame)
    return pl.concat(frames)


def _whole_steps(records: pl.DataFrame, first_step: int) -> pl.DataFrame:
    """The (rank, step) that were recorded from begin to end."""
    wanted = int(Flag.COMPLETE | Flag.RECORDING)
    return records.filter(
        (pl.col("category") == "step") & (pl.col("flags") & wanted == wanted) & (pl.col("step") >= first_step)
    ).select("rank", "step")


def _groups(recording: AttemptRecording) -> dict[int, dict[int, dict[str, Any]]]:
    """Rank -> number -> process group."""
    return {
        one.rank: {int(group["number"]): group for group in one.facts.get("group", [])}
        for one in recording.ranks.values()
    }


def _facts(recording: RankRecording, records: pl.DataFrame, groups: Mapping[int, Mapping[str, Any]]) -> RankFacts:
    """What one rank knows about the layout."""
    used = (
        records.filter(
            (pl.col("rank") == recording.rank)
            & (pl.col("category") == "collective")
            & pl.col("name").str.contains("reduce")
        )
        .group_by("peer")
        .agg(pl.col("extra").sum())
        .sort("extra", "peer", descending=[True, False])
    )
    megatron = recording.facts.get("megatron")
    return RankFacts(
        rank=recording.rank,
        world_size=recording.world_size,
        meshes=tuple(recording.facts.get("mesh", [])),
        megatron=megatron[-1] if megatron else None,
        pipelines=tuple(recording.facts.get("pipeline", [])),
        reduced=tuple(tuple(groups[number]["ranks"]) for number in used["peer"].to_list() if number in groups),
    )


def _placed(records: pl.DataFrame, placement: Placement) -> pl.DataFrame:
    """Records of one rank per worker, with its dp and pp rank."""
    rows = [(rank, place.dp, place.pp) for rank, place in placement.places.items() if place.tp == place.cp == 0]
    places = pl.DataFrame(rows, schema={"rank": pl.Int32, "dp_rank": pl.Int32, "pp_rank": pl.Int16}, orient="row")
    return records.join(places, on="rank", how="inner")


def _group_table(groups: Mapping[int, Mapping[int, Mapping[str, Any]]], placement: Placement) -> pl.DataFrame:
    """Per rank and group number: its description and whether it joins the data-parallel ranks of a stage."""
    rows = []
    for rank, of_rank in groups.items():
        for number, group in of_rank.items():
            places = [placement.places[member] for member in group["ranks"] if member in placement.places]
            description = str(group["description"] or group["name"])
            rows.append((rank, number, description, _is_data_parallel(places, len(group["ranks"]))))
    schema = {"rank": pl.Int32, "peer": pl.Int32, "group": pl.String, "data_parallel": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _is_data_parallel(places: list[Place], size: int) -> bool:
    """More than one rank, all of one stage and one tensor-parallel slice."""
    return size > 1 and len({(place.pp, place.tp) for place in places}) == 1
