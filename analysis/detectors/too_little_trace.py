"""A trace that lacks workers or steps."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.report.finding import Figure, Place, Unit

#: Fewer steps do not show which of them are the usual ones.
FEWEST_STEPS = 3


class TooLittleTrace(Detector):
    """Workers or steps are missing, so that what they did counts as waiting elsewhere.

    Paper: traces a sample of steps of all ranks. tracekit uses what there is and reports the gaps.
    """

    kind = "too-little-trace"
    title = "Too little was traced"
    signature = "fewer than three steps, or workers without ops in some steps"
    refuted_by = "the missing workers do not exist: then correct the layout"
    next_check = "whether the collector ran on all ranks; its count of dropped records"
    suggested_fix = "trace all ranks for at least ten steps"

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        steps = len(job.replay.graph.steps)
        if job.all_lanes_replayed and steps >= FEWEST_STEPS:
            return
        coverage = job.trace.coverage()
        if coverage.complete and steps >= FEWEST_STEPS:
            return
        missing = 1 - coverage.worker_steps_traced / coverage.worker_steps_expected
        figures = (Figure("share of worker-steps missing", missing, 0.0, Unit.SHARE), Figure("steps", steps, 0.0))
        effect = f"{steps:,} step{'s' if steps != 1 else ''} traced"
        if missing:
            effect += f"; {missing:.1%} of the workers' steps are missing"
        yield Candidate(self.kind, Place(workers=coverage.missing_workers), effect, figures, 1.0, None)
