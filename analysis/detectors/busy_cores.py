"""Training threads that wait for a processor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.patterns import TimePattern, pattern_of_series
from tracekit.analysis.detectors.detector import FINDINGS, Candidate, Detector, Repair
from tracekit.analysis.evidence.host_code import run_queue_s
from tracekit.analysis.evidence.off_cpu import WAITS, without_core_waits
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, computing
from tracekit.analysis.evidence.slow_workers import busy_s
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.robust import safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together
from tracekit.base.text import seconds
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, LossKind, Place, Unit, confidence_from
from tracekit.trace.model import Worker

#: Waits are followed over at most so many spans of steps.
MOST_SPANS = 48
#: Found in computes and optimizers without the waits of each step, where these are known.
WITHOUT_WAITS = frozenset({"bad-worker", "slow-optimizer"})


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
        busy = [host for host, here in cells.items() if waits_s[here].mean() >= SMALLEST_BLAMELESS_SHARE * step_s]
        if not busy:
            return
        waiting = np.any([cells[host] for host in busy], axis=0)
        wait_s, longest_s = float(waits_s[waiting].mean()), float(waits_s[waiting].max())
        figures = (
            Figure("waiting for a processor, over the step", wait_s / step_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
            Figure("longest wait", longest_s, 0.0, Unit.SECONDS),
        )
        on = "" if len(busy) == 1 else f" on {len(busy):,} hosts"
        effect = f"training threads{on} wait {seconds(wait_s)} of each step for a processor"
        if seconds(longest_s) != seconds(wait_s):
            effect += f", one of them {seconds(longest_s)}"
        change = without_run_queue(job, waiting)
        where = Place(host=busy[0]) if len(busy) == 1 else Place()
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
        of it.
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
            if not busy or beyond_waits or share < FINDINGS.most_of_price:
                figure = Figure("explained by waits for a processor", share, 0.0, Unit.SHARE)
                figures = (*candidate.evidence, figure) if round(share, 2) else candidate.evidence
                sure = candidate.confidence * (1 - share)
                remaining.append(structs.replace(candidate, evidence=figures, confidence=sure))
        return remaining


def _course(job: PipelineSubject, worker: Worker) -> tuple[TimePattern | None, float]:
    """Since when a worker waits for a processor, None if not since a step within the trace; and how much longer it
    takes then than before, 0.4 = 40 %.

    A thread without a processor waits in some of many short steps, so steps are taken together.
    """
    hit, steps, recorded_s = job.cells_of([worker]), job.steps, job.attribution.recorded
    if job.computes.queued_s is None:
        return None, _longer(float(run_queue_s(job)[hit].item()) / job.recorded_s)
    waits_s = job.computes.queued_s.transpose(0, 2, 1)[hit][0]
    first = np.unique(np.linspace(0, len(steps), MOST_SPANS, endpoint=False).astype(int))
    shares = np.add.reduceat(waits_s, first) / safe(np.add.reduceat(recorded_s, first))
    time = pattern_of_series(1 + shares, steps[first].tolist())
    on = np.asarray(steps >= (steps[0] if time.since_step is None else time.since_step))
    share, usual = (float(waits_s[part].sum() / safe(recorded_s[part].sum())) for part in (on, ~on))
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
