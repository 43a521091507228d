"""From the segments of an attempt to a canonical trace.

In: an `AttemptRecording`. Out: a `Trace` of the steps every rank finished, and a `MergeReport` of what was left out.
Device times become host times here; the rules that turn records into ops of the dependency graph are in `ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.merge.device_clock import DeviceClockFit, fit_device_clock
from tracekit.collectors.merge.device_ops import on_host_clock, timed_alike, waited_for
from tracekit.collectors.merge.gpu_samples import read_samples, summarize_gpu
from tracekit.collectors.merge.lockstep import ranks_of_workers, stands_for_worker, with_waits_for_peers
from tracekit.collectors.merge.ops import OpReport, build_ops
from tracekit.collectors.merge.placement import LayoutOptions, Place, Placement, RankFacts, place_ranks
from tracekit.collectors.merge.stepcut import cut_steps
from tracekit.collectors.merge.unrecorded import find_unrecorded
from tracekit.collectors.nccl.join import join_nccl
from tracekit.collectors.nccl.recording import read_nccl
from tracekit.collectors.run_directory.host_clocks import ClockFit
from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording
from tracekit.collectors.runtime.wire_format import Category, Flag
from tracekit.errors import TraceError
from tracekit.model import Unit
from tracekit.trace import COLLECTED, RUN_QUEUE, UNIT_KEY, Trace

IntArray = npt.NDArray[np.int64]
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
    reference = _reference(recording, clocks or {})
    device_clocks = _device_clocks(recording)
    records = _records(recording, clocks or {}, reference, device_clocks)
    groups = _groups(recording)
    placement = place_ranks([_facts(one, records, groups[one.rank]) for one in recording.ranks.values()], options)
    timed = timed_alike(records, _whole_steps(records, first_step))
    if timed.steps.is_empty():
        raise TraceError(
            f"{recording.directory}: no rank finished a recorded step after step {first_step - 1}; a step ends with an"
            " optimizer step: run longer, choose --steps that the run reaches, or call tracekit.collectors.set_step"
        )
    nccl = read_nccl(Path(recording.directory), recording.processes())
    joined = join_nccl(records, groups, nccl, clocks or {}, timed.steps) if nccl is not None else None
    if joined is not None:
        records = joined.records
    worked = waited_for(_placed(records, placement).join(timed.steps, on=["rank", "step"], how="semi"))
    group_table = _group_table(groups, placement)
    ops, report = build_ops(worked.records, placement.layout, group_table)
    cut = cut_steps(ops)
    met = records.join(timed.steps, on=["rank", "step"], how="semi")
    peers_waited = with_waits_for_peers(cut.ops, met, group_table, placement, cut.step_starts_ns)
    epoch_ns, members = _epoch_ns(reference), ranks_of_workers(placement)
    ranks = tuple(rank_report(one) for one in recording.ranks.values())
    trace = Trace.from_frame(
        peers_waited,
        placement.layout,
        name=name,
        step_starts={step: (start + epoch_ns) / 1e9 for step, start in cut.step_starts_ns.items()},
        metadata={
            "format": COLLECTED,
            "framework": "torch",
            UNIT_KEY: str(Unit.NS),
            "hosts": {str(one.rank): one.host for one in ranks},
            "attempt": recording.attempt,
            "layout_source": placement.source,
            **({"ranks_of_workers": {str(rank): ranks for rank, ranks in members.items()}} if members else {}),
            "missing_ranks": list(recording.missing_ranks),
            "dropped_records": sum(one.dropped for one in ranks),
            "collect": asdict(report),
            **_run_queues(records, timed.steps),
            "clocks": {host: asdict(fit) for host, fit in (clocks or {}).items()},
            "wall_clock_hosts": sorted({one.host for one in ranks} - {reference["host"], *(clocks or {})}),
            **_device_metadata(recording, device_clocks, timed.left_out, worked.hidden),
            **find_unrecorded(recording).metadata(),
            **({"nccl": joined.report.to_dict()} if joined is not None else {}),
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


def _reference(recording: AttemptRecording, clocks: Mapping[str, ClockFit]) -> dict[str, Any]:
    """The process whose monotonic clock all times are put on: of a host that was measured against none."""
    processes: list[dict[str, Any]] = [recording.ranks[rank].facts["process"][0] for rank in sorted(recording.ranks)]
    return next((process for process in processes if process["host"] not in clocks), processes[0])


def _epoch_ns(process: Mapping[str, Any]) -> int:
    """When the monotonic clock of the process's host was 0, in ns since the epoch by its wall clock."""
    return int(process["time_ns"]) - int(process["monotonic_ns"])


def _device_clocks(recording: AttemptRecording) -> dict[int, DeviceClockFit]:
    """The clock of each rank's GPU, where it was read."""
    read = {one.rank: one.facts.get("device-clock") for one in recording.ranks.values()}
    return {rank: fit_device_clock(readings) for rank, readings in read.items() if readings}


def _device_metadata(
    recording: AttemptRecording,
    clocks: Mapping[int, DeviceClockFit],
    left_out: int,
    hidden: Mapping[str, int],
) -> dict[str, Any]:
    """How ranks with a GPU were timed, and what GPUs they had; nothing without one."""
    metadata: dict[str, Any] = {}
    if clocks:
        metadata["device_clock"] = {
            "source": "cuda-events",
            "left_out_rank_steps": left_out,
            "hidden": dict(hidden),
            "ranks": {str(rank): fit.to_dict() for rank, fit in clocks.items()},
        }
    gpus = {}
    for one in recording.ranks.values():
        facts = one.facts.get("device")
        if facts:
            host = one.facts["process"][0]["host"]
            summary = summarize_gpu({"host": host, **facts[-1]}, read_samples(recording.directory, one.rank))
            gpus[str(one.rank)] = summary.to_dict()
    if gpus:
        metadata["gpus"] = gpus
        models = {str(gpu["model"]) for gpu in gpus.values()}
        metadata["gpu_model"] = ", ".join(sorted(models))
    return metadata


def _records(
    recording: AttemptRecording,
    clocks: Mapping[str, ClockFit],
    reference: Mapping[str, Any],
    device_clocks: Mapping[int, DeviceClockFit],
) -> pl.DataFrame:
    """All records, times on the reference clock in ns, names and categories as text.

    A host whose clock nobody measured (no folder shared by the nodes) is placed by the wall clocks.
    """
    frames = []
    for one in recording.ranks.values():
        # A rank killed right behind the first use of a name has not told the name.
        count = 1 + max(int(one.records["name"].max(initial=0)), max(one.names, default=0))
        names = pl.Series([one.names.get(number, "?") for number in range(count)])
        frame = pl.DataFrame({field: one.records[field] for field in one.records.dtype.names or ()}).with_columns(
            rank=pl.lit(one.rank, pl.Int32),
            name=names.gather(one.records["name"].astype(np.uint32)),
            category=pl.col("category").replace_strict(_CATEGORIES, return_dtype=pl.String),
        )
        if one.rank in device_clocks:
            frame = on_host_clock(frame, device_clocks[one.rank])
        process = one.facts["process"][0]
        fit = clocks.get(str(process["host"]))
        if fit is not None:
            frame = _moved(frame, fit.to_reference)
        elif process["host"] != reference["host"]:
            shift = _epoch_ns(process) - _epoch_ns(reference)
            frame = _moved(frame, partial(np.add, shift))
        frames.append(frame)
    return pl.concat(frames)


def _moved(frame: pl.DataFrame, move: Callable[[IntArray], IntArray]) -> pl.DataFrame:
    """Records with every time moved; `extra` is one only of a transfer: when its waiter went on."""
    is_time = pl.lit(value=True), pl.lit(value=True), pl.col("category") == "p2p"
    return frame.with_columns(
        pl.when(rows).then(pl.Series(move(frame[column].to_numpy()))).otherwise(column).alias(column)
        for column, rows in zip(("start_ns", "end_ns", "extra"), is_time, strict=True)
    )


def _whole_steps(records: pl.DataFrame, first_step: int) -> pl.DataFrame:
    """The (rank, step) that were recorded from begin to end."""
    wanted = int(Flag.COMPLETE | Flag.RECORDING)
    return records.filter(
        (pl.col("category") == "step") & (pl.col("flags") & wanted == wanted) & (pl.col("step") >= first_step)
    ).select("rank", "step")


def _run_queues(records: pl.DataFrame, steps: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Rank -> seconds of the mean step in which its training thread waited for a processor, where the kernel says."""
    said = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0)).join(steps, on=["rank", "step"])
    waits = said.group_by("rank").agg(pl.col("peer").mean() / 1e6).sort("rank")
    return {RUN_QUEUE: {str(rank): seconds for rank, seconds in waits.iter_rows()}} if waits.height else {}


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
    rows = [(rank, place.dp, place.pp) for rank, place in placement.places.items() if stands_for_worker(place)]
    places = pl.DataFrame(rows, schema={"rank": pl.Int32, "dp_rank": pl.Int32, "pp_rank": pl.Int16}, orient="row")
    return records.join(places, on="rank", how="inner")


def _group_table(groups: Mapping[int, Mapping[int, Mapping[str, Any]]], placement: Placement) -> pl.DataFrame:
    """Per rank and group number: its description, its size, whether it joins data-parallel ranks of a stage, and all
    of them, or ranks of one worker.

    `members` is the same number on all ranks of a group, whatever each calls it.
    """
    rows = []
    numbers: dict[tuple[int, ...], int] = {}
    for rank, of_rank in groups.items():
        for number, group in of_rank.items():
            places = [placement.places[member] for member in group["ranks"] if member in placement.places]
            description = str(group["description"] or group["name"])
            size, members = len(group["ranks"]), numbers.setdefault(tuple(group["ranks"]), len(numbers))
            data_parallel = _is_data_parallel(places, size)
            joins_all = data_parallel and len({place.dp for place in places}) == placement.layout.dp
            within_worker = size > 1 and len(places) == size and len({(place.dp, place.pp) for place in places}) == 1
            rows.append((rank, number, description, data_parallel, joins_all, within_worker, size, members))
    schema = {
        "rank": pl.Int32,
        "peer": pl.Int32,
        "group": pl.String,
        "data_parallel": pl.Boolean,
        "joins_all": pl.Boolean,
        "within_worker": pl.Boolean,
        "size": pl.Int32,
        "members": pl.Int32,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _is_data_parallel(places: list[Place], size: int) -> bool:
    """More than one rank, all of one stage and one tensor-parallel slice."""
    return size > 1 and len({(place.pp, place.tp) for place in places}) == 1
