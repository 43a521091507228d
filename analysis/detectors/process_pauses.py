"""Processes that the operating system, or something else, stops for a while."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.stops import SMALLEST_STOP_SHARE
from tracekit.analysis.evidence.grids import all_ops, communicating, computing, data_loads, host_work
from tracekit.analysis.evidence.off_cpu import without_stops
from tracekit.analysis.evidence.paused_starts import paused_share
from tracekit.analysis.evidence.pauses import Pauses, stopped_cells
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.scheduler import process_stops_s, run_queue_s, steps_with_stops, stopped_processes
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together, step_times
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.report.verdict import LossKind

#: Fewer unrecorded pauses than this may be chance.
FEWEST_UNRECORDED = 3
#: At most this share of a worker's own time can be spent in stops.
MOST_STOPPED = 0.95
#: No stop is shorter, seconds: the kernel counts microseconds.
NEGLIGIBLE_S = 1e-6


def waited_for_a_core(job: PipelineSubject, pauses_s: Floats) -> Bools:
    """Workers that paused no longer than they waited for a processor, [stages, dp_ranks]. `pauses_s`: shaped as the
    table.

    A stopped process is not in the run queue.
    """
    mean_s = np.nansum(pauses_s, axis=(0, 2, 3, 4)) / pauses_s.shape[4]
    return np.asarray((mean_s > 0) & (mean_s <= run_queue_s(job)))


class ProcessPauses(Detector):
    """Processes are stopped for a while: by the operating system, by throttling, by an unrecorded garbage collector.

    Paper: no signature. tracekit looks for computes prolonged by a fixed time: as long in forwards as in backwards of
    twice the length, whereas noise and slow GPUs act in proportion. Pauses of forwards only are those of Python's
    garbage collector. If a worker's process is stopped again and again, most of its computes are hit: they scatter four
    times as much as its peers', but the fastest are as fast as theirs, unlike those of a slow worker. Where the kernel
    counted how long the training thread neither ran nor was ready to, that decides. The trace does not show what stops
    the process; the next check says where to look.
    """

    kind = "process-pauses"
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
    part = "process"
    loss = LossKind.STALLS
    stragglers_where_few = True
    by_chance = True
    counted = True
    repair = Repair("stop-pauses", "Remove the pauses of the process")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        pauses = job.pauses
        if pauses is None:
            return
        counted = stopped_processes(job)
        if counted.any():
            yield self._counted(job, counted)
        hit = pauses.stopped & ~waited_for_a_core(job, np.maximum(job.table.grid - pauses.usual_s, 0.0))
        hit &= ~counted
        if hit.any():
            yield self._stopped(job, pauses, hit)
        pauses = replace(pauses, seconds=np.where(steps_with_stops(job)[:, None], 0.0, pauses.seconds))
        count = pauses.forwards + pauses.backwards
        paused = (pauses.seconds > 0).any(axis=(0, 2, 3, 4))
        if not pauses.of_processes or waited_for_a_core(job, pauses.seconds)[paused].all():
            return
        lengths = pauses.seconds[pauses.seconds > 0]
        figures = (
            Figure("paused computes", count, FEWEST_UNRECORDED),
            Figure("usual pause", float(np.median(lengths)), 0.0, Unit.SECONDS),
        )
        factor = 1 - pauses.seconds / safe(job.table.grid)
        effect = (
            f"{count:,} computes pause by about {seconds(figures[1].value)} ({pauses.forwards:,} forwards,"
            f" {pauses.backwards:,} backwards)"
        )
        changes: list[Intervention] = [Scale(job.table, factor)]
        if job.paused_starts is not None:
            changes.append(job.paused_starts.change(~pauses.stopped))
        # No time pattern: pauses are random.
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), Together(tuple(changes)))

    def _counted(self, job: PipelineSubject, hit: Bools) -> Candidate:
        """The candidate for the workers in `hit`, [stages, dp_ranks], whose stops the kernel counted."""
        stops = process_stops_s(job)
        busy_s = np.nansum(computing(job).gather(job.replay.durations.cost), axis=1)
        lasts_s = stops[stops > 0]
        usual_and_longest_s = float(np.median(lasts_s)), float(lasts_s.max())
        changes: list[Intervention] = [
            Scale(computing(job), (1 - np.minimum(stops / safe(busy_s), MOST_STOPPED))[:, None])
        ]
        # Who transfers with a stopped worker is in its stage or in its DP rank.
        others = np.asarray(hit.any(axis=1, keepdims=True) | hit.any(axis=0, keepdims=True))
        for ops, taking_part in ((data_loads(job), hit), (communicating(job), others)):
            if not ops.empty:
                took_s = ops.gather(job.replay.durations.cost)
                changes.append(Scale(ops, without_stops(took_s, taking_part, usual_and_longest_s)))
        late_s = all_ops(job).gather(job.replay.durations.launch_delay)
        changes.append(ScaleDelays(all_ops(job), without_stops(late_s, hit, usual_and_longest_s)))
        change = Together(tuple(changes))
        # A step that gets shorter without them has a stop, even one that the kernel could not tell from other waits.
        saved_s = job.unchanged - step_times(job.replay, (change,))
        by_step = np.maximum(stops.max(axis=(0, 2)), saved_s.clip(min=0))
        by_step[by_step < NEGLIGIBLE_S] = 0.0
        long = by_step[by_step > 0]
        figures = (
            Figure(
                "neither running nor ready to, over the step",
                float(by_step.mean()) / job.unchanged_s,
                SMALLEST_STOP_SHARE,
                Unit.SHARE,
            ),
            Figure("usual pause", usual_and_longest_s[0], 0.0, Unit.SECONDS),
        )
        return Candidate(
            self.kind,
            Place(workers=job.workers_where(hit)),
            f"the process is stopped for {seconds(float(long.mean()))} in {len(long)} of {len(by_step)} steps: its"
            " training thread neither runs nor waits for a processor",
            figures,
            confidence_from(figures[:1]),
            change,
            1 + by_step / job.unchanged_s,
            title="The process of a worker is stopped again and again",
            excess=figures[0].value / (1 - figures[0].value),
        )

    def _stopped(self, job: PipelineSubject, pauses: Pauses, hit: Bools) -> Candidate:
        """The candidate for the workers in `hit`, [stages, dp_ranks], whose processes are stopped again and again."""
        grid = job.table.grid
        cells = np.broadcast_to(stopped_cells(hit, grid.shape), grid.shape)
        beyond = np.where(cells, grid - pauses.usual_s, 0.0)
        factor = np.where(beyond > 0, pauses.usual_s / safe(grid), 1.0)
        share = float(beyond[cells].sum() / grid[cells].sum())
        figures = (
            Figure("computes beyond those of its peers, now and then", share, SMALLEST_STOP_SHARE, Unit.SHARE),
            Figure("usual pause", float(np.median(pauses.stops_s)), 0.0, Unit.SECONDS),
        )
        changes: list[Intervention] = [Scale(job.table, factor)]
        for ops in (data_loads(job), host_work(job)):
            if not ops.empty:
                share_of_op = paused_share(ops.gather(job.replay.durations.cost), pauses)
                changes.append(Scale(ops, 1 - share_of_op * hit[:, None, None]))
        if job.paused_starts is not None:
            changes.append(job.paused_starts.change(hit))
        return Candidate(
            self.kind,
            Place(workers=job.workers_where(hit)),
            f"the process is stopped about {seconds(figures[1].value)} at a time, for {share:.0%} of its compute time",
            figures,
            confidence_from(figures),
            Together(tuple(changes)),
            title="The process of a worker is stopped again and again",
            excess=share / (1 - share),
        )
