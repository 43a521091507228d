"""Workers whose speed wanders at random."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.wander import wander_of
from tracekit.analysis.whatif.interventions import Scale, step_times
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: Any job has random variation that costs less than this share of the step.
SMALLEST_VARIATION_SHARE = 0.04


class RandomVariation(Detector):
    """The speed of workers wanders: each is slow for a while, none for long. It costs time, and nobody is responsible.

    Paper: no signature. Neighbouring microbatches and steps of a worker are alike (autocorrelation), unlike sequence
    lengths, which are drawn anew for each microbatch; and no worker's level exceeds what such a random walk does by
    chance. Named if making every step as long as usual saves 4 %: any job has less than that.
    """

    kind = "random-variation"
    title = "Workers vary at random: spread that nobody owns"
    signature = (
        "the speed of workers wanders over microbatches and steps; no worker is slow in more steps than by chance"
    )
    refuted_by = "a longer trace in which the same workers are slow again"
    next_check = Advice(
        gpu="clocks, temperature and power of the GPUs over minutes; other tenants of the hosts; a longer trace",
        cpu="clocks of the cores over minutes; other tenants of the hosts; a longer trace",
    )
    suggested_fix = Advice(
        gpu="lock the clocks of the GPUs (nvidia-smi -lgc) and keep other jobs off the hosts, then record again",
        cpu="pin the processes to cores (taskset) and keep other jobs off the hosts, then record again",
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        wander = wander_of(job)
        if not wander.shows:
            return
        change = Scale(job.table, wander.even)
        saved_s = job.unchanged_s - float(step_times(job.replay, (change,)).mean())
        share = saved_s / job.unchanged_s
        if share < SMALLEST_VARIATION_SHARE:
            return
        figures = (
            Figure("cost of the spread, over the step", share, SMALLEST_VARIATION_SHARE, Unit.SHARE),
            Figure("spread of workers from step to step", wander.spread, 0.0, Unit.SHARE),
        )
        effect = f"workers differ by {wander.spread:.1%} from step to step"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change)
