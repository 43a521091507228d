"""Hosts that cannot launch work as fast as the GPUs do it."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.slow_host_code import slow_host_code
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.whatif.interventions import AddTime, step_times
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

    def in_ops(self, evidence: OpEvidence) -> Iterator[Candidate]:
        """See `Detector.in_ops`."""
        if evidence.kept is None or evidence.leading is not self.loss:
            return
        idle_s = evidence.kept.idle_s
        share = idle_s / evidence.recorded_s
        gpus = "the GPU is idle for" if len(evidence.ranks) == 1 else "every GPU is idle for at least"
        yield Candidate(
            self.kind,
            Place(),
            f"{gpus} {share:.0%} of the recording, because its host launches nothing",
            (Figure("idle, over the recording", share, SMALLEST_HEADLINE_SHARE, Unit.SHARE),),
            confidence_from((Figure("idle", share, SMALLEST_HEADLINE_SHARE),)),
            AddTime(-idle_s),
            bound=True,
            title="The GPU is idle: its host launches nothing",
            next_check="a timeline of the host's threads while the GPU is idle (`tracekit export`); py-spy",
            suggested_fix=(
                "find out what the host does while the GPU is idle (py-spy, a timeline of its threads), then launch"
                " fewer and larger kernels (torch.compile, CUDA graphs) or give the data loader more workers"
            ),
        )

    def in_pipeline(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Detector.in_pipeline`."""
        change = evidence.host_code.none_but_beyond(slow_host_code(evidence))
        share = 1 - float(step_times(evidence.replay, (change,)).mean()) / evidence.unchanged_s
        if share < HOST_BOUND_SHARE:
            return
        figures = (Figure("launch delays and host work, over the step", share, HOST_BOUND_SHARE, Unit.SHARE),)
        effect = f"launch delays and host work between ops take {share:.0%} of the step"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change)
