"""The cases that a corpus is drawn from: causes, and the kinds of jobs that have them.

Draws a `Job` from a seed and the name of a case. P1 to P19 are situations in which a diagnosis built on another
simulator failed; the others are ordinary. Shape, costs, posting rule, machines and noise of a job are random.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from judges.eventsim import recipes, uneven_recipes
from judges.eventsim.causes import Cause
from judges.eventsim.model import (
    ComputeCost,
    Host,
    HostCost,
    Job,
    Network,
    Noise,
    Posting,
    Queueing,
    Recording,
    Schedule,
    Seeds,
    Shape,
)

Maker = Callable[[np.random.Generator, Job], Cause]

#: DP ranks, stages, virtual stages, tensor-parallel ranks.
FLAT = ((2, 1, 1, 8), (4, 1, 1, 8), (8, 1, 1, 8), (8, 1, 1, 4), (16, 1, 1, 2))
SHALLOW = ((4, 2, 1, 8), (8, 2, 1, 4), (6, 2, 1, 8), (2, 2, 1, 8), (4, 2, 2, 8), (16, 2, 1, 2))
DEEP = ((4, 4, 1, 8), (2, 4, 1, 8), (3, 3, 1, 8), (8, 4, 1, 4), (2, 8, 1, 8), (4, 8, 1, 4), (4, 4, 2, 8), (2, 4, 2, 4))
ONE_LANE = ((1, 4, 1, 8), (1, 8, 1, 4))
ONE_WORKER = ((1, 1, 1, 8),)
PIPELINES = SHALLOW + DEEP
ANY = FLAT + PIPELINES
HALVES = tuple(shape for shape in ANY if shape[0] >= 4)
SHARED_HOSTS = tuple(shape for shape in ANY if shape[3] < 8 and shape[0] >= 4)
#: Largest trace, ops, so that hundreds of jobs can be run several times each.
MOST_OPS = 20_000
ASKS_ANY_DIRECTION = (Posting.ANY_DIRECTION, Posting.BATCHED)


@dataclass(frozen=True, slots=True)
class Case:
    """A situation: `makers` make its causes; the other fields restrict its jobs.

    `steps`: fewest and most. `finish`: a last change of the drawn job.
    """

    makers: tuple[Maker, ...] = ()
    shapes: tuple[tuple[int, int, int, int], ...] = ANY
    steps: tuple[int, int] = (8, 24)
    postings: tuple[Posting, ...] = tuple(Posting)
    host: Host | None = None
    finish: Callable[[np.random.Generator, Job], Job] | None = None


def _p1(*more: Maker) -> Case:
    return Case((recipes.skewed_data, *more), shapes=((4, 2, 1, 8),))


def _live(*makers: Maker) -> Case:
    """Two ranks on one machine, like a test job."""
    return Case(makers, shapes=((2, 1, 1, 4),), steps=(16, 40), host=Host.IN_STEP)


def _mixed(count: int) -> Case:
    """Several ordinary causes at once."""
    return Case((), shapes=tuple(shape for shape in PIPELINES if shape[0] >= 4), finish=recipes.several(count))


CASES: dict[str, Case] = {
    "P1": _p1(),
    "P1-bad-worker": _p1(recipes.bad_worker(3.2)),
    "P2-every-third": Case((recipes.bad_worker(1.8, recipes.every_third),), steps=(12, 30)),
    "P2-last-40%": Case((recipes.bad_worker(1.8, recipes.since(0.6)),), steps=(10, 30)),
    "P2-bursts": Case((recipes.bad_worker(1.8, recipes.bursts),), steps=(16, 30)),
    "P2-nic": Case((recipes.slow_nic(5, when=recipes.every_third),), shapes=PIPELINES, steps=(12, 30),
                   finish=recipes.busy_network(2.5)),
    "P3": Case((recipes.bad_worker(1.6, recipes.since(0.5)),), steps=(10, 30)),
    "P4-collectives": Case((recipes.congested_collectives,), shapes=FLAT, steps=(24, 40),
                           finish=recipes.busy_network(4)),
    "P4-all": Case((recipes.congested,), shapes=DEEP),
    "P5": Case((recipes.slow_link(12),), shapes=PIPELINES, postings=ASKS_ANY_DIRECTION,
               finish=recipes.busy_network(2)),
    "P6": Case((recipes.loss(0.5), recipes.unequal_sequences), shapes=DEEP + ONE_LANE),
    "P7": Case((recipes.bad_worker(1.6),), shapes=((4, 1, 1, 8), (8, 1, 1, 8), (4, 2, 1, 8), (4, 4, 1, 8)),
               finish=recipes.unrecorded),
    "P8": Case((recipes.checkpoints,), steps=(15, 30)),
    "P8-recorded": Case((recipes.recorded_checkpoints,), steps=(15, 30)),
    "P8-late-data": Case((recipes.checkpoints, recipes.late_data), steps=(15, 30)),
    "P9": Case((recipes.process_pauses,)),
    "P9-anytime": Case((recipes.random_pauses,)),
    "P10": Case((recipes.slow_first_microbatch,)),
    "P11": Case((recipes.slow_nic(6, "sending"),), shapes=PIPELINES),
    "P12": Case((recipes.older_half,), shapes=HALVES),
    "P13": Case((recipes.slow_steps,), steps=(3, 4)),
    "P14": Case((recipes.wander(0.03, 0.05, 0.07),), shapes=FLAT, steps=(16, 40)),
    "P15": Case((recipes.wander(0.015),), shapes=PIPELINES, steps=(12, 24)),
    "P16-optimizer": Case((recipes.slow_optimizer,)),
    "P16-data": Case((recipes.late_data,)),
    "P16-launches": Case((recipes.slow_launches,), postings=ASKS_ANY_DIRECTION),
    "P17-gc": _live(recipes.gc_of_one_worker),
    "P17-stops": _live(recipes.stopped_process),
    "P18": _live(recipes.sleep_before_backward),
    "P19": Case((), shapes=((2, 1, 1, 4),), steps=(16, 40), host=Host.IN_STEP, finish=recipes.busy_cores),
    "bad-worker": Case((recipes.bad_worker(1.5),)),
    "in-turn": Case(steps=(16, 40), finish=recipes.in_turn),
    "in-turn-lengths": Case((uneven_recipes.odd_sequences(),), steps=(16, 40), finish=recipes.in_turn),
    "slow-backward": Case((recipes.slow_backward,)),
    "slow-host": Case((recipes.slow_host,), shapes=SHARED_HOSTS),
    "sequences": Case((recipes.unequal_sequences,), shapes=ANY),
    "loss": Case((recipes.loss(0.5),), shapes=PIPELINES + ONE_LANE),
    "layers": Case((recipes.more_layers,), shapes=PIPELINES + ONE_LANE),
    "slow-link": Case((recipes.slow_link(15),), shapes=PIPELINES, finish=recipes.busy_network(1.5)),
    "slow-nic": Case((recipes.slow_nic(6),), shapes=PIPELINES),
    "slow-nic-receiving": Case((recipes.slow_nic(6, "receiving"),), shapes=PIPELINES),
    "congestion-episodes": Case((recipes.episodes,), shapes=PIPELINES, steps=(12, 24),
                                finish=recipes.busy_network(2)),
    "congestion-stretches": Case((recipes.stretches("all", 4),), steps=(12, 40), finish=recipes.busy_network(2)),
    "congestion-p2p": Case((recipes.stretches("p2p", 6),), shapes=PIPELINES, steps=(12, 40),
                           finish=recipes.busy_network(2)),
    "congestion-collectives": Case((recipes.stretches("collectives", 4),), steps=(12, 40),
                                   finish=recipes.busy_network(2)),
    "congestion-since": Case((recipes.stretches("all", 4, recipes.since(0.6)),), steps=(12, 40),
                             finish=recipes.busy_network(2)),
    "congestion-mostly": Case((recipes.stretches("all", 4, recipes.since(0.3)),), steps=(12, 40),
                              finish=recipes.busy_network(2)),
    "congestion-scattered": Case((recipes.scattered((0.05, 0.1, 0.2), (3, 8)),), steps=(12, 40),
                                 finish=recipes.busy_network(2)),
    "congestion-tails": Case((recipes.scattered((0.1, 0.2), (4, 10), tails=True),), steps=(12, 40),
                             finish=recipes.busy_network(1.5)),
    "congestion-uplink": Case((recipes.busy_uplink,), shapes=PIPELINES, steps=(12, 40),
                              finish=recipes.busy_network(3)),
    "nic-since": Case((recipes.slow_nic(6, when=recipes.since(0.5)),), shapes=PIPELINES, steps=(12, 30)),
    "nic-sending-late": Case((recipes.slow_nic(6, "sending", recipes.since(0.75)),), shapes=PIPELINES,
                             steps=(12, 30), finish=recipes.busy_network(2.5)),
    "nic-sending-third": Case((recipes.slow_nic(6, "sending", recipes.every_third),), shapes=PIPELINES,
                              steps=(12, 30), finish=recipes.busy_network(2.5)),
    "nic-receiving-bursts": Case((recipes.slow_nic(6, "receiving", recipes.bursts),), shapes=PIPELINES,
                                 steps=(16, 30), finish=recipes.busy_network(2.5)),
    "nic-sending-mild": Case((recipes.slow_nic(3, "sending"),), shapes=PIPELINES, steps=(12, 30),
                             finish=recipes.busy_network(2.5)),
    "healthy-nvlink": Case(shapes=((1, 4, 1, 4), (1, 8, 1, 4), (2, 4, 1, 2)), steps=(6, 24),
                           finish=recipes.fast_nvlink),
    "gc": Case((recipes.gc(recorded=True),)),
    "gc-unrecorded": Case((recipes.gc(recorded=False),)),
    "late-data-everywhere": Case((recipes.late_data_everywhere,)),
    "late-data-of-some": Case((recipes.late_data_of_some,), finish=recipes.another_loop),
    "late-data-in-turn": Case((recipes.late_data_in_turn,), finish=recipes.another_loop),
    "checkpoint-before-step": Case((recipes.checkpoints_before_steps,), steps=(15, 30), finish=recipes.another_loop),
    "checkpoint-of-few": Case((recipes.checkpoints_of_few,), steps=(15, 30), finish=recipes.another_loop),
    "healthy-loop": Case(shapes=ANY + ONE_LANE, steps=(6, 40), finish=recipes.another_loop),
    "slow-steps": Case((recipes.slow_steps,), steps=(8, 24)),
    "clock": Case((recipes.clock_offset,)),
    "two": _mixed(2),
    "three": _mixed(3),
    "four": _mixed(4),
    "slow-rank": Case((recipes.slow_rank(1.5),), finish=recipes.ranks_told_apart),
    "slow-rank-mild": Case((recipes.slow_rank(1.2),), finish=recipes.ranks_told_apart),
    "slow-rank-since": Case((recipes.slow_rank(1.6, recipes.since(0.5)),), steps=(12, 30),
                            finish=recipes.ranks_told_apart),
    "slow-rank-and-worker": Case((recipes.slow_rank(1.5), recipes.bad_worker(1.5)), shapes=PIPELINES,
                                 finish=recipes.ranks_told_apart),
    "creeping": Case((uneven_recipes.creeping(1.3, 2.0),), steps=(8, 30)),
    "creeping-mild": Case((uneven_recipes.creeping(1.08, 1.3),), steps=(8, 40)),
    "creeping-long": Case((uneven_recipes.creeping(1.1, 2.0),), shapes=FLAT + SHALLOW, steps=(80, 200)),
    "creeping-host": Case((uneven_recipes.creeping_host,), shapes=SHARED_HOSTS),
    "lengths": Case((uneven_recipes.odd_sequences(),)),
    "lengths-few": Case((uneven_recipes.odd_sequences(),), finish=uneven_recipes.few_microbatches),
    "lengths-shards": Case((uneven_recipes.odd_sequences(shards=True),), steps=(16, 30)),
    "lengths-and-worker": Case((uneven_recipes.odd_sequences(), recipes.bad_worker(1.5))),
    "slower-half": Case((uneven_recipes.slower_half,), shapes=HALVES),
    "slower-half-noisy": Case((uneven_recipes.slower_half,), shapes=HALVES, finish=recipes.noisy),
    "slower-half-lengths": Case((uneven_recipes.slower_half, uneven_recipes.odd_sequences()), shapes=HALVES),
    "healthy-lockstep": Case(shapes=ANY + ONE_LANE, steps=(6, 40), finish=recipes.ranks_told_apart),
    "healthy": Case(shapes=ANY + ONE_LANE + ONE_WORKER, steps=(3, 40)),
    "healthy-noisy": Case(shapes=ANY + ONE_LANE + ONE_WORKER, steps=(6, 40), finish=recipes.noisy),
}  # fmt: skip


def draw_job(seed: int, case: str) -> Job:
    """Draw a job of a case. Raises KeyError for a name that is not in CASES."""
    wanted = CASES[case]
    rng = np.random.default_rng([seed, zlib.crc32(case.encode())])
    job = _healthy_job(rng, wanted, f"{case}-{seed}")
    if wanted.host is Host.IN_STEP:
        job = replace(job, host=replace(job.host, mode=Host.IN_STEP))
    job = replace(job, causes=tuple(maker(rng, job) for maker in wanted.makers))
    return wanted.finish(rng, job) if wanted.finish else job


def _healthy_job(rng: np.random.Generator, case: Case, name: str) -> Job:
    dp, pp, vpp, tp = case.shapes[rng.integers(len(case.shapes))]
    microbatches = int(rng.choice([4, 6, 8, 12, 16, 32] if vpp == 1 else [pp, 2 * pp, 4 * pp]))
    microbatches = max(microbatches, pp if pp > 2 else 4)
    while case.steps[0] * _ops_in_step(dp, pp, vpp, microbatches) > MOST_OPS and microbatches % (2 * pp) == 0:
        microbatches //= 2
    steps = int(rng.integers(case.steps[0], case.steps[1] + 1))
    steps = max(min(steps, MOST_OPS // _ops_in_step(dp, pp, vpp, microbatches)), case.steps[0])
    shape = Shape(dp=dp, pp=pp, vpp=vpp, tp=tp, microbatches=microbatches, steps=steps)
    plain = Schedule.ONE_F_ONE_B if rng.random() < 0.8 else Schedule.GPIPE
    compute = _compute(rng)
    return Job(
        shape=shape,
        schedule=Schedule.INTERLEAVED if vpp > 1 else plain,
        posting=_posting(rng, case.postings, vpp),
        overlap_dp=bool(rng.integers(2)),
        compute=compute,
        network=_network(rng, shape, compute),
        host=_host(rng),
        noise=Noise(op=0.01, worker=0.004, wander=float(rng.choice([0.0, 0.002]))),
        recording=Recording(
            offset_s=float(rng.choice([10e-6, 50e-6, 150e-6])),
            data_load=bool(rng.integers(2)),
            gc_marker=bool(rng.integers(2)),
            layers=bool(rng.integers(2)),
        ),
        seeds=Seeds.drawn(rng),
        name=name,
    )


def _ops_in_step(dp: int, pp: int, vpp: int, microbatches: int) -> int:
    """Approximate number of ops per step."""
    return dp * pp * ((6 if pp > 1 else 2) * microbatches * vpp + 8)


def _posting(rng: np.random.Generator, allowed: tuple[Posting, ...], vpp: int) -> Posting:
    """Mostly as in real jobs: batches, or transfers that overlap computes if there are virtual stages."""
    usual = {
        Posting.BATCHED: 0.2 if vpp > 1 else 0.4,
        Posting.ANY_DIRECTION: 0.25,
        Posting.SAME_DIRECTION: 0.25,
        Posting.EARLY: 0.3 if vpp > 1 else 0.1,
    }
    weight = np.array([usual[posting] for posting in allowed])
    return allowed[int(rng.choice(len(allowed), p=weight / weight.sum()))]


def _compute(rng: np.random.Generator) -> ComputeCost:
    forward_s = float(np.exp(rng.uniform(np.log(0.008), np.log(0.06))))
    constant, quadratic = float(rng.uniform(0.03, 0.15)), float(rng.uniform(0.1, 0.35))
    return ComputeCost(
        forward_s=forward_s,
        constant=constant,
        linear=1 - constant - quadratic,
        quadratic=quadratic,
        backward_ratio=float(rng.uniform(1.8, 2.2)),
        embedding_s=forward_s * float(rng.uniform(0, 0.005)),
        loss_s=forward_s * float(rng.uniform(0, 0.01)),
        optimizer_s=float(rng.uniform(0.003, 0.015)),
    )


def _network(rng: np.random.Generator, shape: Shape, compute: ComputeCost) -> Network:
    """Bytes such that a transfer between stages takes 1 to 5 % of a forward, parameters 2 to 6 % of a step."""
    step_s = 3 * compute.forward_s * (shape.microbatches + shape.pp - 1)
    nic = float(rng.choice([50e9, 100e9, 400e9]))
    return Network(
        nic=nic,
        nvlink=3 * nic,
        activation_bytes=nic * compute.forward_s * float(rng.uniform(0.01, 0.05)) / shape.vpp,
        parameter_bytes=nic * step_s * float(rng.uniform(0.02, 0.06)),
        separate_bytes=nic * 0.4e-3,
        embedding_bytes=nic * step_s * float(rng.uniform(0.002, 0.01)),
        queueing=Queueing.FIFO if rng.random() < 0.25 else Queueing.FAIR,
    )


def _host(rng: np.random.Generator) -> HostCost:
    return HostCost(
        launch_s=float(rng.uniform(20e-6, 120e-6)),
        data_load_s=float(rng.uniform(0.2e-3, 1.5e-3)),
        all_stages_load=bool(rng.integers(2)),
        between_steps_s=float(rng.uniform(0.3e-3, 2e-3)),
        layernorm_s=float(rng.uniform(0.1e-3, 1e-3)),
        clip_s=float(rng.uniform(0.3e-3, 1.5e-3)),
    )
