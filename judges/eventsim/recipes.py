"""Draws of causes: their strength and their place.

In: a random generator and the job as drawn so far. Out: one `Cause`, sized to the job so that it matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from judges.eventsim.causes import (
    ALWAYS,
    Cause,
    Checkpoints,
    GcPauses,
    HeavyStage,
    LateData,
    Part,
    ProcessPauses,
    RandomPauses,
    SlowFirstMicrobatch,
    SlowHostThread,
    SlowRank,
    SlowSteps,
    SlowWorkers,
    StoppedProcess,
    Wander,
    When,
)
from judges.eventsim.model import Cell, Host, Job, Posting
from judges.eventsim.troubles import (
    BusyUplink,
    ClockOffset,
    Congestion,
    CongestionEpisodes,
    SlowLink,
    SlowNic,
    Traffic,
    Way,
)
from judges.eventsim.uneven import SkewedData, UnequalSequences

Rng = np.random.Generator
Maker = Callable[[Rng, Job], Cause]
Timing = Callable[[Rng, Job], When]


def step_s(job: Job) -> float:
    """About how long a step's computes take, seconds."""
    return (1 + job.compute.backward_ratio) * job.compute.forward_s * (job.shape.microbatches + job.shape.pp - 1)


def _seed(rng: Rng) -> int:
    return int(rng.integers(2**31))


def _cell(rng: Rng, job: Job) -> Cell:
    """A worker without a cause, not of a DP rank with skewed data."""
    troubled = {cell for cause in job.causes for cell in cause.cells(job)}
    skewed = {cause.dp for cause in job.causes if isinstance(cause, SkewedData)}
    free = [cell for cell in job.shape.cells if cell not in troubled and cell[0] not in skewed]
    return free[int(rng.integers(len(free)))]


def always(rng: Rng, job: Job) -> When:
    del rng, job
    return ALWAYS


def every_third(rng: Rng, job: Job) -> When:
    del job
    return When(every=3, phase=int(rng.integers(3)))


def since(share: float) -> Timing:
    """From this share of the trace on."""

    def when(rng: Rng, job: Job) -> When:
        del rng
        return When(since=round(share * job.shape.steps))

    return when


def bursts(rng: Rng, job: Job) -> When:
    del job
    return When(burst=0.3, burst_steps=2, seed=_seed(rng))


def bad_worker(factor: float, timing: Timing = always) -> Maker:
    """One worker that computes slowly, give or take a tenth."""

    def make(rng: Rng, job: Job) -> Cause:
        return SlowWorkers(frozenset({_cell(rng, job)}), _about(rng, factor), timing(rng, job))

    return make


def _about(rng: Rng, factor: float) -> float:
    return 1 + (factor - 1) * float(rng.uniform(0.9, 1.1))


def slow_rank(factor: float, timing: Timing = always) -> Maker:
    """One tensor-parallel rank that computes slowly, give or take a tenth."""

    def make(rng: Rng, job: Job) -> Cause:
        position = int(rng.integers(job.shape.tp))
        return SlowRank(_cell(rng, job), position, _about(rng, factor), timing(rng, job))

    return make


def ranks_told_apart(rng: Rng, job: Job) -> Job:
    """The trace records how long the ranks of a worker wait for each other."""
    return replace(job, noise=replace(job.noise, rank=float(rng.choice([0.005, 0.01, 0.02]))))


def slow_backward(rng: Rng, job: Job) -> Cause:
    return SlowWorkers(frozenset({_cell(rng, job)}), _about(rng, 1.5), part=Part.BACKWARD)


def in_turn(rng: Rng, job: Job) -> Job:
    """Two or more workers of one stage, up to all of them, that are each slow in a share of the steps at random."""
    stage, factor = int(rng.integers(job.shape.pp)), float(rng.uniform(1.25, 1.7))
    share, slow = float(rng.choice([0.3, 0.5, 0.6, 0.75])), int(rng.integers(2, job.shape.dp + 1))
    ranks = rng.permutation(job.shape.dp)[:slow].tolist()
    times = [When(burst=share, burst_steps=1, seed=_seed(rng)) for _ in ranks]
    causes = (SlowWorkers(frozenset({(dp, stage)}), factor, when) for dp, when in zip(ranks, times, strict=True))
    return replace(job, causes=(*job.causes, *causes))


def slow_optimizer(rng: Rng, job: Job) -> Cause:
    """An optimizer that takes 8 to 20 % of a step longer."""
    factor = 1 + float(rng.uniform(0.08, 0.2)) * step_s(job) / job.compute.optimizer_s
    return SlowWorkers(frozenset({_cell(rng, job)}), factor, part=Part.OPTIMIZER)


def slow_host(rng: Rng, job: Job) -> Cause:
    host = int(rng.integers(job.shape.hosts))
    return SlowWorkers(job.shape.cells_of_host(host), _about(rng, 1.4))


def older_half(rng: Rng, job: Job) -> Cause:
    """The first or the second half of the DP ranks, all stages."""
    half = job.shape.dp // 2
    first = int(rng.integers(2)) * (job.shape.dp - half)
    return SlowWorkers(frozenset(cell for cell in job.shape.cells if first <= cell[0] < first + half), 1.12)


def skewed_data(rng: Rng, job: Job) -> Cause:
    return SkewedData(int(rng.integers(job.shape.dp)), float(rng.uniform(1.8, 2.2)))


def unequal_sequences(rng: Rng, job: Job) -> Cause:
    del job
    packed = bool(rng.integers(2))
    return UnequalSequences(_seed(rng), packed=packed, sigma=float(rng.uniform(1.2, 1.6) if packed else 0.8))


def loss(share: float) -> Maker:
    """A last stage with a costly loss, half of the time by tokens."""

    def make(rng: Rng, job: Job) -> Cause:
        return HeavyStage(job.shape.pp - 1, _about(rng, 1 + share) - 1, by_tokens=bool(rng.integers(2)))

    return make


def more_layers(rng: Rng, job: Job) -> Cause:
    return HeavyStage(int(rng.integers(job.shape.pp)), float(rng.choice([0.25, 0.375, 0.5])), layers=True)


def slow_first_microbatch(rng: Rng, job: Job) -> Cause:
    """A factor that costs 8 to 15 % of a step."""
    share = float(rng.uniform(0.08, 0.15))
    return SlowFirstMicrobatch(1 + share * (job.shape.microbatches + job.shape.pp - 1) / job.shape.pp)


def wander(*sds: float) -> Maker:
    """Workers that drift by one of these shares, within a few microbatches to over several steps."""

    def make(rng: Rng, job: Job) -> Cause:
        memory_steps = max(float(rng.choice([0.1, 0.3, 1.0, 4.0])), 1 / job.shape.microbatches)
        return Wander(_seed(rng), float(rng.choice(sds)), memory_steps)

    return make


def process_pauses(rng: Rng, job: Job) -> Cause:
    del job
    return ProcessPauses(_seed(rng))


def random_pauses(rng: Rng, job: Job) -> Cause:
    """Pauses of one and a half forwards that take a fiftieth of each worker's time."""
    pause_s = 1.5 * job.compute.forward_s
    return RandomPauses(_seed(rng), float(rng.uniform(0.015, 0.025)) / pause_s, pause_s)


def gc(*, recorded: bool) -> Maker:
    """Collections on a tenth of the worker-steps of small jobs, fewer of large ones."""

    def make(rng: Rng, job: Job) -> Cause:
        rate = min(0.25, 3.0 / len(job.shape.cells))
        return GcPauses(_seed(rng), rate, float(rng.uniform(0.15, 0.3)) * step_s(job), recorded)

    return make


def gc_of_one_worker(rng: Rng, job: Job) -> Cause:
    return GcPauses(_seed(rng), pause_s=float(rng.uniform(0.3, 1.2)) * step_s(job), worker=_cell(rng, job))


def stopped_process(rng: Rng, job: Job) -> Cause:
    return StoppedProcess(_cell(rng, job))


def sleep_before_backward(rng: Rng, job: Job) -> Cause:
    return SlowHostThread(frozenset({_cell(rng, job)}), 0.02, backward_only=True)


def slow_launches(rng: Rng, job: Job) -> Cause:
    """One worker whose host thread cannot keep up."""
    waits = job.host.mode is Host.IN_STEP or (job.posting is Posting.BATCHED and job.shape.pp > 1)
    if waits:
        compute_s = job.compute.forward_s * (1 + job.compute.backward_ratio) / 2 / job.shape.vpp
        return SlowHostThread(frozenset({_cell(rng, job)}), compute_s * float(rng.uniform(0.2, 0.5)))
    # A host that runs ahead hides its launches behind computes, until they take longer than the step.
    longer = float(rng.uniform(1.1, 1.4))
    return SlowHostThread(frozenset({_cell(rng, job)}), longer * step_s(job) / (2 * job.shape.computes))


def checkpoints(rng: Rng, job: Job) -> Cause:
    del job
    return Checkpoints(phase=int(rng.integers(5)), at_start=bool(rng.integers(2)))


def recorded_checkpoints(rng: Rng, job: Job) -> Cause:
    del job
    return Checkpoints(phase=int(rng.integers(5)), recorded=True)


def late_data(rng: Rng, job: Job) -> Cause:
    dp = frozenset({int(rng.integers(job.shape.dp))})
    return LateData(_seed(rng), float(rng.uniform(0.1, 0.3)) * step_s(job), dp)


def late_data_everywhere(rng: Rng, job: Job) -> Cause:
    return LateData(_seed(rng), float(rng.uniform(0.1, 0.3)) * step_s(job))


def late_data_of_some(rng: Rng, job: Job) -> Cause:
    """On one or two DP ranks, in all steps or in some, by a twentieth of a step to a whole one."""
    dp_ranks = frozenset(
        rng.choice(job.shape.dp, 1 + int(job.shape.dp > 3 and rng.integers(2)), replace=False).tolist()
    )
    return _late_data(rng, job, dp_ranks)


def late_data_in_turn(rng: Rng, job: Job) -> Cause:
    """In each step on another DP rank."""
    return replace(_late_data(rng, job), in_turn=True)


def _late_data(rng: Rng, job: Job, dp_ranks: frozenset[int] = frozenset()) -> LateData:
    delay_s = float(np.exp(rng.uniform(np.log(0.05), 0.0))) * step_s(job)
    share, tailed = float(rng.choice([1.0, 1.0, 0.6, 0.3])), bool(rng.integers(2))
    return LateData(_seed(rng), delay_s / share, dp_ranks, share, tailed=tailed)


def checkpoints_before_steps(rng: Rng, job: Job) -> Cause:
    """Not recorded: on all workers, about equally long."""
    every, stall_s = int(rng.choice([2, 3, 4, 5, 8])), float(np.exp(rng.uniform(np.log(0.3), np.log(4)))) * step_s(job)
    scatter = float(rng.choice([0.0, 0.05, 0.2]))
    gathered = rng.random() < 0.3
    return Checkpoints(every, stall_s, int(rng.integers(every)), scatter=scatter, gathered=gathered, seed=_seed(rng))


def checkpoints_of_few(rng: Rng, job: Job) -> Cause:
    """Not recorded: on the first DP rank, or on its first or last stage alone; the others wait."""
    writers = ([(0, pp) for pp in range(job.shape.pp)], [(0, 0)], [(0, job.shape.pp - 1)])[int(rng.integers(3))]
    return replace(checkpoints_before_steps(rng, job), writers=frozenset(writers))


def another_loop(rng: Rng, job: Job) -> Job:
    """A job that may load data before it gathers parameters, or gather none."""
    return replace(job, gathers=rng.random() < 0.7, host=replace(job.host, loads_first=bool(rng.integers(2))))


def slow_steps(rng: Rng, job: Job) -> Cause:
    """One or two neighbouring steps in which all workers are slow."""
    count = 1 if job.shape.steps < 8 else 2
    first = int(rng.integers(job.shape.steps - count + 1))
    return SlowSteps(_about(rng, 1.6), When(since=first, until=first + count))


def slow_link(factor: float) -> Maker:
    """One connection of two stages, one way or both."""

    def make(rng: Rng, job: Job) -> Cause:
        links = job.shape.pp if job.shape.vpp > 1 else job.shape.pp - 1
        dp, stage = int(rng.integers(job.shape.dp)), int(rng.integers(links))
        way = (Way.FORWARD, Way.BACKWARD, Way.BOTH)[int(rng.integers(3))]
        return SlowLink(dp, stage, _about(rng, factor), way)

    return make


def slow_nic(factor: float, way: str = "both", when: Timing = always) -> Maker:
    """The network card of one host."""

    def make(rng: Rng, job: Job) -> Cause:
        return SlowNic(int(rng.integers(job.shape.hosts)), _about(rng, factor), Way(way), when(rng, job))

    return make


def congested_collectives(rng: Rng, job: Job) -> Cause:
    del job
    return Congestion(_seed(rng), 0.03, 12.0, Traffic.COLLECTIVES)


def congested(rng: Rng, job: Job) -> Cause:
    del job
    return Congestion(_seed(rng), 0.03, float(rng.uniform(12, 40)), Traffic.ALL)


def episodes(rng: Rng, job: Job) -> Cause:
    return CongestionEpisodes(_seed(rng), length_s=0.3 * step_s(job), factor=float(rng.uniform(8, 20)))


def stretches(traffic: str, factor: float, timing: Timing = bursts) -> Maker:
    """All transfers take longer in some stretches of steps."""

    def make(rng: Rng, job: Job) -> Cause:
        return Congestion(_seed(rng), 1.0, _about(rng, factor), Traffic(traffic), timing(rng, job))

    return make


def scattered(rates: tuple[float, ...], factors: tuple[float, float], *, tails: bool = False) -> Maker:
    """A share of all transfers takes longer; with `tails`, some far longer."""

    def make(rng: Rng, job: Job) -> Cause:
        del job
        return Congestion(_seed(rng), float(rng.choice(rates)), float(rng.uniform(*factors)), Traffic.ALL, tails=tails)

    return make


def busy_uplink(rng: Rng, job: Job) -> Cause:
    return BusyUplink(float(rng.uniform(0.05, 0.15)), bursts(rng, job))


def clock_offset(rng: Rng, job: Job) -> Cause:
    offset_s = float(rng.choice([-1, 1])) * float(rng.uniform(0.004, 0.015))
    drift = float(rng.choice([0.0, 5e-5])) if job.shape.steps >= 12 else 0.0
    return ClockOffset(_cell(rng, job), offset_s, drift)


def busy_network(factor: float) -> Callable[[Rng, Job], Job]:
    """A job that moves `factor` times as many bytes, so that its network matters."""

    def finish(rng: Rng, job: Job) -> Job:
        del rng
        network = job.network
        return replace(
            job,
            network=replace(
                network,
                activation_bytes=network.activation_bytes * factor,
                parameter_bytes=network.parameter_bytes * factor,
            ),
        )

    return finish


def fast_nvlink(rng: Rng, job: Job) -> Job:
    """Workers that share a host, and large transfers that are nine times as fast within it as between hosts."""
    job = busy_network(2.5)(rng, job)
    return replace(job, network=replace(job.network, nvlink=9 * job.network.nic))


def unrecorded(rng: Rng, job: Job) -> Job:
    """The workers at fault are not in the trace."""
    del rng
    cells = frozenset(cell for cause in job.causes for cell in cause.cells(job))
    return replace(job, recording=replace(job.recording, unrecorded=cells))


def noisy(rng: Rng, job: Job) -> Job:
    """A healthy job with more noise than usual, some of it in long tails."""
    op, tail = float(rng.choice([0.02, 0.03, 0.05])), float(rng.choice([0.0, 0.002, 0.005]))
    return replace(job, noise=replace(job.noise, op=op, worker=0.006, tail=tail))


def busy_cores(rng: Rng, job: Job) -> Job:
    """A small job on cores that others use too: some computes take far longer."""
    noise = replace(job.noise, op=0.05, tail=0.06, tail_factor=float(rng.uniform(1.5, 2.0)), wander=0.03)
    return replace(job, noise=noise)


_ORDINARY: tuple[Maker, ...] = (
    bad_worker(1.6),
    bad_worker(1.8, every_third),
    slow_backward,
    older_half,
    skewed_data,
    unequal_sequences,
    loss(0.5),
    gc(recorded=True),
    late_data,
    slow_steps,
    slow_link(15),
    slow_nic(6),
    congested,
    checkpoints,
    process_pauses,
)


def several(count: int) -> Callable[[Rng, Job], Job]:
    """`count` different ordinary causes at once."""

    def finish(rng: Rng, job: Job) -> Job:
        for number in rng.permutation(len(_ORDINARY)):
            cause = _ORDINARY[number](rng, job)
            if not any(type(cause) is type(other) for other in job.causes):
                job = replace(job, causes=(*job.causes, cause))
            if len(job.causes) == count:
                break
        return job

    return finish
