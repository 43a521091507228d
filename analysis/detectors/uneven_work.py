"""Computes that differ with the work and not with the worker: stages, microbatches, their places in a step, chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tracekit.analysis.detectors.detector import (
    ONE_KIND_CHECK,
    SLOW_KIND,
    Advice,
    Candidate,
    Detector,
    Repair,
    Treatment,
)
from tracekit.analysis.detectors.stops import chance_figures, time_of_episodes
from tracekit.analysis.evidence.compute_profile import BACKWARD, COMPUTES, FORWARD, ComputeProfile, uneven_lengths
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import (
    SLOW_WORKERS,
    data_factor,
    larger_chunks,
    optimizer_factor,
    ranks_with_more_data,
    slow_workers,
    stage_excess,
    wander_of,
)
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import lower_median, safe
from tracekit.analysis.whatif.interventions import Scale, step_times
from tracekit.report.finding import Figure, Place, Unit, confidence_from

if TYPE_CHECKING:
    from tracekit.analysis.evidence.microbatch_counts import MicrobatchCounts


class VariationThresholds(Struct, frozen=True):
    """When random variation is named."""

    #: Share of the step that it costs. Chosen: any job has some; `eventsim` and `causes` accuse no healthy job with it.
    share: float = 0.04


VARIATION = VariationThresholds()


class StageImbalance(Detector):
    """A stage (most often the last, with the loss layer) has more work than the others.

    Paper: M_S, the share of the loss saved by idealising the last stage; above 0.5 the last stage explains most of it.
    tracekit does not clamp M_S (idealising also lengthens the faster stages, so it can exceed 1), looks at every stage,
    not only the last, and compares the median DP rank of each step, so that no slow worker affects its stage, nor do
    those that are slow in turn. A model chunk that has more work than the other chunks of its stage is named alone. If
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
        larger = larger_chunks(job, profile) & (excess > SLOW_WORKERS.stage_excess)
        for stage in np.flatnonzero(larger.any(axis=1) & ~larger.all(axis=1)):
            yield from _uneven_chunks(self.kind, job, profile, int(stage), np.flatnonzero(larger[stage]))
        for stage in np.flatnonzero(larger.all(axis=1)):
            figures = (
                Figure(
                    "compute beyond that of the usual stage",
                    float(excess[stage].max()),
                    SLOW_WORKERS.stage_excess,
                    Unit.SHARE,
                ),
                Figure(
                    "added by the stage alone to a step without stragglers",
                    float(job.attribution.stage_slowdown[stage]) - 1,
                    0.0,
                    Unit.SHARE,
                ),
                Figure("loss gone if the last stage were ideal", job.attribution.m_s, 0.0, Unit.SHARE),
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
        by_kind = {"forward": float(times[FORWARD])}
        if len(times) > 1:
            by_kind = {"backward": float(times[BACKWARD])} | by_kind
        longer = [(name, factor) for name, factor in by_kind.items() if factor > 1 + SLOW_WORKERS.stage_excess]
        (first, most), *more = longer or [max(by_kind.items(), key=lambda item: item[1])]
        takes = f"its {first} takes {most:.2g} times as long as that of other chunks"
        figures = (
            Figure(
                "compute beyond that of the usual stage",
                float(stage_excess(profile)[stage, chunk]),
                SLOW_WORKERS.stage_excess,
                Unit.SHARE,
            ),
            *(Figure(f"{name} over that of other chunks", ratio, 0.0, Unit.FACTOR) for name, ratio in by_kind.items()),
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
            Figure("correlation within DP rank and step", r, COMPUTES.correlation),
            Figure("spread of microbatches", spread, COMPUTES.length_spread, Unit.SHARE),
        )
        even = 1 / safe(profile.microbatch)
        yield Candidate(
            self.kind,
            Place(),
            f"microbatches take unequal time ({spread:.0%} more or less), as sequences of unequal length do",
            figures,
            confidence_from(figures[1:]) * min(1.0, r),
            Scale(job.table, even[None, None, None]),
            suggested_fix=None if len(even) > 1 else "have the sampler give each step sequences of similar length",
        )


class UnequalMicrobatches(Detector):
    """DP ranks run unequal numbers of microbatches in a step, and the others wait for those that run most.

    Paper: no signature; its ideal gives each op the mean duration and leaves the number of ops as it is, so S is 1.
    tracekit counts the microbatches of each DP rank in each step. Nothing is estimated, so no noise can look like it; a
    rank whose recording lacks ops of a step is left out of that step. The price comes from a replay in which a step of
    each DP rank is as long as with the mean number of microbatches.
    """

    kind = "unequal-microbatches"
    title = "DP ranks run unequal numbers of microbatches"
    signature = "forwards and backwards of some DP ranks are more in number, on all stages; none takes longer"
    refuted_by = "the loop runs the same number on all ranks, and the recording of some ranks lacks ops"
    next_check = (
        "the number of batches that the sampler gives each DP rank in a step; batches that are dropped or repeated"
    )
    suggested_fix = "have the sampler deal equal numbers of microbatches to all DP ranks in every step"
    part = "workload"
    label = "uneven work"
    counted = True
    repair = Repair(
        "equal-microbatches",
        "Give all DP ranks equal numbers of microbatches",
        assumes="as much work in all, in equal parts",
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if not job.replay.graph.computes_differ:
            return
        from tracekit.analysis.evidence.microbatch_counts import microbatch_counts  # most jobs have equal numbers

        counts = microbatch_counts(job)
        if counts is None:
            return
        more = _ranks_with_more(counts)
        busiest = counts.busiest_over_mean
        figures = (
            Figure("microbatches of the busiest DP rank over the mean", float(busiest.mean()), 0.0, Unit.FACTOR),
            Figure("share of steps with unequal numbers", float(counts.uneven.mean()), 0.0, Unit.SHARE),
        )
        yield Candidate(
            self.kind,
            Place(dp_ranks=tuple(job.dp_ranks[index] for index in more)),
            _counts_words(counts, more),
            figures,
            1.0,
            Scale(counts.ops, counts.to_the_mean),
            busiest,
        )


def _ranks_with_more(counts: MicrobatchCounts) -> list[int]:
    """The indices of the DP ranks that run more than the mean wherever numbers differ; none if the busiest rank of some
    step is not one of them, or if these are most of the ranks: then no rank has more than its share.
    """
    of_step = counts.count[counts.uneven]
    more = (of_step > counts.mean[counts.uneven]) | np.isnan(of_step)
    always = np.asarray(more.all(axis=0) & np.isfinite(of_step).any(axis=0))
    busiest = of_step == np.nan_to_num(of_step, nan=0.0).max(axis=1, keepdims=True)
    if (busiest & ~always).any() or 2 * always.sum() > always.size:
        return []
    return [int(index) for index in np.flatnonzero(always)]


def _counts_words(counts: MicrobatchCounts, more: list[int]) -> str:
    """How many microbatches the ranks with more run, and how many the others; those of all ranks if there are none."""
    of_step = counts.count[counts.uneven]
    if not more:
        return (
            f"DP ranks run {_range(of_step)} microbatches in a step, the busiest"
            f" {counts.busiest_over_mean[counts.uneven].mean() - 1:.0%} more than the mean, and the others wait for it"
        )
    of_busy, of_others = of_step[:, more], np.delete(of_step, more, axis=1)
    verb = "runs" if len(more) == 1 else "run"
    return f"{verb} {_range(of_busy)} microbatches in a step, the others {_range(of_others)}"


def _range(count: Floats) -> str:
    """The smallest and the largest of some numbers of microbatches: `4`, `2 to 6`."""
    least, most = int(np.nanmin(count)), int(np.nanmax(count))
    return str(least) if least == most else f"{least} to {most}"


def ranks_with_more_work(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield DP ranks with more data than the others."""
    hit = ranks_with_more_data(job)
    profile = job.profile
    if profile is None or not hit.any():
        return
    members = np.flatnonzero(hit)
    excess = float(np.expm1(profile.ranks.level[members].min()))
    optimizer = float(np.median(optimizer_factor(job)[:, :, hit])) - 1
    figures = (
        Figure("compute beyond that of other DP ranks, on all stages", excess, COMPUTES.factor, Unit.SHARE),
        *chance_figures(profile.ranks, hit),
        Figure("optimizer beyond that of other DP ranks", optimizer, 0.0, Unit.SHARE),
    )
    share = np.where(hit, data_factor(job), 1.0)
    even = share.mean(axis=1, keepdims=True) / share  # the total amount of data stays
    change = Scale(job.table, even[None, None, None, None])
    series = profile.rank_by_step[:, members].mean(axis=1)
    yield Candidate(
        kind,
        Place(dp_ranks=tuple(job.dp_ranks[int(dp_index)] for dp_index in members)),
        f"{'takes' if len(members) == 1 else 'take'} at least {excess:.0%} longer than other DP ranks, on all"
        f" {job.stages} stages; the optimizers take {optimizer:.0%} longer, so it is not the machines",
        figures,
        confidence_from(figures[:2]),
        change,
        series,
        time_of_episodes(job, profile.ranks, int(members[0])),
    )


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
                "compute beyond that of other places", float(profile.position.max()) - 1, COMPUTES.position, Unit.SHARE
            ),
            Figure("first slow place", float(places[0]), 0.0),
        )
        change = Scale(job.table, 1 / profile.position[:, None, None, :, None, None])
        named = f"microbatch {places[0]}" if len(places) == 1 else f"{len(places)} microbatches, {places[0]} the first,"
        effect = f"{named} of each step take{'s' if len(places) == 1 else ''} up to {figures[0].value:.0%} longer"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures[:1]), change)


class LongMicrobatch(Detector):
    """A microbatch at one place of each step takes longer on one rank: data that is dealt by place, or user code.

    Paper: no signature. tracekit compares each compute with those of its peers at that place, and that excess with the
    one at other places of the rank: 4 % in nine of ten steps, beyond chance (see `place_factor`). An excess that
    returns at one place is work; pauses and collections of garbage come at any place. All other causes are looked for
    without it.
    """

    kind = "long-microbatch"
    title = "A microbatch at one place of the step is longer on one rank"
    signature = "the same microbatch of each step takes longer on one rank, on all of its stages if it is its data"
    refuted_by = "it is as long on other ranks, comes at another place, or has as many tokens and as long sequences"
    next_check = (
        "tokens and sum of squared sequence lengths of that microbatch on this rank and on others; the sampler's order"
    )
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by count"
    part = "workload"
    label = "uneven work"
    repair = Repair("even-work", "Give the rank the same work as its peers", "the same work as its peers")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        longer = job.computes.at_places
        if longer is None:
            return
        for dp_index in np.flatnonzero((longer > 1).any(axis=(0, 1, 2, 3, 4))).tolist():
            of_rank = np.where(np.arange(len(job.dp_ranks)) == dp_index, longer, 1.0)
            hit: Bools = np.asarray((of_rank > 1).any(axis=(0, 2, 3, 4)))
            places = np.flatnonzero((of_rank > 1).any(axis=(0, 1, 2, 4, 5)))
            excess, slow_kinds = float(of_rank.max()) - 1, np.flatnonzero((of_rank > 1).any(axis=(1, 2, 3, 4, 5)))
            figures = (
                Figure("compute beyond that of peers at this place", excess, COMPUTES.position, Unit.SHARE),
                Figure("first slow place", float(places[0]), 0.0),
            )
            named, verb = f"microbatch {places[0]}", "takes"
            if len(places) > 1:
                named, verb = f"{len(places)} microbatches, {places[0]} the first,", "take"
            one_kind = len(slow_kinds) < len(of_rank)
            if one_kind:
                named, verb = f"the {'backward' if slow_kinds[0] else 'forward'} of {named}", "takes"
            yield Candidate(
                self.kind,
                Place(workers=job.workers_where(hit)),
                f"{named} of each step {verb} up to {excess:.0%} longer than on its peers",
                figures,
                confidence_from(figures[:1]),
                Scale(job.table, 1 / of_rank),
                next_check=ONE_KIND_CHECK if one_kind else None,
                suggested_fix=SLOW_KIND if one_kind else None,
            )


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
        if share < VARIATION.share:
            return
        figures = (
            Figure("cost of the spread, over the step", share, VARIATION.share, Unit.SHARE),
            Figure("spread of workers from step to step", wander.spread, 0.0, Unit.SHARE),
        )
        effect = f"workers differ by {wander.spread:.1%} from step to step"
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change)
