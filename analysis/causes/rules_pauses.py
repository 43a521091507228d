"""Rules for what stops a worker between or inside its ops: garbage collection, and whatever stops its process.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Change, Scale, ScaleDelays, Together, step_times_with
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.off_cpu import without_stops
from tracekit.analysis.evidence.paused_starts import paused_share
from tracekit.analysis.evidence.pauses import Pauses, stopped_cells
from tracekit.analysis.evidence.significance import SMALLEST_SIGMA, Noise, needed_nats
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.base.text import seconds
from tracekit.trace.model import Worker

FEWEST_PAUSES = 2
#: Fewer unrecorded pauses than this may be chance.
FEWEST_UNRECORDED = 3
#: Price by replay only if the worst worker is stopped for this share of the step.
SMALLEST_STOP_SHARE = 0.02
#: At most this share of a worker's own time can be spent in stops.
MOST_STOPPED = 0.95
#: No stop is shorter, seconds: the kernel counts microseconds.
NEGLIGIBLE_S = 1e-6
#: A worker stands out if it is stopped this many times as long as the usual one.
STOP_FACTOR = 2.0
#: What stops a worker does so in every step if it does in this share of them.
EVERY_STEP_SHARE = 0.9


def stops_s(evidence: Evidence, grid: OpGrid) -> Floats:
    """How long the ops of a grid stop each worker in each step, seconds, [stages, steps, dp_ranks]."""
    if grid.empty:
        return np.zeros((evidence.stages, len(evidence.replay.graph.steps), len(evidence.dp_ranks)))
    total: Floats = np.nan_to_num(grid.gather(evidence.replay.durations.cost)).sum(axis=1)
    return total


def stopped_workers(evidence: Evidence, stops: Floats) -> tuple[Worker, ...]:
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


def figures_of_stops(evidence: Evidence, lost_s: Floats, what: str, one: str) -> tuple[Figure, Figure, Figure]:
    """How much of the time, how often and how long at most. `lost_s`: seconds of each step."""
    return (
        Figure(f"{what}, over all steps", float(lost_s.mean()) / evidence.unchanged_s, SMALLEST_STOP_SHARE, Unit.SHARE),
        Figure(f"steps with {one}", int((lost_s > 0).sum()), 0.0),
        Figure("longest", float(lost_s.max()), 0.0, Unit.SECONDS),
    )


def longest_share(evidence: Evidence, stops: Floats) -> float:
    """How long the worst worker of each step is stopped, as a share of the step."""
    return float(stops.max(axis=(0, 2)).mean()) / evidence.unchanged_s


def _collections(share: float, where: Where) -> str:
    """What collections of garbage do, at the worst worker for this share of the step."""
    if where.workers:
        return f"Python's garbage collection takes {share:.0%} of the step"
    return f"ranks collect garbage, the worst for {share:.0%} of the step, and wait for each other"


def _in_every_step(evidence: Evidence, stops: Floats, where: Where) -> bool:
    """Whether these workers collect garbage in nearly every step, which Python does not do by itself."""
    cells = [(worker.pp_rank, evidence.dp_index[worker.dp_rank]) for worker in where.workers]
    return bool(cells) and all((stops[stage, :, at] > 0).mean() >= EVERY_STEP_SHARE for stage, at in cells)


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
        if longest_share(evidence, stops) >= SMALLEST_STOP_SHARE:
            changes.append(Scale(evidence.collections, np.array(0.0)))
            share = Figure(
                "recorded collections of garbage, over the step",
                longest_share(evidence, stops),
                SMALLEST_STOP_SHARE,
                Unit.SHARE,
            )
            figures.append(share)
            where = Where(workers=stopped_workers(evidence, stops))
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
                only = evidence.workers_where(paused) if paused.sum() == 1 else ()
                where = Where(workers=only or stopped_workers(evidence, pause[FORWARD].sum(axis=(1, 2))))
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
                every_step=_in_every_step(evidence, stops, where),
            )


def pauses_in_forwards(evidence: Evidence) -> Floats | None:
    """Seconds of each pause in a forward, in the shape of the table; None if not caused by the garbage collector."""
    pauses = evidence.pauses
    if pauses is None or not pauses.spare_backwards:
        return None
    seen = evidence.pauses_inside_computes
    if seen is not None and seen < pauses.forwards / 2:  # something else paused them
        return None
    pause = np.where(evidence.steps_with_stops[:, None], 0.0, pauses.seconds)
    pause[BACKWARD] = 0.0
    return pause if pause.any() else None


def _usual_pause(evidence: Evidence, pause: Floats) -> Floats:
    """The usual pause of each step over the step, so that a leak shows as a drift, whatever the number of pauses."""
    count = (pause[FORWARD] > 0).sum(axis=(0, 1, 2, 4))
    total = pause.sum(axis=(0, 1, 2, 3, 5))
    usual: Floats = np.where(count > 0, total / np.maximum(count, 1), total.sum() / count.sum())
    return 1 + usual / evidence.unchanged_s


def waited_for_a_core(evidence: Evidence, pauses_s: Floats) -> Bools:
    """Workers that paused no longer than they waited for a processor, [stages, dp_ranks]. `pauses_s`: shaped as the
    table.

    A stopped process is not in the run queue.
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
        counted = evidence.stopped_processes
        if counted.any():
            yield self._counted(evidence, counted)
        hit = pauses.stopped & ~waited_for_a_core(evidence, np.maximum(evidence.table.grid - pauses.usual_s, 0.0))
        hit &= ~counted
        if hit.any():
            yield self._stopped(evidence, pauses, hit)
        pauses = replace(pauses, seconds=np.where(evidence.steps_with_stops[:, None], 0.0, pauses.seconds))
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
        """The candidate for the workers in `hit`, [stages, dp_ranks], whose stops the kernel counted."""
        stops = evidence.process_stops_s
        busy_s = np.nansum(evidence.computing.gather(evidence.replay.durations.cost), axis=1)
        lasts_s = stops[stops > 0]
        usual_and_longest_s = float(np.median(lasts_s)), float(lasts_s.max())
        changes: list[Change] = [
            Scale(evidence.computing, (1 - np.minimum(stops / safe(busy_s), MOST_STOPPED))[:, None])
        ]
        # Who transfers with a stopped worker is in its stage or in its DP rank.
        others = np.asarray(hit.any(axis=1, keepdims=True) | hit.any(axis=0, keepdims=True))
        for ops, taking_part in ((evidence.data_loads, hit), (evidence.communicating, others)):
            if not ops.empty:
                took_s = ops.gather(evidence.replay.durations.cost)
                changes.append(Scale(ops, without_stops(took_s, taking_part, usual_and_longest_s)))
        late_s = evidence.all_ops.gather(evidence.replay.durations.launch_delay)
        changes.append(ScaleDelays(evidence.all_ops, without_stops(late_s, hit, usual_and_longest_s)))
        change = Together(tuple(changes))
        # A step that gets shorter without them has a stop, even one that the kernel could not tell from other waits.
        saved_s = evidence.unchanged - step_times_with(evidence.replay, (change,))
        by_step = np.maximum(stops.max(axis=(0, 2)), saved_s.clip(min=0))
        by_step[by_step < NEGLIGIBLE_S] = 0.0
        long = by_step[by_step > 0]
        figures = (
            Figure(
                "neither running nor ready to, over the step",
                float(by_step.mean()) / evidence.unchanged_s,
                SMALLEST_STOP_SHARE,
                Unit.SHARE,
            ),
            Figure("usual pause", usual_and_longest_s[0], 0.0, Unit.SECONDS),
        )
        return Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"the process is stopped for {seconds(float(long.mean()))} in {len(long)} of {len(by_step)} steps: its"
            " training thread neither runs nor waits for a processor",
            figures,
            confidence_from(figures[:1]),
            change,
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
            Figure("usual pause", float(np.median(pauses.stops_s)), 0.0, Unit.SECONDS),
        )
        changes: list[Change] = [Scale(evidence.table, factor)]
        for ops in (evidence.data_loads, evidence.host_work):
            if not ops.empty:
                share_of_op = paused_share(ops.gather(evidence.replay.durations.cost), pauses)
                changes.append(Scale(ops, 1 - share_of_op * hit[:, None, None]))
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
