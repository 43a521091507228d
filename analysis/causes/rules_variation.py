"""Rules for variation between microbatches and steps: sequence lengths, places in a step, chance.

In: `Evidence`. Out: `Candidate`s. See `rule`.

The thresholds named "paper" are those of "Understanding Stragglers in Large Model Training" (OSDI'25).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale, step_times_with
from tracekit.analysis.evidence.compute_profile import SMALLEST_CORRELATION, SMALLEST_LENGTH_SPREAD, uneven_lengths
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.wander import wander_of
from tracekit.analysis.evidence.workload import SMALLEST_POSITION
from tracekit.analysis.numeric.robust import safe

#: Any job has random variation that costs less than this share of the step.
SMALLEST_VARIATION_SHARE = 0.04


class SequenceLengthImbalance(Rule):
    """Microbatches differ in cost because attention grows with the square of sequence lengths.

    Paper: Pearson correlation of forward and backward durations of the same microbatch >= 0.9. On its published job AR
    that is 0.999, although one bad worker is the cause. tracekit correlates within a DP rank and step, after removing
    stage, worker and step factors, so that only the microbatch varies. Noise does not correlate there, so 0.6 is
    enough; and the microbatches must differ by more than 4 %. Without a pipeline, a worker whose speed wanders looks
    the same, but then neighbouring microbatches of a step are alike too, which sequence lengths are not.
    """

    kind = CauseKind.SEQUENCE_LENGTH_IMBALANCE
    title = "Microbatches differ in cost: sequence lengths"
    signature = "forward and backward of the same microbatch vary together, on all stages of its DP rank"
    refuted_by = "microbatches of equal sum of squared lengths differ as well"
    next_check = "the lengths of the packed documents per microbatch: cost against the sum of their squares"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by token count"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None:
            return
        r, spread = profile.length_correlation, profile.length_spread
        if not uneven_lengths(r, spread) or wander_of(evidence).in_workload:
            return
        figures = (
            Figure("correlation within DP rank and step", r, SMALLEST_CORRELATION),
            Figure("spread of microbatches", spread, SMALLEST_LENGTH_SPREAD, Unit.SHARE),
        )
        even = 1 / safe(profile.microbatch)
        yield Candidate(
            self.kind,
            Where(),
            f"microbatches take unequal time ({spread:.0%} more or less), as sequences of unequal length do",
            figures,
            confidence_from(figures[1:]) * min(1.0, r),
            Scale(evidence.table, even[None, None, None]),
        )


class PositionEffect(Rule):
    """Microbatches at one place of each step, most often the first, take longer on all ranks.

    Paper: no signature. tracekit compares each place with the others on the same workers and steps, and uses the median
    over ranks: 4 %, and five standard errors of the place's scatter over the steps, which noise reaches in fewer than
    one of a thousand jobs of 64 microbatches. Sequence lengths change from step to step and from rank to rank.
    """

    kind = CauseKind.POSITION_EFFECT
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

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or (profile.position == 1).all():
            return
        places = np.flatnonzero((profile.position != 1).any(axis=0))
        figures = (
            Figure(
                "compute beyond that of other places", float(profile.position.max()) - 1, SMALLEST_POSITION, Unit.SHARE
            ),
            Figure("first slow place", float(places[0]), 0.0),
        )
        change = Scale(evidence.table, 1 / profile.position[:, None, None, :, None, None])
        named = f"microbatch {places[0]}" if len(places) == 1 else f"{len(places)} microbatches, {places[0]} the first,"
        effect = f"{named} of each step take{'s' if len(places) == 1 else ''} up to {figures[0].value:.0%} longer"
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures[:1]), change)


class RandomVariation(Rule):
    """The speed of workers wanders: each is slow for a while, none for long. It costs time, and nobody is responsible.

    Paper: no signature. Neighbouring microbatches and steps of a worker are alike (autocorrelation), unlike sequence
    lengths, which are drawn anew for each microbatch; and no worker's level exceeds what such a random walk does by
    chance. Named if making every step as long as usual saves 4 %: any job has less than that.
    """

    kind = CauseKind.RANDOM_VARIATION
    title = "Workers vary at random: spread that nobody owns"
    signature = (
        "the speed of workers wanders over microbatches and steps; no worker is slow in more steps than by chance"
    )
    refuted_by = "a longer trace in which the same workers are slow again"
    next_check = "clocks, temperature and power of the GPUs over minutes; other tenants of the hosts; a longer trace"
    suggested_fix = "lock the clocks of the GPUs (nvidia-smi -lgc) and keep other jobs off the hosts, then record again"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        wander = wander_of(evidence)
        if not wander.shows:
            return
        change = Scale(evidence.table, wander.even)
        saved_s = evidence.unchanged_s - float(step_times_with(evidence.replay, (change,)).mean())
        share = saved_s / evidence.unchanged_s
        if share < SMALLEST_VARIATION_SHARE:
            return
        figures = (
            Figure("cost of the spread, over the step", share, SMALLEST_VARIATION_SHARE, Unit.SHARE),
            Figure("spread of workers from step to step", wander.spread, 0.0, Unit.SHARE),
        )
        effect = f"workers differ by {wander.spread:.1%} from step to step"
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures), change)
