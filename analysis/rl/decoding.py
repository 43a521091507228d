"""Requests on inference engines that batch continuously, replayed.

In: `Requests` and the `Engines` that decode them. Out: when each request ends. All requests that an engine runs get one
token in every decoding step, which takes base + per request x running, divided by the engine's speed; a request that
finds no free slot waits for one, and a tool begins after half of a request's tokens and keeps the slot.
"""

from __future__ import annotations

import heapq
import math

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Floats, Ints

#: More slots than requests.
NO_LIMIT = 1 << 40


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
        """Dealt to engines in turn, as submitted or with the longest of each step first."""
        order = np.lexsort((-self.tokens if longest_first else self.arrives, self.step))
        first = np.searchsorted(self.step, np.arange(self.step[-1] + 2))
        place = np.arange(len(order)) - first[self.step]
        engine, turn = np.empty_like(self.engine), np.empty_like(self.turn)
        engine[order], turn[order] = place % engines, place
        return self.replace(engine=engine, turn=turn)

    def balanced(self, engines: int) -> Requests:
        """The longest first to the engine with the fewest tokens; engines run theirs in the order of submission."""
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
