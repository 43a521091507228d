"""Microbatches that differ in cost, as sequences of unequal length do."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Treatment
from tracekit.analysis.evidence.compute_profile import SMALLEST_CORRELATION, SMALLEST_LENGTH_SPREAD, uneven_lengths
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.wander import wander_of
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class UnevenSequences(Detector):
    """Microbatches differ in cost because attention grows with the square of sequence lengths.

    Paper: Pearson correlation of forward and backward durations of the same microbatch >= 0.9. On its published job AR
    that is 0.999, although one bad worker is the cause. tracekit correlates within a DP rank and step, after removing
    stage, worker and step factors, so that only the microbatch varies. Noise does not correlate there, so 0.6 is
    enough; and the microbatches must differ by more than 4 %. Without a pipeline, a worker whose speed wanders looks
    the same, but then neighbouring microbatches of a step are alike too, which sequence lengths are not.
    """

    kind = "sequence-length-imbalance"
    title = "Microbatches differ in cost: sequence lengths"
    signature = "forward and backward of the same microbatch vary together, on all stages of its DP rank"
    refuted_by = "microbatches of equal sum of squared lengths differ as well"
    next_check = "the lengths of the packed documents per microbatch: cost against the sum of their squares"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by token count"
    label = "uneven work"
    treatment = Treatment.BALANCE_DATA

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        profile = job.profile
        if profile is None:
            return
        r, spread = profile.length_correlation, profile.length_spread
        if not uneven_lengths(r, spread) or wander_of(job).in_workload:
            return
        figures = (
            Figure("correlation within DP rank and step", r, SMALLEST_CORRELATION),
            Figure("spread of microbatches", spread, SMALLEST_LENGTH_SPREAD, Unit.SHARE),
        )
        even = 1 / safe(profile.microbatch)
        yield Candidate(
            self.kind,
            Place(),
            f"microbatches take unequal time ({spread:.0%} more or less), as sequences of unequal length do",
            figures,
            confidence_from(figures[1:]) * min(1.0, r),
            Scale(job.table, even[None, None, None]),
        )
