"""Join attempts of one job, before and after an elastic restart, as segments of one trace.

In: merged attempts. Out: the attempts that belong together, and their trace, in which the steps of each attempt follow
those of the previous one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import polars as pl

from tracekit.base.errors import TracekitError
from tracekit.collectors.merge.merge import MergedAttempt
from tracekit.trace.canonical import Trace
from tracekit.trace.step_values import STEP_VALUES, step_values

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
    dropped = sum(one.trace.metadata["dropped_records"] for one in segments)
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
    own = {segment.trace.metadata["attempt"] for segment in segments}
    others = [number for number in numbers if number not in own]
    return replace(trace, metadata={**trace.metadata, "other_attempts": others}) if others else trace
