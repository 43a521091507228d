"""Causes in a job's workers and hosts. `uneven` has those in its data, `troubles` those in network and clocks.

A cause changes a drawn `World`. Random causes have a seed of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from judges.eventsim.engine import Pauses, Stops
from judges.eventsim.graph import Source
from judges.eventsim.model import Cell, Job, Shape
from judges.eventsim.world import World, walk

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class When:
    """The steps in which a cause acts: from `since` to before `until` (counted from 0), every `every`-th, in bursts.

    `burst`: chance that a run of `burst_steps` steps is hit; 0 means no bursts but all steps.
    """

    since: int = 0
    until: int | None = None
    every: int = 1
    phase: int = 0
    burst: float = 0.0
    burst_steps: int = 2
    seed: int = 0

    def mask(self, steps: int) -> Bools:
        """True for each step in which it acts, [steps]."""
        step = np.arange(steps)
        hit: Bools = (step >= self.since) & (step < (self.until or steps)) & (step % self.every == self.phase)
        if self.burst:
            runs = np.random.default_rng(self.seed).random(steps // self.burst_steps + 1) < self.burst
            runs[1 + self.seed % max(len(runs) - 2, 1)] = True  # at least one burst
            hit &= np.repeat(runs, self.burst_steps)[:steps]
        return hit


ALWAYS = When()


class Part(StrEnum):
    """The slow computes of a worker."""

    ALL = "all"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Rise(StrEnum):
    """The course of a slowdown: at once, or rising up to the last step."""

    AT_ONCE = "at once"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    SATURATING = "saturating"

    def factors(self, shares: Floats, last: float) -> Floats:
        """Factors at these shares of the time, 0 to 1, that end at `last`."""
        match self:
            case Rise.LINEAR:
                return 1 + (last - 1) * shares
            case Rise.EXPONENTIAL:
                return np.asarray(last**shares)
            case Rise.SATURATING:
                return np.asarray(1 + (last - 1) * (1 - np.exp(-4 * shares)) / (1 - np.exp(-4)))
            case _:
                return np.full_like(shares, last)


@dataclass(frozen=True, slots=True)
class Cause:
    """Something wrong with a job."""

    def apply(self, world: World) -> None:
        """Put the cause into a run's costs."""
        raise NotImplementedError

    def cells(self, job: Job) -> frozenset[Cell]:
        """The workers that the cause affects; empty if it is not tied to workers."""
        del job
        return frozenset()


@dataclass(frozen=True, slots=True)
class SlowWorkers(Cause):
    """Some workers compute `factor` times as long: one bad worker, a host, or the older GPUs of a job.

    `rise`: the course from the first slow step to the last one, in which they are this slow.
    """

    workers: frozenset[Cell]
    factor: float = 1.5
    when: When = ALWAYS
    part: Part = Part.ALL
    rise: Rise = Rise.AT_ONCE

    def apply(self, world: World) -> None:
        steps = world.job.shape.steps
        shares = np.clip(np.arange(1 - self.when.since, steps - self.when.since + 1) / (steps - self.when.since), 0, 1)
        factor = np.where(self.when.mask(steps), self.rise.factors(shares, self.factor), 1.0)
        for dp, pp in self.workers:
            if self.part in (Part.ALL, Part.FORWARD):
                world.forward[:, dp, pp] *= factor[:, None, None]
            if self.part in (Part.ALL, Part.BACKWARD):
                world.backward[:, dp, pp] *= factor[:, None, None]
            if self.part in (Part.ALL, Part.OPTIMIZER):
                world.optimizer[:, dp, pp] *= factor

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return self.workers


@dataclass(frozen=True, slots=True)
class SlowRank(Cause):
    """One tensor-parallel rank of a worker, at `position`, computes `factor` times as long up to each meeting."""

    worker: Cell
    position: int
    factor: float = 1.5
    when: When = ALWAYS

    def apply(self, world: World) -> None:
        steps, (dp, pp) = self.when.mask(world.job.shape.steps), self.worker
        for ranks in (world.ranks_forward, world.ranks_backward):
            if ranks is not None:
                ranks[steps, dp, pp, ..., self.position] *= self.factor

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return frozenset({self.worker})

    def rank(self, job: Job) -> int:
        """Its global number."""
        return job.shape.rank(*self.worker) + self.position


@dataclass(frozen=True, slots=True)
class SlowSteps(Cause):
    """Every worker computes `factor` times as long in some steps."""

    factor: float = 1.6
    when: When = ALWAYS

    def apply(self, world: World) -> None:
        steps = self.when.mask(world.job.shape.steps)
        world.forward[steps] *= self.factor
        world.backward[steps] *= self.factor


@dataclass(frozen=True, slots=True)
class HeavyStage(Cause):
    """A stage costs `share` of an average stage more: by layers, or by a constant part such as the loss.

    `layers`: transformer layers, which also cost what their sequences cost; else a constant, or, with `by_tokens`,
    a cost per token without attention.
    """

    stage: int
    share: float = 0.5
    layers: bool = False
    by_tokens: bool = False

    def apply(self, world: World) -> None:
        chunk = 0 if self.stage == 0 else -1
        if self.layers:
            world.layers[self.stage, chunk] += self.share
        elif self.by_tokens:
            world.constant_scales[self.stage, chunk] += self.share * world.job.compute.forward_s
        else:
            world.constant_s[self.stage, chunk] += self.share * world.job.compute.forward_s


@dataclass(frozen=True, slots=True)
class SlowFirstMicrobatch(Cause):
    """The first microbatch of each step is slow on every rank: caches, autotuning, allocation."""

    factor: float = 2.0

    def apply(self, world: World) -> None:
        world.forward[..., 0] *= self.factor
        world.backward[..., 0] *= self.factor


@dataclass(frozen=True, slots=True)
class Wander(Cause):
    """Every worker's speed drifts slowly (AR(1)): no worker is at fault, but it costs time."""

    seed: int
    sd: float = 0.03
    memory_steps: float = 2.0

    def apply(self, world: World) -> None:
        shape = world.job.shape
        factor = walk(shape.steps, (shape.dp, shape.pp), shape.microbatches, self.sd, self.memory_steps, self.seed)
        world.forward *= factor
        world.backward *= factor


@dataclass(frozen=True, slots=True)
class ProcessPauses(Cause):
    """A share of all computes, forward and backward, on any worker, is stopped for `pause_s`."""

    seed: int
    rate: float = 0.01
    pause_s: float = 0.05

    def apply(self, world: World) -> None:
        rng = np.random.default_rng(self.seed)
        for field in (world.forward_s, world.backward_s):
            field[...] += np.where(rng.random(field.shape) < self.rate, self.pause_s, 0.0)


@dataclass(frozen=True, slots=True)
class RandomPauses(Cause):
    """Every process pauses for `pause_s` at random times, `rate` times a second, also while it waits."""

    seed: int
    rate: float = 0.4
    pause_s: float = 0.06

    def apply(self, world: World) -> None:
        job = world.job
        count = round(8 * self.rate * job.shape.steps * (job.shape.microbatches + job.shape.pp) * job.compute.forward_s)
        for number in range(len(job.shape.cells)):
            gaps = np.random.default_rng([self.seed, number]).exponential(1 / self.rate, count + 20)
            begins = np.cumsum(gaps) + self.pause_s * np.arange(len(gaps))
            world.stops[number] = Pauses(tuple(begins.tolist()), tuple((begins + self.pause_s).tolist()))


@dataclass(frozen=True, slots=True)
class StoppedProcess(Cause):
    """One process is stopped for `length_s` every `period_s` (SIGSTOP, a busy neighbour)."""

    worker: Cell
    period_s: float = 0.12
    length_s: float = 0.03

    def apply(self, world: World) -> None:
        number = self.worker[0] * world.job.shape.pp + self.worker[1]
        world.stops[number] = Stops(self.period_s, self.length_s)

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return frozenset({self.worker})


@dataclass(frozen=True, slots=True)
class GcPauses(Cause):
    """Python collects garbage during a forward: on a share of worker-steps, or on one worker in each step.

    `recorded`: as a gc op before the forward; else the forward is that much longer.
    """

    seed: int
    rate: float = 0.1
    pause_s: float = 0.2
    recorded: bool = True
    worker: Cell | None = None

    def apply(self, world: World) -> None:
        shape, rng = world.job.shape, np.random.default_rng(self.seed)
        cells = world.optimizer.shape
        hit, number = rng.random(cells) < self.rate, rng.integers(shape.computes, size=cells)
        if self.worker is not None:
            hit = np.zeros_like(hit)
            hit[:, self.worker[0], self.worker[1]] = True
        field = world.gc_s if self.recorded else world.forward_s
        for step, dp, pp in np.argwhere(hit):
            chunk, microbatch = divmod(int(number[step, dp, pp]), shape.microbatches)
            field[step, dp, pp, chunk, microbatch] += self.pause_s

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return frozenset() if self.worker is None else frozenset({self.worker})


@dataclass(frozen=True, slots=True)
class Checkpoints(Cause):
    """Workers stop for `stall_s` every few steps. `at_start`: when the step has begun, else between two steps.

    `writers`: the workers that stop, empty: all; `scatter`: relative spread of their stalls. `gathered`: after the
    gathering of parameters has started.
    """

    every: int = 5
    stall_s: float = 1.0
    phase: int = 2
    at_start: bool = True
    recorded: bool = False
    writers: frozenset[Cell] = frozenset()
    scatter: float = 0.0
    gathered: bool = False
    seed: int = 0

    def apply(self, world: World) -> None:
        steps = np.arange(world.job.shape.steps) % self.every == self.phase
        if self.at_start:
            off = np.random.default_rng(self.seed).uniform(-1, 1, world.checkpoint_s.shape)
            for dp, pp in self.writers or world.job.shape.cells:
                world.checkpoint_s[steps, dp, pp] += self.stall_s * (1 + self.scatter * off[steps, dp, pp])
            if not self.recorded:
                world.hidden.add(Source.CHECKPOINT)
        else:
            steps[-1] = False  # invisible after the last step
            world.pause_s[steps] += self.stall_s


@dataclass(frozen=True, slots=True)
class LateData(Cause):
    """Loading a step's data takes `delay_s` longer (give or take a fifth), on some DP ranks (empty: all).

    `share`: of the steps; `in_turn`: on one random DP rank per step; `tailed`: exponential delays; `spared`: DP ranks
    that get their data in time after all.
    """

    seed: int
    delay_s: float = 0.3
    dp_ranks: frozenset[int] = frozenset()
    share: float = 1.0
    in_turn: bool = False
    tailed: bool = False
    spared: frozenset[int] = frozenset()

    def late(self, shape: Shape) -> Bools:
        """True for each step and DP rank with late data, [steps, DP ranks]."""
        rng, ranks = np.random.default_rng([self.seed, 1]), sorted(self.dp_ranks or range(shape.dp))
        steps = rng.random(shape.steps) < self.share
        turn, every = rng.choice(ranks, shape.steps)[:, None], np.arange(shape.dp)
        ranks_late = turn == every if self.in_turn else np.isin(every, ranks)
        return np.asarray(steps[:, None] & ranks_late & ~np.isin(every, list(self.spared)))

    def apply(self, world: World) -> None:
        rng = np.random.default_rng(self.seed)
        delay = self.delay_s * rng.uniform(0.8, 1.2, world.data_s.shape)
        if self.tailed:
            delay *= rng.exponential(size=world.data_s.shape[:2])[..., None]
        world.data_s += np.where(self.late(world.job.shape)[..., None], delay, 0.0)


@dataclass(frozen=True, slots=True)
class SlowHostThread(Cause):
    """The host thread of some workers (empty: all) takes `extra_s` longer to launch each compute.

    `backward_only`: user code sleeps between forward and backward.
    """

    workers: frozenset[Cell] = frozenset()
    extra_s: float = 0.01
    backward_only: bool = False

    def apply(self, world: World) -> None:
        for dp, pp in self.workers or world.job.shape.cells:
            world.launch_backward_s[:, dp, pp] += self.extra_s
            if not self.backward_only:
                world.launch_forward_s[:, dp, pp] += self.extra_s

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return self.workers


def needs_gc(job: Job) -> bool:
    """Whether the job records garbage collections, which need nodes in its graph."""
    return any(isinstance(cause, GcPauses) and cause.recorded for cause in job.causes)


def needs_checkpoint(job: Job) -> bool:
    """Whether the job stalls inside its steps."""
    return any(isinstance(cause, Checkpoints) and cause.at_start for cause in job.causes)


def checkpoints_gathered(job: Job) -> bool:
    """Whether its checkpoints start after the first launch of a step."""
    return any(isinstance(cause, Checkpoints) and cause.gathered for cause in job.causes)
