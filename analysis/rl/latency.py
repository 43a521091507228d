"""How fast inference engines that batch continuously decode, and requests on them, replayed.

In: recorded requests. Out: `Engines`, and when each request ends. Two facts suffice: how many requests an engine ran at
any time is recorded, and the decoding steps between a request's start and end are its tokens. All requests that an
engine runs get one token in every decoding step, which takes base + per request x running, divided by the engine's
speed; a request that finds no free slot waits for one, and a tool begins after half of a request's tokens and keeps the
slot.
"""

from __future__ import annotations

import heapq
import math

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints

#: Requests that a fit reads: whole steps, evenly spread over the run.
_ENOUGH = 100_000
_ROUNDS, _ROUNDS_OF_TOOLS = 60, 6
#: More slots than requests.
NO_LIMIT = 1 << 40


class Ran(Struct, frozen=True, eq=False):
    """When requests ran, [requests], seconds of their generation. `step`, `engine`: positions."""

    step: Ints
    engine: Ints
    submit: Floats
    start: Floats
    end: Floats
    tokens: Floats
    tool_s: Floats

    def only(self, mask: Bools) -> Ran:
        """The requests of a mask."""
        return Ran(*(getattr(self, name)[mask] for name in self.__struct_fields__))


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
        request = np.concatenate((np.arange(count), np.arange(count), tools, tools))
        group = (ran.step * (int(ran.engine.max()) + 1) + ran.engine)[request]
        order = np.lexsort((change, time, group))
        self.engine = ran.engine[request][order]
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
        measured = (*columns, missed)
        shares = [np.bincount(ran.engine, predicted * series, count) / size for series in measured]
        free = [series - predicted * share[ran.engine] for series, share in zip(measured, shares, strict=True)]
        # What engines that always run equally many requests leave of a column is rounding.
        unknown = [np.linalg.norm(column) < 1e-6 * np.linalg.norm(predicted) for column in free[:2]]
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


class Engines(Struct, frozen=True, eq=False):
    """Inference engines. `speeds`: [engines], relative to the median; `slots`: most requests that one runs at once."""

    base_s: float
    per_request_s: float
    speeds: Floats
    slots: int

    def of_number(self, number: int) -> Engines:
        """So many engines: the first of these, and further ones of the median speed."""
        speeds = np.concatenate((self.speeds[:number], np.ones(max(0, number - len(self.speeds)))))
        return msgspec.structs.replace(self, speeds=speeds)


class Requests(Struct, frozen=True, eq=False):
    """Requests of all steps, by step and submission; all arrays are [requests], times are seconds of their generation.

    `step`: position of the step; `engine`: that decodes it; `arrives`: when it can start; `turn`: order among those
    that arrive at one time.
    """

    step: Ints
    engine: Ints
    arrives: Floats
    turn: Floats
    tokens: Floats
    tool_s: Floats

    def replace(self, **columns: Floats | Ints) -> Requests:
        """The same requests with other columns."""
        return msgspec.structs.replace(self, **columns)

    def dealt(self, engines: int, *, longest_first: bool = False) -> Requests:
        """The requests, dealt to engines in turn: as submitted, or the longest of each step first."""
        order = np.lexsort((-self.tokens if longest_first else self.arrives, self.step))
        first = np.searchsorted(self.step, np.arange(self.step[-1] + 2))
        place = np.arange(len(order)) - first[self.step]
        engine, turn = np.empty_like(self.engine), np.empty_like(self.turn)
        engine[order], turn[order] = place % engines, place
        return self.replace(engine=engine, turn=turn)

    def balanced(self, engines: int) -> Requests:
        """The requests, the longest first, dealt to the engine with the fewest tokens; engines run them in order."""
        engine = np.empty_like(self.engine)
        order = np.lexsort((-self.tokens, self.step))
        last = -1
        for request, step, tokens in zip(
            order.tolist(), self.step[order].tolist(), self.tokens[order].tolist(), strict=True
        ):
            if step != last:
                last, loads = step, [(0.0, number) for number in range(engines)]
            load, number = loads[0]
            heapq.heapreplace(loads, (load + tokens, number))
            engine[request] = number
        return self.replace(engine=engine)


def decode(requests: Requests, engines: Engines, until: float = math.inf) -> tuple[Floats, Floats, Floats]:
    """When each request ends, nan if not by `until`, and the tokens and seconds of tools that are left then."""
    order = np.lexsort((requests.turn, requests.arrives, requests.engine, requests.step))
    count = len(engines.speeds)
    group = (requests.step * count + requests.engine)[order]
    groups, first = np.unique(group, return_index=True)
    speeds = engines.speeds[groups % count]
    tokens, tools, ends = requests.tokens[order], requests.tool_s[order], np.full(len(order), np.nan)
    native.roll_out(
        np.append(first, len(order)).astype(np.int64),
        requests.arrives[order],
        engines.base_s / speeds,
        engines.per_request_s / speeds,
        engines.slots,
        until,
        tokens,
        tools,
        ends,
    )
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return ends[back], tokens[back], tools[back]


def generations(requests: Requests, engines: Engines) -> Floats:
    """Seconds of each step's generation, [steps]: until its last request ends."""
    ends = decode(requests, engines)[0]
    return np.asarray(np.maximum.reduceat(ends, np.searchsorted(requests.step, np.arange(requests.step[-1] + 1))))


def partial_generations(requests: Requests, engines: Engines, share: float) -> tuple[Floats, int]:
    """As `generations`, but each ends once that share of its requests has ended; the next begins with the others, which
    keep their tokens, and takes fewer new ones. Also the most steps that a request is carried over.
    """
    count = len(engines.speeds)
    sizes = np.bincount(requests.step)
    tokens, tools, age = np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)
    took, oldest, used = np.empty(len(sizes)), 0, 0
    for number, size in enumerate(sizes.tolist()):
        new = slice(used, used + max(0, size - len(tokens)))
        used = new.stop
        arrives = np.concatenate((np.zeros(len(tokens)), requests.arrives[new]))
        batch = Requests(
            np.zeros(len(arrives), dtype=np.int64),
            np.arange(len(arrives)) % count,
            arrives,
            np.arange(len(arrives), dtype=np.float64),
            np.concatenate((tokens, requests.tokens[new])),
            np.concatenate((tools, requests.tool_s[new])),
        )
        age = np.concatenate((age, np.zeros(len(arrives) - len(age), dtype=np.int64)))
        ends = np.sort(decode(batch, engines)[0])
        took[number] = ends[min(math.ceil(round(share * size, 9)), len(ends)) - 1]
        ends, tokens, tools = decode(batch, engines, took[number])
        unfinished = np.isnan(ends)
        oldest = max(oldest, int(age[~unfinished].max(initial=0)))
        tokens, tools, age = np.ceil(tokens[unfinished]), tools[unfinished], age[unfinished] + 1
    return took, oldest
