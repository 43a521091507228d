"""How fast engines decode, from when requests started and ended.

In: recorded requests. Out: `Engines`. Two facts suffice: how many requests an engine ran at any time is recorded, and
the decoding steps between a request's start and end are its tokens.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.rl.decoding import NO_LIMIT, Engines

#: Requests that a fit reads: whole steps, evenly spread over the run.
_ENOUGH = 100_000
_ROUNDS, _ROUNDS_OF_TOOLS = 60, 6


class Ran(Struct, frozen=True, eq=False):
    """When requests ran, [requests], seconds of their generation. `step`, `engine`: positions."""

    step: Ints
    engine: Ints
    submit: Floats
    start: Floats
    end: Floats
    tokens: Floats
    tool_s: Floats

    def only(self, which: Bools) -> Ran:
        """The requests of a mask."""
        return Ran(*(getattr(self, name)[which] for name in self.__struct_fields__))


def fit(ran: Ran, count: int) -> Engines:
    """The latency and the speeds of `count` engines that explain the tokens of all requests best, without slots."""
    stride = min(max(1, len(ran.step) // _ENOUGH), int(ran.step.max()) + 1)
    sample = ran.only(ran.step % stride == stride - 1)
    half = np.floor(sample.tokens / 2)
    has_tool = sample.tool_s > 0
    rest = np.maximum(sample.end - sample.start - sample.tool_s, 0.0)
    tool_from = sample.start + rest / 2
    decoded = float(rest.sum()), float(sample.tokens.sum())
    base_s = decoded[0] / decoded[1] if min(decoded) > 0 else 1e-9
    latency, speeds = np.array([base_s, base_s / 100]), np.ones(count)
    for _ in range(_ROUNDS_OF_TOOLS if has_tool.any() else 1):
        times = _DecodeTimes(sample, tool_from, has_tool)
        latency, speeds = _least_squares(sample, times, latency, speeds)
        tool_from = times.when(half, latency, speeds)
    present = np.bincount(sample.engine, minlength=count) > 0
    median = float(np.median(speeds[present]))
    latency, speeds = latency / median, np.where(present, speeds / median, 1.0)
    return Engines(float(latency[0]), float(latency[1]), speeds, NO_LIMIT)


class _DecodeTimes:
    """The times at which the number of running requests changes, engine by engine, and that number from each on."""

    def __init__(self, ran: Ran, tool_from: Floats, has_tool: Bools) -> None:
        count = len(ran.step)
        self.ran, self.has_tool, tools = ran, has_tool, np.flatnonzero(has_tool)
        time = np.concatenate((ran.start, ran.end, tool_from[tools], (tool_from + ran.tool_s)[tools]))
        change = np.repeat([1, -1, -1, 1], (count, count, len(tools), len(tools)))
        of = np.concatenate((np.arange(count), np.arange(count), tools, tools))
        group = (ran.step * (int(ran.engine.max()) + 1) + ran.engine)[of]
        order = np.lexsort((change, time, group))
        self.engine = ran.engine[of][order]
        self.running = np.cumsum(change[order])
        self.time = time[order]
        self.lasts = np.append(np.diff(self.time), 0.0)
        self.lasts[np.flatnonzero(np.diff(group[order]))] = 0.0
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        self.start, self.end = place[:count], place[count : 2 * count]
        self.tool_start, self.tool_end = self.start.copy(), self.start.copy()
        self.tool_start[tools], self.tool_end[tools] = np.split(place[2 * count :], 2)

    def steps(self, latency: Floats, speeds: Floats) -> Floats:
        """Decoding steps until each time, summed over the engines before."""
        rate = speeds[self.engine] / (latency[0] + latency[1] * self.running)
        return self.since_first(np.where(self.running > 0, rate, 0.0))

    def since_first(self, rate: Floats) -> Floats:
        """The integral of a rate until each time."""
        return np.concatenate(([0.0], np.cumsum(rate * self.lasts)[:-1]))

    def of_requests(self, until: Floats) -> Floats:
        """What an integral grows by while each request decodes."""
        return np.asarray(until[self.end] - until[self.tool_end] + until[self.tool_start] - until[self.start])

    def when(self, tokens: Floats, latency: Floats, speeds: Floats) -> Floats:
        """When each request has decoded so many tokens."""
        steps = self.steps(latency, speeds)
        wanted = steps[self.start] + tokens
        event = np.clip(np.searchsorted(steps, wanted) - 1, self.start, self.end)
        step_s = (latency[0] + latency[1] * self.running[event]) / speeds[self.engine[event]]
        time = self.time[event] + (wanted - steps[event]) * step_s
        return np.asarray(np.clip(time, self.ran.start, np.maximum(self.ran.end - self.ran.tool_s, self.ran.start)))


def _least_squares(ran: Ran, times: _DecodeTimes, latency: Floats, speeds: Floats) -> tuple[Floats, Floats]:
    """Gauss-Newton for the logarithms of latency and speeds; those of the speeds are eliminated engine by engine."""
    count = len(speeds)
    for _ in range(_ROUNDS):
        step_s = latency[0] + latency[1] * times.running
        rate = np.where(times.running > 0, speeds[times.engine] / step_s, 0.0)
        predicted = times.of_requests(times.since_first(rate))
        columns = [
            times.of_requests(times.since_first(-rate * part / step_s))
            for part in (latency[0], latency[1] * times.running)
        ]
        missed = ran.tokens - predicted
        size = np.maximum(np.bincount(ran.engine, predicted**2, count), 1e-300)
        shares = [np.bincount(ran.engine, predicted * one, count) / size for one in (*columns, missed)]
        free = [one - predicted * share[ran.engine] for one, share in zip((*columns, missed), shares, strict=True)]
        # What engines that always run equally many requests leave of a column is rounding.
        unknown = [np.linalg.norm(one) < 1e-6 * np.linalg.norm(predicted) for one in free[:2]]
        design = np.where(unknown, 0.0, np.stack(free[:2], axis=1))
        change = np.linalg.lstsq(design, free[2], rcond=1e-9)[0]
        faster = shares[2] - change[0] * shares[0] - change[1] * shares[1]
        change, faster = np.clip(change, -1, 1), np.clip(faster, -1, 1)
        latency, speeds = latency * np.exp(change), speeds * np.exp(faster)
        middle = float(np.exp(np.median(np.log(speeds))))  # only ratios of speeds are known
        latency, speeds = latency / middle, speeds / middle
        # A latency without a part per request, or of it alone, is approached without an end.
        small = latency * (1.0, float(times.running.max())) < 1e-6 * latency.sum()
        if max(np.abs(np.where(small, 0.0, change)).max(), np.abs(faster).max()) < 1e-9:
            break
    return latency, speeds


def started(ran: Ran, slots: int) -> Ran:
    """The requests with starts that slots allow, for recorders that know only when a request was submitted: with all
    slots taken, the next one starts when the first of those that run ends.
    """
    group = ran.step * (int(ran.engine.max()) + 1) + ran.engine
    in_order, by_end = np.lexsort((ran.start, ran.submit, group)), np.lexsort((ran.end, group))
    place = np.arange(len(group)) - np.searchsorted(group[in_order], group[in_order])
    late = np.flatnonzero(place >= slots)
    start = ran.start.copy()
    start[in_order[late]] = np.maximum(start[in_order[late]], ran.end[by_end[late - slots]])
    return msgspec.structs.replace(ran, start=np.minimum(start, ran.end))


def queued(ran: Ran, engines: Engines) -> tuple[Bools, int | None]:
    """Which requests waited for a slot, and how many slots an engine has, None if none waited.

    Such a request starts later than a decoding step after its submission, within a decoding step of the end of another
    one. Any other wait is no queue.
    """
    group = ran.step * len(engines.speeds) + ran.engine
    far = float(max(ran.end.max(), 0.0)) * 2 + 1.0
    start, end = np.sort(group * far + ran.start), np.sort(group * far + ran.end)
    slack = engines.base_s / 2
    starts = group * far + ran.start
    ended = np.searchsorted(end, starts + slack, side="right")
    before = end[np.maximum(ended - 1, 0)]
    running = np.searchsorted(start, starts, side="right") - ended
    step_s = (engines.base_s + engines.per_request_s * np.maximum(running, 1)) / engines.speeds[ran.engine]
    waited = (ran.start - ran.submit > step_s) & (ended > 0) & (before >= group * far) & (starts - before <= step_s)
    return waited, int(np.median(running[waited])) if waited.any() else None
