"""Merge the segments of an attempt into a canonical trace, and attempts of one job into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import TraceError, TracekitError
from tracekit.collectors.merge.collective_ops import ALL_TO_ALL, gradient_figures
from tracekit.collectors.merge.lockstep import (
    ranks_of_workers,
    with_thread_waits,
    with_waits_for_peers,
    with_work_of_ranks,
)
from tracekit.collectors.merge.ops import build_ops
from tracekit.collectors.merge.placement import LayoutOptions, Placement, RankFacts, place_ranks
from tracekit.collectors.merge.record_times import (
    DeviceClockFit,
    cut_steps,
    fit_device_clock,
    on_host_clock,
    timed_alike,
    waited_for,
)
from tracekit.collectors.merge.run_facts import (
    Read,
    find_unrecorded,
    logged_values,
    read_samples,
    sampled_series,
    summarize_gpu,
)
from tracekit.collectors.record.wire_format import GPU_SUFFIX, Category, Flag
from tracekit.collectors.run_directory.segments import AttemptRecording, ClockFit, RankRecording, joined
from tracekit.trace.canonical import DEVICE_CLOCK, RUN_QUEUE, UNIT_KEY, Trace
from tracekit.trace.facts import COLLECTED, STEP_VALUES, step_values
from tracekit.trace.model import TimeUnit
from tracekit.trace.schema import POSTED, RECEIVED, RESUMED, ROWS_TYPE, SENT, WAITED

IntArray = npt.NDArray[np.int64]
_CATEGORIES = {int(category): category.name.lower() for category in Category}


@dataclass(frozen=True, slots=True)
class RankReport:
    """Counts of one rank's recording. `failures`: hook -> number of failures; `off`: why its recorder stopped."""

    rank: int
    host: str
    steps: int
    records: int
    dropped: int
    unfinished: int
    failures: Mapping[str, int]
    off: str | None
    closed: bool


@dataclass(frozen=True, slots=True)
class MergedAttempt:
    """The trace of one attempt, with details of how it was made. `program`: the arguments of its first rank."""

    trace: Trace
    missing_ranks: tuple[int, ...]
    placement: Placement
    program: tuple[str, ...]


def merge_attempt(
    recording: AttemptRecording,
    *,
    name: str,
    first_step: int = 1,
    options: LayoutOptions | None = None,
    clocks: Mapping[str, ClockFit] | None = None,
    metadata: Mapping[str, Any] | None = None,
    running: bool = False,
) -> MergedAttempt:
    """Merge the ranks of one attempt. Raises LayoutError if ranks disagree, TraceError if no step is complete.

    `running`: the recording is part of a run that is still going on. NCCL's events and GPU samples are then left out,
    because their files cover the whole run.
    """
    reference, device_clocks, records = records_on_one_clock(recording, clocks or {})
    groups = _groups(recording)
    reduced = _reduced(records)
    facts = [_facts(rank, reduced.get(number, []), groups[number]) for number, rank in recording.ranks.items()]
    placement = place_ranks(facts, options)
    steps, left_out = timed_alike(records, _whole_steps(records, first_step))
    if steps.is_empty():
        raise TraceError(
            f"{recording.directory}: no rank finished a recorded step after step {first_step - 1}; a step ends with an"
            " optimizer step: run longer, choose --steps that the run reaches, or call tracekit.collectors.set_step"
        )
    joined = None
    if not running:
        from tracekit.collectors.nccl.join import join_nccl  # windows of a running job do without
        from tracekit.collectors.nccl.rings import read_nccl

        if (nccl := read_nccl(Path(recording.directory), recording.processes())) is not None:
            records, joined = join_nccl(records, groups, nccl, clocks or {}, steps)
    records = _with_rows(records, recording)
    in_steps = records.join(steps, on=["rank", "step"], how="semi")
    worked, hidden = waited_for(_placed(in_steps, placement))
    group_table = _group_table(groups, placement)
    ops, report = build_ops(worked, placement.layout, group_table)
    cut, step_starts_ns = cut_steps(ops)
    # NCCL's kernels show when a transfer ran, not when a stream issued it or waited for it.
    records_of_trace = cut if joined is None else cut.drop(POSTED, RESUMED, strict=False)
    peers_waited = with_waits_for_peers(records_of_trace, in_steps, group_table, placement, step_starts_ns)
    begun_ns, members = epoch_ns(reference), ranks_of_workers(placement)
    # The files of a run that goes on are longer than what is read of it now.
    read = cache(lambda rank, suffix: [] if running else read_samples(recording.directory, rank, suffix))
    if members and WAITED in peers_waited.columns:
        others = _ops_of_peers(in_steps, placement, group_table)
        peers_waited = with_work_of_ranks(peers_waited, pl.concat([ops.select(others.columns), others]), placement)
    facts_of_ranks = {number: rank.facts for number, rank in recording.ranks.items()}
    rank_reports = tuple(rank_report(recorded) for recorded in recording.ranks.values())
    trace = Trace.from_frame(
        with_thread_waits(peers_waited, in_steps, group_table, members),
        placement.layout,
        name=name,
        step_starts={step: (start + begun_ns) / 1e9 for step, start in step_starts_ns.items()},
        metadata={
            **recording.scheduler,
            "format": COLLECTED,
            "framework": "torch",
            UNIT_KEY: str(TimeUnit.S),  # known: a step that seems to take 1,000 times as long as the others really did
            "hosts": {str(entry.rank): entry.host for entry in rank_reports},
            "attempt": recording.attempt,
            "layout_source": placement.source,
            **({"ranks_of_workers": {str(rank): ranks for rank, ranks in members.items()}} if members else {}),
            "missing_ranks": list(recording.missing_ranks),
            "dropped_records": sum(entry.dropped for entry in rank_reports),
            "collect": report,
            **_run_queues(records, steps),
            **gradient_figures(facts_of_ranks, in_steps, group_table, placement),
            **logged_values(records, placement, step_starts_ns),
            "clocks": {host: asdict(fit) for host, fit in (clocks or {}).items()},
            "wall_clock_hosts": sorted({entry.host for entry in rank_reports} - {reference["host"], *(clocks or {})}),
            **_device_metadata(recording, device_clocks, left_out, hidden, read),
            **({} if running else sampled_series(recording, read)),
            **find_unrecorded(recording).metadata(),
            **({"nccl": joined} if joined is not None else {}),
            **(metadata or {}),
        },
        source=str(recording.directory),
    )
    return MergedAttempt(trace, recording.missing_ranks, placement, recording.program)


def records_on_one_clock(
    recording: AttemptRecording, clocks: Mapping[str, ClockFit]
) -> tuple[dict[str, Any], dict[int, DeviceClockFit], pl.DataFrame]:
    """The process on whose host's clock all times are, the fitted clocks of GPUs, and all records of an attempt."""
    processes: list[dict[str, Any]] = [recording.ranks[rank].facts["process"][0] for rank in sorted(recording.ranks)]
    # One whose host was not measured against another.
    reference = next((process for process in processes if process["host"] not in clocks), processes[0])
    readings_of_rank = {recorded.rank: recorded.facts.get("device-clock") for recorded in recording.ranks.values()}
    device_clocks = {rank: fit_device_clock(readings) for rank, readings in readings_of_rank.items() if readings}
    return reference, device_clocks, _records(recording, clocks, reference, device_clocks)


def rank_report(recording: RankRecording) -> RankReport:
    """The counters of one rank. Steps are counted from its records, because a killed rank leaves no summary."""
    summary = recording.summary or {}
    return RankReport(
        rank=recording.rank,
        host=str(recording.facts["process"][0]["host"]),
        steps=int(np.count_nonzero(recording.records["category"] == Category.STEP)),
        records=len(recording.records),
        dropped=int(summary.get("dropped", recording.facts.get("dropped", [0])[-1])),
        unfinished=int(summary.get("unfinished", 0)),
        failures=summary.get("failures", {}),
        off=summary.get("off"),
        closed=recording.summary is not None,
    )


def epoch_ns(process: Mapping[str, Any]) -> int:
    """The wall-clock time at which the monotonic clock of the process's host was 0, ns since the epoch."""
    return int(process["time_ns"]) - int(process["monotonic_ns"])


def _device_metadata(
    recording: AttemptRecording,
    clocks: Mapping[int, DeviceClockFit],
    left_out: int,
    hidden: Mapping[str, int],
    read: Read,
) -> dict[str, Any]:
    """Metadata on timing by GPUs, and the GPUs of the ranks; empty if there are none."""
    metadata: dict[str, Any] = {}
    if clocks:
        metadata[DEVICE_CLOCK] = {
            "source": "cuda-events",
            "left_out_rank_steps": left_out,
            "hidden": dict(hidden),
            "ranks": {str(rank): fit.to_dict() for rank, fit in clocks.items()},
        }
    gpus = {}
    for of_rank in recording.ranks.values():
        facts = of_rank.facts.get("device")
        if facts:
            process = of_rank.facts["process"][0]
            samples = read(of_rank.rank, GPU_SUFFIX)
            gpus[str(of_rank.rank)] = summarize_gpu({"host": process["host"], **facts[-1]}, samples)
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
    """All records, with times on the reference clock in ns, and names and categories as text.

    A host whose clock was not measured (the nodes share no folder) is aligned by the wall clocks.
    """
    on_host = [recorded for recorded in recording.ranks.values() if recorded.rank not in device_clocks]
    on_device = [recorded for recorded in recording.ranks.values() if recorded.rank in device_clocks]
    frames = [_frame(on_host)] if on_host else []
    frames += [on_host_clock(_frame([recorded]), device_clocks[recorded.rank]) for recorded in on_device]
    moves = [(len(recorded.records), _move(recorded, clocks, reference)) for recorded in (*on_host, *on_device)]
    return _moved(pl.concat(frames), moves)


def _move(
    rank: RankRecording, clocks: Mapping[str, ClockFit], reference: Mapping[str, Any]
) -> Callable[[IntArray], IntArray] | None:
    """A function that converts the times of a rank to the reference clock; None if they are already on it."""
    process = rank.facts["process"][0]
    fit = clocks.get(str(process["host"]))
    if fit is not None:
        return fit.to_reference
    if process["host"] == reference["host"]:
        return None
    return partial(np.add, epoch_ns(process) - epoch_ns(reference))


def _frame(members: Sequence[RankRecording]) -> pl.DataFrame:
    """The records of some ranks, rank by rank, with names and categories as text."""
    records = joined(recorded.records for recorded in members)
    sizes = [len(recorded.records) for recorded in members]
    # A rank that was killed right after the first use of a name has not written the name.
    counts = [1 + max(int(rank.records["name"].max(initial=0)), max(rank.names, default=0)) for rank in members]
    names = pl.Series(
        [rank.names.get(number, "?") for rank, count in zip(members, counts, strict=True) for number in range(count)]
    )
    first = np.repeat(np.cumsum([0, *counts[:-1]]), sizes)
    return pl.DataFrame({field: records[field] for field in records.dtype.names or ()}).with_columns(
        rank=pl.Series(np.repeat(np.array([recorded.rank for recorded in members], np.int32), sizes)),
        name=names.gather((first + records["name"]).astype(np.uint32)),
        category=pl.col("category").replace_strict(_CATEGORIES, return_dtype=pl.String),
    )


def _moved(frame: pl.DataFrame, moves: Sequence[tuple[int, Callable[[IntArray], IntArray] | None]]) -> pl.DataFrame:
    """Convert every time in the records. `moves`: (number of rows, conversion), in order of the rows.

    `extra` is a time for transfers only: when the wait began.
    """
    if not any(move for _, move in moves):
        return frame
    times = {name: frame[name].to_numpy().copy() for name in ("start_ns", "end_ns", "extra")}
    is_transfer = (frame["category"] == "p2p").to_numpy()
    first = 0
    for count, move in moves:
        rows = slice(first, first + count)
        first += count
        if move is not None:
            extra, transfers = times["extra"][rows], is_transfer[rows]
            extra[transfers] = move(extra[transfers])
            for name in ("start_ns", "end_ns"):
                times[name][rows] = move(times[name][rows])
    return frame.with_columns(**{name: pl.Series(values) for name, values in times.items()})


def _whole_steps(records: pl.DataFrame, first_step: int) -> pl.DataFrame:
    """The (rank, step) pairs that were recorded from beginning to end."""
    wanted = int(Flag.COMPLETE | Flag.RECORDING)
    return records.filter(
        (pl.col("category") == "step") & (pl.col("flags") & wanted == wanted) & (pl.col("step") >= first_step)
    ).select("rank", "step")


def _run_queues(records: pl.DataFrame, steps: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Rank -> mean seconds per step that its training thread waited for a processor, if the kernel reports it."""
    counted = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0)).join(steps, on=["rank", "step"])
    waits = counted.group_by("rank").agg(pl.col("peer").mean() / 1e6).sort("rank")
    return {RUN_QUEUE: {str(rank): seconds for rank, seconds in waits.iter_rows()}} if waits.height else {}


def _with_rows(records: pl.DataFrame, recording: AttemptRecording) -> pl.DataFrame:
    """Add the rows that all-to-alls send and receive, if the ranks wrote any."""
    stated = [
        (rank, fact["number"], fact["sent"], fact["received"])
        for rank, recorded in recording.ranks.items()
        for fact in recorded.facts.get("rows", [])
    ]
    if not stated:
        return records
    schema = pl.Schema([("rank", pl.Int32), ("chunk", pl.Int32), (SENT, ROWS_TYPE), (RECEIVED, ROWS_TYPE)])
    rows = pl.DataFrame(stated, schema, orient="row").with_columns(category=pl.lit("wait")).unique(["rank", "chunk"])
    return records.join(rows, on=["rank", "chunk", "category"], how="left", maintain_order="left")


def _groups(recording: AttemptRecording) -> dict[int, dict[int, dict[str, Any]]]:
    """Rank -> number -> process group."""
    return {
        recorded.rank: {int(group["number"]): group for group in recorded.facts.get("group", [])}
        for recorded in recording.ranks.values()
    }


def _reduced(records: pl.DataFrame) -> dict[int, list[int]]:
    """Rank -> numbers of the groups over which it reduced gradients, most used first, then of those of all-to-alls."""
    reduces = pl.col("name").str.contains("reduce")
    used = (
        records.filter(pl.col("category") == "collective")
        .filter(reduces | ALL_TO_ALL)
        .group_by("rank", "peer", reduces=reduces)
        .agg(pl.col("extra").sum())
        .sort("rank", "reduces", "extra", "peer", descending=[False, True, True, False])
        .group_by("rank", maintain_order=True)
        .agg("peer")
    )
    return dict(used.iter_rows())


def _facts(recording: RankRecording, reduced: Sequence[int], groups: Mapping[int, Mapping[str, Any]]) -> RankFacts:
    """Facts of one rank about the layout. `reduced`: numbers of groups, as returned by `_reduced`."""
    megatron = recording.facts.get("megatron")
    return RankFacts(
        rank=recording.rank,
        world_size=recording.world_size,
        meshes=tuple(recording.facts.get("mesh", [])),
        megatron=megatron[-1] if megatron else None,
        pipelines=tuple(recording.facts.get("pipeline", [])),
        reduced=tuple(groups[number]["ranks"] for number in reduced if number in groups),
    )


def _ops_of_peers(records: pl.DataFrame, placement: Placement, groups: pl.DataFrame) -> pl.DataFrame:
    """Ops of the ranks that represent no worker, by the same rules: `step`, `rank`, `kind`, `start_ns`, `end_ns`."""
    frames = []
    for tp, cp in sorted({(place.tp, place.cp) for place in placement.places.values()} - {(0, 0)}):
        worked, _ = waited_for(_placed(records, placement, tp, cp))
        ops, _ = build_ops(worked, placement.layout, groups)
        frames.append(ops.select("step", "rank", "kind", "start_ns", "end_ns"))
    return pl.concat(frames)


def _placed(records: pl.DataFrame, placement: Placement, tp: int = 0, cp: int = 0) -> pl.DataFrame:
    """Records of one rank per worker, the one at `tp` and `cp`, with their dp and pp rank."""
    placed = [(rank, place) for rank, place in placement.places.items() if (place.tp, place.cp) == (tp, cp)]
    rows = [(rank, place.dp, place.pp) for rank, place in placed]
    places = pl.DataFrame(rows, schema={"rank": pl.Int32, "dp_rank": pl.Int32, "pp_rank": pl.Int16}, orient="row")
    return records.join(places, on="rank", how="inner")


def _group_table(groups: Mapping[int, Mapping[int, Mapping[str, Any]]], placement: Placement) -> pl.DataFrame:
    """For each rank and group number: the group's description, its size, and whether it joins data-parallel ranks of a
    stage, all of them, or ranks of one worker.

    `members` is the same number on all ranks of a group, even if the ranks number the group differently.
    """
    rows = []
    relations: dict[tuple[int, ...], tuple[Any, ...]] = {}
    seen: dict[int, tuple[Any, ...]] = {}  # by identity: ranks that wrote the same group share one object
    for rank, of_rank in groups.items():
        for number, group in of_rank.items():
            if id(group) not in seen:
                members = tuple(group["ranks"])
                if members not in relations:
                    relations[members] = (*_relations(members, placement), len(members), len(relations))
                seen[id(group)] = (str(group["description"] or group["name"]), *relations[members])
            rows.append((rank, number, *seen[id(group)]))
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


def _relations(ranks: Sequence[int], placement: Placement) -> tuple[bool, bool, bool]:
    """Whether these ranks are data-parallel, with the same stage and tensor-parallel slice; whether they are of all
    DP ranks; whether they are of one worker.
    """
    places, size = [placement.places[rank] for rank in ranks if rank in placement.places], len(ranks)
    within_worker = size > 1 and len(places) == size and len({(place.dp, place.pp) for place in places}) == 1
    data_parallel = size > 1 and len({(place.pp, place.tp) for place in places}) == 1 and not within_worker
    joins_all = data_parallel and len({place.dp for place in places}) == placement.layout.dp
    return data_parallel, joins_all, within_worker


#: Key of the trace's metadata that maps steps to attempts.
SEGMENTS = "segments"


def segments_of_jobs(attempts: Iterable[MergedAttempt]) -> list[list[MergedAttempt]]:
    """Group consecutive attempts, in order, that are one job: the same program on the same hosts in the same layout.

    A restart on other hosts or with another number of ranks begins another trace, because its workers are different.
    """
    jobs: list[list[MergedAttempt]] = []
    for attempt in attempts:
        if jobs and _is_same_job(jobs[-1][-1], attempt):
            jobs[-1].append(attempt)
        else:
            jobs.append([attempt])
    return jobs


def _is_same_job(before: MergedAttempt, after: MergedAttempt) -> bool:
    hosts, later = before.trace.hosts, after.trace.hosts
    return (
        before.program == after.program
        and before.trace.layout == after.trace.layout
        and all(hosts[rank] == later[rank] for rank in hosts.keys() & later.keys())
    )


def trace_of_segments(segments: Sequence[MergedAttempt]) -> Trace:
    """Make one trace of all segments of a job; a single segment keeps its own trace.

    Steps keep their numbers if these continue (the script numbers its steps itself); otherwise they are numbered on
    from the previous segment. One number is left free between two segments: the job was down there, no worker was
    stalled. The metadata is that of the last segment, with the steps of each segment in `segments`.
    """
    last = segments[-1].trace
    if len(segments) == 1:
        return last
    frames, starts, descriptions = [], dict[int, float](), []
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    free = None
    for segment in segments:
        trace = segment.trace
        first = int(trace.steps[0])
        shift = 0 if free is None or first >= free else free - first
        frames.append(trace.ops.with_columns(step=(pl.col("step") + shift).cast(trace.ops.schema["step"])))
        starts |= {step + shift: start for step, start in trace.step_starts.items()}
        for name, logged in step_values(trace.metadata).items():
            values[name] |= {str(step + shift): value for step, value in logged.items()}
        end = int(trace.steps[-1]) + shift
        descriptions.append(
            {
                "attempt": trace.metadata["attempt"],
                "first_step": first + shift,
                "last_step": end,
                "numbered_from": first,
                "missing_ranks": list(segment.missing_ranks),
            }
        )
        free = end + 2
    dropped = sum(segment.trace.metadata["dropped_records"] for segment in segments)
    return Trace.from_frame(
        pl.concat(frames, how="diagonal"),
        last.layout,
        name=last.name,
        step_starts=starts,
        metadata={**last.metadata, "dropped_records": dropped, SEGMENTS: descriptions, STEP_VALUES: values},
        source=last.name,
    )


def merge_run(numbers: Sequence[int], merge: Callable[[int], MergedAttempt]) -> Trace:
    """The trace of the last job in a run directory, with all its segments. `merge` merges an attempt, given its number.

    The metadata lists attempts that cannot be merged or belong to another job as `other_attempts`. If no attempt can be
    merged, raises what `merge` raises for the last one.
    """
    merged: list[MergedAttempt] = []
    for number in numbers:
        try:
            merged.append(merge(number))
        except TracekitError:
            if number == numbers[-1] and not merged:
                raise
    segments = segments_of_jobs(merged)[-1]
    trace = trace_of_segments(segments)
    merged_numbers = {segment.trace.metadata["attempt"] for segment in segments}
    others = [number for number in numbers if number not in merged_numbers]
    return replace(trace, metadata={**trace.metadata, "other_attempts": others}) if others else trace
