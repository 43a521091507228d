"""Rules for causes on the host: late data, and Python or launches that cannot keep up.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

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
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import (
    Change,
    NoOverlap,
    Scale,
    ScaleDelays,
    Together,
    step_times_with,
)
from tracekit.analysis.evidence.data_waits import late_ranks
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import busy_s, slow_workers, worker_factor
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, median, nan_mean, safe
from tracekit.base.text import ratio, seconds
from tracekit.trace.model import Worker

#: Name launch delays and other host work if they take at least this share of the step, not counting waits for data.
HOST_BOUND_SHARE = 0.04
#: Name the host code of a worker if it exceeds that of its peers by at least this share of the step.
SMALLEST_HOST_SHARE = 0.02
#: Data of a stage is late if it is in this share of the steps with late data.
MOST_STEPS_SHARE = 0.5
#: At most this share of a worker's own activity can be waiting for a processor.
LARGEST_WAITING_SHARE = 0.95
#: If at least this share of it is in one place of the step, all of it counts as being there.
ALL_OF_IT = 0.9
#: An optimizer is slow if it takes this many times as long as its peers', by this many standard errors.
SMALLEST_OPTIMIZER_FACTOR = 1.5
OPTIMIZER_ERRORS = 6.0
#: The same for a comparison with other stages, which hold different parameters.
SMALLEST_OPTIMIZER_FACTOR_OF_STAGES = 2.0


class LateData(Rule):
    """A step waits for its data.

    Paper: excludes launch delays from the replay, and discards jobs in which they exceed 5 % of the step. tracekit
    keeps them per op: delays of the first forwards, and of the first gathering of parameters, are data loading, priced
    by a replay without them. If the loading itself was recorded, its duration is the wait, and a delay after it has
    another cause.
    """

    kind = CauseKind.LATE_DATA
    title = "Steps wait for their data"
    signature = "long data loading, or a launch delay before the first ops where loading was not recorded"
    refuted_by = "the delay stays when the loader's workers and prefetch depth are doubled"
    next_check = "the loader's queue depth at the start of a step; host: PSI io, page cache, storage latency"
    suggested_fix = (
        "raise num_workers and prefetch_factor of the data loader on {ranks} until steps no longer wait for it; if that"
        " does not help, see to the storage that it reads from"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        found = evidence.data_waits
        if not any(wait.late.any() for wait in found.waits):
            return
        where = _where_late(evidence)
        here = _cells_of(evidence, where)[:, None, None]
        late = [wait.late & here for wait in found.waits]
        waited = [np.where(late_here, wait.waits_s, 0.0) for late_here, wait in zip(late, found.waits, strict=True)]
        worst = np.sum([waits_s.sum(axis=1) for waits_s in waited], axis=0).max(axis=(0, 2))
        figures = (Figure(self._figure(evidence), float(worst.mean()), found.least_s, Unit.SECONDS),)
        scale = Scale if found.recorded else ScaleDelays
        change = Together(
            tuple(
                scale(wait.ops, np.where(waits_s > 0, found.usual_s / safe(waits_s), 1.0))
                for wait, waits_s in zip(found.waits, waited, strict=True)
            )
        )
        series = 1 + worst / evidence.unchanged_s
        mean, longest = seconds(float(worst.mean())), seconds(float(worst.max()))
        by_rank = np.logical_or.reduce([late_here.any(axis=(0, 1)) for late_here in late])
        few = by_rank.shape[1] > 1 and 2 * by_rank.sum() <= by_rank.any(axis=1).sum() * by_rank.shape[1]
        changing = ", on changing ranks" if few and where == Where() else ""
        effect = f"data comes {mean} late on average, {longest} in the worst step{changing}"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change, series)

    def _figure(self, evidence: Evidence) -> str:
        return "delay before the first ops" if evidence.data_loads.empty else "data loading of the worst DP rank"


def _cells_of(evidence: Evidence, where: Where) -> Bools:
    """The workers of a place, [stages, dp_ranks]."""
    if where.workers:
        return evidence.cells_of(where.workers)
    dp_ranks = np.isin(evidence.dp_ranks, where.dp_ranks or evidence.dp_ranks)
    return np.broadcast_to(dp_ranks, (evidence.stages, len(dp_ranks)))


def _where_late(evidence: Evidence) -> Where:
    """The DP ranks whose data is late, or the workers if that of only some of their stages is."""
    waits = evidence.data_waits.waits
    late = np.logical_or.reduce([wait.late.any(axis=1) for wait in waits])
    hit = late.any(axis=(0, 2))
    late_s = np.sum([np.where(wait.late, wait.waits_s, 0.0).sum(axis=1) for wait in waits], axis=0)
    ranks = late_ranks(late_s.max(axis=0))
    mostly = (late[:, hit].mean(axis=1) >= MOST_STEPS_SHARE) & ranks
    fetches = np.logical_or.reduce([np.isfinite(wait.waits_s).any(axis=(1, 2)) for wait in waits])
    if evidence.data_waits.recorded and (mostly.any(axis=0) & (mostly != fetches).any(axis=0)).any():
        return Where(workers=evidence.workers_where(mostly))
    some = not ranks.all() or len(ranks) == 1
    return Where(dp_ranks=tuple(evidence.dp_ranks[int(at)] for at in np.flatnonzero(ranks)) if some else ())


class SlowOptimizer(Rule):
    """The optimizer of a worker takes longer than those of its peers; its forwards and backwards do not.

    Paper: no signature; an optimizer is a compute op like others. tracekit compares the median optimizer of each worker
    with those of its stage: at least half as long again, and by six standard errors over the steps. Optimizers hold the
    same parameters on all DP ranks of a stage, so they do not differ by design. With one DP rank, it compares stages:
    at least twice as long, beyond what the stage computes longer. A worker that is slow in everything it computes is a
    bad worker.
    """

    kind = CauseKind.SLOW_OPTIMIZER
    title = "Optimizer of a worker is slow"
    signature = "the optimizer of one worker takes longer in all steps, its forwards and backwards do not"
    refuted_by = "the worker's optimizer has more parameters than those of its peers"
    next_check = (
        "a profile of the optimizer step on this rank: offloading or swapping to the host, memory bandwidth, fused or"
        " foreach kernels; whether it also logs or writes there"
    )
    suggested_fix = (
        "profile the optimizer step of {ranks} beside a peer's (torch.profiler), and take out what runs only there:"
        " offloading, swapping, other kernels, logging"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        among_stages = len(evidence.dp_ranks) < 2
        if evidence.optimizers.empty or (among_stages and evidence.stages < 2):
            return
        axis = 0 if among_stages else 1
        taken_s = evidence.optimizers.gather(evidence.replay.durations.cost).sum(axis=1)
        level = median(taken_s, (1,))
        usual = np.maximum(np.expand_dims(lower_median(level, axis=axis), axis), 1e-9)
        scatter = MAD_TO_SIGMA * median(np.abs(taken_s - level[:, None]), (1,)) / np.sqrt(taken_s.shape[1])
        apart = MAD_TO_SIGMA * np.expand_dims(lower_median(np.abs(level - usual), axis=axis), axis)
        # A stage with more layers has more parameters, too.
        peers = usual * (np.maximum(worker_factor(evidence), 1.0) if among_stages else 1.0)
        error, factor = np.hypot(scatter, apart) / peers, level / peers
        smallest = SMALLEST_OPTIMIZER_FACTOR_OF_STAGES if among_stages else SMALLEST_OPTIMIZER_FACTOR
        hit = (factor > smallest) & (factor - 1 > OPTIMIZER_ERRORS * error) & ~slow_workers(evidence)
        if not hit.any():
            return
        figures = (
            Figure("optimizer over that of its peers", float(factor[hit].max()), smallest, Unit.FACTOR),
            Figure("beyond its peers", float((level - peers)[hit].max()), 0.0, Unit.SECONDS),
        )
        as_peers = Scale(evidence.optimizers, 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        change = Together((as_peers, NoOverlap()))
        series = np.where(hit[:, None], taken_s / peers[:, None], np.nan)
        whose = "those of other stages" if among_stages else "its peers'"
        yield Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"optimizer takes {ratio(figures[0].value)} times as long as {whose}, {seconds(figures[1].value)} more",
            figures,
            confidence_from(figures),
            change,
            nan_mean(series, (0, 2)),
            bound=not evidence.distances_seen,
        )


class SlowHostCode(Rule):
    """The training thread of a worker takes longer between its ops than those of its peers.

    Paper: ignores launch delays. tracekit compares what the script does between the ops of a worker (launch delays,
    host work, the time between a forward and its backward) with its peers, beyond their noise and beyond what a worker
    that computes slower takes longer there too, and reports the place in the step.
    """

    kind = CauseKind.SLOW_HOST_CODE
    title = "Host code of a worker takes longer than its peers'"
    signature = "one worker is late at the same place of each step, with nothing recorded before that it waited for"
    refuted_by = "a CPU profile of the rank shows the same time at that place as one of its peers"
    next_check = (
        "a CPU profile of the rank's training thread at that place (py-spy record): user code, logging, evaluation,"
        " data preparation; run queue and steal of its cores"
    )
    suggested_fix = (
        "record the training thread of {ranks} (py-spy record), and move what runs only there off that thread:"
        " logging, evaluation, data preparation"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        code, slow = evidence.host_code, slow_host_code(evidence)
        if not slow.any():
            return
        hit = np.asarray(slow.any(axis=1))
        by_place = code.beyond_s(slow).reshape(len(code.places), -1)
        worst = int(by_place.sum(axis=0).argmax())
        longer_s, place = float(by_place[:, worst].sum()), int(by_place[:, worst].argmax())
        most = "" if by_place[place, worst] > ALL_OF_IT * longer_s else "mostly "
        stage, dp_index = divmod(worst, hit.shape[1])
        # Its level, not its scatter: chance has already been ruled out.
        by_step = np.where(slow[stage, :, dp_index], 1 + longer_s / evidence.unchanged_s, 1.0)
        episodes = code.episodes
        figures = (
            Figure(
                "longer than its peers, over the step", longer_s / evidence.unchanged_s, SMALLEST_HOST_SHARE, Unit.SHARE
            ),
            Figure(
                "more likely slow than by chance", float(episodes.nats[hit.ravel()].min()), episodes.needed, Unit.NATS
            ),
        )
        yield Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"host code takes {seconds(longer_s)} longer than that of its peers, {most}{code.places[place]}",
            figures,
            confidence_from(figures),
            code.as_peers(slow),
            by_step,
        )


class HostBound(Rule):
    """Launch delays and host work between ops: Python or kernel launches cannot keep up with the GPUs.

    Paper: as for late data; above 5 %, the job's replay is not trusted. tracekit names it if it takes at least 4 % of
    the step, not counting waits for data and what single workers take longer than their peers.
    """

    kind = CauseKind.HOST_BOUND
    title = "The host cannot keep up: launch delays and host work between ops"
    signature = "launch delays and host work between ops that together make up a large share of the step"
    refuted_by = "CUDA graphs or larger microbatches leave the gaps as they are"
    next_check = "a CPU profile of the launching thread; host: run queue, steal, CPU frequency; gaps in a Kineto trace"
    suggested_fix = (
        "launch less: CUDA graphs or torch.compile(mode='reduce-overhead'), no .item() or logging within the step; pin"
        " the launching threads to cores"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        change = evidence.host_code.none_but_beyond(slow_host_code(evidence))
        share = 1 - float(step_times_with(evidence.replay, (change,)).mean()) / evidence.unchanged_s
        if share < HOST_BOUND_SHARE:
            return
        figures = (Figure("launch delays and host work, over the step", share, HOST_BOUND_SHARE, Unit.SHARE),)
        effect = f"launch delays and host work between ops take {share:.0%} of the step"
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures), change)


class BusyCores(Rule):
    """Training threads are ready to run but have no processor: more is running on the host than it has cores for.

    Paper: not seen, because the kernel was not asked. `tracekit collect` asks it once per step how long the training
    thread waited in the run queue. The wait is assumed to affect all of a worker's own activity in proportion.
    """

    kind = CauseKind.BUSY_CORES
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

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        waits_s, step_s = evidence.run_queue_s, evidence.recorded_s
        if not waits_s.any():
            return
        workers: defaultdict[str, list[Worker]] = defaultdict(list)
        for worker, host in evidence.hosts.items():
            if worker.dp_rank in evidence.dp_index:
                workers[host].append(worker)
        cells = {host: evidence.cells_of(workers[host]) for host in sorted(workers)}
        busy = [host for host, here in cells.items() if waits_s[here].mean() >= SMALLEST_BLAMELESS_SHARE * step_s]
        if not busy:
            return
        here = np.any([cells[host] for host in busy], axis=0)
        wait_s, longest_s = float(waits_s[here].mean()), float(waits_s[here].max())
        figures = (
            Figure("waiting for a processor, over the step", wait_s / step_s, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
            Figure("longest wait", longest_s, 0.0, Unit.SECONDS),
        )
        on = "" if len(busy) == 1 else f" on {len(busy):,} hosts"
        effect = f"training threads{on} wait {seconds(wait_s)} of each step for a processor"
        if seconds(longest_s) != seconds(wait_s):
            effect += f", one of them {seconds(longest_s)}"
        change = without_run_queue(evidence, here)
        where = Where(host=busy[0]) if len(busy) == 1 else Where()
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change)


def without_run_queue(evidence: Evidence, here: Bools) -> Change:
    """The job in which the workers `here`, [stages, dp_ranks], never wait for a processor."""
    left = 1 - np.minimum(evidence.run_queue_s / safe(busy_s(evidence)), LARGEST_WAITING_SHARE)
    factor = np.where(here, left, 1.0)[:, None, None, :]
    return Together((Scale(evidence.computing, factor), ScaleDelays(evidence.computing, factor)))


def slow_host_code(evidence: Evidence) -> Bools:
    """Which workers' host code takes longer than their peers', and when, [stages, steps, dp_ranks].

    Stops of a process make it launch late, too: one problem, one cause. Where the kernel counted them, steps with stops
    are left out; otherwise, launch delays are those without the stops seen in computes.
    """
    return np.asarray(evidence.host_code.slow(SMALLEST_HOST_SHARE) & ~(evidence.process_stops_s > 0))
