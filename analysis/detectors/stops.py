"""Work that stops a worker, or that one worker does while the others wait.

In: `PipelineSubject` and a grid of ops. Out: seconds, workers, figures and sentences for detectors of such work.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.attribution.patterns import pattern_of_series
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.significance import SMALLEST_SIGMA, Noise, needed_nats
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit
from tracekit.trace.model import Worker

#: Price by replay only if the worst worker is stopped for this share of the step.
SMALLEST_STOP_SHARE = 0.02
#: A worker stands out if it is stopped this many times as long as the usual one.
STOP_FACTOR = 2.0


def slow_at_it(job: PipelineSubject, stops: Floats) -> tuple[Worker, ...]:
    """The workers that take much longer than the others for work that most workers do; empty if a few do it for all.

    If rank 0 alone writes checkpoints or evaluates, the job is designed that way: everybody waits, and nobody is slow.
    """
    return () if do_it_for_all(job, stops) else stopped_workers(job, stops)


def do_it_for_all(job: PipelineSubject, stops: Floats) -> tuple[Worker, ...]:
    """The workers that do the work while the others wait; empty if more than half of all workers do it."""
    does = np.asarray((stops > 0).any(axis=1))
    return job.workers_where(does) if 2 * does.sum() <= does.size else ()


def said_of_few(job: PipelineSubject, workers: tuple[Worker, ...], lost_s: Floats, does: str, do: str) -> str:
    """Sentence about work that a few workers do for all: how often, and how long at most. `lost_s`: seconds of each
    step.
    """
    place = job.names.place(Place(workers=workers))
    assert place is not None
    pattern = pattern_of_series(1 + lost_s / job.unchanged_s, [int(step) for step in job.replay.graph.steps])
    count = int((lost_s > 0).sum())
    often = f"every {pattern.period} steps" if pattern.period is not None else f"in {count:,} of {len(lost_s):,} steps"
    return f"{place.words} {place.verb(does, do)} {often}, up to {seconds(float(lost_s.max()))}, while the others wait"


def stops_s(job: PipelineSubject, grid: OpGrid) -> Floats:
    """How long the ops of a grid stop each worker in each step, seconds, [stages, steps, dp_ranks]."""
    if grid.empty:
        return np.zeros((job.stages, len(job.replay.graph.steps), len(job.dp_ranks)))
    total: Floats = np.nan_to_num(grid.gather(job.replay.durations.cost)).sum(axis=1)
    return total


def stopped_workers(job: PipelineSubject, stops: Floats) -> tuple[Worker, ...]:
    """The workers that are stopped much longer than the others, beyond chance; empty if most are stopped alike."""
    mean = stops.mean(axis=1)
    usual = float(lower_median(mean.ravel(), 0))
    hit = mean > max(STOP_FACTOR * usual, SMALLEST_STOP_SHARE / 2 * job.unchanged_s)
    if hit.all() or 2 * hit.sum() > max(hit.size, 2):
        return ()
    those = (stops > 0).any(axis=(0, 2))  # steps in which nobody stops say nothing about who does
    longer = (stops - stops.transpose(1, 0, 2)[:, ~hit].mean(axis=1)[:, None])[:, those]
    steps = longer.shape[1]
    if steps < 2:
        return ()
    scatter = np.maximum(longer.var(axis=1, ddof=1), (SMALLEST_SIGMA * job.unchanged_s) ** 2)
    by_chance = Noise(scatter, freedom=steps - 1, spread=0.0, memory=0.0)
    return job.workers_where(hit & (by_chance.nats(longer.mean(axis=1), steps) >= needed_nats(hit.size)))


def figures_of_stops(job: PipelineSubject, lost_s: Floats, what: str, single: str) -> tuple[Figure, Figure, Figure]:
    """How much of the time, how often and how long at most. `lost_s`: seconds of each step."""
    return (
        Figure(f"{what}, over all steps", float(lost_s.mean()) / job.unchanged_s, SMALLEST_STOP_SHARE, Unit.SHARE),
        Figure(f"steps with {single}", int((lost_s > 0).sum()), 0.0),
        Figure("longest", float(lost_s.max()), 0.0, Unit.SECONDS),
    )


def longest_share(job: PipelineSubject, stops: Floats) -> float:
    """How long the worst worker of each step is stopped, as a share of the step."""
    return float(stops.max(axis=(0, 2)).mean()) / job.unchanged_s
