"""Rules for causes in the computes of more than a few workers: data, stages, steps.

In: `Evidence`. Out: `Candidate`s. See `rule`. Slow workers are in `rules_workers`, variation without a lasting reason
in `rules_variation`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.causes.episode_figures import chance_figures, time_of_episodes
from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR, ComputeProfile
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import (
    SMALLEST_STAGE_EXCESS,
    data_factor,
    larger_chunks,
    optimizer_factor,
    ranks_with_more_data,
    slow_workers,
    stage_excess,
)
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, median, safe

#: Fewer steps do not show which of them are the usual ones.
FEWEST_STEPS = 3


class DataSkew(Rule):
    """A DP rank has more data than the others: its ops take longer on all stages, in proportion.

    Paper: no signature; finds sequence lengths by the correlation of forwards and backwards, which a slow worker raises
    as well. tracekit separates what the stages of a DP rank share from what a worker adds, so it still names a bad
    worker next to the skew. Machines that are slow as a whole show in their optimizer, which does not depend on tokens.
    The rule needs a pipeline: with one stage, data and machine cannot be separated.
    """

    kind = CauseKind.DATA_SKEW
    title = "A DP rank gets more data than the others"
    signature = (
        "forwards and backwards of one DP rank take longer by one factor on all its stages; its optimizer does not"
    )
    refuted_by = "its microbatches have as many tokens, and as long sequences, as those of other DP ranks"
    next_check = "tokens and sum of squared sequence lengths per DP rank and step; the sampler's shards"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by count"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        hit = ranks_with_more_data(evidence)
        profile = evidence.profile
        if profile is None or not hit.any():
            return
        members = np.flatnonzero(hit)
        excess, optimizer = float(np.expm1(profile.ranks.level[members].min())), _optimizer_excess(evidence, hit)
        figures = (
            Figure("compute beyond that of other DP ranks, on all stages", excess, SMALLEST_FACTOR, Unit.SHARE),
            *chance_figures(profile.ranks, hit),
            Figure("optimizer beyond that of other DP ranks", optimizer, 0.0, Unit.SHARE),
        )
        share = np.where(hit, data_factor(evidence), 1.0)
        even = share.mean(axis=1, keepdims=True) / share  # the total amount of data stays
        change = Scale(evidence.table, even[None, None, None, None])
        series = profile.rank_by_step[:, members].mean(axis=1)
        yield Candidate(
            self.kind,
            Where(dp_ranks=tuple(evidence.dp_ranks[int(at)] for at in members)),
            f"{'takes' if len(members) == 1 else 'take'} at least {excess:.0%} longer than other DP ranks, on all"
            f" {evidence.stages} stages; the optimizers take {optimizer:.0%} longer, so it is not the machines",
            figures,
            confidence_from(figures[:2]),
            change,
            series,
            time_of_episodes(evidence, profile.ranks, int(members[0]), series),
        )


def _optimizer_excess(evidence: Evidence, hit: Bools) -> float:
    return float(np.median(optimizer_factor(evidence)[:, :, hit])) - 1


class StageImbalance(Rule):
    """A stage (most often the last, with the loss layer) has more work than the others.

    Paper: M_S, the share of the loss saved by idealising the last stage; above 0.5 the last stage explains most of it.
    tracekit does not clamp M_S (idealising also lengthens the faster stages, so it can exceed 1), looks at every stage,
    not only the last, and compares medians over DP ranks, so that one slow worker does not affect a stage. If
    microbatches differ, the work that is equal for all of them (a loss per token) and the work that follows the layers
    are fitted separately, and the price is that of a stage that follows its microbatches as the usual one does. 6 %:
    one layer more than the 16 layers of the other stages.
    """

    kind = CauseKind.STAGE_IMBALANCE
    title = "Stage has more work than the others"
    signature = "forwards and backwards of one stage take longer on all DP ranks"
    refuted_by = "the stage's DP ranks differ (then it is a worker), or all of them sit on one host"
    next_check = "layers per stage, vocabulary size and loss on the last stage, embedding on the first"
    suggested_fix = "give {place} fewer layers"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or evidence.stages < 2:
            return
        excess = stage_excess(profile)
        if len(evidence.dp_ranks) == 1:
            excess[slow_workers(evidence)[:, 0]] = 0.0
        larger = larger_chunks(evidence, profile) & (excess > SMALLEST_STAGE_EXCESS)
        for stage in np.flatnonzero(larger.any(axis=1)):
            figures = (
                Figure(
                    "compute beyond that of the usual stage",
                    float(excess[stage].max()),
                    SMALLEST_STAGE_EXCESS,
                    Unit.SHARE,
                ),
                Figure("S of the stage", float(evidence.attribution.stage_slowdown[stage]), 0.0),
                Figure("loss gone if the last stage were ideal", evidence.attribution.m_s.removal, 0.0, Unit.SHARE),
            )
            yield Candidate(
                self.kind,
                Where(pp_ranks=(int(stage),)),
                f"takes {excess[stage].max():.0%} longer than the usual stage, on all DP ranks",
                figures,
                confidence_from(figures[:1]),
                Scale(evidence.table, _like_the_usual_stage(profile, int(stage), larger[stage])),
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


class SlowSteps(Rule):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the lower quartile of the computes
    of each step with that of the usual step: 4 %, and a likelihood against chance as for workers, with the noise of the
    other steps and of the computes within them. Of three steps, one may be slow; then only two show what is usual, so
    the confidence is at most one minus the share of slow steps.
    """

    kind = CauseKind.SLOW_STEPS
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = "cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps"
    suggested_fix = (
        "compare clocks and power caps of all GPUs in those steps with the others (DCGM_FI_DEV_SM_CLOCK); leave warm-up"
        " and compilation out of the trace"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or len(profile.step) < FEWEST_STEPS:
            return
        slow = (profile.slow_step > 1) & ~evidence.steps_with_stops
        if evidence.pauses is not None and evidence.pauses.stopped.any():
            slow &= _slow_on(~evidence.pauses.stopped, evidence.table.grid)
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
        steps = tuple(int(step) for step in evidence.replay.graph.steps[slow])
        change = Scale(evidence.table, 1 / np.where(slow, profile.slow_step, 1.0)[:, None])
        confidence = min(confidence_from(figures[:2]), 1 - float(slow.mean()))
        effect = (
            f"computes of {len(steps)} of {len(profile.step)} steps take up to {figures[0].value:.0%} longer than in"
            " the usual step, on all workers"
        )
        yield Candidate(self.kind, Where(steps=steps), effect, figures, confidence, change, profile.step)


def _slow_on(workers: Bools, grid: Floats) -> Bools:
    """In which steps these workers, [stages, dp_ranks], compute slower than in the usual step, [steps].

    `grid`: seconds, as in a `ComputeTable`.
    """
    theirs = np.moveaxis(grid, -1, 2)[:, workers]
    step = median(theirs / safe(median(theirs, (4,)))[..., None], (0, 1, 2, 3))
    return np.asarray(step / lower_median(step, 0) >= 1 + SMALLEST_FACTOR)
