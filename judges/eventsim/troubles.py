"""Causes in a job's network and clocks. See `causes`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from judges.eventsim.causes import ALWAYS, Cause, When
from judges.eventsim.model import Cell, Job
from judges.eventsim.world import World


class Way(StrEnum):
    """Slow direction of a link, or slow side of a network card."""

    BOTH = "both"
    FORWARD = "forward"
    BACKWARD = "backward"
    SENDING = "sending"
    RECEIVING = "receiving"


class Traffic(StrEnum):
    """Transfers that meet congestion."""

    ALL = "all"
    P2P = "p2p"
    COLLECTIVES = "collectives"


@dataclass(frozen=True, slots=True)
class SlowLink(Cause):
    """The connection of stage `stage` to the next one, on one DP rank, has a `factor`-th of its bandwidth."""

    dp: int
    stage: int
    factor: float = 12.0
    way: Way = Way.BOTH
    when: When = ALWAYS

    def apply(self, world: World) -> None:
        steps = self.when.mask(world.job.shape.steps)
        for forward in (True, False):
            if self.way in (Way.BOTH, Way.FORWARD if forward else Way.BACKWARD):
                world.bandwidth[steps, world.topology.wire(self.dp, self.stage, forward=forward)] /= self.factor

    def cells(self, job: Job) -> frozenset[Cell]:
        return frozenset({(self.dp, self.stage), (self.dp, (self.stage + 1) % job.shape.pp)})


@dataclass(frozen=True, slots=True)
class SlowNic(Cause):
    """The network card of a host has a `factor`-th of its bandwidth, for transfers and collectives alike."""

    host: int
    factor: float = 5.0
    way: Way = Way.BOTH
    when: When = ALWAYS

    def apply(self, world: World) -> None:
        steps = self.when.mask(world.job.shape.steps)
        if self.way in (Way.BOTH, Way.SENDING):
            world.bandwidth[steps, world.topology.sending(self.host)] /= self.factor
        if self.way in (Way.BOTH, Way.RECEIVING):
            world.bandwidth[steps, world.topology.receiving(self.host)] /= self.factor

    def cells(self, job: Job) -> frozenset[Cell]:
        return job.shape.cells_of_host(self.host)


@dataclass(frozen=True, slots=True)
class Congestion(Cause):
    """A share of transfers, anywhere, takes `factor` times as long; with `tails`, that much longer on average."""

    seed: int
    rate: float = 0.03
    factor: float = 12.0
    traffic: Traffic = Traffic.ALL
    when: When = ALWAYS
    tails: bool = False

    def apply(self, world: World) -> None:
        rng = np.random.default_rng(self.seed)
        hit = (rng.random(world.p2p.shape) < self.rate) & self.when.mask(len(world.p2p))[:, None]
        longer = (self.factor - 1) * (rng.exponential(size=hit.shape) if self.tails else 1.0)
        stretch = np.where(hit, 1 + longer, 1.0)
        if self.traffic is not Traffic.COLLECTIVES:
            world.p2p *= stretch
        if self.traffic is not Traffic.P2P:
            world.collectives *= stretch


@dataclass(frozen=True, slots=True)
class CongestionEpisodes(Cause):
    """In some steps all transfers that start within `length_s` take `factor` times as long."""

    seed: int
    rate: float = 0.3
    length_s: float = 0.2
    factor: float = 10.0

    def apply(self, world: World) -> None:
        rng, job = np.random.default_rng(self.seed), world.job
        usual_s = 3.5 * job.compute.forward_s * (job.shape.microbatches + job.shape.pp - 1)
        hit, begin = rng.random(job.shape.steps) < self.rate, rng.random(job.shape.steps) * usual_s
        hit[rng.integers(job.shape.steps)] = True
        for step in np.flatnonzero(hit):
            world.episodes[step].append((float(begin[step]), self.length_s, self.factor))


@dataclass(frozen=True, slots=True)
class BusyUplink(Cause):
    """Other jobs use the uplink of two switches: in some steps it keeps `share` of half of the cards' bandwidth."""

    share: float = 0.2
    when: When = ALWAYS

    def apply(self, world: World) -> None:
        shape = world.job.shape
        bandwidth = self.share * world.job.network.nic * shape.hosts / 2
        world.bandwidth[self.when.mask(shape.steps), world.topology.uplink] = bandwidth


@dataclass(frozen=True, slots=True)
class ClockOffset(Cause):
    """One worker's clock is ahead (below 0: behind), and gains `drift` seconds a second; nothing is slow."""

    worker: Cell
    offset_s: float = 0.012
    drift: float = 0.0

    def apply(self, world: World) -> None:
        world.offset_s[self.worker] += self.offset_s
        world.drift[self.worker] += self.drift

    def cells(self, job: Job) -> frozenset[Cell]:
        del job
        return frozenset({self.worker})
