"""Steps in which all workers compute slower."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.episode_figures import chance_figures
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.detectors.too_little_trace import FEWEST_STEPS
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.scheduler import steps_with_stops
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, median, safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class StepsSlowForAll(Detector):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the lower quartile of the computes
    of each step with that of the usual step: 4 %, and a likelihood against chance as for workers, with the noise of the
    other steps and of the computes within them. Of three steps, one may be slow; then only two show what is usual, so
    the confidence is at most one minus the share of slow steps.
    """

    kind = "slow-steps"
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = Advice(
        gpu="cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps",
        cpu="cluster power cap, CPU clocks over time (turbostat), compilation in warm-up steps",
    )
    suggested_fix = Advice(
        gpu="compare clocks and power caps of all GPUs in those steps with the others (DCGM_FI_DEV_SM_CLOCK); leave"
        " warm-up and compilation out of the trace",
        cpu="compare the clocks of all cores in those steps with the others (turbostat); leave warm-up and compilation"
        " out of the trace",
    )
    repair = Repair("steady-steps", "Keep all steps as fast as the usual one", "all steps as fast as the usual one")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        profile = job.profile
        if profile is None or len(profile.step) < FEWEST_STEPS:
            return
        slow = (profile.slow_step > 1) & ~steps_with_stops(job)
        if job.pauses is not None and job.pauses.stopped.any():
            slow &= _slow_on(~job.pauses.stopped, job.table.grid)
        if not slow.any() or slow.mean() > 0.5:
            return
        figures = (
            Figure(
                "compute beyond that of the usual step",
                float(profile.step[slow].max()) - 1,
                SMALLEST_FACTOR,
                Unit.SHARE,
            ),
            *chance_figures(profile.steps, np.array([True])),
        )
        steps = tuple(int(step) for step in job.replay.graph.steps[slow])
        change = Scale(job.table, 1 / np.where(slow, profile.slow_step, 1.0)[:, None])
        confidence = min(confidence_from(figures[:2]), 1 - float(slow.mean()))
        effect = (
            f"computes of {len(steps)} of {len(profile.step)} steps take up to {figures[0].value:.0%} longer than in"
            " the usual step, on all workers"
        )
        yield Candidate(self.kind, Place(steps=steps), effect, figures, confidence, change, profile.step)


def _slow_on(workers: Bools, grid: Floats) -> Bools:
    """In which steps these workers, [stages, dp_ranks], compute slower than in the usual step, [steps].

    `grid`: seconds, as in a `ComputeTable`.
    """
    theirs = np.moveaxis(grid, -1, 2)[:, workers]
    step = median(theirs / safe(median(theirs, (4,)))[..., None], (0, 1, 2, 3))
    return np.asarray(step / lower_median(step, 0) >= 1 + SMALLEST_FACTOR)
