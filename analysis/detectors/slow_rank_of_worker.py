"""One rank of a worker that is late for the others at each of their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.remedies import SLOW_RANK, Advice
from tracekit.analysis.detectors.slow_host_code import SMALLEST_HOST_SHARE
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes.plan import SPEED_OF_PEERS
from tracekit.analysis.numeric.arrays import Bools
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.trace.model import OpKind

#: What makes a rank late besides computing: the kinds of op, and what they are in words.
PARTS_OF_RANKS: Mapping[str, tuple[tuple[OpKind, ...], str]] = {
    "slow-host-code": ((OpKind.HOST_DELAY, OpKind.LOSS), "host code"),
    "slow-optimizer": ((OpKind.OPTIMIZER,), "the optimizer"),
    "late-data-loading": ((OpKind.DATA_LOAD,), "data loading"),
    "python-gc": ((OpKind.GC,), "garbage collection"),
}


def late_ranks(job: PipelineSubject) -> dict[str, Bools]:
    """Ranks that hold up their worker by something other than computing, and when, [workers, ranks, steps] each; only
    the kinds that the trace records for each rank.
    """
    lockstep = job.lockstep
    if lockstep is None or lockstep.work_s is None:
        return {}
    by_kind = {"process-pauses": lockstep.stopped(job.unchanged_s)[0]}
    for kind, (ops, _) in PARTS_OF_RANKS.items():
        episodes = lockstep.late_by(ops, job.unchanged_s, len(PARTS_OF_RANKS))
        hit = episodes.on & episodes.significant(SMALLEST_HOST_SHARE)[:, None]
        by_kind[kind] = np.asarray(hit.reshape(lockstep.beyond_s(ops).shape))
    return {kind: late for kind, late in by_kind.items() if late.any()}


class SlowRankOfWorker(Detector):
    """One rank of a worker is late for the others at each of their collectives.

    Paper: tensor-parallel ranks run in lockstep, only one of them is recorded, and a slow one slows down its worker.
    tracekit subtracts from every op the time that each rank waited inside it, and compares the rest. It names a rank
    that computes longer than its peers by more than their noise explains; once fixed, the worker is as fast as its
    slowest other rank.
    """

    kind = "slow-rank-of-worker"
    title = "One rank of a worker is slow; its tensor- and context-parallel peers wait for it"
    signature = "the other ranks of the worker wait for it inside their ops, and it waits for none"
    refuted_by = "the others wait as long after it has changed its node with one of them"
    next_check = Advice(
        gpu="what the rank does between its collectives: clock and throttling of its GPU, its CPU cores, user code",
        cpu="what the rank does between its collectives: its CPU cores, user code",
    )
    suggested_fix = SLOW_RANK
    part = "compute"
    repair = Repair("replace-workers", "Make the rank as fast as the other ranks of its worker", SPEED_OF_PEERS)

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        lockstep = job.lockstep
        if lockstep is None:
            return
        late_by_kind = late_ranks(job)
        slow = lockstep.slow(SMALLEST_FACTOR)
        if (stopped := late_by_kind.get("process-pauses")) is not None:
            slow &= ~stopped.any(axis=2, keepdims=True)
        for worker in np.flatnonzero(slow.any(axis=(1, 2))):
            of_worker = np.zeros_like(slow)
            of_worker[worker] = slow[worker]
            yield self._candidate(job, lockstep, of_worker)
        for kind, late in late_by_kind.items():
            yield from self._late(job, lockstep, kind, late)

    def _late(self, job: PipelineSubject, lockstep: Lockstep, kind: str, late: Bools) -> Iterator[Candidate]:
        """Ranks that hold up their worker by something other than computing, one candidate per worker."""
        if kind == "process-pauses":
            beyond_s = lockstep.stopped(job.unchanged_s)[1]
        else:
            beyond_s = lockstep.beyond_s(PARTS_OF_RANKS[kind][0])
        for worker in np.flatnonzero(late.any(axis=(1, 2))):
            of_worker = np.zeros_like(late)
            of_worker[worker] = late[worker]
            positions, steps = np.flatnonzero(late[worker].any(axis=1)), late[worker].any(axis=0)
            longer_s = float(beyond_s[of_worker].mean())
            figures = (
                Figure(
                    "longer than its peers, over the step",
                    longer_s / job.unchanged_s,
                    SMALLEST_HOST_SHARE,
                    Unit.SHARE,
                ),
            )
            numbers = lockstep.ranks[worker]
            where = (
                Place(workers=(lockstep.workers[worker],))
                if numbers is None
                else Place(ranks=tuple(numbers[at] for at in positions))
            )
            if kind == "process-pauses":
                when = f"in {int(steps.sum())} of {len(steps)} steps"
                effect = (
                    f"the process is stopped for {seconds(longer_s)} {when}; the other ranks of the worker wait for it"
                )
            else:
                longer = f"{PARTS_OF_RANKS[kind][1]} takes {seconds(longer_s)} longer"
                effect = f"{longer} than on the other ranks of the worker, which wait for it"
            series = np.where(steps, 1 + longer_s / job.unchanged_s, 1.0)
            change = lockstep.on_time(of_worker, beyond_s)
            yield Candidate(kind, where, effect, figures, confidence_from(figures), change, series)

    def _candidate(self, job: PipelineSubject, lockstep: Lockstep, slow: np.ndarray) -> Candidate:
        (worker,) = np.flatnonzero(slow.any(axis=(1, 2)))
        positions = np.flatnonzero(slow[worker].any(axis=1))
        steps = slow[worker].any(axis=0)
        gained = np.bincount(lockstep.step, lockstep.held_up_s(slow), minlength=len(steps))
        episodes, members = lockstep.episodes, worker * slow.shape[1] + positions
        excess, noise = float(np.expm1(episodes.level[members]).max()), float(episodes.error[members].max())
        figures = (
            Figure("computing beyond its peers", excess, SMALLEST_FACTOR, Unit.SHARE),
            Figure("more likely slow than by chance", float(episodes.nats[members].min()), episodes.needed, Unit.NATS),
        )
        numbers = lockstep.ranks[worker]
        if numbers is None:
            where = Place(workers=(lockstep.workers[worker],))
            who = f"its rank at position {', '.join(map(str, positions))} computes"
        else:
            where, who = Place(ranks=tuple(numbers[at] for at in positions)), "computes"
        waits = seconds(float(gained[steps].mean()))
        effect = (
            f"{who} {excess:.0%} slower than its peers in the worker; they wait {waits} of each step for it, and noise"
            f" alone makes {noise:.0%}"
        )
        series = 1 + gained / job.unchanged_s
        change = lockstep.as_fast_as_peers(slow)
        confidence = confidence_from(figures)
        return Candidate(self.kind, where, effect, figures, confidence, change, series, excess=excess)
