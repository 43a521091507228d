"""Training threads that do not run: garbage collection, processes that are stopped, waits for a processor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import replace

from tracekit.analysis.attribution.patterns import TimePattern, pattern_of_series
from tracekit.analysis.detectors.detector import FINDINGS, Candidate, Detector, Repair
from tracekit.analysis.detectors.stops import STOPS, longest_share, stopped_workers, stops_s
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.computes import Pauses, paused_share, stopped_cells
from tracekit.analysis.evidence.host_code import (
    HOST_CODE,
    process_stops_s,
    run_queue_s,
    steps_with_stops,
    stopped_processes,
)
from tracekit.analysis.evidence.off_cpu import WAITS, without_core_waits, without_stops
from tracekit.analysis.evidence.pipeline_subject import (
    PipelineSubject,
    all_ops,
    checkpoints,
    collections,
    communicating,
    computing,
    data_loads,
    evaluations,
    host_work,
)
from tracekit.analysis.evidence.slow_workers import busy_s
from tracekit.analysis.evidence.subject import Cause, Plan, Subject, evidence
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together, step_times
from tracekit.base.text import seconds
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, LossKind, Place, Unit, confidence_from
from tracekit.trace.model import OpKind, Worker

#: Intervals, in steps, at which to collect garbage; the first one that costs little enough is proposed.
GC_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
#: Waits are followed over at most so many spans of steps.
MOST_SPANS = 48
#: Findings that consist of recorded ops of the host, and these.
_HOST_WORK = {"python-gc": collections, "checkpoint-stalls": checkpoints, "evaluation": evaluations}
#: Found in computes and optimizers without the waits of each step, where these are known.
WITHOUT_WAITS = frozenset({"bad-worker", "slow-optimizer"})


class PauseThresholds(Struct, frozen=True):
    """When pauses inside computes, and collections of garbage, are named."""

    #: Pauses of forwards that spare backwards. Chosen: one may be anything.
    fewest_in_forwards: int = 2
    #: Other pauses that were not recorded. Chosen: fewer may be chance; `eventsim` finds them with it.
    fewest: int = 3
    #: Share of the step that collecting on all ranks may cost at the interval that is proposed. Chosen.
    collecting_share: float = 0.005
    #: Share of the steps in which a worker collects that does so in every one. Chosen: Python by itself does in few.
    every_step_share: float = 0.9
    #: Share of its own time that a worker can spend in stops. Definition: the rest of it computed.
    most_stopped: float = 0.95
    #: The shortest stop, seconds. Definition: the kernel counts microseconds.
    shortest_s: float = 1e-6


PAUSES = PauseThresholds()


def _in_every_step(job: PipelineSubject, stops: Floats, where: Place) -> bool:
    """Whether these workers collect garbage in nearly every step, which Python does not do by itself."""
    cells = [(worker.pp_rank, job.dp_index[worker.dp_rank]) for worker in where.workers]
    share = (stops > 0).mean(axis=1)
    return bool(cells) and all(share[cell] >= PAUSES.every_step_share for cell in cells)


def collections_of_workers(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield recorded collections of garbage together with pauses of forwards that spare backwards."""
    changes: list[Intervention] = []
    figures: list[Figure] = []
    effects: list[str] = []
    stops = stops_s(job, collections(job))
    where = Place()
    if longest_share(job, stops) >= STOPS.share:
        changes.append(Scale(collections(job), np.array(0.0)))
        share = Figure(
            "recorded collections of garbage, over the step", longest_share(job, stops), STOPS.share, Unit.SHARE
        )
        figures.append(share)
        where = Place(workers=stopped_workers(job, stops))
        effects.append(
            f"Python's garbage collection takes {share.value:.0%} of the step"
            if where.workers
            else f"ranks collect garbage, the worst for {share.value:.0%} of the step, and wait for each other"
        )
    pause = pauses_in_forwards(job)
    if pause is not None:
        long = pause > 0
        factor = np.ones_like(pause)
        factor[long] = 1 - pause[long] / job.table.grid[long]
        changes.append(Scale(job.table, factor))
        paused = long[FORWARD].any(axis=(1, 2, 3))
        figures += [
            Figure("paused forwards", int(long[FORWARD].sum()), PAUSES.fewest_in_forwards),
            Figure("longest pause", float(pause.max()), 0.0, Unit.SECONDS),
        ]
        effects.append(
            f"{figures[-2].value:,.0f} forwards pause, up to {seconds(figures[-1].value)}, and no backwards,"
            " which points to Python's garbage collector"
        )
        if not stops.any():
            only = job.workers_where(paused) if paused.sum() == 1 else ()
            where = Place(workers=only or stopped_workers(job, pause[FORWARD].sum(axis=(1, 2))))
    if changes:
        series = None if pause is None else _usual_pause(job, pause)
        yield Candidate(
            kind,
            where,
            "; ".join(effects),
            tuple(figures),
            confidence_from(tuple(figures[:1])),
            Together(tuple(changes)),
            series,
            every_step=_in_every_step(job, stops, where),
        )


def planned_collections(job: Subject, finding: Cause) -> Iterator[Plan] | None:
    """Collect garbage on all ranks in the same steps, at an interval that costs little; None for other jobs."""
    pauses_s = _pauses_s(job)
    return None if pauses_s is None else iter((_planned(job, finding, float(pauses_s.mean())),))


def pauses_in_forwards(job: PipelineSubject) -> Floats | None:
    """Seconds of each pause in a forward, in the shape of the table; None if not caused by garbage collection."""
    pauses = job.pauses
    if pauses is None or not pauses.spare_backwards:
        return None
    seen = pauses_inside_computes(job)
    if seen is not None and seen < pauses.forwards / 2:  # something else paused them
        return None
    pause = np.where(steps_with_stops(job)[:, None], 0.0, pauses.seconds)
    pause[BACKWARD] = 0.0
    return pause if pause.any() else None


def _usual_pause(job: PipelineSubject, pause: Floats) -> Floats:
    """The usual pause of each step over the step, so that a leak shows as a drift, whatever the number of pauses."""
    count = (pause[FORWARD] > 0).sum(axis=(0, 1, 2, 4))
    total = pause.sum(axis=(0, 1, 2, 3, 5))
    usual: Floats = np.where(count > 0, total / np.maximum(count, 1), total.sum() / count.sum())
    return 1 + usual / job.unchanged_s


def _planned(job: Subject, cause: Cause, pause_s: float) -> Plan:
    """No pauses in forwards; all ranks pause together once every N steps, for the length of an average pause."""
    step_s = job.measured_s
    most_s = PAUSES.collecting_share * step_s
    interval = next((count for count in GC_INTERVALS if pause_s / count <= most_s), GC_INTERVALS[-1])
    without = job.unchanged if cause.without_s is None else cause.without_s
    sweep = [
        {"every_steps": count, "new_step_s": step_s - job.unchanged_s + float(without.mean()) + pause_s / count}
        for count in GC_INTERVALS
    ]
    title = (
        f"Collect garbage on all ranks together every {interval} steps (gc.disable(), then gc.collect() in those steps)"
    )
    place = job.names.place(cause.where)
    if place is not None and cause.every_step:
        title = (
            f"Take out what collects garbage in every step on {place.words}"
            " (gc.collect() in the loop or a callback: py-spy dump); if it is Python itself, collect on all ranks"
            f" together every {interval} steps"
        )
    return Plan(
        "planned-gc",
        title,
        Place(),
        cause.change,
        step_times=cause.without_s,
        extra_s=pause_s / interval,
        details={"pause_s": pause_s, "every_steps": interval, "sweep": sweep, "assumes": "collections as long as now"},
        cause=cause,
    )


@evidence(PipelineSubject)
def _pauses_s(job: PipelineSubject) -> Floats:
    """Seconds of each garbage collection, recorded as an op or found as a pause of a forward."""
    between = np.empty(0) if collections(job).empty else collections(job).gather(job.replay.durations.cost)
    inside = pauses_in_forwards(job)
    within = np.empty(0) if inside is None else inside
    lengths_s: Floats = np.concatenate([between[between > 0], within[within > 0]])
    lockstep = job.lockstep
    # Perhaps only other ranks of workers collect.
    if not len(lengths_s) and lockstep is not None and lockstep.work_s is not None:
        of_ranks = lockstep.work_of((OpKind.GC,))
        lengths_s = of_ranks[of_ranks > 0]
    return lengths_s


@evidence(PipelineSubject)
def pauses_inside_computes(job: PipelineSubject) -> int | None:
    """The number of garbage collections seen inside computes; None if they were not recorded."""
    collected = job.trace.metadata.get("collect")
    nested = collected.get("nested") if isinstance(collected, dict) else None
    count = nested.get(str(OpKind.GC), 0) if isinstance(nested, dict) else None
    return count if isinstance(count, int) and 0 <= count < 2**53 else None


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
            Figure("paused computes", count, PAUSES.fewest),
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
            Scale(computing(job), (1 - np.minimum(stops / safe(busy_s), PAUSES.most_stopped))[:, None])
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
        by_step[by_step < PAUSES.shortest_s] = 0.0
        long = by_step[by_step > 0]
        figures = (
            Figure(
                "neither running nor ready to, over the step",
                float(by_step.mean()) / job.unchanged_s,
                STOPS.share,
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
            Figure("computes beyond those of its peers, now and then", share, STOPS.share, Unit.SHARE),
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


class BusyCores(Detector):
    """Training threads are ready to run but have no processor: more is running on the host than it has cores for.

    Paper: not seen, because the kernel was not asked. `tracekit collect` asks it once per step how long the training
    thread waited in the run queue. The wait is assumed to affect all of a worker's own activity in proportion, or,
    where the waits of each step are known, what is longer in that step than in others.
    """

    kind = "busy-cores"
    title = "Training threads wait for a processor"
    signature = "the kernel counts time in which the training threads of a host were ready to run and had no core"
    refuted_by = "the waits stay with nothing else on the host and one core for each training thread"
    next_check = (
        "top, and the CPU limit of the container (cpu.stat: nr_throttled); OMP_NUM_THREADS and loader workers times"
        " ranks against the cores; other jobs on the host"
    )
    suggested_fix = (
        "lower OMP_NUM_THREADS and the number of loader workers on {hosts} until all threads have a core; raise the CPU"
        " limit if cpu.stat shows nr_throttled"
    )
    part_of_machine = "process"
    loss = LossKind.HOST
    lost_to = "are lost to busy cores"
    repair = Repair("free-cores", "Give each training thread a core of its own", "a core for each training thread")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        waits_s, step_s = run_queue_s(job), job.recorded_s
        if not waits_s.any():
            return
        workers: defaultdict[str, list[Worker]] = defaultdict(list)
        for worker, host in job.hosts.items():
            if worker.dp_rank in job.dp_index:
                workers[host].append(worker)
        cells = {host: job.cells_of(workers[host]) for host in sorted(workers)}
        busy = [host for host, mask in cells.items() if waits_s[mask].mean() >= SMALLEST_BLAMELESS_SHARE * step_s]
        if not busy:
            return
        waiting = np.any([cells[host] for host in busy], axis=0)
        where, named = Place(host=busy[0]) if len(busy) == 1 else Place(), waiting
        few = _with_nearly_all(waits_s * waiting)
        if 2 * few.sum() <= waiting.sum():
            where, named = Place(workers=job.workers_where(few)), few
        wait_s, longest_s = float(waits_s[named].mean()), float(waits_s[named].max())
        figures = (
            Figure("waiting for a processor, over the step", wait_s / step_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
            Figure("longest wait", longest_s, 0.0, Unit.SECONDS),
        )
        on = "" if len(busy) == 1 else f" on {len(busy):,} hosts"
        effect = f"training threads{on} wait {seconds(wait_s)} of each step for a processor"
        if seconds(longest_s) != seconds(wait_s):
            effect += f", one of them {seconds(longest_s)}"
        change = without_run_queue(job, waiting)
        slowest = job.worker(*divmod(int(np.where(waiting, waits_s, -1.0).argmax()), waits_s.shape[1]))
        time, excess = _course(job, slowest)
        yield Candidate(
            self.kind,
            where,
            effect,
            figures,
            confidence_from(figures),
            change,
            time=time,
            excess=excess,
            slowest=slowest,
        )

    def review(self, job: PipelineSubject, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Make candidates less sure by the share of their price that goes with the waits for a processor.

        A thread without a processor is slow at whatever it does. A candidate gives way to busy cores that explain most
        of it, unless it is host work that was recorded: such work is done, however long the thread waits in it.
        """
        if not run_queue_s(job).any():
            return candidates
        free = without_run_queue(job, np.ones(run_queue_s(job).shape, np.bool_))
        busy = any(candidate.kind == self.kind for candidate in candidates)
        remaining = []
        for candidate in candidates:
            share = 0.0
            if candidate.change is not None and candidate.kind != self.kind:
                share = job.explained(candidate.change, free)
            beyond_waits = job.computes.queued_s is not None and candidate.kind in WITHOUT_WAITS
            work = _HOST_WORK.get(candidate.kind)
            recorded = work is not None and not work(job).empty
            if not busy or beyond_waits or recorded or share < FINDINGS.most_of_price:
                figure = Figure("explained by waits for a processor", share, 0.0, Unit.SHARE)
                figures = (*candidate.evidence, figure) if round(share, 2) else candidate.evidence
                sure = candidate.confidence * (1 - share)
                remaining.append(structs.replace(candidate, evidence=figures, confidence=sure))
        return remaining


def _with_nearly_all(waits_s: Floats) -> Bools:
    """The fewest workers with nearly all waits; both [stages, dp_ranks]."""
    order = np.argsort(-waits_s, axis=None, kind="stable")
    shares = np.cumsum(waits_s.ravel()[order]) / waits_s.sum()
    few = np.zeros(waits_s.size, np.bool_)
    few[order[: int(np.searchsorted(shares, HOST_CODE.of_few_share)) + 1]] = True
    return few.reshape(waits_s.shape)


def _course(job: PipelineSubject, worker: Worker) -> tuple[TimePattern | None, float]:
    """Since when a worker waits for a processor, None if not since a step within the trace; and how much longer it
    takes then than before, 0.4 = 40 %.

    A thread without a processor waits in some of many short steps, so steps are taken together.
    """
    hit, steps, recorded_s = job.cells_of([worker]), job.steps, job.attribution.recorded
    if job.computes.queued_s is None:
        return None, _longer(float(run_queue_s(job)[hit].item()) / job.recorded_s)
    waits_s = job.computes.queued_s.transpose(0, 2, 1)[hit][0]
    time = pattern_of_series(1 + waits_s / safe(recorded_s), steps.tolist())
    if time.period is not None:
        return time, _longer(float(waits_s.sum() / safe(recorded_s.sum())))
    first = np.unique(np.linspace(0, len(steps), MOST_SPANS, endpoint=False).astype(int))
    shares = np.add.reduceat(waits_s, first) / safe(np.add.reduceat(recorded_s, first))
    time = pattern_of_series(1 + shares, steps[first].tolist())
    after = np.asarray(steps >= (steps[0] if time.since_step is None else time.since_step))
    share, usual = (float(waits_s[part].sum() / safe(recorded_s[part].sum())) for part in (after, ~after))
    if time.since_step is None or share < usual:
        return None, _longer(float(waits_s.sum() / safe(recorded_s.sum())))
    return time, _longer(share, usual)


def _longer(share: float, usual: float = 0.0) -> float:
    """How much longer work takes that waits for this share of the time, and usually for that one."""
    return (share - usual) / (1 - min(share, WAITS.share))


def without_run_queue(job: PipelineSubject, workers: Bools) -> Intervention:
    """The job in which the workers `here`, [stages, dp_ranks], never wait for a processor."""
    if job.computes.queued_s is not None:
        waits_s = np.where(workers[:, None], job.computes.queued_s, 0.0)
        return without_core_waits(computing(job), job.replay.durations.cost, waits_s)
    share = 1 - np.minimum(run_queue_s(job) / safe(busy_s(job)), WAITS.share)
    factor = np.where(workers, share, 1.0)[:, None, None, :]
    return Together((Scale(computing(job), factor), ScaleDelays(computing(job), factor)))
