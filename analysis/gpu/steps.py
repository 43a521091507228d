"""The training step of each call if the profiler did not mark it.

In: a recording and its matches. Out: the same recording with steps. Ranks are compared by step: the same kernel at the
same place of the same step is equal work. Marks can be missing in two ways:

- *On some ranks*, whose window began or ended inside a step. A step that other ranks mark fills the time between two
  neighbouring marks of such a rank, or before or after all of its marks.
- *On all ranks*. The collectives that all ranks take part in are anchors: between the same two anchors, ranks do equal
  work. If the kernels launched between anchors repeat, one period is taken as a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.trace.gpu_recording import GpuRecording

#: Sections between anchors repeat if this share of them looks like the section one period earlier.
_ALIKE = 0.9


class _StepSpan(NamedTuple):
    """A step of a rank; seconds, without the begin itself."""

    rank: int
    step: int
    begin: float
    end: float


def with_steps(recording: GpuRecording, matches: Matches) -> GpuRecording:
    """The recording with a step for calls, and what they launched, without one; existing marks stay as they are."""
    missing = _unmarked(recording, matches) if recording.step_spans.height else _repeated(recording, matches)
    if not missing:
        return recording
    calls = recording.calls
    step = calls["step"].fill_null(-1).to_numpy().copy()
    rank, start = calls["rank"].to_numpy(), calls["start"].to_numpy()
    for rank_number in recording.ranks:
        spans = sorted((span for span in missing if span.rank == rank_number), key=lambda span: span.begin)
        unmarked = np.flatnonzero((rank == rank_number) & (step < 0))
        # A step begins after the call that launched its anchor: other calls can have the same whole microsecond.
        span_of = np.searchsorted([span.begin for span in spans], start[unmarked], side="left") - 1
        inside = (span_of >= 0) & (start[unmarked] <= np.array([*(span.end for span in spans), -np.inf])[span_of])
        step[unmarked] = np.where(inside, np.array([*(span.step for span in spans), -1])[span_of], -1)
    of_launch = np.append(step, -1)[recording.gpu_ops["launch"].fill_null(-1).to_numpy()]
    return replace(
        recording,
        calls=calls.with_columns(step=_or_null(step)),
        gpu_ops=recording.gpu_ops.with_columns(step=pl.coalesce("step", _or_null(of_launch))),
    )


def _or_null(step: Ints) -> pl.Series:
    return pl.Series("step", step, dtype=pl.Int32).set(pl.Series(step < 0), None)


def _unmarked(recording: GpuRecording, matches: Matches) -> list[_StepSpan]:
    """Spans of steps that a rank does not mark; only those whose place is certain.

    The time before the first mark of all ranks, and after the last, is a step if it launches at least half as many
    collectives as one. Steps that launch none, such as all behind the end of a file that is cut off, do not count.
    """
    spans = {
        (rank, step): (start, start + duration) for rank, step, start, duration in recording.step_spans.iter_rows()
    }
    marked = sorted({step for _, step in spans})
    launched = dict(zip(recording.ranks, _launch_times(recording, matches), strict=True))
    counts = [_count(launched[rank], *span) for (rank, _), span in spans.items()]
    usual = np.median([count for count in counts if count] or [1])
    earlier, later = marked[0] - 1, marked[-1] + 1
    around = zip([earlier, earlier, *marked], [earlier, *marked, later], [*marked, later, later], strict=True)
    unmarked = []
    for rank, (before, step, behind) in product(recording.ranks, around):
        begin = -np.inf if before == earlier else spans.get((rank, before), (None, None))[1]
        end = np.inf if behind == later else spans.get((rank, behind), (None, None))[0]
        if (rank, step) in spans or begin is None or end is None:
            continue
        if step in marked or 2 * _count(launched[rank], begin, end) >= usual:
            unmarked.append(_StepSpan(rank, step, begin, end))
    return unmarked


def _count(times: Floats, begin: float, end: float) -> int:
    """The number of times in a span."""
    return int(((times > begin) & (times <= end)).sum())


def _repeated(recording: GpuRecording, matches: Matches) -> list[_StepSpan]:
    """Spans from anchor to anchor; none if there are no anchors, or ranks differ in their order."""
    launched = _launch_times(recording, matches)
    if not launched.shape[1] or (np.diff(launched, axis=1) < 0).any():
        return []
    first = launched[:, :: _period(_sections(recording, launched[0]))]
    return [
        _StepSpan(rank, number, begin, end)
        for rank, begins in zip(recording.ranks, first.tolist(), strict=True)
        for number, (begin, end) in enumerate(zip(begins, [*begins[1:], np.inf], strict=True))
    ]


def _launch_times(recording: GpuRecording, matches: Matches) -> Floats:
    """When the calls that launched the collectives of all ranks began, in the order of the first rank, [ranks,
    anchors].
    """
    launch = recording.gpu_ops["launch"].fill_null(-1).to_numpy()[matches.row]
    called = np.append(recording.calls["start"].to_numpy(), np.nan)[launch]
    times = np.full((len(recording.ranks), matches.matched), np.nan)
    times[np.searchsorted(recording.ranks, matches.rank), matches.instance] = called
    times = times[:, np.isfinite(times).all(axis=0)]
    return times[:, np.argsort(times[0], kind="stable")]


def _sections(recording: GpuRecording, anchors: Floats) -> Ints:
    """A number for what the first rank launches between neighbouring anchors, [anchors - 1]; equal for equal names."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null() & pl.col("rank").eq(recording.ranks[0]))
    called = recording.calls["start"].gather(ops["launch"]).to_numpy()
    ops = ops.select("name", called=called, section=np.searchsorted(anchors, called, side="left") - 1)
    names = (
        ops.filter(pl.col("section").is_between(0, len(anchors) - 2))
        .sort("section", "called")
        .group_by("section", maintain_order=True)
        .agg(pl.col("name").str.join("\n"))
    )
    return names["name"].rank("dense").cast(pl.Int64).to_numpy()


def _period(sections: Ints) -> int:
    """The number of sections after which they repeat; more than their number if they do not."""
    alike = (
        shift for shift in range(1, len(sections) // 2 + 1) if (sections[shift:] == sections[:-shift]).mean() >= _ALIKE
    )
    return next(alike, len(sections) + 1)
