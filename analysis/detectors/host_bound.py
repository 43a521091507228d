"""Hosts that cannot launch work as fast as the GPUs do it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.detectors.slow_host_code import slow_host_code
from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_code import host_code_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.whatif.interventions import step_times
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.report.verdict import LossKind

#: Name launch delays and other host work if they take at least this share of the step, not counting waits for data.
HOST_BOUND_SHARE = 0.04


class HostBound(Detector):
    """Launch delays and host work between ops: Python or kernel launches cannot keep up with the GPUs.

    Paper: as for late data; above 5 %, the job's replay is not trusted. tracekit names it if it takes at least 4 % of
    the step, not counting waits for data and what single workers take longer than their peers.
    """

    kind = "host-bound-launch"
    title = "The host cannot keep up: launch delays and host work between ops"
    signature = "launch delays and host work between ops that together make up a large share of the step"
    refuted_by = "CUDA graphs or larger microbatches leave the gaps as they are"
    next_check = "a CPU profile of the launching thread; host: run queue, steal, CPU frequency; gaps in a Kineto trace"
    suggested_fix = (
        "launch less: CUDA graphs or torch.compile(mode='reduce-overhead'), no .item() or logging within the step; pin"
        " the launching threads to cores"
    )
    part = "host"
    loss = LossKind.HOST
    explains_delays = False  # its whole signature is launch delays, and waits that the graph lacks look the same
    repair = Repair(
        "hide-launch-delays", "Remove launch delays and host work between ops", assumes="all launch delays go"
    )

    def find(self, job: Subject) -> Iterator[Candidate]:
        yield from self._in_recording(job)
        yield from self._in_pipeline(job)

    @only_in(RecordingSubject)
    def _in_recording(self, job: RecordingSubject) -> Iterator[Candidate]:
        from tracekit.analysis.detectors.launch_bound import launch_bound  # which a pipeline does not need

        return launch_bound(self.kind, job)

    def fixes(self, job: Subject, finding: Cause) -> Iterator[Plan]:
        """See `Detector.fixes`. Of one GPU, the price is that of a graph."""
        for plan in super().fixes(job, finding):
            graph = {"assumes": "one launch for all kernels"}
            yield plan if finding.spent is None else structs.replace(plan, details=graph)

    @only_in(PipelineSubject)
    def _in_pipeline(self, job: PipelineSubject) -> Iterator[Candidate]:
        change = host_code_of(job).none_but_beyond(slow_host_code(job))
        share = 1 - float(step_times(job.replay, (change,)).mean()) / job.unchanged_s
        if share < HOST_BOUND_SHARE:
            return
        figures = (Figure("launch delays and host work, over the step", share, HOST_BOUND_SHARE, Unit.SHARE),)
        effect = f"launch delays and host work between ops take {share:.0%} of the step"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change)
