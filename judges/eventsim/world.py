"""Costs of one run: a job's random draws, changed by its causes.

A `World` has arrays with one value per step and op. Every array is drawn in full from a seed of its own before any
cause is applied; causes scale and add. So the same job without a cause differs in that cause alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from judges.eventsim.engine import Pauses, Stops
from judges.eventsim.graph import Source, launches
from judges.eventsim.model import Job
from judges.eventsim.topology import Topology

Floats = npt.NDArray[np.float64]


@dataclass
class World:
    """A run's costs before it runs. Axes: steps S, DP ranks D, stages P, chunks V, microbatches M.

    Workload: `tokens` and `attention` [S, D, M], means of 1. Model: `layers` [P, V], share of an average stage;
    `constant_s` [P, V], seconds added to a forward (times the backward ratio: to a backward), and `constant_scales`
    [P, V], the same per unit of tokens. Machines: `forward`, `backward` [S, D, P, V, M] and `optimizer` [S, D, P],
    factors; `forward_s`, `backward_s`, `gc_s` like them, `data_s`, `checkpoint_s` [S, D, P] and the launches
    `launch_forward_s`, `launch_backward_s` [S, D, P, V, M], seconds added. `launch` [S, D, P]: factor on every launch.
    Network: `bandwidth` [S, resources], `p2p` and `collectives`, [S, flows], factors on bytes; `episodes` per step:
    (begin after the start of the step, length, factor). Recording: `offset_s`, `drift` [D, P]. `pause_s` [S]: seconds
    between two steps in which every rank waits. `ranks_forward`, `ranks_backward` [S, D, P, V, M, meetings, tp]:
    factors on what each rank of a worker computes up to a meeting, None if ranks are not distinguished. `hidden`: work
    that takes its time and is not recorded.
    """

    job: Job
    topology: Topology
    tokens: Floats
    attention: Floats
    layers: Floats
    constant_s: Floats
    constant_scales: Floats
    forward: Floats
    backward: Floats
    optimizer: Floats
    forward_s: Floats
    backward_s: Floats
    gc_s: Floats
    data_s: Floats
    checkpoint_s: Floats
    launch: Floats
    launch_forward_s: Floats
    launch_backward_s: Floats
    bandwidth: Floats
    p2p: Floats
    collectives: Floats
    offset_s: Floats
    drift: Floats
    pause_s: Floats
    episodes: list[list[tuple[float, float, float]]]
    ranks_forward: Floats | None = None
    ranks_backward: Floats | None = None
    stops: dict[int, Stops | Pauses] = field(default_factory=dict)
    hidden: set[Source] = field(default_factory=set)


def draw_world(job: Job, flows: int) -> World:
    """Draw a healthy run, then apply the job's causes in order."""
    shape = job.shape
    lanes, cells = (shape.steps, shape.dp, shape.microbatches), (shape.steps, shape.dp, shape.pp)
    ops = (*cells, shape.vpp, shape.microbatches)
    topology = Topology(job)
    network = np.random.default_rng(job.seeds.network)
    stretch = np.maximum(1 + job.noise.transfer * network.standard_normal((shape.steps, flows)), 0.2)
    offset_s, drift = _clocks(job)
    worker = _workers(job)
    forward, backward = (worker[..., None, None] * noise for noise in _noise(job, ops))
    world = World(
        job=job, topology=topology,
        tokens=np.ones(lanes), attention=np.ones(lanes),
        layers=np.full((shape.pp, shape.vpp), 1 / shape.vpp),
        constant_s=np.zeros((shape.pp, shape.vpp)), constant_scales=np.zeros((shape.pp, shape.vpp)),
        forward=forward, backward=backward,
        optimizer=worker * np.random.default_rng([job.seeds.noise, 2]).normal(1, job.noise.op, cells),
        forward_s=np.zeros(ops), backward_s=np.zeros(ops), gc_s=np.zeros(ops), data_s=np.zeros(cells),
        checkpoint_s=np.zeros(cells), launch=np.ones(cells),
        launch_forward_s=np.zeros(ops), launch_backward_s=np.zeros(ops),
        bandwidth=np.tile(topology.bandwidth(), (shape.steps, 1)),
        p2p=stretch, collectives=stretch.copy(), offset_s=offset_s, drift=drift,
        pause_s=np.full(shape.steps, job.extra_step_s), episodes=[[] for _ in range(shape.steps)],
    )  # fmt: skip
    if job.noise.rank:
        ranks = np.random.default_rng([job.seeds.noise, 3])
        shape_of_ranks = (*ops, job.compute.meetings, shape.tp)
        world.ranks_forward, world.ranks_backward = (
            np.maximum(1 + job.noise.rank * ranks.standard_normal(shape_of_ranks), 0.2) for _ in range(2)
        )
    world.constant_s[0, 0] += job.compute.embedding_s
    world.constant_s[-1, -1] += job.compute.loss_s
    for cause in job.causes:
        cause.apply(world)
    if job.balanced:
        _deal(world)
    if job.layer_factor:
        world.layers *= np.array(job.layer_factor)[:, None]
    return world


def _noise(job: Job, ops: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Noise of each forward and backward: normal, with a tail, times each worker's slow walk."""
    rng = np.random.default_rng([job.seeds.noise, 1])
    walk = _wander(job)
    factors = []
    for _ in range(2):
        noise = np.maximum(1 + job.noise.op * rng.standard_normal(ops), 0.2)
        hit, size = rng.random(ops), rng.exponential(size=ops)
        noise *= np.where(hit < job.noise.tail, 1 + (job.noise.tail_factor - 1) * size, 1.0)
        factors.append(noise * walk)
    return factors[0], factors[1]


def _wander(job: Job) -> Floats:
    """exp(AR(1)) per worker over its microbatches, one walk for forward and backward, [S, D, P, 1, M]."""
    shape = job.shape
    return walk(shape.steps, (shape.dp, shape.pp), shape.microbatches, job.noise.wander, 3.0, job.seeds.wander)


def walk(steps: int, cells: tuple[int, int], microbatches: int, sd: float, memory_steps: float, seed: int) -> Floats:
    """exp(AR(1)) with standard deviation `sd` that forgets within `memory_steps`, [S, D, P, 1, M]."""
    length = steps * microbatches
    keep = float(np.exp(-1 / (memory_steps * microbatches)))
    shock = np.random.default_rng(seed).standard_normal((length, *cells))
    value = np.empty_like(shock)
    value[0] = shock[0]
    for number in range(1, length):
        value[number] = keep * value[number - 1] + np.sqrt(1 - keep**2) * shock[number]
    by_step = np.exp(sd * value).reshape(steps, microbatches, *cells)
    return np.moveaxis(by_step, 1, -1)[:, :, :, None, :]


def _workers(job: Job) -> Floats:
    """Slowness of each worker relative to the average; replaced workers are average, [S, D, P]."""
    shape = job.shape
    factor = 1 + job.noise.worker * np.random.default_rng(job.seeds.worker).standard_normal((shape.dp, shape.pp))
    for cell in job.replaced:
        factor[cell] = 1.0
    return np.tile(factor, (shape.steps, 1, 1))


def _clocks(job: Job) -> tuple[Floats, Floats]:
    """Offset and drift of each worker's clock: those of its host, [D, P]."""
    shape, rng = job.shape, np.random.default_rng(job.seeds.clock)
    offset = rng.standard_normal(shape.hosts) * job.recording.offset_s
    drift = rng.standard_normal(shape.hosts) * job.recording.drift
    host = np.array([[shape.host(dp, pp) for pp in range(shape.pp)] for dp in range(shape.dp)])
    return offset[host], drift[host]


def workload(world: World) -> Floats:
    """Forward cost of a microbatch on an average stage, as a share of `forward_s`, [S, D, M]."""
    cost = world.job.compute
    total: Floats = cost.constant + cost.linear * world.tokens + cost.quadratic * world.attention
    return total


def _deal(world: World) -> None:
    """Deal each step's microbatches anew: the largest first, to the DP rank with least work that has room.

    A DP rank runs them in the order in which it gets them.
    """
    cost = workload(world)
    steps, dp, microbatches = cost.shape
    for step in range(steps):
        load = np.zeros(dp)
        dealt: list[list[int]] = [[] for _ in range(dp)]
        for sequence in np.argsort(-cost[step].ravel(), kind="stable"):
            room = [rank for rank in range(dp) if len(dealt[rank]) < microbatches]
            rank = min(room, key=lambda rank: load[rank])
            dealt[rank].append(int(sequence))
            load[rank] += cost[step].flat[sequence]
        new = np.array(dealt)
        world.tokens[step] = world.tokens[step].ravel()[new]
        world.attention[step] = world.attention[step].ravel()[new]


def seconds(world: World) -> dict[Source, Floats]:
    """Seconds of each work node, by source: [S, entries], as `graph` numbers the entries."""
    job, shape = world.job, world.job.shape
    cost, host = job.compute, job.host
    tokens = world.tokens[:, :, None, None, :]
    base = cost.forward_s * workload(world)[:, :, None, None, :] * world.layers[:, :, None]
    base = base + world.constant_s[:, :, None] + world.constant_scales[:, :, None] * tokens
    rng = np.random.default_rng(job.seeds.host)
    cells = world.optimizer.shape
    per_launch = world.launch[..., None]
    jitter = [rng.gamma(4.0, 0.25, world.forward.shape) for _ in range(2)]
    other = rng.gamma(4.0, 0.25, (*cells, launches(shape)))
    load = host.data_load_s * rng.gamma(16.0, 1 / 16, cells) + world.data_s
    layernorm = host.layernorm_s * rng.normal(1, 0.03, cells)
    clip = host.clip_s * rng.normal(1, 0.03, (shape.steps, 1))
    factor = host.launch_s * per_launch[..., None]
    arrays = {
        Source.FORWARD: base * world.forward * _together(world.ranks_forward) + world.forward_s,
        Source.BACKWARD: base * cost.backward_ratio * world.backward * _together(world.ranks_backward)
        + world.backward_s,
        Source.OPTIMIZER: cost.optimizer_s * world.optimizer,
        Source.DATA_LOAD: load,
        Source.GC: world.gc_s,
        Source.CHECKPOINT: world.checkpoint_s,
        Source.LAUNCH_FORWARD: factor * jitter[0] + world.launch_forward_s,
        Source.LAUNCH_BACKWARD: factor * jitter[1] + world.launch_backward_s,
        Source.LAUNCH: host.launch_s * 0.3 * per_launch * other,
        Source.LAYERNORM: layernorm,
        Source.CLIP: clip,
    }
    return {source: array.reshape(shape.steps, -1) for source, array in arrays.items()}


def _together(ranks: Floats | None) -> Floats | float:
    """Factor of a compute because each meeting waits for the last rank, [S, D, P, V, M]."""
    return 1.0 if ranks is None else np.asarray(ranks.max(axis=-1).mean(axis=-1))


def waited_share(world: World) -> dict[Source, Floats]:
    """Share of a compute for which each rank of its worker waits for the last one, [S, entries, tp]."""
    shares = {}
    for source, ranks in ((Source.FORWARD, world.ranks_forward), (Source.BACKWARD, world.ranks_backward)):
        if ranks is not None:
            last = ranks.max(axis=-1, keepdims=True)
            share = (last - ranks).mean(axis=-2) / last.mean(axis=-2)
            shares[source] = share.reshape(world.job.shape.steps, -1, world.job.shape.tp)
    return shares
