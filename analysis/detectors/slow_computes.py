"""Workers, hosts and groups of ranks that compute slower than their peers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.detectors.detector import (
    FINDINGS,
    ONE_KIND_CHECK,
    SLOW_KIND,
    SLOW_RANK,
    Advice,
    Candidate,
    Detector,
    Repair,
    Treatment,
)
from tracekit.analysis.detectors.host_work import HOST
from tracekit.analysis.detectors.pauses import ProcessPauses
from tracekit.analysis.detectors.stops import NOISE, chance_figures, time_of_episodes
from tracekit.analysis.evidence.compute_profile import COMPUTES, FORWARD
from tracekit.analysis.evidence.off_cpu import Lockstep
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import (
    as_fast_as_peers,
    beyond_peers_s,
    clocks_of,
    factor_by_step,
    kind_factors,
    slow_factor,
    slow_groups,
    slow_kind,
    slow_machines,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.evidence.subject import SPEED_OF_PEERS
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.whatif.interventions import Intervention, step_times
from tracekit.base.text import seconds
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, Place, Unit, confidence_from
from tracekit.trace.model import OpKind, Worker

#: Factors that differ by less are one figure in a sentence.
_ALIKE = 0.03
#: What makes a rank late besides computing: the kinds of op, and what they are in words.
PARTS_OF_RANKS: Mapping[str, tuple[tuple[OpKind, ...], str]] = {
    "slow-host-code": ((OpKind.HOST_DELAY, OpKind.LOSS), "host code"),
    "slow-optimizer": ((OpKind.OPTIMIZER,), "the optimizer"),
    "late-data-loading": ((OpKind.DATA_LOAD,), "data loading"),
    "python-gc": ((OpKind.GC,), "garbage collection"),
}


def bad_workers(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield workers that compute slower than their peers; those that do so at times alone."""
    _, hit = slow_groups(job)
    if not hit.any():
        return
    at_times = np.zeros_like(hit)
    if len(job.dp_ranks) > 1:
        assert job.profile is not None
        at_times = hit & ~job.profile.slow_steps.all(axis=1)
    if (hit & ~at_times).any():
        yield _of_workers(kind, job, job.workers_where(hit & ~at_times))
    for worker in job.workers_where(at_times):
        yield _of_workers(kind, job, (worker,))


def _of_workers(kind: str, job: PipelineSubject, workers: Sequence[Worker]) -> Candidate:
    """The candidate that names `workers`, which are slow in the same steps."""
    hit, who = job.cells_of(workers), "its peers" if len(workers) == 1 else "their peers"
    slow = of_cells(kind, job, hit, Place(workers=tuple(workers)), who)
    if slow_kind(job, hit) is None:
        return slow
    return structs.replace(slow, next_check=ONE_KIND_CHECK, suggested_fix=SLOW_KIND)


def only_costly(kind: str, job: PipelineSubject, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leave out workers that are slow because their processes are stopped, and those whose slowness costs nothing
    once all other findings are gone.
    """
    remaining = []
    for candidate in candidates:
        stopped = _stopped(job, candidate, candidates) if candidate.kind == kind else set()
        slow = tuple(worker for worker in candidate.where.workers if worker not in stopped)
        if not stopped:
            remaining.append(candidate)
        elif slow:
            remaining.append(_of_workers(kind, job, slow))
    reviewed = list(remaining)
    for index, candidate in enumerate(remaining):
        if candidate.kind == kind and len(candidate.where.workers) > 1:
            others = [other.change for other in remaining if other is not candidate and other.change is not None]
            reviewed[index] = _of_workers(kind, job, _costly(job, candidate.where.workers, others))
    return reviewed


def _stopped(job: PipelineSubject, slow: Candidate, candidates: Sequence[Candidate]) -> set[Worker]:
    """The slow workers whose processes are stopped for long enough to explain that."""
    stopped: set[Worker] = set()
    for pauses in candidates:
        shared = set(pauses.where.workers) & set(slow.where.workers)
        if pauses.kind == ProcessPauses.kind and pauses.change is not None and shared:
            change = as_fast_as_peers(job, sorted(shared))
            if job.explained(change, pauses.change) >= FINDINGS.most_of_price:
                stopped |= shared
    return stopped


def _costly(job: PipelineSubject, workers: tuple[Worker, ...], others: Sequence[Intervention]) -> tuple[Worker, ...]:
    """Return the workers that each cost as much as a finding must; all of them, if they do so only together.

    The longer a worker computes beyond its peers, the more it costs, so bisection finds where it begins to matter.
    """

    def step_s(slow: Worker | None) -> float:
        repaired = as_fast_as_peers(job, [worker for worker in workers if worker != slow])
        return float(job.step_times((*others, repaired)).mean())

    ranked = sorted(workers, key=lambda worker: beyond_peers_s(job, worker))
    least_s = step_s(None) + FINDINGS.smallest_cost_share * job.unchanged_s
    return tuple(sorted(ranked[bisect_left(ranked, least_s, key=step_s) :])) or workers


class SlowHosts(Detector):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host of their
    rank, because the check and the repair differ. It needs two traced workers on the host, 70 % of them slow: of eight,
    one may not be busy enough to show it. Those that are slow at times are so in the same steps.
    """

    kind = "slow-host"
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = Advice(
        gpu="host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet"
        " temperature of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs",
        cpu="host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet"
        " temperature of the chassis",
    )
    suggested_fix = Advice(
        gpu="on {hosts}, check clocks and power (nvidia-smi -q -d PERFORMANCE), busy cores (cat /proc/pressure/cpu),"
        " other jobs: stop what should not run there; drain {hosts} if the GPUs are throttled",
        cpu="on {hosts}, check clocks (turbostat), busy cores (cat /proc/pressure/cpu), other jobs: stop what should"
        " not run there",
    )
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        for group in slow_groups(job)[0]:
            if group.host is not None:
                where = Place(workers=job.workers_where(group.hit), host=group.host)
                yield of_cells(self.kind, job, group.hit, where, "their peers on other hosts")


class SlowRankGroup(Detector):
    """Several DP ranks compute slower than the others by one factor: older GPUs, a lower power cap, a warmer rack.

    Paper: no signature. tracekit groups slow DP ranks that are adjacent or half of all DP ranks, are slow on all
    stages, in the same steps, by factors that differ by less than a quarter of their excess and what chance adds, and
    make up a quarter of the DP ranks (or, with a pipeline, have slow optimizers too). Where microbatches of unequal
    length hide how slow they compute, their optimizers show it. Independent faults agree in neither factor nor time.
    """

    kind = "slow-rank-group"
    title = "A group of DP ranks computes slower than the others"
    signature = "forwards and backwards of several DP ranks take longer by one factor, on all stages, in the same steps"
    refuted_by = "the factors differ within the group, or follow the tokens of its microbatches"
    next_check = Advice(
        gpu="what the group has in common: GPU model, power cap, driver, rack, inlet temperature",
        cpu="what the group has in common: CPU model, frequency governor, rack, inlet temperature",
    )
    suggested_fix = Advice(
        gpu="compare GPU model, power cap and driver of {ranks} with the others (nvidia-smi -q): make them alike, or"
        " give {it} fewer microbatches",
        cpu="compare CPU model and frequency governor of {ranks} with the others (lscpu, cpupower): make them alike, or"
        " give {it} fewer microbatches",
    )
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        for group in slow_groups(job)[0]:
            if group.dp_ranks:
                yield of_cells(self.kind, job, group.hit, Place(dp_ranks=group.dp_ranks), "the other DP ranks")


def late_ranks(job: PipelineSubject) -> dict[str, tuple[Bools, Floats]]:
    """Ranks that hold up their worker by something other than computing, and when, and by how many seconds, [workers,
    ranks, steps] each; only the kinds that the trace records for each rank.
    """
    lockstep = job.lockstep
    if lockstep is None or lockstep.work_s is None:
        return {}
    by_kind = {"process-pauses": lockstep.stopped(job.unchanged_s)}
    for kind, (ops, _) in PARTS_OF_RANKS.items():
        episodes, beyond_s = lockstep.late_by(ops, job.unchanged_s, len(PARTS_OF_RANKS)), lockstep.beyond_s(ops)
        hit = episodes.slow & episodes.significant(HOST.code_share)[:, None]
        by_kind[kind] = np.asarray(hit.reshape(beyond_s.shape)), beyond_s
    return {kind: (late, beyond_s) for kind, (late, beyond_s) in by_kind.items() if late.any()}


def _of_worker(hit: Bools) -> Iterator[tuple[Bools, int, Ints]]:
    """Of each worker with ranks in `hit`, [workers, ranks, steps]: `hit` for it alone, its number, its ranks."""
    for worker in np.flatnonzero(hit.any(axis=(1, 2))).tolist():
        alone = np.zeros_like(hit)
        alone[worker] = hit[worker]
        yield alone, worker, np.flatnonzero(hit[worker].any(axis=1))


def _place(lockstep: Lockstep, worker: int, positions: Ints) -> Place:
    """The ranks at these positions of a worker; the worker if its ranks have no numbers."""
    numbers = lockstep.ranks[worker]
    if numbers is None:
        return Place(workers=(lockstep.workers[worker],))
    return Place(ranks=tuple(numbers[position] for position in positions))


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
        slow = lockstep.slow(COMPUTES.factor)
        if "process-pauses" in late_by_kind:
            slow &= ~late_by_kind["process-pauses"][0].any(axis=2, keepdims=True)
        for of_worker, worker, positions in _of_worker(slow):
            yield self._slow(job, lockstep, of_worker, worker, positions)
        for kind, (late, beyond_s) in late_by_kind.items():
            for of_worker, worker, positions in _of_worker(late):
                steps, longer_s = late[worker].any(axis=0), float(beyond_s[of_worker].mean())
                share = Figure(
                    "longer than its peers, over the step", longer_s / job.unchanged_s, HOST.code_share, Unit.SHARE
                )
                if kind in PARTS_OF_RANKS:
                    longer = f"{PARTS_OF_RANKS[kind][1]} takes {seconds(longer_s)} longer"
                    effect = f"{longer} than on the other ranks of the worker, which wait for it"
                else:
                    stopped = (
                        f"the process is stopped for {seconds(longer_s)} in {int(steps.sum())} of {len(steps)} steps"
                    )
                    effect = f"{stopped}; the other ranks of the worker wait for it"
                yield Candidate(
                    kind,
                    _place(lockstep, worker, positions),
                    effect,
                    (share,),
                    confidence_from((share,)),
                    lockstep.on_time(of_worker, beyond_s),
                    np.where(steps, 1 + longer_s / job.unchanged_s, 1.0),
                )

    def _slow(self, job: PipelineSubject, lockstep: Lockstep, slow: Bools, worker: int, positions: Ints) -> Candidate:
        steps = slow[worker].any(axis=0)
        gained = np.bincount(lockstep.step, lockstep.held_up_s(slow), minlength=len(steps))
        episodes, members = lockstep.episodes, worker * slow.shape[1] + positions
        excess, noise = float(np.expm1(episodes.level[members]).max()), float(episodes.error[members].max())
        figures = (
            Figure("computing beyond its peers", excess, COMPUTES.factor, Unit.SHARE),
            Figure("more likely slow than by chance", float(episodes.nats[members].min()), episodes.needed, Unit.NATS),
        )
        where = _place(lockstep, worker, positions)
        who = "computes" if where.ranks else f"its rank at position {', '.join(map(str, positions))} computes"
        waits = seconds(float(gained[steps].mean()))
        effect = (
            f"{who} {excess:.0%} slower than its peers in the worker; they wait {waits} of each step for it, and noise"
            f" alone makes {noise:.0%}"
        )
        series, change = 1 + gained / job.unchanged_s, lockstep.as_fast_as_peers(slow)
        return Candidate(self.kind, where, effect, figures, confidence_from(figures), change, series, excess=excess)


class LockstepJitter(Detector):
    """The ranks of a worker take turns in waiting for each other; none waits more than the others.

    Paper: not seen, because only one rank of a worker is recorded. Each collective waits for the rank that is last this
    time, so noise that evens out over a step still costs time. Nobody is to blame, and no saving is reported.
    """

    kind = "lockstep-jitter"
    title = "The ranks of a worker wait for each other in turn"
    signature = "ranks wait inside their ops for the last one, which is another one each time"
    refuted_by = "a longer recording in which one rank is the last one more often than chance explains"
    next_check = "what else runs on the cores and GPUs of these nodes; how long the ops between collectives are"
    suggested_fix = Advice(
        gpu="pin the processes to cores and lock the GPU clocks (nvidia-smi -lgc); merge small ops between collectives",
        cpu="pin the processes to cores (taskset); merge small ops between collectives",
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        lockstep = job.lockstep
        if lockstep is None:
            return
        slow = [lockstep.slow(COMPUTES.factor), *(late for late, _ in late_ranks(job).values())]
        even = np.logical_not(np.logical_or.reduce(slow).any(axis=(1, 2)))
        if not even.any():
            return
        change = lockstep.alike(even)
        lost_s = job.unchanged_s - float(step_times(job.replay, (change,)).mean())
        if lost_s < SMALLEST_BLAMELESS_SHARE * job.unchanged_s:
            return
        ops = even[lockstep.worker]
        share = float(lockstep.waited_s[ops].mean(axis=1).sum() / max(lockstep.duration_s[ops].sum(), 1e-9))
        figures = (
            Figure("waiting in turn, over the step", lost_s / job.unchanged_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
        )
        effect = (
            f"ranks of a worker wait for each other for {share:.0%} of their ops; none is last more often than chance"
            " explains"
        )
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures), change, bound=True)


def slower(job: PipelineSubject, hit: Bools, who: str) -> str:
    """How much slower the workers in `hit` compute than `who`, and how large noise is, in words."""
    alone = slow_kind(job, hit)
    factors = worker_factor(job)[hit] - 1 if alone is None else kind_factors(job, hit)[alone] - 1
    low, high = float(factors.min()), float(factors.max())
    size = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if 0 < high - low < _ALIKE:
        size = f"about {(low + high) / 2:.0%}"
    grows = _growth(job, hit, alone)
    if alone is not None:
        slow, well = ("forwards", "backwards") if alone == FORWARD else ("backwards", "forwards")
        whose = "its" if len(factors) == 1 else "their"
        words = f"{whose} {slow} take {size} longer than those of {who}{grows}, {whose} {well} do not"
    else:
        words = f"compute{'s' if len(factors) == 1 else ''} {size} slower than {who}{grows}"
    noise = next((figure.value for figure in _confidence_figures(job, hit) if figure.name == NOISE), None)
    clocks = clocks_of(job, job.workers_where(hit))
    clocks_text = (
        clocks and f"; its GPU runs at {clocks.own_mhz:,.0f} MHz, those of others at {clocks.peers_mhz:,.0f} MHz"
    )
    return words + ("" if noise is None else f"; noise alone makes {noise:.1%}") + (clocks_text or "")


def _growth(job: PipelineSubject, hit: Bools, kind: int | None) -> str:
    """How the slowness of the workers in `hit` (in one kind, or in both) grows, in words; "" if it does not."""
    profile = job.profile
    if len(job.dp_ranks) < 2 or profile is None or not profile.workers.rises.reshape(hit.shape)[hit].all():
        return ""
    factor = factor_by_step(job) if kind is None else slow_factor(job)[kind]
    by_step = factor.transpose(0, 2, 1)[hit].mean(axis=0)
    slow = by_step[by_step > 1] - 1
    return f", growing step by step from {slow[0]:.0%} to {slow[-1]:.0%}"


def worker_figures(job: PipelineSubject, hit: Bools) -> tuple[Figure, ...]:
    """Return by how much the workers in `hit` are slow, and how certain that is."""
    factor = float(worker_factor(job)[hit].min()) - 1
    exact = job.attribution.worker_slowdown.T[hit]
    return (
        Figure("compute beyond that of its peers", factor, COMPUTES.factor, Unit.SHARE),
        *_confidence_figures(job, hit),
        Figure("added by it alone to a step without stragglers", float(exact.max()) - 1, 0.0, Unit.SHARE),
    )


def _confidence_figures(job: PipelineSubject, hit: Bools) -> tuple[Figure, ...]:
    """How unlikely the slowness is by chance, and how large the noise of the run is."""
    profile = job.profile
    assert profile is not None
    if len(job.dp_ranks) < 2:
        return ()
    slow = profile.slow_workers & hit
    if slow.any():
        return chance_figures(profile.workers, slow)
    return chance_figures(profile.ranks, slow_machines(job) & hit.any(axis=0))


def time_of(job: PipelineSubject, hit: Bools) -> TimePattern | None:
    """When the workers in `hit` are slow; all of them are slow in the same steps."""
    profile = job.profile
    assert profile is not None
    if len(job.dp_ranks) < 2:
        return None
    slow = profile.slow_workers & hit
    if slow.any():
        return time_of_episodes(job, profile.workers, int(np.flatnonzero(slow.ravel())[0]))
    return time_of_episodes(job, profile.ranks, int(np.flatnonzero(hit.any(axis=0))[0]))


def of_cells(kind: str, job: PipelineSubject, hit: Bools, where: Place, who: str) -> Candidate:
    """Return the candidate for the workers in `hit`, [stages, dp_ranks], slow together; `who`: their peers in words."""
    figures = worker_figures(job, hit)
    return Candidate(
        kind,
        where,
        slower(job, hit, who),
        figures,
        confidence_from(figures[:2]),
        workers_as_fast_as_peers(job, hit),
        worker_series(job, hit),
        time_of(job, hit),
        excess=figures[0].value,
    )
