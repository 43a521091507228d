"""Wires and network cards of each transfer.

In: a `Job`. Out: numbers of resources, and each resource's bandwidth. Every host has one network card with a sending
and a receiving side, shared by its workers; every connection between two stages of a DP rank has a wire of its own per
direction; workers of one host talk over NVLink. Each half of the hosts has a switch; the uplink between both is wide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from judges.eventsim.model import Cell, Job


class Topology:
    """The resources of a job: 2 x hosts card sides, wires [dp, link, direction], one NVLink per host, the uplink."""

    def __init__(self, job: Job) -> None:
        self.job, self.shape = job, job.shape
        self.cards = 2 * self.shape.hosts
        self.wires = self.shape.dp * self.shape.pp * 2
        self.uplink = self.cards + self.wires + self.shape.hosts

    def sending(self, host: int) -> int:
        """The sending side of a host's card."""
        return 2 * host

    def receiving(self, host: int) -> int:
        """The receiving side of a host's card."""
        return 2 * host + 1

    def wire(self, dp: int, link: int, *, forward: bool) -> int:
        """The connection of stage `link` to the next one, one direction."""
        return self.cards + (dp * self.shape.pp + link) * 2 + (not forward)

    def nvlink(self, host: int) -> int:
        """The NVLink of a host, which its workers share."""
        return self.cards + self.wires + host

    def bandwidth(self) -> npt.NDArray[np.float64]:
        """Bytes per second of each resource, [resources]."""
        network = self.job.network
        wires = [
            network.nvlink if self._neighbours((dp, link), (dp, (link + 1) % self.shape.pp)) else network.nic
            for dp in range(self.shape.dp)
            for link in range(self.shape.pp)
            for _ in range(2)
        ]
        ends = [network.nvlink] * self.shape.hosts + [np.inf]
        return np.array([network.nic] * self.cards + wires + ends, np.float64)

    def between(self, sender: Cell, receiver: Cell, link: int, *, forward: bool) -> tuple[int, ...]:
        """Resources of a transfer between two stages of a DP rank."""
        wire = self.wire(sender[0], link, forward=forward)
        if self._neighbours(sender, receiver):
            return (wire,)
        return (wire, *self._sides([(self.shape.host(*sender), self.shape.host(*receiver))]))

    def exchange(self, first: Cell, second: Cell) -> tuple[int, ...]:
        """Resources of two workers that send to each other at once."""
        hosts = self.shape.host(*first), self.shape.host(*second)
        if hosts[0] == hosts[1]:
            return (self.nvlink(hosts[0]),)
        return self._sides([hosts, hosts[::-1]])

    def ring(self, stage: int) -> tuple[int, ...]:
        """Resources of a ring over the DP ranks of a stage: each hop between hosts, or NVLink within one host."""
        hosts = [self.shape.host(dp, stage) for dp in range(self.shape.dp)]
        hops = [(one, other) for one, other in zip(hosts, hosts[1:] + hosts[:1], strict=True) if one != other]
        if not hops:
            return (self.nvlink(hosts[0]),)
        return self._sides(hops)

    def _sides(self, hops: list[tuple[int, int]]) -> tuple[int, ...]:
        """Sides of cards on the way from host to host, and the uplink if it is crossed."""
        sides = {side for one, other in hops for side in (self.sending(one), self.receiving(other))}
        half = (self.shape.hosts + 1) // 2
        return (*sorted(sides), *([self.uplink] if any((one < half) != (other < half) for one, other in hops) else []))

    def _neighbours(self, first: Cell, second: Cell) -> bool:
        return self.shape.host(*first) == self.shape.host(*second)
