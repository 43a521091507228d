"""The event loop: runs one step of a job.

Takes the step's graph, the seconds of each work node, bandwidths, stopped processes and episodes of congestion; returns
the start and end of each node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from judges.eventsim.graph import ON_THE_PROCESS, Source, StepGraph
from judges.eventsim.network import SharedNetwork


@dataclass(frozen=True, slots=True)
class Stops:
    """A process that is stopped for `length_s` every `period_s`, first at `phase_s` of absolute time."""

    period_s: float
    length_s: float
    phase_s: float = 0.0

    def end(self, start: float, seconds: float) -> float:
        """End of work of `seconds` that starts at `start`."""
        running = self.period_s - self.length_s
        periods, within = divmod(start - self.phase_s, self.period_s)
        work = periods * running + max(within - self.length_s, 0.0) + seconds  # done by then since the first stop
        periods, within = divmod(work, running)
        return self.phase_s + periods * self.period_s + self.length_s + within


@dataclass(frozen=True, slots=True)
class Pauses:
    """A process that pauses from each of `begins` to that of `ends` (absolute seconds, ascending)."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]

    def end(self, start: float, seconds: float) -> float:
        """End of work of `seconds` that starts at `start`."""
        now = start
        for pause in range(bisect_right(self.ends, start), len(self.begins)):
            if self.begins[pause] > now + seconds:
                break
            seconds -= max(self.begins[pause] - now, 0.0)
            now = self.ends[pause]
        return now + seconds


@dataclass(frozen=True, slots=True)
class Episode:
    """Transfers that start from `begin` to `end` (absolute seconds) move `factor` times as many bytes."""

    begin: float
    end: float
    factor: float


@dataclass(frozen=True, slots=True)
class StepInput:
    """Costs of one step. `seconds`: by node. `stretch`: factor on each flow's bytes, by its number."""

    begin: Sequence[float]
    seconds: Sequence[float]
    stretch: Sequence[float]
    stops: Mapping[int, Stops | Pauses] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Start and end of each node, absolute seconds."""

    start: list[float]
    end: list[float]


def run_step(graph: StepGraph, given: StepInput, network: SharedNetwork) -> StepTimes:
    """Run one step. Raises RuntimeError if nodes wait for each other in a circle."""
    step = _Step(graph, given, network)
    step.run()
    if step.open:
        raise RuntimeError(f"{step.open} of {len(graph.source)} nodes never ran: the program waits for itself")
    return StepTimes(step.start, step.end)


class _Step:
    """The state of a step under way. Events are (time, node, version); version -1: the node ends."""

    def __init__(self, graph: StepGraph, given: StepInput, network: SharedNetwork) -> None:
        self.graph, self.given, self.network = graph, given, network
        self.waits = graph.waits.copy()
        self.start = [0.0] * len(graph.source)
        self.end = [0.0] * len(graph.source)
        self.open = len(graph.source)
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """Run until no event is left."""
        for node, waits in enumerate(self.graph.waits):
            begin = self.given.begin[self.graph.cell[node]]
            if waits == 0 and self._begin(node, begin):
                heappush(self.events, (begin, node, -1))
        events, network, flows = self.events, self.network, self.graph.flows
        while events:
            now, node, version = heappop(events)
            if version < 0:
                self._ended(node, now)
            elif network.is_current(node, version):
                for event in network.finish(node, flows[node], now):
                    heappush(events, event)
                heappush(events, (now + flows[node].latency_s, node, -1))

    def _ended(self, first: int, now: float) -> None:
        """A node ends, and with it the points that waited for it alone."""
        ended = [first]
        while ended:
            node = ended.pop()
            self.end[node] = now
            self.open -= 1
            for other in self.graph.after[node]:
                self.waits[other] -= 1
                if self.waits[other] == 0 and self._begin(other, now):
                    ended.append(other)

    def _begin(self, node: int, now: float) -> bool:
        """Start a node that waits for nothing more. True if it ends at once."""
        self.start[node] = now
        source = self.graph.source[node]
        if source == Source.FLOW:
            flow = self.graph.flows[node]
            size = flow.size * self.given.stretch[flow.number]
            for episode in self.given.episodes:
                if episode.begin <= now < episode.end:
                    size *= episode.factor
            for event in self.network.start(node, flow, size, now):
                heappush(self.events, event)
            return False
        seconds = self.given.seconds[node]
        stops = self.given.stops.get(self.graph.cell[node]) if self.given.stops else None
        if stops is not None and source in ON_THE_PROCESS:
            heappush(self.events, (stops.end(now, seconds), node, -1))
            return False
        if seconds == 0.0:
            return True
        heappush(self.events, (now + seconds, node, -1))
        return False
