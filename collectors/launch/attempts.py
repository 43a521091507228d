"""Merges the attempts of a run, then writes and stores their traces.

In: a run directory whose command has ended. Out: a `CollectedAttempt` for each attempt. A problem with one attempt does
not affect the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.base.errors import OutputError, TracekitError
from tracekit.collectors.launch.launcher import script_name
from tracekit.collectors.merge.merge import MergedAttempt, RankReport, merge_attempt, rank_report
from tracekit.collectors.merge.recording_cost import RecordingCost, recording_cost
from tracekit.collectors.merge.restarts import segments_of_jobs, trace_of_segments
from tracekit.collectors.merge.unrecorded import find_unrecorded
from tracekit.collectors.nccl.launching import nccl_lines
from tracekit.collectors.record.wire_format import IDLE, Category, Flag, attempt_directory
from tracekit.collectors.run_directory.host_clocks import read_clocks
from tracekit.collectors.run_directory.segments import AttemptRecording
from tracekit.collectors.run_directory.whole import read_attempt
from tracekit.collectors.run_directory.writing import write_manifest
from tracekit.store import Incoming, Store, default_store
from tracekit.trace.canonical import Trace

if TYPE_CHECKING:
    from tracekit.collectors.launch.collect import CollectOptions


@dataclass(frozen=True, slots=True)
class CollectedAttempt:
    """One attempt of the run (an elastic restart begins another). `problem`: why there is no trace, if there is none.
    `continued`: its trace continues with the next attempt.

    `cost`: what recording costs, or why that is unknown; None if nothing could be read. `notes`: what the ranks could
    not record, one line each. `nccl`: lines about NCCL's events, if they were requested.
    """

    attempt: int
    name: str = ""
    world_size: int = 0
    steps: int = 0
    ops: int = 0
    layout: dict[str, int] | None = None
    layout_source: str | None = None
    ranks: tuple[RankReport, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    out: str | None = None
    store: str | None = None
    cost: RecordingCost | str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    continued: bool = False


def collect_attempts(options: CollectOptions, directory: Path, numbers: Sequence[int]) -> Iterator[CollectedAttempt]:
    """Merge all attempts, and write and store a trace for each job. A problem with one does not affect the others."""
    read = [_read_attempt(options, directory, number) for number in numbers]
    jobs: dict[int, dict[str, Any]] = {}
    for segments in segments_of_jobs(merged for _, merged in read if merged is not None):
        members = [int(one.trace.metadata["attempt"]) for one in segments]
        fields = _keep(options, trace_of_segments(segments), members[-1], last=members[-1] == numbers[-1])
        jobs |= {member: {**fields, "continued": member != members[-1]} for member in members}
    for collected, _ in read:
        name = job_name(options, collected.attempt, last=collected.attempt == numbers[-1])
        yield replace(collected, **jobs.get(collected.attempt, {"name": name}))


def _read_attempt(
    options: CollectOptions, directory: Path, number: int
) -> tuple[CollectedAttempt, MergedAttempt | None]:
    """Merge one attempt, or report why that is impossible. Its trace has not been written yet."""
    unlisted: tuple[str, ...] = ()
    try:
        write_manifest(attempt_directory(directory, number))
    except OutputError as error:  # a full disk: the data on it can still be read
        unlisted = (f"WARNING: {error}; the trace has what was written until then",)
    try:
        recording = read_attempt(directory, number)
    except TracekitError as error:
        return CollectedAttempt(number, problem=str(error)), None
    notes = (*unlisted, *recording.left_out, *find_unrecorded(recording).lines())
    read = CollectedAttempt(
        number,
        world_size=recording.world_size,
        ranks=tuple(rank_report(one) for one in recording.ranks.values()),
        missing_ranks=recording.missing_ranks,
        notes=notes,
    )
    if options.schedule == IDLE and not _recorded_steps(recording):
        idle = "nothing was recorded: with --idle, only `tracekit attach` starts a recording"
        return replace(read, notes=(*notes, idle)), None
    read = replace(read, cost=recording_cost(recording))
    try:
        merged = merge_attempt(
            recording,
            name=str(options.name),
            first_step=options.schedule.first_step,
            options=options.layout,
            clocks=read_clocks(directory),
            metadata={"command": list(options.command)},
        )
    except TracekitError as error:
        return replace(read, problem=str(error), nccl=_nccl_lines(options, recording, None)), None
    trace = merged.trace
    read = replace(
        read,
        steps=len(trace.steps),
        ops=trace.ops.height,
        layout=trace.layout.to_dict(),
        layout_source=merged.placement.source,
        nccl=_nccl_lines(options, recording, trace.metadata.get("nccl")),
    )
    return read, merged


def _keep(options: CollectOptions, trace: Trace, attempt: int, *, last: bool) -> dict[str, Any]:
    """Write and store the trace of a job whose last attempt is `attempt`; returns the same fields of its attempts.

    `last`: the attempt is the last of the run, too.
    """
    trace = replace(trace, name=job_name(options, attempt, last=last))
    fields: dict[str, Any] = {"name": trace.name, "out": None, "store": None, "problem": None}
    out = options.out
    if out is not None and not last:
        out = out.with_name(f"{out.stem}.attempt-{attempt}{out.suffix}")
    try:
        if out is not None:
            trace.write_parquet(out)
        if options.keep_in_store and options.live is None:
            fields["store"] = str(store_trace(options, trace))
    except TracekitError as error:
        return {**fields, "problem": str(error)}
    return {**fields, "out": None if out is None else str(out)}


def _recorded_steps(recording: AttemptRecording) -> bool:
    """True if a step after the first was recorded."""
    whole = int(Flag.COMPLETE | Flag.RECORDING)
    records = np.concatenate([one.records for one in recording.ranks.values()])
    ends = records[(records["category"] == Category.STEP) & (records["step"] > 0)]
    return bool((ends["flags"] & whole == whole).any())


def _nccl_lines(options: CollectOptions, recording: AttemptRecording, report: dict[str, Any] | None) -> tuple[str, ...]:
    return () if options.nccl is None else tuple(nccl_lines(recording, report, options.nccl))


def store_trace(options: CollectOptions, trace: Trace) -> Path:
    """Add the trace and the results of its analysis to the store. Raises StoreError."""
    path = options.store or default_store()
    findings = None if options.analyse is None else options.analyse(trace)
    Store(path).check_new(trace.name)
    Store(path).add([Incoming(trace, trace.name, " ".join(options.command), findings)])
    return path


def job_name(options: CollectOptions, attempt: int, *, last: bool) -> str:
    """The requested name, else script and time; jobs before the last carry the number of their last attempt."""
    base = options.name
    if base is None:
        base = f"{script_name(options.command)}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    return base if last else f"{base}-attempt-{attempt}"
