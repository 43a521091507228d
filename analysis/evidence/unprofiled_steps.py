"""The training steps of a recording, as recorded and without the profiler that recorded them.

In: a job of any graph. Out: seconds of its steps, and what changes save of a step without the profiler. A job that no
profiler recorded, or one of which its cost is not known, has None. The
diagnosis asks any job, so what only recordings need is imported for those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject, RecordingSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.analysis.whatif.interventions import Intervention

if TYPE_CHECKING:
    from tracekit.analysis.gpu.unprofiled import StepsOfRecording, WithoutProfiler


@evidence(RecordingSubject)
def marked_steps(job: RecordingSubject) -> StepsOfRecording:
    """The training steps of a recording."""
    from tracekit.analysis.evidence.launches import arrives_s
    from tracekit.analysis.gpu.unprofiled import StepsOfRecording

    label = pl.col("profiler_step") if "profiler_step" in job.ops.columns else pl.lit(None, pl.Int32)
    on_gpu = job.ops["role"].eq("gpu").to_numpy()
    return StepsOfRecording.of(
        job.ops.select(rank="rank", step=label)["step"], job.graph.ops.start, on_gpu, arrives_s(job)
    )


@evidence(RecordingSubject)
def unprofiled(job: RecordingSubject) -> WithoutProfiler | None:
    """The job without the profiler that recorded it; None if what recording cost is not known of all ranks."""
    return unprofiled_after(job, ())


@evidence(RecordingSubject)
def recording_factors(job: RecordingSubject) -> tuple[float, ...]:
    """How many times recording costs what the recording shows of it: likely, at most, at least; or, if steps were
    measured without a profiler, the one factor with which the replay takes as long.

    Raises SelectionError if none does, as those steps are of another job.
    """
    from tracekit.analysis.gpu.unprofiled import WITH_STACKS, WITHOUT_STACKS

    if job.measured is None:
        return WITH_STACKS if all(cost.stacks for cost in job.summary.costs.values()) else WITHOUT_STACKS

    def step_s(factor: float) -> float:
        without = _at_factors(job, (factor,), ())
        return float("nan") if without is None else without.step_s.value

    return (job.measured.factor(job.trace.name, step_s),)


def unprofiled_after(
    job: RecordingSubject, after: Sequence[Intervention], *, bounds: bool = True
) -> WithoutProfiler | None:
    """Return the same after some changes. `bounds`: with the highest and lowest cost of recording, too."""
    factors = recording_factors(job)
    return _at_factors(job, factors if bounds else factors[:1], after)


def _at_factors(
    job: RecordingSubject, factors: Sequence[float], after: Sequence[Intervention]
) -> WithoutProfiler | None:
    """The job without the profiler after some changes, `factors`: as of `recording_factors`."""
    from tracekit.analysis.evidence.host_time import host_time
    from tracekit.analysis.evidence.launches import arrives_s, in_queue_s, launch_latency_s
    from tracekit.analysis.gpu.unprofiled import OpLaunches, WithoutProfiler

    costs = job.summary.costs
    if not {*job.ranks} <= {*costs} or "recording_s" not in job.ops.columns:
        return None
    in_launch_s = np.array([costs[rank].in_launch for rank in job.ranks])
    launches = OpLaunches(
        in_launch_s[np.searchsorted(job.ranks, job.ops["rank"].to_numpy())],
        arrives_s(job),
        launch_latency_s(job),
        host_time(job).launched_by,
        in_queue_s(job),
    )
    recording_s = job.ops["recording_s"].fill_null(0.0).to_numpy()
    return WithoutProfiler.of(job.replay, marked_steps(job), recording_s, launches, factors, after)


@evidence(RecordingSubject)
def unprofiled_step(job: RecordingSubject) -> Estimate | None:
    """The step without the profiler, seconds, as measured or else replayed; None if that is not known."""
    without = unprofiled(job)
    if without is None or job.measured is None:
        return None if without is None else without.step_s
    return job.measured.step_s


def profiled_steps_s(job: GraphSubject) -> Floats:
    """Return how long steps take as recorded, with the work that a GPU finishes after them, seconds, [steps]."""
    lengths_s = _lengths_s(job)
    return job.times.recorded if lengths_s is None else lengths_s


@evidence(RecordingSubject)
def _lengths_s(job: RecordingSubject) -> Floats:
    ops = job.graph.ops
    return marked_steps(job).lengths_s(ops.start, ops.start + ops.duration)


def in_production_s(job: GraphSubject) -> float:
    """How long the steps that were recorded take without the profiler; if that is not known, the recording."""
    step = unprofiled_step(job)
    return job.recorded_s if step is None else step.value * job.steps_in_whole


@evidence(RecordingSubject)
def profiler_s(job: RecordingSubject) -> float:
    """By how much the profiler made the recorded steps longer, seconds; 0 if that is not known."""
    without = unprofiled(job)
    return 0.0 if without is None else max(float(profiled_steps_s(job).sum() - without.steps_s[0].sum()), 0.0)


def worth_s(job: Subject, finding: Cause) -> float:
    """Return what the end of a finding saves of the steps without the profiler, or of the recording, seconds."""
    in_production = unprofiled_step(job) is not None and finding.saves_step_s is not None
    return finding.worth_s * job.steps_in_whole if in_production else finding.saved_s


def saves_step(
    job: Subject, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
) -> Estimate | None:
    """Return what these changes save of the step without the profiler. `bound`: at most so much. `after`: once that
    is done.
    """
    without = unprofiled(job)
    return None if without is None else without.saves(changes, bound=bound, after=after)


@evidence(RecordingSubject)
def _replayed_s(job: RecordingSubject) -> tuple[Sequence[int], Callable[[tuple[Intervention, ...]], Floats]]:
    """The marked steps of a recording, and how long each takes after changes, seconds, [steps]."""
    return marked_steps(job).numbers, cache(partial(marked_steps(job).replayed_s, job.replay))


def lost_by_step(job: Subject, change: Intervention, without: Floats) -> tuple[Sequence[int], Floats]:
    """Return training steps, and what each loses to what a change takes away, seconds, [steps].

    `without`: the step times after the change, seconds.
    """
    replayed_s = _replayed_s(job)
    if replayed_s is None:
        return job.steps.tolist(), job.unchanged - without
    steps, times_s = replayed_s
    return steps, times_s(()) - times_s((change,))
