"""Draws of workers that become slower, slower halves and uneven sequences. See `recipes`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from judges.eventsim.causes import Cause, Part, Rise, SlowWorkers, When
from judges.eventsim.model import Job
from judges.eventsim.recipes import Maker, Rng
from judges.eventsim.uneven import Lengths, UnequalSequences


def slower_half(rng: Rng, job: Job) -> Cause:
    """Half of the DP ranks, all stages: the first or the last ones, every other one, every other host, any."""
    dp = np.arange(job.shape.dp)
    hosts = np.array([job.shape.host(rank, 0) for rank in range(job.shape.dp)])
    halves = (dp < job.shape.dp // 2, dp % 2 == 0, hosts % 2 == 0, rng.permutation(dp) % 2 == 0)
    chosen = halves[int(rng.integers(len(halves)))] ^ bool(rng.integers(2))
    slow = chosen if 0 < chosen.sum() < len(dp) else dp % 2 == 0
    cells = frozenset(cell for cell in job.shape.cells if slow[cell[0]])
    return SlowWorkers(cells, float(rng.uniform(1.06, 1.2)))


def creeping(least: float, most: float) -> Maker:
    """One worker that becomes slower step by step, half of the time from the first step on."""

    def make(rng: Rng, job: Job) -> Cause:
        last = float(np.exp(rng.uniform(np.log(least), np.log(most))))
        begin = When(since=int(rng.integers(2)) * int(rng.integers(job.shape.steps // 2)))
        cell = job.shape.cells[int(rng.integers(len(job.shape.cells)))]
        part = (Part.ALL, Part.ALL, Part.ALL, Part.FORWARD, Part.BACKWARD)[int(rng.integers(5))]
        rise = (Rise.LINEAR, Rise.EXPONENTIAL, Rise.SATURATING)[int(rng.integers(3))]
        return SlowWorkers(frozenset({cell}), last, begin, part, rise)

    return make


def creeping_host(rng: Rng, job: Job) -> Cause:
    host = int(rng.integers(job.shape.hosts))
    return SlowWorkers(job.shape.cells_of_host(host), float(rng.uniform(1.3, 1.8)), rise=Rise.LINEAR)


def odd_sequences(shards: bool = False) -> Maker:
    """Documents of any length distribution, one or a few per microbatch, or packed into it."""

    def make(rng: Rng, job: Job) -> Cause:
        del job
        lengths = list(Lengths)[int(rng.integers(3))]
        packed, documents = bool(rng.integers(2)), int(rng.choice([1, 2, 4, 16]))
        every = int(rng.choice([1, 2, 4])) if shards else 0
        sigma = float(rng.uniform(0.9, 1.6) if packed else rng.uniform(0.3, 0.9))
        return UnequalSequences(int(rng.integers(2**31)), packed, sigma, documents, lengths, every)

    return make


def few_microbatches(rng: Rng, job: Job) -> Job:
    """Few enough microbatches that chance gives some DP ranks more work than others."""
    if job.shape.vpp > 1:
        return job
    count = max(int(rng.integers(2, 5)), job.shape.pp)
    return replace(job, shape=replace(job.shape, microbatches=count))
