"""Rules for what a training loop does now and then, while others wait: checkpoints, evaluation.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.attribution.patterns import pattern_of_series
from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Where, confidence_from
from tracekit.analysis.causes.naming import Names
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.causes.rules_pauses import (
    SMALLEST_STOP_SHARE,
    figures_of_stops,
    longest_share,
    stopped_workers,
    stops_s,
)
from tracekit.analysis.evidence.changes import Change, NoStalls, Scale, Together
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.base.text import seconds
from tracekit.trace.model import Worker

_UNRECORDED = "as for a checkpoint that is not recorded"
TOGETHER_TITLE = f"All ranks stop together, {_UNRECORDED}"
ALONE_TITLE = f"A rank stops while the others wait, {_UNRECORDED}"
#: Confidence that an unrecorded stall of all ranks is a checkpoint.
UNRECORDED_CONFIDENCE = 0.9
STALL_CHECK = (
    "what the loop does in these steps: its checkpoint and evaluation intervals against the period; record it as a span"
)
ROLLOUT_CHECK = (
    "what the loop does between model.eval() and model.train(): for rollouts, tokens per second, the longest sequence"
    " of a batch, and whether the inference engine batches continuously"
)
ROLLOUT_FIX = "generate rollouts with an inference engine on GPUs of its own, a step ahead; or fewer and shorter ones"


def _slow_at_it(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
    """The workers that take much longer than the others for work that most workers do; empty if a few do it for all.

    If rank 0 alone writes checkpoints or evaluates, the job is designed that way: everybody waits, and nobody is slow.
    """
    return () if _do_it_for_all(evidence, stops) else stopped_workers(evidence, stops)


def _do_it_for_all(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
    """The workers that do the work while the others wait; empty if more than half of all workers do it."""
    does = np.asarray((stops > 0).any(axis=1))
    return evidence.workers_where(does) if 2 * does.sum() <= does.size else ()


def _said_of_few(evidence: Evidence, workers: tuple[Worker, ...], lost_s: Floats, does: str, do: str) -> str:
    """Sentence about work that a few workers do for all: how often, and how long at most. `lost_s`: seconds of each
    step.
    """
    place = Names.of(evidence).place(Where(workers=workers))
    assert place is not None
    pattern = pattern_of_series(1 + lost_s / evidence.unchanged_s, [int(step) for step in evidence.replay.graph.steps])
    count = int((lost_s > 0).sum())
    often = f"every {pattern.period} steps" if pattern.period is not None else f"in {count:,} of {len(lost_s):,} steps"
    return f"{place.words} {place.verb(does, do)} {often}, up to {seconds(float(lost_s.max()))}, while the others wait"


class Checkpoints(Rule):
    """Checkpoints stop workers while all others wait, or stop the whole job.

    Paper: leaves out steps with a checkpoint. tracekit names checkpoints that were recorded as ops and prices them by a
    replay without them. An unrecorded checkpoint shows as time in which no rank does anything, before anybody begins a
    step or between two steps: a tenth of the usual step or more, in some steps but not in most. Or all ranks, or the
    first DP rank alone, are late with the first ops of every n-th step (see `evidence.breaks`). Data that is late for
    all ranks is late in every step, or in irregular ones. A period makes the stall a checkpoint (or an evaluation);
    without one, time in which no rank does anything is still named, with less confidence.
    """

    kind = CauseKind.CHECKPOINT_STALLS
    title = "Checkpoints stop the job"
    signature = "recorded checkpoints that make up a large share of the time; or all ranks stand still every n steps"
    refuted_by = "the steps stay as long with checkpoints off"
    next_check = "how long a rank writes and to where; bandwidth of the storage; whether all ranks wait for one"
    suggested_fix = (
        "write checkpoints in the background (torch.distributed.checkpoint.async_save), each rank its own shard"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        stops, breaks = stops_s(evidence, evidence.checkpoints), evidence.breaks
        recorded = longest_share(evidence, stops) >= SMALLEST_STOP_SHARE
        still_s = evidence.stalled_s + (0.0 if breaks is None else breaks.late_s.max(axis=(0, 2)))
        stalled = float(still_s.mean()) >= SMALLEST_STOP_SHARE * evidence.unchanged_s
        if not recorded and not stalled:
            return
        lost_s = still_s * stalled + stops.max(axis=(0, 2)) * recorded
        figures = figures_of_stops(
            evidence, lost_s, *(("checkpoints", "a checkpoint") if recorded else ("all ranks stand still", "a stall"))
        )
        changes: list[Change] = [Scale(evidence.checkpoints, np.array(0.0))] if recorded else []
        changes += [NoStalls()] if stalled else []
        changes += [breaks.change] if stalled and breaks is not None else []
        few = _stop_the_others(evidence, stops, recorded=recorded, stalled=stalled)
        title = ALONE_TITLE if few else TOGETHER_TITLE
        yield Candidate(
            self.kind,
            Where(workers=_slow_at_it(evidence, stops) if recorded and not stalled else ()),
            self._effect(evidence, few, lost_s, figures, recorded=recorded),
            figures,
            confidence_from(figures) * (1.0 if recorded else UNRECORDED_CONFIDENCE),
            Together(tuple(changes)),
            1 + lost_s / evidence.unchanged_s,
            title=None if recorded else title,
            next_check=None if recorded else STALL_CHECK,
        )

    def _effect(
        self,
        evidence: Evidence,
        few: tuple[Worker, ...],
        lost_s: Floats,
        figures: tuple[Figure, ...],
        *,
        recorded: bool,
    ) -> str:
        """What the checkpoints do. `lost_s`: seconds of each step; `few`: who stops the others."""
        if few and recorded:
            return _said_of_few(evidence, few, lost_s, "writes a checkpoint", "write checkpoints")
        if few:
            return _said_of_few(evidence, few, lost_s, "stands still", "stand still")
        return (
            f"{'checkpoints take' if recorded else 'all ranks stand still for'} {figures[0].value:.0%} of the time, in"
            f" {figures[1].value:,.0f} of {len(lost_s):,} steps, up to {seconds(figures[2].value)}"
        )


def _stop_the_others(evidence: Evidence, stops: Floats, *, recorded: bool, stalled: bool) -> tuple[Worker, ...]:
    """The workers for whose checkpoints, recorded or not, the others wait; empty if all stop together."""
    if recorded:
        return () if stalled else _do_it_for_all(evidence, stops)
    breaks = evidence.breaks
    return () if breaks is None or evidence.stalled_s.any() else evidence.workers_where(breaks.alone)


class Evaluations(Rule):
    """Evaluation between training steps takes a large share of the time.

    Paper: no signature. tracekit names evaluations that were recorded as ops and prices them by a replay without them.
    They are compared only with those of the same step, so an evaluation every n steps is not a straggler. An evaluation
    in every step is part of the loop in evaluation mode, such as the rollouts of reinforcement learning.
    """

    kind = CauseKind.EVALUATION
    title = "Evaluation takes its time from training"
    signature = "recorded evaluations that make up a large share of the time"
    refuted_by = "the time between training steps stays with evaluation off"
    next_check = "how often the loop evaluates, on how many batches, and whether all ranks share them"
    suggested_fix = (
        "evaluate less often or on fewer batches, split over all ranks; or evaluate checkpoints in a job of its own"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        stops = stops_s(evidence, evidence.evaluations)
        if longest_share(evidence, stops) < SMALLEST_STOP_SHARE:
            return
        lost_s = stops.max(axis=(0, 2))
        figures = figures_of_stops(evidence, lost_s, "evaluation", "an evaluation")
        slow = _slow_at_it(evidence, stops)
        few, rollouts = _do_it_for_all(evidence, stops), bool((lost_s > 0).all())
        what = "evaluation or rollouts take" if rollouts else "evaluation takes"
        effect = (
            f"{what} {figures[0].value:.0%} of the time, in {figures[1].value:,.0f} of {len(lost_s):,} steps, up to"
            f" {seconds(figures[2].value)}{', longer than on its peers' if slow else ''}"
        )
        if few:
            effect = _said_of_few(evidence, few, lost_s, "evaluates", "evaluate")
        yield Candidate(
            self.kind,
            Where(workers=slow),
            effect,
            figures,
            confidence_from(figures),
            Scale(evidence.evaluations, _as_in_step(stops, evidence.cells_of(slow)) if slow else np.array(0.0)),
            1 + lost_s / evidence.unchanged_s,
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
