"""Rules for the ranks inside a worker: tensor- and context-parallel ranks, which compute in lockstep.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tracekit.analysis.causes.model import (
    SMALLEST_BLAMELESS_SHARE,
    Candidate,
    CauseKind,
    Figure,
    Unit,
    Where,
    confidence_from,
)
from tracekit.analysis.causes.remedies import SLOW_RANK
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.causes.rules_host import SMALLEST_HOST_SHARE
from tracekit.analysis.evidence.changes import step_times_with
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.numeric.arrays import Bools
from tracekit.base.text import seconds
from tracekit.trace.model import OpKind

#: What makes a rank late besides computing: the kinds of op, and what they are in words.
_PARTS: Mapping[CauseKind, tuple[tuple[OpKind, ...], str]] = {
    CauseKind.SLOW_HOST_CODE: ((OpKind.HOST_DELAY, OpKind.LOSS), "host code"),
    CauseKind.SLOW_OPTIMIZER: ((OpKind.OPTIMIZER,), "the optimizer"),
    CauseKind.LATE_DATA: ((OpKind.DATA_LOAD,), "data loading"),
    CauseKind.PYTHON_GC: ((OpKind.GC,), "garbage collection"),
}


def late_ranks(evidence: Evidence) -> dict[CauseKind, Bools]:
    """Ranks that hold up their worker by something other than computing, and when, [workers, ranks, steps] each; only
    the kinds that the trace records for each rank.
    """
    lockstep = evidence.lockstep
    if lockstep is None or lockstep.work_s is None:
        return {}
    found = {CauseKind.PROCESS_PAUSES: lockstep.stopped(evidence.unchanged_s)[0]}
    for kind, (ops, _) in _PARTS.items():
        episodes = lockstep.late_by(ops, evidence.unchanged_s, len(_PARTS))
        hit = episodes.on & episodes.significant(SMALLEST_HOST_SHARE)[:, None]
        found[kind] = np.asarray(hit.reshape(lockstep.beyond_s(ops).shape))
    return {kind: late for kind, late in found.items() if late.any()}


class SlowRankOfWorker(Rule):
    """One rank of a worker is late for the others at each of their collectives.

    Paper: tensor-parallel ranks run in lockstep, only one of them is recorded, and a slow one slows down its worker.
    tracekit subtracts from every op the time that each rank waited inside it, and compares the rest. It names a rank
    that computes longer than its peers by more than their noise explains; once fixed, the worker is as fast as its
    slowest other rank.
    """

    kind = CauseKind.SLOW_RANK_OF_WORKER
    title = "One rank of a worker is slow; its tensor- and context-parallel peers wait for it"
    signature = "the other ranks of the worker wait for it inside their ops, and it waits for none"
    refuted_by = "the others wait as long after it has changed its node with one of them"
    next_check = "what the rank does between its collectives: clock and throttling of its GPU, its CPU cores, user code"
    suggested_fix = SLOW_RANK

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        lockstep = evidence.lockstep
        if lockstep is None:
            return
        late_by_kind = late_ranks(evidence)
        slow = lockstep.slow(SMALLEST_FACTOR)
        if (stopped := late_by_kind.get(CauseKind.PROCESS_PAUSES)) is not None:
            slow &= ~stopped.any(axis=2, keepdims=True)
        for worker in np.flatnonzero(slow.any(axis=(1, 2))):
            here = np.zeros_like(slow)
            here[worker] = slow[worker]
            yield self._candidate(evidence, lockstep, here)
        for kind, late in late_by_kind.items():
            yield from self._late(evidence, lockstep, kind, late)

    def _late(self, evidence: Evidence, lockstep: Lockstep, kind: CauseKind, late: Bools) -> Iterator[Candidate]:
        """Ranks that hold up their worker by something other than computing, one candidate per worker."""
        if kind is CauseKind.PROCESS_PAUSES:
            beyond_s = lockstep.stopped(evidence.unchanged_s)[1]
        else:
            beyond_s = lockstep.beyond_s(_PARTS[kind][0])
        for worker in np.flatnonzero(late.any(axis=(1, 2))):
            here = np.zeros_like(late)
            here[worker] = late[worker]
            positions, steps = np.flatnonzero(late[worker].any(axis=1)), late[worker].any(axis=0)
            longer_s = float(beyond_s[here].mean())
            figures = (
                Figure(
                    "longer than its peers, over the step",
                    longer_s / evidence.unchanged_s,
                    SMALLEST_HOST_SHARE,
                    Unit.SHARE,
                ),
            )
            numbers = lockstep.ranks[worker]
            where = (
                Where(workers=(lockstep.workers[worker],))
                if numbers is None
                else Where(ranks=tuple(numbers[at] for at in positions))
            )
            if kind is CauseKind.PROCESS_PAUSES:
                when = f"in {int(steps.sum())} of {len(steps)} steps"
                effect = (
                    f"the process is stopped for {seconds(longer_s)} {when}; the other ranks of the worker wait for it"
                )
            else:
                longer = f"{_PARTS[kind][1]} takes {seconds(longer_s)} longer"
                effect = f"{longer} than on the other ranks of the worker, which wait for it"
            series = np.where(steps, 1 + longer_s / evidence.unchanged_s, 1.0)
            change = lockstep.on_time(here, beyond_s)
            yield Candidate(kind, where, effect, figures, confidence_from(figures), change, series)

    def _candidate(self, evidence: Evidence, lockstep: Lockstep, slow: np.ndarray) -> Candidate:
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
            where = Where(workers=(lockstep.workers[worker],))
            who = f"its rank at position {', '.join(map(str, positions))} computes"
        else:
            where, who = Where(ranks=tuple(numbers[at] for at in positions)), "computes"
        waits = seconds(float(gained[steps].mean()))
        effect = (
            f"{who} {excess:.0%} slower than its peers in the worker; they wait {waits} of each step for it, and noise"
            f" alone makes {noise:.0%}"
        )
        series = 1 + gained / evidence.unchanged_s
        change = lockstep.as_fast_as_peers(slow)
        return Candidate(self.kind, where, effect, figures, confidence_from(figures), change, series)


class LockstepJitter(Rule):
    """The ranks of a worker take turns in waiting for each other; none waits more than the others.

    Paper: not seen, because only one rank of a worker is recorded. Each collective waits for the rank that is last this
    time, so noise that evens out over a step still costs time. Nobody is to blame, and no saving is reported.
    """

    kind = CauseKind.LOCKSTEP_JITTER
    title = "The ranks of a worker wait for each other in turn"
    signature = "ranks wait inside their ops for the last one, which is another one each time"
    refuted_by = "a longer recording in which one rank is the last one more often than chance explains"
    next_check = "what else runs on the cores and GPUs of these nodes; how long the ops between collectives are"
    suggested_fix = (
        "pin the processes to cores and lock the GPU clocks (nvidia-smi -lgc); merge small ops between collectives"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        lockstep = evidence.lockstep
        if lockstep is None:
            return
        slow = [lockstep.slow(SMALLEST_FACTOR), *late_ranks(evidence).values()]
        even = np.logical_not(np.logical_or.reduce(slow).any(axis=(1, 2)))
        if not even.any():
            return
        change = lockstep.alike(even)
        lost_s = evidence.unchanged_s - float(step_times_with(evidence.replay, (change,)).mean())
        if lost_s < SMALLEST_BLAMELESS_SHARE * evidence.unchanged_s:
            return
        here = even[lockstep.worker]
        share = float(lockstep.waited_s[here].mean(axis=1).sum() / max(lockstep.duration_s[here].sum(), 1e-9))
        figures = (
            Figure(
                "waiting in turn, over the step", lost_s / evidence.unchanged_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE
            ),
        )
        effect = (
            f"ranks of a worker wait for each other for {share:.0%} of their ops; none is last more often than chance"
            " explains"
        )
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures), change, bound=True)
