"""Rules for what stops a worker between or inside its ops: garbage collection, checkpoints.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Change, Scale, Together
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median
from tracekit.model import Worker

FEWEST_PAUSES = 2
#: What stops the worst worker for this share of the step is worth a replay to price it.
SMALLEST_STOP_SHARE = 0.02
#: A worker stands out that is stopped this many times as long as the usual one.
STOP_FACTOR = 2.0


def stops_s(evidence: Evidence, grid: OpGrid) -> Floats:
    """How long the ops of a grid stop each worker in each step, seconds, [stages, steps, dp_ranks]."""
    if grid.empty:
        return np.zeros((evidence.stages, len(evidence.replay.graph.steps), len(evidence.dp_ranks)))
    total: Floats = np.nan_to_num(grid.gather(evidence.replay.durations.own)).sum(axis=1)
    return total


def _stopped_workers(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
    """The workers that are stopped much longer than the usual one; none where most are stopped alike."""
    mean = stops.mean(axis=1)
    usual = float(lower_median(mean.ravel(), 0))
    hit = mean > max(STOP_FACTOR * usual, SMALLEST_STOP_SHARE / 2 * evidence.unchanged_s)
    return evidence.workers_where(hit) if 2 * hit.sum() <= max(hit.size, 2) else ()


def _longest_share(evidence: Evidence, stops: Floats) -> float:
    """How long the worst worker of each step is stopped, over the step."""
    return float(stops.max(axis=(0, 2)).mean()) / evidence.unchanged_s


class PythonGc(Rule):
    """Python's garbage collector stops a worker between its ops or during a forward.

    Paper: pauses hit forwards only (backwards are launched from C++), on different workers at different steps, and
    can lengthen over time; found by hand. tracekit names collections that were recorded as ops, and looks for single
    forwards that exceed what stage, worker, step and microbatch (taken from the backward) explain by half or more,
    without like pauses in backwards.
    """

    kind = CauseKind.PYTHON_GC
    title = "Python garbage collection stops workers"
    signature = (
        "recorded collections; or single long forwards, on other workers each time, whose backwards are not long"
    )
    refuted_by = "pauses also in backwards, or at the same microbatch on all workers"
    next_check = "gc.callbacks with a timer, or gc.freeze() and gc.disable() for a hundred steps: do the pauses go?"
    suggested_fix = "plan garbage collection: all ranks together, once every N steps"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        changes: list[Change] = []
        figures: list[Figure] = []
        stops = stops_s(evidence, evidence.collections)
        where = Where()
        if _longest_share(evidence, stops) >= SMALLEST_STOP_SHARE:
            changes.append(Scale(evidence.collections, np.array(0.0)))
            share = Figure("recorded collections, over the step", _longest_share(evidence, stops), SMALLEST_STOP_SHARE)
            figures.append(share)
            where = Where(workers=_stopped_workers(evidence, stops))
        pause = pauses_in_forwards(evidence)
        if pause is not None:
            long = pause > 0
            factor = np.ones_like(pause)
            factor[long] = 1 - pause[long] / evidence.table.grid[long]
            changes.append(Scale(evidence.table, factor))
            paused = long[FORWARD].any(axis=(1, 2, 3))
            figures += [
                Figure("paused forwards", int(long[FORWARD].sum()), FEWEST_PAUSES),
                Figure("longest pause", float(pause.max()), 0.0, "s"),
            ]
            if not stops.any():
                where = Where(workers=evidence.workers_where(paused)) if paused.sum() == 1 else Where()
        if changes:
            series = None if pause is None else _usual_pause(evidence, pause)
            yield Candidate(
                self.kind, where, tuple(figures), confidence_from(tuple(figures[:1])), Together(tuple(changes)), series
            )


def pauses_in_forwards(evidence: Evidence) -> Floats | None:
    """Seconds of each pause in a forward, in the shape of the table; None where pauses are not those of a collector."""
    profile = evidence.profile
    if profile is None:
        return None
    paused = profile.pause_s > 0
    forwards, backwards = int(paused[FORWARD].sum()), int(paused[BACKWARD].sum())
    if forwards < FEWEST_PAUSES or backwards > 0.2 * forwards:
        return None
    seen = evidence.pauses_inside_computes
    if seen is not None and seen < forwards / 2:  # something else paused them
        return None
    pause = np.where(paused, profile.pause_s, 0.0)
    pause[BACKWARD] = 0.0
    return pause


def _usual_pause(evidence: Evidence, pause: Floats) -> Floats:
    """The usual pause of each step over the step, so that a leak shows as a drift whatever the number of pauses."""
    count = (pause[FORWARD] > 0).sum(axis=(0, 1, 2, 4))
    total = pause.sum(axis=(0, 1, 2, 3, 5))
    usual: Floats = np.where(count > 0, total / np.maximum(count, 1), total.sum() / count.sum())
    return 1 + usual / evidence.unchanged_s


class Checkpoints(Rule):
    """Writing checkpoints stops workers while all others wait.

    Paper: leaves steps with a checkpoint out. tracekit names checkpoints that were recorded as ops and prices them by
    replaying without.
    """

    kind = CauseKind.CHECKPOINT_STALLS
    title = "Checkpoints stop the job"
    signature = "recorded checkpoints that make up a large share of the time"
    refuted_by = "the steps stay as long with checkpoints off"
    next_check = "how long a rank writes and to where; bandwidth of the storage; whether all ranks wait for one"
    suggested_fix = "write checkpoints asynchronously, from a copy in host memory, sharded over the ranks"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        stops = stops_s(evidence, evidence.checkpoints)
        share = _longest_share(evidence, stops)
        if share < SMALLEST_STOP_SHARE:
            return
        steps = stops.max(axis=(0, 2)) > 0
        figures = (
            Figure("checkpoints, over all steps", share, SMALLEST_STOP_SHARE),
            Figure("steps with a checkpoint", int(steps.sum()), 0.0),
        )
        series = 1 + stops.max(axis=(0, 2)) / evidence.unchanged_s
        where = Where(workers=_stopped_workers(evidence, stops))
        yield Candidate(
            self.kind, where, figures, confidence_from(figures), Scale(evidence.checkpoints, np.array(0.0)), series
        )
