"""Which wires and network cards a transfer uses.

In: a `Job`. Out: numbers of resources, and each resource's bandwidth. Every host has one network card with a sending
and a receiving side, shared by its workers; every connection between two stages of a DP rank has a wire of its own per
direction; workers of one host talk over NVLink.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.eventsim.model import Cell, Job


class Topology:
    """The resources of a job: 2 x hosts card sides, then wires [dp, link, direction], then one NVLink per host."""

    def __init__(self, job: Job) -> None:
        self.job, self.shape = job, job.shape
        self.cards = 2 * self.shape.hosts
        self.wires = self.shape.dp * self.shape.pp * 2

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
        """What workers of one host share."""
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
        return np.array([network.nic] * self.cards + wires + [network.nvlink] * self.shape.hosts, np.float64)

    def between(self, sender: Cell, receiver: Cell, link: int, *, forward: bool) -> tuple[int, ...]:
        """What a transfer between two stages of a DP rank uses."""
        wire = self.wire(sender[0], link, forward=forward)
        if self._neighbours(sender, receiver):
            return (wire,)
        return (wire, self.sending(self.shape.host(*sender)), self.receiving(self.shape.host(*receiver)))

    def exchange(self, one: Cell, other: Cell) -> tuple[int, ...]:
        """What two workers use that send to each other at once."""
        hosts = self.shape.host(*one), self.shape.host(*other)
        if hosts[0] == hosts[1]:
            return (self.nvlink(hosts[0]),)
        return tuple(side for host in hosts for side in (self.sending(host), self.receiving(host)))

    def ring(self, stage: int) -> tuple[int, ...]:
        """What a ring over the DP ranks of a stage uses: each hop between hosts, or NVLink where there is none."""
        hosts = [self.shape.host(dp, stage) for dp in range(self.shape.dp)]
        hops = [(one, other) for one, other in zip(hosts, hosts[1:] + hosts[:1], strict=True) if one != other]
        if not hops:
            return (self.nvlink(hosts[0]),)
        return tuple(sorted({side for one, other in hops for side in (self.sending(one), self.receiving(other))}))

    def _neighbours(self, one: Cell, other: Cell) -> bool:
        return self.shape.host(*one) == self.shape.host(*other)
