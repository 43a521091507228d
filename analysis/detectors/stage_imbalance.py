"""A stage that has more work than the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Treatment
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD, ComputeProfile
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import SMALLEST_STAGE_EXCESS, larger_chunks, slow_workers, stage_excess
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class StageImbalance(Detector):
    """A stage (most often the last, with the loss layer) has more work than the others.

    Paper: M_S, the share of the loss saved by idealising the last stage; above 0.5 the last stage explains most of it.
    tracekit does not clamp M_S (idealising also lengthens the faster stages, so it can exceed 1), looks at every stage,
    not only the last, and compares medians over DP ranks, so that one slow worker does not affect a stage. A model
    chunk that has more work than the other chunks of its stage is named alone. If
    microbatches differ, the work that is equal for all of them (a loss per token) and the work that follows the layers
    are fitted separately, and the price is that of a stage that follows its microbatches as the usual one does. 6 %:
    one layer more than the 16 layers of the other stages.
    """

    kind = "stage-imbalance"
    title = "Stage has more work than the others"
    signature = "forwards and backwards of one stage take longer on all DP ranks"
    refuted_by = "the stage's DP ranks differ (then it is a worker), or all of them sit on one host"
    next_check = "layers per stage, vocabulary size and loss on the last stage, embedding on the first"
    suggested_fix = "give {place} fewer layers"
    label = "uneven work"
    treatment = Treatment.MOVE_LAYERS

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        profile = job.profile
        if profile is None or job.stages < 2:
            return
        excess = stage_excess(profile)
        if len(job.dp_ranks) == 1:
            excess[slow_workers(job)[:, 0]] = 0.0
        larger = larger_chunks(job, profile) & (excess > SMALLEST_STAGE_EXCESS)
        for stage in np.flatnonzero(larger.any(axis=1) & ~larger.all(axis=1)):
            yield from _uneven_chunks(self.kind, job, profile, int(stage), np.flatnonzero(larger[stage]))
        for stage in np.flatnonzero(larger.all(axis=1)):
            figures = (
                Figure(
                    "compute beyond that of the usual stage",
                    float(excess[stage].max()),
                    SMALLEST_STAGE_EXCESS,
                    Unit.SHARE,
                ),
                Figure(
                    "added to a step by the stage alone",
                    float(job.attribution.stage_slowdown[stage]) - 1,
                    0.0,
                    Unit.SHARE,
                ),
                Figure("loss gone if the last stage were ideal", job.attribution.m_s.removal, 0.0, Unit.SHARE),
            )
            yield Candidate(
                self.kind,
                Place(pp_ranks=(int(stage),)),
                f"takes {excess[stage].max():.0%} longer than the usual stage, on all DP ranks",
                figures,
                confidence_from(figures[:1]),
                Scale(job.table, _like_the_usual_stage(profile, int(stage), larger[stage])),
            )


def _uneven_chunks(
    kind: str, job: PipelineSubject, profile: ComputeProfile, stage: int, chunks: Ints
) -> Iterator[Candidate]:
    """Yield each of these chunks of a stage of which others have no more work than usual."""
    for chunk in chunks.tolist():
        others = np.ones(profile.stage_s.shape, np.bool_)
        others[stage, chunk] = False
        times = profile.base_s[:, stage, chunk] / safe(lower_median(profile.base_s[:, others], -1))
        of = {"forward": float(times[FORWARD])}
        if len(times) > 1:
            of = {"backward": float(times[BACKWARD])} | of
        longer = [(name, factor) for name, factor in of.items() if factor > 1 + SMALLEST_STAGE_EXCESS]
        (first, most), *more = longer or [max(of.items(), key=lambda item: item[1])]
        takes = f"its {first} takes {most:.2g} times as long as that of other chunks"
        figures = (
            Figure(
                "compute beyond that of the usual stage",
                float(stage_excess(profile)[stage, chunk]),
                SMALLEST_STAGE_EXCESS,
                Unit.SHARE,
            ),
            *(Figure(f"{name} over that of other chunks", factor, 0.0, Unit.FACTOR) for name, factor in of.items()),
        )
        factor = np.ones(profile.base_s.shape)
        factor[:, stage, chunk] = np.minimum(1 / safe(times), 1.0)
        yield Candidate(
            kind,
            Place(pp_ranks=(stage,), chunks=(chunk,)),
            takes + "".join(f", its {name} {factor:.2g} times" for name, factor in more),
            figures,
            confidence_from(figures[:1]),
            Scale(job.table, factor[:, :, :, None, None, None]),
            title="Model chunk has more work than the others",
            next_check="layers of the chunk; output head, vocabulary size and loss in the last, embedding in the first",
            suggested_fix="give {place} fewer layers, or make its embedding, output head or loss faster",
        )


def _like_the_usual_stage(profile: ComputeProfile, stage: int, chunks: Bools) -> Floats:
    """The factor that makes some chunks of a stage cost as much as those of the usual stage, for each microbatch."""
    usual_s = lower_median(profile.stage_s.ravel(), -1)
    even = (profile.elasticity[:, stage, chunks] == 1).all()
    work = np.ones((1, 1, 1)) if even else np.nan_to_num(profile.workload, nan=1.0)
    elastic, seconds = profile.elasticity[:, stage], profile.base_s[:, stage]
    now_s = seconds[:, :, None, None, None] * (1 + elastic[:, :, None, None, None] * (work - 1))
    # Distribute the excess over forwards and backwards as the usual stage distributes its time.
    then_s = (seconds * usual_s / seconds.sum(axis=0))[:, :, None, None, None] * work
    factor = np.ones((len(seconds), len(profile.stage_s), *now_s.shape[1:]))
    factor[:, stage, chunks] = (then_s / safe(now_s))[:, chunks]
    return factor
