"""Launch delays of a pipeline: what they add to a step, and how much of that causes explain.

In: a pipeline, and the changes that undo its causes. Out: shares of the step, and the delays that pauses leave.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.whatif.interventions import Intervention, NoDelays

_NO_DELAYS = NoDelays()


@evidence(PipelineSubject)
def delay_share(job: PipelineSubject) -> float:
    """The share that a step's own launch delays add to it; below 0 if ops overlap that the graph orders."""
    return float(job.replay.fit.with_delays.mean()) / job.attribution.original_s - 1


def delay_share_without(job: PipelineSubject, changes: Sequence[Intervention]) -> float:
    """As `delay_share`, without the launch delays that go with `changes`: the part left to explain, at least 0.

    Delays that only show once a change has made room for them cost the recorded step nothing.
    """
    gone_s = max(_delays_s(job, ()) - _delays_s(job, changes), 0.0)
    return max(delay_share(job) - gone_s / job.attribution.original_s, 0.0)


def _delays_s(job: PipelineSubject, changes: Sequence[Intervention]) -> float:
    """Seconds that the launch delays of compute ops add to the mean step after `changes`."""
    return float((job.step_times(changes) - job.step_times((*changes, _NO_DELAYS))).mean())


@evidence(PipelineSubject)
def launch_delays(job: PipelineSubject) -> tuple[Floats, ...]:
    """Launch delays without the parts due to paused processes and to breaks, seconds, one [rows, lanes] matrix per
    block.
    """
    paused = job.paused_starts
    delays = job.replay.durations.launch_delay if paused is None else paused.delays_left
    return delays if job.breaks is None else job.breaks.without(delays)
