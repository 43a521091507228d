"""Evaluation, or rollouts, between training steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.stops import (
    SMALLEST_STOP_SHARE,
    do_it_for_all,
    figures_of_stops,
    longest_share,
    said_of_few,
    slow_at_it,
    stops_s,
)
from tracekit.analysis.evidence.grids import evaluations
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.text import seconds
from tracekit.report.finding import Place, confidence_from
from tracekit.report.verdict import LossKind
from tracekit.trace.model import OpKind

ROLLOUT_CHECK = (
    "what the loop does between model.eval() and model.train(): for rollouts, tokens per second, the longest sequence"
    " of a batch, and whether the inference engine batches continuously"
)
ROLLOUT_FIX = "generate rollouts with an inference engine on GPUs of its own, a step ahead; or fewer and shorter ones"


class Evaluations(Detector):
    """Evaluation between training steps takes a large share of the time.

    Paper: no signature. tracekit names evaluations that were recorded as ops and prices them by a replay without them.
    They are compared only with those of the same step, so an evaluation every n steps is not a straggler. An evaluation
    in every step is part of the loop in evaluation mode, such as the rollouts of reinforcement learning.
    """

    kind = "evaluation"
    title = "Evaluation takes its time from training"
    signature = "recorded evaluations that make up a large share of the time"
    refuted_by = "the time between training steps stays with evaluation off"
    next_check = "how often the loop evaluates, on how many batches, and whether all ranks share them"
    suggested_fix = (
        "evaluate less often or on fewer batches, split over all ranks; or evaluate checkpoints in a job of its own"
    )
    part = "evaluation"
    loss = LossKind.EVALUATION
    stragglers_where_few = True
    planned = OpKind.EVALUATION
    repair = Repair("evaluate-elsewhere", "Evaluate, or generate rollouts, in a job of its own")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        stops = stops_s(job, evaluations(job))
        if longest_share(job, stops) < SMALLEST_STOP_SHARE:
            return
        lost_s = stops.max(axis=(0, 2))
        figures = figures_of_stops(job, lost_s, "evaluation", "an evaluation")
        slow = slow_at_it(job, stops)
        few, rollouts = do_it_for_all(job, stops), bool((lost_s > 0).all())
        what = "evaluation or rollouts take" if rollouts else "evaluation takes"
        effect = (
            f"{what} {figures[0].value:.0%} of the time, in {figures[1].value:,.0f} of {len(lost_s):,} steps, up to"
            f" {seconds(figures[2].value)}{', longer than on its peers' if slow else ''}"
        )
        if few:
            effect = said_of_few(job, few, lost_s, "evaluates", "evaluate")
        yield Candidate(
            self.kind,
            Place(workers=slow),
            effect,
            figures,
            confidence_from(figures),
            Scale(evaluations(job), _as_in_step(stops, job.cells_of(slow)) if slow else np.array(0.0)),
            1 + lost_s / job.unchanged_s,
            title="Evaluation takes longer on a worker than on its peers" if slow else None,
            next_check=ROLLOUT_CHECK if rollouts else None,
            suggested_fix=ROLLOUT_FIX if rollouts else None,
        )


def _as_in_step(stops: Floats, workers: Bools) -> Floats:
    """The factor that takes these workers, [stages, dp_ranks], to what others of their stage take in the same step, as
    a grid.
    """
    usual = np.asarray(lower_median(stops, axis=-1))[..., None]
    return np.asarray(np.where(workers[:, None] & (stops > usual), usual / safe(stops), 1.0)[:, None])
