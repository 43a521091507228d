"""Flows that share wires and network cards.

A flow moves at the smallest share that any of its resources gives it. FAIR: a resource divides its bandwidth equally
among its flows. FIFO: transfers between stages pass one after the other, in order of arrival; collectives share with
the one that passes. Switches always divide equally.
"""

from __future__ import annotations

from collections.abc import Sequence

from judges.eventsim.graph import Flow
from judges.eventsim.model import Queueing


class SharedNetwork:
    """The flows under way. Times in seconds, sizes in bytes."""

    def __init__(self, bandwidth: Sequence[float], queueing: Queueing, switch: int = -1) -> None:
        self.bandwidth, self.switch = bandwidth, switch
        self.fifo = queueing is Queueing.FIFO
        self.on: list[dict[int, Flow]] = [{} for _ in bandwidth]  # dicts keep the order of arrival
        self.remaining: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.version: dict[int, int] = {}

    def start(self, node: int, flow: Flow, size: float, now: float) -> list[tuple[float, int, int]]:
        """Start a flow. Returns (time, node, version) of every flow whose end changes."""
        self.remaining[node], self.rate[node], self.since[node], self.version[node] = size, 0.0, now, 0
        for resource in flow.resources:
            self.on[resource][node] = flow
        return self._share(flow, now)

    def finish(self, node: int, flow: Flow, now: float) -> list[tuple[float, int, int]]:
        """Finish a flow; the others share its bandwidth. Returns the same as `start`."""
        for resource in flow.resources:
            del self.on[resource][node]
        for table in (self.remaining, self.rate, self.since, self.version):
            del table[node]
        return self._share(flow, now)

    def is_current(self, node: int, version: int) -> bool:
        """Whether an end returned earlier is still valid."""
        return self.version.get(node) == version

    def _share(self, changed: Flow, now: float) -> list[tuple[float, int, int]]:
        """Recompute the shares on the resources of `changed`."""
        touched = {node: flow for resource in changed.resources for node, flow in self.on[resource].items()}
        ends = []
        for node, flow in touched.items():
            rate = min(self._offered(node, flow, resource) for resource in flow.resources)
            if rate == self.rate[node]:
                continue
            self.remaining[node] = max(self.remaining[node] - self.rate[node] * (now - self.since[node]), 0.0)
            self.rate[node], self.since[node] = rate, now
            self.version[node] += 1
            if rate > 0.0:
                ends.append((now + self.remaining[node] / rate, node, self.version[node]))
        return ends

    def _offered(self, node: int, flow: Flow, resource: int) -> float:
        """The bandwidth that one resource gives one flow."""
        flows = self.on[resource]
        if not self.fifo or len(flows) == 1 or resource == self.switch:
            return self.bandwidth[resource] / len(flows)
        between_stages = [other for other, kind in flows.items() if not kind.collective]
        if not flow.collective and between_stages[0] != node:
            return 0.0
        return self.bandwidth[resource] / (len(flows) - max(len(between_stages) - 1, 0))
