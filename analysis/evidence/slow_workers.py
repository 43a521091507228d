"""Workers that compute slower than their peers: by how much, what they have in common, what their GPUs say.

In: a pipeline. Out: factors of workers, the job with workers as fast as their peers, disjoint `SlowGroup`s, a `Wander`,
and what `collect` sampled of GPUs, as in the trace's metadata.

A GPU is judged against others of its model only. A share of samples at the power cap says nothing: under load, every
data-center GPU reaches its cap. Nor does a GPU that a peer shares, or a worker that is slow in its forwards alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import (
    BACKWARD,
    COMPUTES,
    FORWARD,
    ComputeProfile,
    remembers,
    uneven_lengths,
)
from tracekit.analysis.evidence.hidden_slowness import OPTIMIZERS, together
from tracekit.analysis.evidence.host_code import launch_delays, run_queue_s
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, computing, optimizers
from tracekit.analysis.evidence.significance import episodes_of, kinds_and_all, most_telling
from tracekit.analysis.evidence.subject import Subject, evidence
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import MEDIAN_ERROR, lower_median, median, nan_mean, of_peers, safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, Together
from tracekit.trace.canonical import share_of_samples
from tracekit.trace.model import Worker

#: Reasons for a lower clock that no healthy GPU has under load, as `tracekit collect` names them.
FAULTS = frozenset({"hw-slowdown", "sw-thermal-slowdown", "hw-thermal-slowdown", "hw-power-brake"})
#: No GPU has such a clock.
HIGHEST_MHZ = 1e5


class SlowWorkerThresholds(Struct, frozen=True):
    """When workers are slow, alone or together. `causes`: the benchmark of 582 simulated jobs."""

    #: Stages differ by design; this much more than the usual stage is an imbalance. Benchmark `causes`.
    stage_excess: float = 0.06
    #: Next to a slow worker, name others only if their excess is at least this share of its excess. Chosen: the first
    #: fix is the worst one.
    naming_share: float = 0.1
    #: A DP rank has more data if it has more in at least this share of the steps. Definition: mostly.
    lasting_share: float = 0.5
    #: To separate noise from an effect, suggest at least this many steps ... Chosen.
    fewest_steps: int = 10
    #: ... and at most this many times those of the trace. Chosen: nobody records more.
    times: float = 100.0
    #: A worker is slow for lack of a core if waiting for one makes up this share of its excess over its peers.
    #: Definition: most.
    waiting_share: float = 0.5
    #: DP ranks share one factor if theirs differ by less than this share of their excess. Benchmark `causes`.
    one_factor_share: float = 0.25
    #: A worker is slow in one kind only if the excess of the other kind is below this share of it. Benchmark
    #: `causes`.
    other_kind_share: float = 0.25
    #: A host is slow if this share of its workers is slow. Benchmark `causes`.
    host_share: float = 0.7
    #: If at least this share of the DP ranks is slow, they are a different kind of machine, not bad workers. Chosen.
    group_share: float = 0.25
    #: Steps of a worker whose speed wanders vary this many times as much as the scatter of its ops explains.
    #: Benchmark `causes`.
    variance_ratio: float = 2.0
    #: A GPU with faults in this share of its samples is slow because of them. Chosen: short ones are normal.
    faulty_share: float = 0.05
    #: A lower clock is to blame if it explains more than this share of what a worker is slow by. Definition: at half
    #: the clock, work that only computing limits takes twice as long.
    explained_share: float = 0.5


SLOW_WORKERS = SlowWorkerThresholds()
SMALLEST_NATS = 1e-3


def workers_as_fast_as_peers(job: PipelineSubject, hit: Bools) -> Intervention:
    """The workers in `hit` [stages, dp_ranks] as fast as their peers, in the steps in which they are slow."""
    return cells_as_fast_as_peers(job, _slowness(job), hit[None, :, None, :], hit[:, None, :])


def cells_as_fast_as_peers(job: PipelineSubject, factor: Floats, computes: Bools, of_optimizers: Bools) -> Intervention:
    """Cells of workers as fast as their peers, where they are slow by `factor` [kinds, stages, steps, dp_ranks].

    `computes`: whose forwards and backwards, broadcasts to that; `of_optimizers`: whose optimizers, to [stages, steps,
    dp_ranks].
    """
    repair = np.where(computes, 1 / np.maximum(factor, 1.0), 1.0)
    changes: list[Intervention] = [Scale(job.table, repair[:, :, None, None])]
    if not optimizers(job).empty:
        slow = np.where(of_optimizers, optimizer_factor(job), 1.0)
        slow = np.where((slow > 1 + COMPUTES.factor) & (repair < 1).any(axis=0), slow, 1.0)
        changes.append(Scale(optimizers(job), 1 / slow[:, None]))
    return Together(tuple(changes))


def _slowness(job: PipelineSubject) -> Floats:
    """How much slower than its peers each worker is, [kinds, stages, steps, dp_ranks]; 1 if it is not slow."""
    profile = job.factors
    if len(job.dp_ranks) > 1:
        return slow_factor(job)
    return np.broadcast_to(worker_factor(job)[None, :, None, :], profile.slow_worker.shape)


def slowness_with_data(job: PipelineSubject) -> Floats:
    """How much slower than its peers each worker is, because of its machine or of more data, [kinds, stages, steps,
    dp_ranks].
    """
    slowness = _slowness(job)
    return slowness * data_factor(job) if job.stages > 1 and len(job.dp_ranks) > 1 else slowness


def as_fast_as_peers(job: PipelineSubject, workers: Sequence[Worker]) -> Intervention:
    """These workers as fast as their peers."""
    return workers_as_fast_as_peers(job, job.cells_of(workers))


def beyond_peers_s(job: PipelineSubject, worker: Worker) -> float:
    """Seconds of each forward and backward by which a worker exceeds its peers."""
    beyond = (worker_factor(job) - 1) * job.factors.stage_s.sum(axis=1)[:, None]
    return float(beyond[job.cells_of([worker])].sum())


def slow_factor(job: PipelineSubject) -> Floats:
    """Slowdown of workers over their peers, 1 if they are not slow, [kinds, stages, steps, dp_ranks]."""
    profile = job.factors
    if job.stages == 1:
        return profile.slow_worker
    return np.asarray(profile.slow_worker * _machine_factor(job, profile.slow_rank))


def worker_factor(job: PipelineSubject) -> Floats:
    """Computes of each worker over those of its peers (with one DP rank: of the usual stage), [stages, dp_ranks].

    The mean over the steps in which it is slow; forwards and backwards weighted by their time on its stage.
    """
    profile = job.factors
    if len(job.dp_ranks) == 1:
        return np.asarray(1 + stage_excess(profile).min(axis=1)[:, None])
    factors = factor_by_step(job)
    slow = factors > 1
    factor: Floats = np.where(slow, factors, 0.0).sum(axis=1) / np.maximum(slow.sum(axis=1), 1)
    return np.where(slow.any(axis=1), factor, 1.0)


def stage_slowness(job: PipelineSubject) -> Floats:
    """How many times as long as its peers the slowest worker of each stage computes, 1 or more, [stages]."""
    factor = worker_factor(job)
    if len(job.dp_ranks) == 1:  # over the usual stage, which a stage with more work exceeds as well
        factor = np.where(slow_workers(job), factor, 1.0)
    return np.asarray(np.maximum(factor.max(axis=1), 1.0))


def usual_base_s(job: PipelineSubject) -> Floats:
    """`ComputeProfile.base_s` on usual workers: with one DP rank, that of a slow worker's stage is its own."""
    slowness = stage_slowness(job) if len(job.dp_ranks) == 1 else np.ones(job.stages)
    return np.asarray(job.factors.base_s / slowness[:, None])


def slow_kind(job: PipelineSubject, hit: Bools) -> int | None:
    """`FORWARD` or `BACKWARD` if the workers in `hit` are slow in that kind only; None if they are slow in both."""
    if len(job.dp_ranks) < 2 or not hit.any():
        return None
    beyond = kind_factors(job, hit) - 1
    for kind, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
        if (beyond[other] < SLOW_WORKERS.other_kind_share * beyond[kind]).all():
            return kind
    return None


def kind_factors(job: PipelineSubject, hit: Bools) -> Floats:
    """How slow the forwards and the backwards of the workers in `hit` are relative to their peers', [kinds, workers].

    The mean over the steps in which they are slow.
    """
    factor = slow_factor(job).transpose(0, 1, 3, 2)[:, hit]  # [kinds, workers, steps]
    slow = (factor > 1).any(axis=0)
    return np.asarray(1 + ((factor - 1) * slow).sum(axis=2) / np.maximum(slow.sum(axis=1), 1))


def factor_by_step(job: PipelineSubject) -> Floats:
    """Computes of each worker over those of its peers, 1 if it is not slow, [stages, steps, dp_ranks].

    With one DP rank: over those of the usual stage, the same in each step.
    """
    profile = job.factors
    if len(job.dp_ranks) == 1:
        excess = stage_excess(profile).min(axis=1)
        return np.broadcast_to(1 + excess[:, None, None], (len(excess), len(job.replay.graph.steps), 1))
    seconds = profile.base_s.sum(axis=2)[:, :, None, None]
    return np.asarray((slow_factor(job) * seconds).sum(axis=0) / safe(seconds.sum(axis=0)))


def optimizer_factor(job: PipelineSubject) -> Floats:
    """The optimizer of each worker over that of its peers, [stages, steps, dp_ranks]; 1 if it was not recorded."""
    optimizer = job.computes.optimizer
    return np.ones((job.stages, *job.table.shape[4:])) if optimizer is None else optimizer


def slow_machines(job: PipelineSubject) -> Bools:
    """Slow DP ranks whose machines are slow, regardless of their data, [dp_ranks].

    DP ranks that are slow by one factor in the same steps have one kind of machine, because amounts of data vary. Else
    the optimizer decides: it does not depend on tokens, and a slow GPU slows it down too. A DP rank with more data
    whose optimizer is as slow as theirs also counts as one of them.
    """
    profile = job.profile
    if profile is None or job.stages < 2 or not profile.slow_ranks.any():
        return np.zeros(len(job.dp_ranks), np.bool_)
    hit, level = profile.slow_ranks, np.expm1(profile.ranks.level)
    if hit.sum() > 1 and one_factor(level[hit], profile.ranks.error[hit], profile.ranks.slow[hit]):
        return hit
    optimizer = median(optimizer_factor(job), (1,)).min(axis=0) - 1
    # A bad worker among healthy ones has a slow optimizer too, so all stages must have one.
    machines = hit & (optimizer > OPTIMIZERS.share * level)
    if machines.any():
        return np.asarray(machines | (hit & (optimizer > OPTIMIZERS.share * np.median(level[machines]))))
    return np.zeros_like(hit)


def one_factor(excess: Floats, error: Floats, slow: Bools) -> bool:
    """True if members are slow by one factor, up to chance, and in the same steps. `slow`: [members, steps]."""
    alike = SLOW_WORKERS.one_factor_share * excess.max() + 2 * float(np.median(error))
    return bool(np.ptp(excess) <= alike) and bool((slow == slow[0]).all())


def _machine_factor(job: PipelineSubject, rank: Floats) -> Floats:
    """The part of the factors `rank` [steps, dp_ranks] that is due to machines; the rest is data; same shape."""
    machines, level = slow_machines(job), np.exp(job.profile.ranks.level) if job.profile else None
    if level is None or not machines.any():
        return np.ones_like(rank)
    usual = float(lower_median(level[machines], axis=0))
    for_both_reasons = machines & (level - 1 > (usual - 1) * (1 + 1 / OPTIMIZERS.share))
    return np.asarray(np.where(machines, np.where(for_both_reasons, usual, rank), 1.0))


def ranks_with_more_data(job: PipelineSubject) -> Bools:
    """DP ranks whose computes take longer on all stages in proportion, although their machines are not slow,
    [dp_ranks].
    """
    profile = job.profile
    if profile is None or job.stages < 2:
        return np.zeros(len(job.dp_ranks), np.bool_)
    # Sequences that happen to be long in a few steps are uneven sequences, not a shard with more data.
    lasting = profile.ranks.slow.mean(axis=1) >= SLOW_WORKERS.lasting_share
    return np.asarray(lasting & (data_factor(job) > 1 + COMPUTES.factor).any(axis=0))


def data_factor(job: PipelineSubject) -> Floats:
    """Data of each DP rank over that of the others, 1 if it has no more, [steps, dp_ranks]."""
    profile = job.factors
    return np.asarray(profile.slow_rank / _machine_factor(job, profile.slow_rank))


def microbatch_cost(job: PipelineSubject) -> Floats:
    """Relative cost of each microbatch on any rank, 1 = the mean one, [microbatches, steps, dp_ranks]."""
    profile = job.factors
    data_factors = np.where(ranks_with_more_data(job), data_factor(job), 1.0)
    cost = np.where(np.isfinite(profile.microbatch), profile.microbatch, 1.0) * data_factors
    return np.asarray(cost / cost.mean())


def slow_workers(job: PipelineSubject) -> Bools:
    """Workers whose computes take longer than those of their peers, bool [stages, dp_ranks]."""
    profile = job.profile
    if profile is None:
        return np.zeros((job.stages, len(job.dp_ranks)), np.bool_)
    if len(job.dp_ranks) < 2:
        return _slow_without_peers(job, profile)
    slow = (profile.slow_workers | slow_machines(job)[None, :]) & ~waits_for_a_core(job)
    excess = worker_factor(job) - 1
    return np.asarray(slow & (excess >= SLOW_WORKERS.naming_share * np.where(slow, excess, 0.0).max()))


def busy_s(job: PipelineSubject) -> Floats:
    """Seconds per mean step in which each worker does something itself, with launch delays, [stages, dp_ranks]."""
    grid = computing(job)
    busy = np.nan_to_num(grid.gather(job.replay.durations.cost)) + np.maximum(
        np.nan_to_num(grid.gather(launch_delays(job))), 0.0
    )
    return np.asarray(busy.sum(axis=1).mean(axis=1))


def waits_for_a_core(job: PipelineSubject) -> Bools:
    """Workers that compute longer than their peers because they wait for a processor meanwhile, [stages, dp_ranks].

    The waiting time that the kernel counted is spread over everything a worker does, in proportion. On a rank next to
    one that collects garbage on all cores, most of it is in the computes.
    """
    if job.computes.queued_s is not None or not run_queue_s(job).any():  # the table is without these waits
        return np.zeros(run_queue_s(job).shape, np.bool_)
    computes_s = np.nansum(job.table.grid, axis=(0, 2, 3)).mean(axis=1)
    waits_s = run_queue_s(job) * np.minimum(computes_s / safe(busy_s(job)), 1.0)
    beyond_s, more_s = (times_s - lower_median(times_s, axis=1)[:, None] for times_s in (computes_s, waits_s))
    return np.asarray((beyond_s > 0) & (more_s >= SLOW_WORKERS.waiting_share * beyond_s))


def _slow_without_peers(job: PipelineSubject, profile: ComputeProfile) -> Bools:
    """With one DP rank, a slow worker looks like a stage with more work; that its forwards, backwards and optimizer are
    equally slow identifies it.
    """
    excess = stage_excess(profile).min(axis=1)
    if job.stages < 2 or optimizers(job).empty:
        return np.zeros((job.stages, 1), np.bool_)
    of_kind = median(np.nansum(job.table.grid, axis=(2, 3))[..., 0], (2,))
    of_kind = of_kind[of_kind.all(axis=1)]
    optimizer = median(optimizer_factor(job), (1,))[None, :, 0]
    parts = np.concatenate([of_kind / of_peers(of_kind, 1), optimizer]) - 1
    alike = ((parts > OPTIMIZERS.share * excess) & (OPTIMIZERS.share * parts < excess)).all(axis=0)
    lasting = larger_chunks(job, profile).all(axis=1)
    slow: Bools = (excess > SLOW_WORKERS.stage_excess) & alike & lasting
    return slow[:, None]


def stage_excess(profile: ComputeProfile) -> Floats:
    """Relative excess of each chunk's compute time over the usual one, [stages, chunks]."""
    return np.asarray(profile.stage_s / safe(lower_median(profile.stage_s.ravel(), -1)) - 1)


def larger_chunks(job: PipelineSubject, profile: ComputeProfile) -> Bools:
    """The chunks that compute longer than the usual one by design, [stages, chunks].

    With one DP rank, the steps must show that this is more than how its machines happened to vary, and more than a
    stage may differ anyway.
    """
    excess = stage_excess(profile)
    steps = len(job.replay.graph.steps)
    if len(job.dp_ranks) > 1 or steps < SLOW_WORKERS.fewest_steps:
        return np.asarray(excess > SLOW_WORKERS.stage_excess)
    chunk_s = np.nansum(job.table.grid, axis=3).reshape(-1, excess.size, steps)
    beyond = [view - math.log1p(SLOW_WORKERS.stage_excess) for view in kinds_and_all(chunk_s, of_peers(chunk_s, 1))]
    episodes = most_telling([episodes_of(view, excess.size) for view in beyond])
    return np.asarray((excess > SLOW_WORKERS.stage_excess) & (episodes.nats >= episodes.needed).reshape(excess.shape))


@evidence(PipelineSubject)
def undecided(job: PipelineSubject) -> str | None:
    """Which worker looks slow throughout the trace, but no slower than chance explains, and how many steps would tell;
    None if there is none.

    The error of a level falls with the square root of the number of steps, so the evidence grows in proportion to them.
    """
    profile = job.profile
    if profile is None or len(job.dp_ranks) < 2:
        return None
    episodes = profile.workers
    looks_slow = (
        episodes.slow.all(axis=1) & (np.expm1(episodes.level) >= COMPUTES.factor) & (episodes.nats < episodes.needed)
    )
    if not looks_slow.any():
        return None
    worst = int(np.where(looks_slow, episodes.level, -np.inf).argmax())
    stage, dp_index = divmod(worst, len(job.dp_ranks))
    factor = min(episodes.needed / max(float(episodes.nats[worst]), SMALLEST_NATS), SLOW_WORKERS.times)
    steps = max(math.ceil(factor * episodes.slow.shape[1]), SLOW_WORKERS.fewest_steps)
    return (
        f"worker {job.worker(stage, dp_index)} computes {np.expm1(episodes.level[worst]):.0%} slower, where noise alone"
        f" makes {np.expm1(episodes.error[worst]):.0%}: about {steps} steps would tell"
    )


def worker_series(job: PipelineSubject, hit: Bools) -> Floats:
    """Slowdown of the workers in `hit` step by step, relative to their peers, as measured, [steps]."""
    profile = job.factors
    if len(job.dp_ranks) == 1:
        return np.full(len(job.replay.graph.steps), float(worker_factor(job)[hit].mean()))
    machines = _machine_factor(job, profile.rank_by_step)
    measured = profile.worker_by_step.mean(axis=0) * machines
    return np.asarray(np.nan_to_num(measured.transpose(0, 2, 1)[hit], nan=1.0).mean(axis=0))


class SlowGroup(Struct, frozen=True, eq=False):
    """Slow workers [stages, dp_ranks] with one label: a host, or DP ranks."""

    hit: Bools
    host: str | None = None
    dp_ranks: tuple[int, ...] = ()


def slow_groups(job: PipelineSubject) -> tuple[list[SlowGroup], Bools]:
    """The groups, and the slow workers [stages, dp_ranks] outside of any group.

    A label explains workers if it covers exactly these. Of several labels, the one with the fewest parts wins, since
    one old rack is likelier than four bad hosts.
    """
    ungrouped = slow_workers(job)
    groups = []
    if len(job.dp_ranks) > 1 and ungrouped.sum() > 1:
        for find in (_ranks, _hosts):
            for group in find(job, ungrouped):
                groups.append(group)
                ungrouped = ungrouped & ~group.hit
    return groups, ungrouped


def _ranks(job: PipelineSubject, slow: Bools) -> Iterator[SlowGroup]:
    """DP ranks slow on all stages, by one factor and at the same time: so many that their kind of machine explains
    them. Either neighbours, or half of all DP ranks wherever they are: every other host, or as a scheduler mixed them.
    """
    whole: Bools = np.asarray(slow.all(axis=0))
    hosts = {job.hosts.get(worker) for worker in job.workers_where(slow & whole)}
    if job.stages == 1 and len(hosts) == 1 and None not in hosts:
        return  # a single host is the better label
    if whole.sum() < 2 and (job.stages == 1 or not whole.any()):
        return
    if job.stages == 1 and whole.sum() < max(2, SLOW_WORKERS.group_share * len(whole)):
        return
    hit, indices = slow & whole, np.flatnonzero(whole)
    neighbours = indices[-1] - indices[0] == len(indices) - 1  # as the ranks on one kind of machine are
    if _one_factor(job, hit) and (neighbours or 2 * whole.sum() >= len(whole) - 1):
        yield SlowGroup(hit, dp_ranks=tuple(job.dp_ranks[index] for index in indices.tolist()))


def _one_factor(job: PipelineSubject, hit: Bools) -> bool:
    profile = job.factors
    error = profile.workers.error if job.stages == 1 else profile.ranks.error
    slow = np.asarray((slow_factor(job) > 1).any(axis=0)).transpose(0, 2, 1)[hit]
    return one_factor(worker_factor(job)[hit] - 1, error[hit.any(axis=0)], slow)


def _hosts(job: PipelineSubject, slow: Bools) -> Iterator[SlowGroup]:
    """Hosts with at least two traced workers, most of them slow, in the same steps. A job's only host has no peers."""
    by_step = np.asarray((slow_factor(job) > 1).any(axis=0)).transpose(1, 0, 2)
    hosts: dict[str, list[Worker]] = {}
    for worker, host in sorted(job.hosts.items()):
        hosts.setdefault(host, []).append(worker)
    for host, workers in hosts.items():
        hit = job.cells_of(workers)
        of_host, fewest = slow & hit, max(2, SLOW_WORKERS.host_share * len(workers))
        if not hit.all() and of_host.sum() >= fewest and together(by_step[:, of_host]):
            yield SlowGroup(of_host, host=host)


class Wander(Struct, frozen=True, eq=False):
    """`spread`: standard deviation of workers from step to step, relative. `even`: factor on computes that makes each
    worker's steps alike, broadcasts to the table. `in_workload`: it shows as differing microbatches.
    """

    spread: float
    shows: bool
    in_workload: bool
    even: Floats


def wander_of(job: PipelineSubject) -> Wander:
    """Measure the wandering of a job's workers.

    A worker whose speed wanders resembles its own recent past: neighbouring microbatches (without a pipeline) or steps
    of a worker differ less from each other than from the rest of its trace.
    """
    profile = job.profile
    if profile is None or len(job.dp_ranks) < 2:
        return Wander(0.0, False, False, np.ones((1,) * 6))
    if job.stages == 1:
        return _of_workload(profile)
    return _of_workers(job, profile)


def _of_workload(profile: ComputeProfile) -> Wander:
    work = profile.microbatch
    over_run, within = remembers(work)
    shows = over_run and (within or not uneven_lengths(profile.length_correlation, profile.length_spread))
    level = nan_mean(work, (0,))
    even = 1 / safe(level / np.nanmean(level))
    return Wander(float(np.nanstd(level)), shows, shows, np.nan_to_num(even, nan=1.0)[None, None, None, None])


def _of_workers(job: PipelineSubject, profile: ComputeProfile) -> Wander:
    # Of two ranks, each is measured by the other one: it looks fast while that one is slow.
    other = profile.slow_worker[..., ::-1] if len(job.dp_ranks) == 2 else 1.0
    level = profile.worker_by_step / profile.slow_worker * other
    seconds = profile.base_s.sum(axis=2)[:, :, None, None]
    all_kinds = (level * seconds).sum(axis=0) / safe(seconds.sum(axis=0))
    log_factor = np.log(safe(all_kinds))
    log_factor = log_factor - nan_mean(log_factor, (1,))[:, None]
    ops = 2 * job.table.shape[2] * job.table.shape[3]
    expected = MEDIAN_ERROR**2 * profile.op_scatter**2 / ops
    seen = float(np.nanmean(log_factor**2))
    shows = seen > SLOW_WORKERS.variance_ratio * expected
    even = 1 / np.exp(np.nan_to_num(log_factor))
    return Wander(float(np.sqrt(seen)), bool(shows), False, even[None, :, None, None])


class SampledGpu(Struct, frozen=True):
    """One sampled GPU. `sm_mhz`: its median clock, None if unknown. `faulty`: the share of samples with a reason of
    `FAULTS`, None if reasons were not sampled.
    """

    uuid: str | None
    model: str | None
    sm_mhz: float | None
    faulty: float | None


class GpuClocks(Struct, frozen=True):
    """Median clocks of slow workers' GPUs and of the others', MHz."""

    own_mhz: float
    peers_mhz: float

    def explain(self, factor: float) -> bool:
        """Whether the lower clock explains most of a slowdown by `factor`."""
        return self.peers_mhz / self.own_mhz - 1 > SLOW_WORKERS.explained_share * (factor - 1)


@evidence(PipelineSubject)
def cards_of(job: PipelineSubject) -> dict[Worker, SampledGpu]:
    """The sampled GPU of each worker, as far as the trace's metadata has it."""
    gpus = job.trace.metadata.get("gpus")
    sampled = gpus if isinstance(gpus, dict) else {}
    of_workers = {worker: sampled.get(str(rank)) for worker, rank in job.worker_ranks.items()}
    return {worker: _card(gpu) for worker, gpu in of_workers.items() if isinstance(gpu, dict)}


def _card(gpu: Mapping[str, Any]) -> SampledGpu:
    spread, reasons = gpu.get("sm_mhz"), gpu.get("reasons")
    mhz = spread.get("median") if isinstance(spread, dict) else None
    shares = [share_of_samples(reasons.get(fault, 0.0)) for fault in FAULTS] if isinstance(reasons, dict) else []
    uuid, model = gpu.get("uuid"), gpu.get("model")
    return SampledGpu(
        uuid if isinstance(uuid, str) else None,
        model if isinstance(model, str) else None,
        float(mhz) if isinstance(mhz, int | float) and 0 < mhz < HIGHEST_MHZ else None,
        max((share for share in shares if share is not None), default=None),
    )


def shares_card(job: Subject, workers: Iterable[Worker]) -> bool:
    """Whether one of `workers` computes on the GPU of another worker."""
    slow, cards = set(workers), cards_of(job) or {}
    uuids = {cards[worker].uuid for worker in slow & cards.keys()} - {None}
    return any(card.uuid in uuids for worker, card in cards.items() if worker not in slow)


def clocks_of(job: PipelineSubject, workers: Iterable[Worker]) -> GpuClocks | None:
    """The clocks of the GPUs of `workers` and of others of the same models; None if one of them is unknown."""
    own, peers = _own_and_peers(job, workers)
    own_mhz, peers_mhz = ([card.sm_mhz for card in cards if card.sm_mhz is not None] for cards in (own, peers))
    return GpuClocks(statistics.median(own_mhz), statistics.median(peers_mhz)) if own_mhz and peers_mhz else None


def report_faults(job: Subject, workers: Iterable[Worker]) -> bool | None:
    """Whether the GPUs of `workers` report faults that their peers do not; None if nothing is known of either."""
    own, peers = _own_and_peers(job, workers)
    if not peers or all(card.faulty is None for card in own):
        return None
    return _faulty(own) and not _faulty(peers)


class Sampled(Enum):
    """What the samples of GPUs say of workers that are slow on them."""

    NOTHING = "nothing"
    FAULTY = "they report faults, and no clock says otherwise"
    SAME_CARD = "a worker that is not slow computes on the same GPU"
    LOW_CLOCK = "their clock explains it, without a fault"
    SAME_CLOCK = "they run at the clock of the others"


def sampled(job: PipelineSubject, workers: Sequence[Worker]) -> Sampled:
    """Why `workers` are slow, as far as samples of their GPUs show it.

    A slow compute alone shows no fault: user code, data or a neighbour on the cores slow it down just as well.
    """
    hit = job.cells_of(workers)
    if job.profile is None or not workers or slow_kind(job, hit) is not None:
        return Sampled.NOTHING
    if shares_card(job, workers):
        return Sampled.SAME_CARD
    clocks, factor = clocks_of(job, workers), float(worker_factor(job)[hit].min())
    explained = clocks is None or clocks.explain(factor)
    if explained and factor >= 1 + COMPUTES.factor and report_faults(job, workers):
        return Sampled.FAULTY
    if clocks is None:
        return Sampled.NOTHING
    return Sampled.LOW_CLOCK if explained else Sampled.SAME_CLOCK


def _own_and_peers(job: Subject, workers: Iterable[Worker]) -> tuple[list[SampledGpu], list[SampledGpu]]:
    """The GPUs of `workers`, and those of the other workers that are of the same models."""
    slow, cards = set(workers), cards_of(job) or {}
    own_cards = [card for worker, card in cards.items() if worker in slow]
    models = {card.model for card in own_cards}
    return own_cards, [card for worker, card in cards.items() if worker not in slow and card.model in models]


def _faulty(cards: Iterable[SampledGpu]) -> bool:
    shares = [card.faulty for card in cards if card.faulty is not None]
    return bool(shares) and statistics.median(shares) >= SLOW_WORKERS.faulty_share
