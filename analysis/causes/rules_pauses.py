"""Rules for what stops a worker between or inside its ops: garbage collection, checkpoints, evaluation.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.attribution.patterns import pattern_of_series
from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.naming import Names
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Change, NoStalls, Scale, Together
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.off_cpu import LEAST_OF_LONGEST, stopped
from tracekit.analysis.evidence.paused_starts import as_peers
from tracekit.analysis.evidence.pauses import Pauses, stopped_cells
from tracekit.analysis.evidence.significance import SMALLEST_SIGMA, Bools, Noise, needed_nats
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.model import Worker
from tracekit.text import seconds

FEWEST_PAUSES = 2
#: Fewer unrecorded pauses than this may be chance.
FEWEST_UNRECORDED = 3
#: Price by replay only if the worst worker is stopped for this share of the step.
SMALLEST_STOP_SHARE = 0.02
#: An unrecorded stall of all ranks is probably a checkpoint; the confidence in that.
UNRECORDED_CONFIDENCE = 0.9
STALL_CHECK = (
    "what the loop does in these steps: its checkpoint and evaluation intervals against the period; record it as a span"
)
ROLLOUT_CHECK = (
    "what the loop does between model.eval() and model.train(): for rollouts, tokens per second, the longest sequence"
    " of a batch, and whether the inference engine batches continuously"
)
ROLLOUT_FIX = "generate rollouts with an inference engine on GPUs of its own, a step ahead; or fewer and shorter ones"
#: No more of a step than this is spent in stops.
MOST_STOPPED = 0.95
#: A worker stands out if it is stopped this many times as long as the usual one.
STOP_FACTOR = 2.0


def stops_s(evidence: Evidence, grid: OpGrid) -> Floats:
    """How long the ops of a grid stop each worker in each step, seconds, [stages, steps, dp_ranks]."""
    if grid.empty:
        return np.zeros((evidence.stages, len(evidence.replay.graph.steps), len(evidence.dp_ranks)))
    total: Floats = np.nan_to_num(grid.gather(evidence.replay.durations.cost)).sum(axis=1)
    return total


def stopped_by_kernel(evidence: Evidence) -> Bools:
    """Workers whose process is stopped in several steps, and much longer than the others', [stages, dp_ranks]."""
    stops = evidence.stopped_s.transpose(0, 2, 1)
    return stopped(stops.reshape(-1, stops.shape[2]), evidence.unchanged_s).reshape(stops.shape[:2])


def _stopped_workers(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
    """The workers that are stopped much longer than the others, beyond chance; empty if most are stopped alike."""
    mean = stops.mean(axis=1)
    usual = float(lower_median(mean.ravel(), 0))
    hit = mean > max(STOP_FACTOR * usual, SMALLEST_STOP_SHARE / 2 * evidence.unchanged_s)
    if hit.all() or 2 * hit.sum() > max(hit.size, 2):
        return ()
    those = (stops > 0).any(axis=(0, 2))  # steps in which nobody stops say nothing about who does
    longer = (stops - stops.transpose(1, 0, 2)[:, ~hit].mean(axis=1)[:, None])[:, those]
    steps = longer.shape[1]
    if steps < 2:
        return ()
    scatter = np.maximum(longer.var(axis=1, ddof=1), (SMALLEST_SIGMA * evidence.unchanged_s) ** 2)
    by_chance = Noise(scatter, freedom=steps - 1, spread=0.0, memory=0.0)
    return evidence.workers_where(hit & (by_chance.nats(longer.mean(axis=1), steps) >= needed_nats(hit.size)))


def _slow_at_it(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
    """Of work that most workers do, the workers that take much longer for it; empty if a few do it for all.

    If rank 0 alone writes checkpoints or evaluates, the job is designed that way: everybody waits, and nobody is slow.
    """
    return () if _do_it_for_all(evidence, stops) else _stopped_workers(evidence, stops)


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


def _figures_of_stops(evidence: Evidence, lost_s: Floats, what: str, one: str) -> tuple[Figure, Figure, Figure]:
    """How much of the time, how often and how long at most. `lost_s`: seconds of each step."""
    return (
        Figure(f"{what}, over all steps", float(lost_s.mean()) / evidence.unchanged_s, SMALLEST_STOP_SHARE, Unit.SHARE),
        Figure(f"steps with {one}", int((lost_s > 0).sum()), 0.0),
        Figure("longest", float(lost_s.max()), 0.0, Unit.SECONDS),
    )


def _longest_share(evidence: Evidence, stops: Floats) -> float:
    """How long the worst worker of each step is stopped, as a share of the step."""
    return float(stops.max(axis=(0, 2)).mean()) / evidence.unchanged_s


def _collections(share: float, where: Where) -> str:
    """What collections of garbage do, at the worst worker for this share of the step."""
    if where.workers:
        return f"Python's garbage collection takes {share:.0%} of the step"
    return f"ranks collect garbage, the worst for {share:.0%} of the step, and wait for each other"


class PythonGc(Rule):
    """Python's garbage collector stops a worker between its ops or during a forward.

    Paper: pauses hit forwards only (backwards are launched from C++), on different workers at different steps, and can
    get longer over time; found by hand. tracekit names collections that were recorded as ops, and pauses of forwards
    that spare backwards too often for chance (see `evidence.pauses`).
    """

    kind = CauseKind.PYTHON_GC
    title = "Python garbage collection stops workers"
    signature = (
        "recorded collections; or single long forwards, on other workers each time, whose backwards are not long"
    )
    refuted_by = "pauses also in backwards, or at the same microbatch on all workers"
    next_check = "gc.callbacks with a timer, or gc.freeze() and gc.disable() for a hundred steps: do the pauses go?"
    suggested_fix = "call gc.disable() on all ranks, then gc.collect() on all of them in the same step, every N steps"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        changes: list[Change] = []
        figures: list[Figure] = []
        effects: list[str] = []
        stops = stops_s(evidence, evidence.collections)
        where = Where()
        if _longest_share(evidence, stops) >= SMALLEST_STOP_SHARE:
            changes.append(Scale(evidence.collections, np.array(0.0)))
            share = Figure(
                "recorded collections of garbage, over the step",
                _longest_share(evidence, stops),
                SMALLEST_STOP_SHARE,
                Unit.SHARE,
            )
            figures.append(share)
            where = Where(workers=_stopped_workers(evidence, stops))
            effects.append(_collections(share.value, where))
        pause = pauses_in_forwards(evidence)
        if pause is not None:
            long = pause > 0
            factor = np.ones_like(pause)
            factor[long] = 1 - pause[long] / evidence.table.grid[long]
            changes.append(Scale(evidence.table, factor))
            paused = long[FORWARD].any(axis=(1, 2, 3))
            figures += [
                Figure("paused forwards", int(long[FORWARD].sum()), FEWEST_PAUSES),
                Figure("longest pause", float(pause.max()), 0.0, Unit.SECONDS),
            ]
            effects.append(
                f"{figures[-2].value:,.0f} forwards pause, up to {seconds(figures[-1].value)}, and no backwards,"
                " which points to Python's garbage collector"
            )
            if not stops.any():
                where = Where(workers=evidence.workers_where(paused)) if paused.sum() == 1 else Where()
        if changes:
            series = None if pause is None else _usual_pause(evidence, pause)
            yield Candidate(
                self.kind,
                where,
                "; ".join(effects),
                tuple(figures),
                confidence_from(tuple(figures[:1])),
                Together(tuple(changes)),
                series,
            )


def pauses_in_forwards(evidence: Evidence) -> Floats | None:
    """Seconds of each pause in a forward, in the shape of the table; None if not caused by the garbage collector."""
    pauses = evidence.pauses
    if pauses is None or not pauses.spare_backwards:
        return None
    seen = evidence.pauses_inside_computes
    if seen is not None and seen < pauses.forwards / 2:  # something else paused them
        return None
    pause = pauses.seconds.copy()
    pause[BACKWARD] = 0.0
    return pause


def _usual_pause(evidence: Evidence, pause: Floats) -> Floats:
    """The usual pause of each step over the step, so that a leak shows as a drift, whatever the number of pauses."""
    count = (pause[FORWARD] > 0).sum(axis=(0, 1, 2, 4))
    total = pause.sum(axis=(0, 1, 2, 3, 5))
    usual: Floats = np.where(count > 0, total / np.maximum(count, 1), total.sum() / count.sum())
    return 1 + usual / evidence.unchanged_s


def waited_for_a_core(evidence: Evidence, pauses_s: Floats) -> Bools:
    """Workers that paused no longer than they waited for a processor, [stages, dp_ranks]. `pauses_s`: shaped as the
    table.

    A process that somebody stops is not in the run queue.
    """
    mean_s = np.nansum(pauses_s, axis=(0, 2, 3, 4)) / pauses_s.shape[4]
    return np.asarray((mean_s > 0) & (mean_s <= evidence.run_queue_s))


class ProcessPauses(Rule):
    """Processes are stopped for a while: by the operating system, by throttling, by an unrecorded garbage collector.

    Paper: no signature. tracekit looks for computes prolonged by a fixed time: as long in forwards as in backwards of
    twice the length, whereas noise and slow GPUs act in proportion. Pauses of forwards only are those of Python's
    garbage collector. If a worker's process is stopped again and again, most of its computes are hit: they scatter four
    times as much as its peers', but the fastest are as fast as theirs, unlike those of a slow worker. Where the kernel
    counted how long the training thread neither ran nor was ready to, that decides. The trace does not show what stops
    the process; the next check says where to look.
    """

    kind = CauseKind.PROCESS_PAUSES
    title = "Processes pause"
    signature = "single computes, forwards and backwards, take longer by about the same time, whatever their length"
    refuted_by = "long computes are longer in proportion to what they compute"
    next_check = (
        "host: cgroup cpu.stat (nr_throttled), PSI cpu, steal, run queue, signals to the process (strace -e signal);"
        " gc.callbacks with a timer: is it Python's collector?"
    )
    suggested_fix = (
        "check nr_throttled in cpu.stat of the container of {ranks} on {hosts}: if it grows, raise the CPU limit; if"
        " not, find what stops the process (perf sched, strace -e signal, gc.callbacks)"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        pauses = evidence.pauses
        if pauses is None:
            return
        counted = stopped_by_kernel(evidence)
        if counted.any():
            yield self._counted(evidence, counted)
        hit = pauses.stopped & ~waited_for_a_core(evidence, np.maximum(evidence.table.grid - pauses.usual_s, 0.0))
        hit &= ~counted
        if hit.any():
            yield self._stopped(evidence, pauses, hit)
        count = pauses.forwards + pauses.backwards
        paused = (pauses.seconds > 0).any(axis=(0, 2, 3, 4))
        if not pauses.of_processes or waited_for_a_core(evidence, pauses.seconds)[paused].all():
            return
        lengths = pauses.seconds[pauses.seconds > 0]
        figures = (
            Figure("paused computes", count, FEWEST_UNRECORDED),
            Figure("usual pause", float(np.median(lengths)), 0.0, Unit.SECONDS),
        )
        factor = 1 - pauses.seconds / safe(evidence.table.grid)
        effect = (
            f"{count:,} computes pause by about {seconds(figures[1].value)} ({pauses.forwards:,} forwards,"
            f" {pauses.backwards:,} backwards)"
        )
        changes: list[Change] = [Scale(evidence.table, factor)]
        if evidence.paused_starts is not None:
            changes.append(evidence.paused_starts.change(~pauses.stopped))
        # No time pattern: pauses are random.
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures), Together(tuple(changes)))

    def _counted(self, evidence: Evidence, hit: Bools) -> Candidate:
        """The candidate for the workers in `hit`, [stages, dp_ranks], of which the kernel says how long they stood."""
        stops = np.where(hit[:, None], evidence.off_cpu_s, 0.0)
        busy_s = np.nansum(evidence.computing.gather(evidence.replay.durations.cost), axis=1)
        by_step = stops.max(axis=(0, 2))
        long = by_step[by_step > LEAST_OF_LONGEST * by_step.max()]
        figures = (
            Figure(
                "neither running nor ready to, over the step",
                float(by_step.mean()) / evidence.unchanged_s,
                SMALLEST_STOP_SHARE,
                Unit.SHARE,
            ),
            Figure("usual pause", float(np.median(long)), 0.0, Unit.SECONDS),
        )
        return Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"the process is stopped for {seconds(figures[1].value)} in {len(long)} of {len(by_step)} steps: its"
            " training thread neither runs nor waits for a processor",
            figures,
            confidence_from(figures[:1]),
            Scale(evidence.computing, (1 - np.minimum(stops / safe(busy_s), MOST_STOPPED))[:, None]),
            1 + by_step / evidence.unchanged_s,
            title="The process of a worker is stopped again and again",
        )

    def _stopped(self, evidence: Evidence, pauses: Pauses, hit: Bools) -> Candidate:
        """The candidate for the workers in `hit`, [stages, dp_ranks], whose processes are stopped again and again."""
        grid = evidence.table.grid
        mine = np.broadcast_to(stopped_cells(hit, grid.shape), grid.shape)
        beyond = np.where(mine, grid - pauses.usual_s, 0.0)
        factor = np.where(beyond > 0, pauses.usual_s / safe(grid), 1.0)
        share = float(beyond[mine].sum() / grid[mine].sum())
        figures = (
            Figure("computes beyond those of its peers, now and then", share, SMALLEST_STOP_SHARE, Unit.SHARE),
            Figure("usual pause", float(np.median(beyond[mine][beyond[mine] > 0.2 * beyond.max()])), 0.0, Unit.SECONDS),
        )
        changes: list[Change] = [Scale(evidence.table, factor)]
        for ops in (evidence.data_loads, evidence.host_work):
            if not ops.empty:
                changes.append(Scale(ops, as_peers(ops.gather(evidence.replay.durations.cost), hit)))
        if evidence.paused_starts is not None:
            changes.append(evidence.paused_starts.change(hit))
        return Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"the process is stopped about {seconds(figures[1].value)} at a time, for {share:.0%} of its compute time",
            figures,
            confidence_from(figures),
            Together(tuple(changes)),
            title="The process of a worker is stopped again and again",
        )


class Checkpoints(Rule):
    """Checkpoints stop workers while all others wait, or stop the whole job.

    Paper: leaves out steps with a checkpoint. tracekit names checkpoints that were recorded as ops and prices them by a
    replay without them. An unrecorded checkpoint shows as time in which no rank does anything, before anybody begins a
    step or between two steps: a tenth of the usual step or more, in some steps but not in most. Data that is late for
    all ranks is late in every step, and data that is late for some never stops the others. A period makes the stall a
    checkpoint (or an evaluation); without one, it is still named, with less confidence.
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
        stops = stops_s(evidence, evidence.checkpoints)
        recorded = _longest_share(evidence, stops) >= SMALLEST_STOP_SHARE
        stalled = float(evidence.stalled_s.mean()) >= SMALLEST_STOP_SHARE * evidence.unchanged_s
        if not recorded and not stalled:
            return
        lost_s = evidence.stalled_s * stalled + stops.max(axis=(0, 2)) * recorded
        figures = _figures_of_stops(
            evidence, lost_s, *(("checkpoints", "a checkpoint") if recorded else ("all ranks stand still", "a stall"))
        )
        series = 1 + lost_s / evidence.unchanged_s
        effect = (
            f"{'checkpoints take' if recorded else 'all ranks stand still for'} {figures[0].value:.0%} of the time, in"
            f" {figures[1].value:,.0f} of {len(lost_s):,} steps, up to {seconds(figures[2].value)}"
        )
        few = _do_it_for_all(evidence, stops) if recorded and not stalled else ()
        if few:
            effect = _said_of_few(evidence, few, lost_s, "writes a checkpoint", "write checkpoints")
        changes: list[Change] = [Scale(evidence.checkpoints, np.array(0.0))] if recorded else []
        changes += [NoStalls()] if stalled else []
        yield Candidate(
            self.kind,
            Where(workers=_slow_at_it(evidence, stops) if recorded and not stalled else ()),
            effect,
            figures,
            confidence_from(figures) * (1.0 if recorded else UNRECORDED_CONFIDENCE),
            Together(tuple(changes)),
            series,
            title=None if recorded else "All ranks stop together, as for a checkpoint that is not recorded",
            next_check=None if recorded else STALL_CHECK,
        )


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
        if _longest_share(evidence, stops) < SMALLEST_STOP_SHARE:
            return
        lost_s = stops.max(axis=(0, 2))
        figures = _figures_of_stops(evidence, lost_s, "evaluation", "an evaluation")
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
