"""Steps in which training stops, or is slower for all: checkpoints, evaluations, slow steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.patterns import TimePattern, TimeShape, pattern_of_series
from tracekit.analysis.detectors.detector import Advice, Candidate, Detector, Repair
from tracekit.analysis.detectors.trace_faults import TRACE_FAULTS
from tracekit.analysis.evidence.compute_profile import COMPUTES
from tracekit.analysis.evidence.host_code import steps_with_stops
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, checkpoints, evaluations
from tracekit.analysis.evidence.significance import SIGNIFICANCE, Episodes, Noise, episodes_of, needed_nats
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Bools, Floats, number
from tracekit.analysis.numeric.statistics import lower_median, median, safe
from tracekit.analysis.whatif.interventions import Intervention, NoStalls, Scale, Together
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, LossKind, Place, Unit, confidence_from
from tracekit.trace.model import OpKind, Worker

_UNRECORDED = "as for a checkpoint that is not recorded"
TOGETHER_TITLE = f"All ranks stop together, {_UNRECORDED}"
ALONE_TITLE = f"A rank stops while the others wait, {_UNRECORDED}"
STALL_CHECK = (
    "what the loop does in these steps: its checkpoint and evaluation intervals against the period; record it as a span"
)

ROLLOUT_CHECK = (
    "what the loop does between model.eval() and model.train(): for rollouts, tokens per second, the longest sequence"
    " of a batch, and whether the inference engine batches continuously"
)
ROLLOUT_FIX = "generate rollouts with an inference engine on GPUs of its own, a step ahead; or fewer and shorter ones"

NOISE = "what noise alone does to it"


class StopThresholds(Struct, frozen=True):
    """When work that stops workers is named, and who stands out at it."""

    #: Share of the step that the worst worker is stopped. Chosen; `eventsim` and `causes` find checkpoints, evaluations
    #: and collections with it, and accuse no healthy job.
    share: float = 0.02
    #: How many times as long as the usual worker one is stopped that stands out. Chosen: chance is ruled out besides.
    factor: float = 2.0
    #: Confidence that a stall of all ranks is a checkpoint that was not recorded. Chosen.
    unrecorded_confidence: float = 0.9


STOPS = StopThresholds()


def checkpoint_stalls(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield recorded checkpoints together with stalls that look like some."""
    stops, breaks = stops_s(job, checkpoints(job)), job.breaks
    recorded = longest_share(job, stops) >= STOPS.share
    still_s = stalled_s(job) + (0.0 if breaks is None else breaks.late_s.max(axis=(0, 2)))
    stalled = float(still_s.mean()) >= STOPS.share * job.unchanged_s
    if not recorded and not stalled:
        return
    lost_s = still_s * stalled + stops.max(axis=(0, 2)) * recorded
    figures = figures_of_stops(
        job, lost_s, *(("checkpoints", "a checkpoint") if recorded else ("all ranks stand still", "a stall"))
    )
    changes: list[Intervention] = [Scale(checkpoints(job), np.array(0.0))] if recorded else []
    changes += [NoStalls()] if stalled else []
    changes += [breaks.change] if stalled and breaks is not None else []
    few = _stop_the_others(job, stops, recorded=recorded, stalled=stalled)
    title = ALONE_TITLE if few else TOGETHER_TITLE
    slow = slow_at_shared_work(job, stops) if recorded and not stalled else ()
    if slow:
        yield _slow_at_checkpoints(kind, job, stops, slow)
    yield Candidate(
        kind,
        Place(),
        _effect(job, few, lost_s, figures, recorded=recorded),
        figures,
        confidence_from(figures) * (1.0 if recorded else STOPS.unrecorded_confidence),
        Together(tuple(changes)),
        1 + lost_s / job.unchanged_s,
        title=None if recorded else title,
        next_check=None if recorded else STALL_CHECK,
    )


def _slow_at_checkpoints(kind: str, job: PipelineSubject, stops: Floats, slow: tuple[Worker, ...]) -> Candidate:
    """Workers that take longer than their peers at a checkpoint that all write: they cost their excess."""
    factor = _at_pace_of_step(stops, job.cells_of(slow))
    excess_s = (stops * (1 - factor[:, 0])).max(axis=(0, 2))
    figures = figures_of_stops(job, excess_s, "checkpoints beyond those of the peers", "such a checkpoint")
    return Candidate(
        kind,
        Place(workers=slow),
        f"its checkpoints take up to {seconds(figures[2].value)} longer than those of its peers, in"
        f" {figures[1].value:,.0f} of {len(excess_s):,} steps",
        figures,
        confidence_from(figures),
        Scale(checkpoints(job), factor),
        1 + excess_s / job.unchanged_s,
        title="Checkpoints take longer on a worker than on its peers",
        suggested_fix="compare what {ranks} and a peer write to (bandwidth, load of the storage), and how large their"
        " shards are",
    )


def _effect(
    job: PipelineSubject, few: tuple[Worker, ...], lost_s: Floats, figures: tuple[Figure, ...], *, recorded: bool
) -> str:
    """What the checkpoints do. `lost_s`: seconds of each step; `few`: who stops the others."""
    if few:
        words = ("writes a checkpoint", "write checkpoints") if recorded else ("stands still", "stand still")
        return sentence_on_few(job, few, lost_s, *words)
    return (
        f"{'checkpoints take' if recorded else 'all ranks stand still for'} {figures[0].value:.0%} of the time, in"
        f" {figures[1].value:,.0f} of {len(lost_s):,} steps, up to {seconds(figures[2].value)}"
    )


def _stop_the_others(job: PipelineSubject, stops: Floats, *, recorded: bool, stalled: bool) -> tuple[Worker, ...]:
    """The workers for whose checkpoints, recorded or not, the others wait; empty if all stop together."""
    if recorded:
        return () if stalled else work_for_all(job, stops)
    breaks = job.breaks
    return () if breaks is None or stalled_s(job).any() else job.workers_where(breaks.alone)


@evidence(PipelineSubject)
def stalled_s(job: PipelineSubject) -> Floats:
    """Seconds in which no rank does anything, [steps]."""
    zeros = np.zeros(len(job.replay.graph.steps))
    return zeros if job.replay.stalled_s is None else job.replay.stalled_s


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
        if longest_share(job, stops) < STOPS.share:
            return
        lost_s = stops.max(axis=(0, 2))
        figures = figures_of_stops(job, lost_s, "evaluation", "an evaluation")
        slow = slow_at_shared_work(job, stops)
        few, rollouts = work_for_all(job, stops), bool((lost_s > 0).all())
        subject = "evaluation or rollouts take" if rollouts else "evaluation takes"
        effect = (
            f"{subject} {figures[0].value:.0%} of the time, in {figures[1].value:,.0f} of {len(lost_s):,} steps, up to"
            f" {seconds(figures[2].value)}{', longer than on its peers' if slow else ''}"
        )
        if few:
            effect = sentence_on_few(job, few, lost_s, "evaluates", "evaluate")
        yield Candidate(
            self.kind,
            Place(workers=slow),
            effect,
            figures,
            confidence_from(figures),
            Scale(evaluations(job), _at_pace_of_step(stops, job.cells_of(slow)) if slow else np.array(0.0)),
            1 + lost_s / job.unchanged_s,
            title="Evaluation takes longer on a worker than on its peers" if slow else None,
            next_check=ROLLOUT_CHECK if rollouts else None,
            suggested_fix=ROLLOUT_FIX if rollouts else None,
        )


def _at_pace_of_step(stops: Floats, workers: Bools) -> Floats:
    """The factor that takes these workers, [stages, dp_ranks], to what others of their stage take in the same step, as
    a grid.
    """
    usual = np.asarray(lower_median(stops, axis=-1))[..., None]
    return np.asarray(np.where(workers[:, None] & (stops > usual), usual / safe(stops), 1.0)[:, None])


class StepsSlowForAll(Detector):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the lower quartile of the computes
    of each step with that of the usual step: 4 %, and a likelihood against chance as for workers, with the noise of the
    other steps and of the computes within them. Of three steps, one may be slow; then only two show what is usual, so
    the confidence is at most one minus the share of slow steps.
    """

    kind = "slow-steps"
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = Advice(
        gpu="cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps",
        cpu="cluster power cap, CPU clocks over time (turbostat), compilation in warm-up steps",
    )
    suggested_fix = Advice(
        gpu="compare clocks and power caps of all GPUs in those steps with the others (DCGM_FI_DEV_SM_CLOCK); leave"
        " warm-up and compilation out of the trace",
        cpu="compare the clocks of all cores in those steps with the others (turbostat); leave warm-up and compilation"
        " out of the trace",
    )
    beyond_one_offs = False
    repair = Repair("steady-steps", "Keep all steps as fast as the usual one", "all steps as fast as the usual one")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        profile = job.profile
        if profile is None or len(profile.step) < TRACE_FAULTS.fewest_steps:
            return
        slow = (profile.slow_step > 1) & ~steps_with_stops(job)
        if job.pauses is not None and job.pauses.stopped.any():
            slow &= _slow_on(~job.pauses.stopped, job.table.grid)
        if not slow.any() or slow.mean() > 0.5:
            return
        figures = (
            Figure(
                "compute beyond that of the usual step",
                float(profile.step[slow].max()) - 1,
                COMPUTES.factor,
                Unit.SHARE,
            ),
            *chance_figures(profile.steps, np.array([True])),
        )
        steps = tuple(int(step) for step in job.replay.graph.steps[slow])
        change = Scale(job.table, 1 / np.where(slow, profile.slow_step, 1.0)[:, None])
        confidence = min(confidence_from(figures[:2]), 1 - float(slow.mean()))
        effect = (
            f"computes of {len(steps)} of {len(profile.step)} steps take up to {figures[0].value:.0%} longer than in"
            " the usual step, on all workers"
        )
        yield Candidate(self.kind, Place(steps=steps), effect, figures, confidence, change, profile.step)


def _slow_on(workers: Bools, grid: Floats) -> Bools:
    """In which steps these workers, [stages, dp_ranks], compute slower than in the usual step, [steps].

    `grid`: seconds, as in a `ComputeTable`.
    """
    times_s = np.moveaxis(grid, -1, 2)[:, workers]
    step = median(times_s / safe(median(times_s, (4,)))[..., None], (0, 1, 2, 3))
    return np.asarray(step / lower_median(step, 0) >= 1 + COMPUTES.factor)


def slow_at_shared_work(job: PipelineSubject, stops: Floats) -> tuple[Worker, ...]:
    """The workers that take much longer than the others for work that most workers do; empty if a few do it for all.

    If rank 0 alone writes checkpoints or evaluates, the job is designed that way: everybody waits, and nobody is slow.
    """
    return () if work_for_all(job, stops) else stopped_workers(job, stops)


def work_for_all(job: PipelineSubject, stops: Floats) -> tuple[Worker, ...]:
    """The workers that do the work while the others wait; empty if more than half of all workers do it."""
    does = np.asarray((stops > 0).any(axis=1))
    return job.workers_where(does) if 2 * does.sum() <= does.size else ()


def sentence_on_few(job: PipelineSubject, workers: tuple[Worker, ...], lost_s: Floats, does: str, do: str) -> str:
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
    hit = mean > max(STOPS.factor * usual, STOPS.share / 2 * job.unchanged_s)
    if hit.all() or 2 * hit.sum() > max(hit.size, 2):
        return ()
    with_stops = (stops > 0).any(axis=(0, 2))  # steps in which nobody stops say nothing about who does
    longer = (stops - stops.transpose(1, 0, 2)[:, ~hit].mean(axis=1)[:, None])[:, with_stops]
    steps = longer.shape[1]
    if steps < 2:
        return ()
    scatter = np.maximum(longer.var(axis=1, ddof=1), (SIGNIFICANCE.sigma * job.unchanged_s) ** 2)
    by_chance = Noise(scatter, freedom=steps - 1, spread=0.0, memory=0.0)
    return job.workers_where(hit & (by_chance.nats(longer.mean(axis=1), steps) >= needed_nats(hit.size)))


def figures_of_stops(job: PipelineSubject, lost_s: Floats, work: str, single: str) -> tuple[Figure, Figure, Figure]:
    """How much of the time, how often and how long at most. `lost_s`: seconds of each step."""
    return (
        Figure(f"{work}, over all steps", float(lost_s.mean()) / job.unchanged_s, STOPS.share, Unit.SHARE),
        Figure(f"steps with {single}", int((lost_s > 0).sum()), 0.0),
        Figure("longest", float(lost_s.max()), 0.0, Unit.SECONDS),
    )


def longest_share(job: PipelineSubject, stops: Floats) -> float:
    """How long the worst worker of each step is stopped, as a share of the step."""
    return float(stops.max(axis=(0, 2)).mean()) / job.unchanged_s


def chance_figures(episodes: Episodes, hit: Bools) -> tuple[Figure, ...]:
    """How unlikely these episodes are by chance, and how large the noise of the run is."""
    members = np.flatnonzero(hit.ravel())
    return (
        Figure("more likely slow than by chance", float(episodes.nats[members].min()), episodes.needed, Unit.NATS),
        Figure(NOISE, float(np.expm1(episodes.error[members].max())), 0.0, Unit.SHARE),
    )


def time_of_episodes(job: PipelineSubject, episodes: Episodes, member: int) -> TimePattern:
    """When a member is slow, as a time pattern."""
    steps = job.replay.graph.steps
    mask, since, period = episodes.slow[member], int(episodes.since[member]), int(episodes.period[member])
    shape, slow = TimeShape.TRANSIENT, tuple(int(step) for step in steps[mask])
    if episodes.rises[member]:
        shape, slow = TimeShape.DRIFTING, ()
    elif mask.all():
        shape, slow = TimeShape.PERSISTENT, ()
    elif period:
        shape = TimeShape.PERIODIC
    elif since:
        shape, slow = TimeShape.CHANGED, ()
    return TimePattern(
        shape=shape,
        statistic=number(episodes.nats[member]),
        needed=episodes.needed,
        since_step=int(steps[since]) if since and not period else None,
        period=period or None,
        slow_steps=slow,
    )


def network_time(job: PipelineSubject, series: Floats) -> TimePattern:
    """When the network is slow. `series`: by which factor, 1 if it is not, [steps]."""
    return time_of_episodes(job, episodes_of(np.log(series)[None], 2, fewest=1, remembers=False), 0)


def on_one_host(job: PipelineSubject) -> bool:
    """Whether nothing passes a network: copies within a host are held up by its cores or memory."""
    hosts = job.hosts
    return len(set(hosts.values())) == 1 and len(hosts) == len(job.dp_ranks) * job.stages
