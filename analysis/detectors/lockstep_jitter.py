"""Ranks of a worker that wait for each other in turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.detectors.slow_rank_of_worker import late_ranks
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.whatif.interventions import step_times
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, Place, Unit, confidence_from


class LockstepJitter(Detector):
    """The ranks of a worker take turns in waiting for each other; none waits more than the others.

    Paper: not seen, because only one rank of a worker is recorded. Each collective waits for the rank that is last this
    time, so noise that evens out over a step still costs time. Nobody is to blame, and no saving is reported.
    """

    kind = "lockstep-jitter"
    title = "The ranks of a worker wait for each other in turn"
    signature = "ranks wait inside their ops for the last one, which is another one each time"
    refuted_by = "a longer recording in which one rank is the last one more often than chance explains"
    next_check = "what else runs on the cores and GPUs of these nodes; how long the ops between collectives are"
    suggested_fix = Advice(
        gpu="pin the processes to cores and lock the GPU clocks (nvidia-smi -lgc); merge small ops between collectives",
        cpu="pin the processes to cores (taskset); merge small ops between collectives",
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        lockstep = job.lockstep
        if lockstep is None:
            return
        slow = [lockstep.slow(SMALLEST_FACTOR), *late_ranks(job).values()]
        even = np.logical_not(np.logical_or.reduce(slow).any(axis=(1, 2)))
        if not even.any():
            return
        change = lockstep.alike(even)
        lost_s = job.unchanged_s - float(step_times(job.replay, (change,)).mean())
        if lost_s < SMALLEST_BLAMELESS_SHARE * job.unchanged_s:
            return
        ops = even[lockstep.worker]
        share = float(lockstep.waited_s[ops].mean(axis=1).sum() / max(lockstep.duration_s[ops].sum(), 1e-9))
        figures = (
            Figure("waiting in turn, over the step", lost_s / job.unchanged_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
        )
        effect = (
            f"ranks of a worker wait for each other for {share:.0%} of their ops; none is last more often than chance"
            " explains"
        )
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change, bound=True)
