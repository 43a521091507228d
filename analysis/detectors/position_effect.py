"""Microbatches at one place of each step that are slow on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.workload import SMALLEST_POSITION
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class PositionEffect(Detector):
    """Microbatches at one place of each step, most often the first, take longer on all ranks.

    Paper: no signature. tracekit compares each place with the others on the same workers and steps, and uses the median
    over ranks: 4 %, and five standard errors of the place's scatter over the steps, which noise reaches in fewer than
    one of a thousand jobs of 64 microbatches. Sequence lengths change from step to step and from rank to rank.
    """

    kind = "position-effect"
    title = "Microbatches at one place of the step are slow on all ranks"
    signature = "the same microbatch of each step takes longer, on all DP ranks and stages, forwards, backwards or both"
    refuted_by = "the microbatch is slow on some ranks only, or in some steps only"
    next_check = (
        "a Kineto trace of the first microbatch: allocations, autotuning, cache misses, a collective in between"
    )
    suggested_fix = (
        "take a torch.profiler trace of a step, and move what only this microbatch does out of it: allocations,"
        " autotuning, a collective; balancing data does not help"
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        profile = job.profile
        if profile is None or (profile.position == 1).all():
            return
        places = np.flatnonzero((profile.position != 1).any(axis=0))
        figures = (
            Figure(
                "compute beyond that of other places", float(profile.position.max()) - 1, SMALLEST_POSITION, Unit.SHARE
            ),
            Figure("first slow place", float(places[0]), 0.0),
        )
        change = Scale(job.table, 1 / profile.position[:, None, None, :, None, None])
        named = f"microbatch {places[0]}" if len(places) == 1 else f"{len(places)} microbatches, {places[0]} the first,"
        effect = f"{named} of each step take{'s' if len(places) == 1 else ''} up to {figures[0].value:.0%} longer"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures[:1]), change)
