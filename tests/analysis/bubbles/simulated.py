"""A pipeline simulated event by event, and what its idle time is, by brute force.

Shares no code with tracekit but the canonical columns: orders, times, places and causes are worked out here again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations, product
from statistics import mean, median

import polars as pl

from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout
from tracekit.trace.schema import SCHEMA

#: (kind, virtual stage, microbatch); kinds are F, B and W.
Compute = tuple[str, int, int]
KINDS = {"F": "forward-compute", "B": "backward-compute", "W": "backward-weight"}
TRANSFERS = {"F": "forward", "B": "backward"}
#: (place, reason) -> seconds
Cells = dict[tuple[str, str], float]


def gpipe(p: int, m: int) -> list[list[Compute]]:
    return [[("F", s, k) for k in range(m)] + [("B", s, k) for k in range(m)] for s in range(p)]


def one_f_one_b(p: int, m: int) -> list[list[Compute]]:
    orders = []
    for s in range(p):
        warm = min(p - 1 - s, m)
        order = [("F", s, k) for k in range(warm)]
        for k in range(m):
            order += ([("F", s, warm + k)] if warm + k < m else []) + [("B", s, k)]
        orders.append(order)
    return orders


def zb_h1(p: int, m: int) -> list[list[Compute]]:
    orders: list[list[Compute]] = []
    for s, order in enumerate(one_f_one_b(p, m)):
        new, done = [], 0
        for compute in order:
            new.append(compute)
            if compute[0] == "B" and compute[2] >= s:
                new.append(("W", s, compute[2] - s))
                done += 1
        orders.append(new + [("W", s, k) for k in range(done, m)])
    return orders


def v_shaped(p: int, m: int) -> list[list[Compute]]:
    """Zero bubble with the virtual stages s and 2 p - 1 - s on stage s: whoever is free computes what is ready in turns
    of equal length, backwards first, and weight gradients if there is nothing else.
    """
    done: dict[Compute, int] = {}
    orders: list[list[Compute]] = [[] for _ in range(p)]
    turn = 0
    while sum(map(len, orders)) < 6 * p * m:
        for s, order in enumerate(orders):
            for c in product("BFW", (2 * p - 1 - s, s), range(m)):
                kind, v, k = c
                needs = {
                    "F": [("F", v - 1, k)] if v else [],
                    "B": [("F", v, k), *([("B", v + 1, k)] if v < 2 * p - 1 else [])],
                    "W": [("B", v, k)],
                }[kind]
                held = sum(x[0] == "F" for x in order) - sum(x[0] == "B" for x in order)
                if c in done or any(done.get(x, turn) >= turn for x in needs) or (kind == "F" and held > 2 * p):
                    continue
                done[c] = turn
                order.append(c)
                break
        turn += 1
    return orders


@dataclass
class Pipeline:
    """One lane. `cost`: seconds of each compute; `wire`: of the transfer of its result; `late`: launch delays."""

    orders: list[list[Compute]]
    cost: Mapping[Compute, float]
    wire: Callable[[Compute], float]
    late: Mapping[Compute, float] = field(default_factory=dict)
    start: dict[Compute, float] = field(default_factory=dict)
    end: dict[Compute, float] = field(default_factory=dict)
    sent: dict[Compute, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage = {c: s for s, order in enumerate(self.orders) for c in order}
        self.last = max(v for _, v, _ in self.stage)

    def need(self, c: Compute) -> Compute | None:
        """The compute on another stage that `c` needs."""
        kind, v, k = c
        other = {"F": ("F", v - 1, k), "B": ("B", v + 1, k)}.get(kind)
        return other if other in self.stage and self.stage[other] != self.stage[c] else None

    def run(self) -> Pipeline:
        """Fill in the times: repeat over the stages until nothing moves."""
        self.start, self.end, self.sent = {}, {}, {}
        at, free, link = [0] * len(self.orders), [0.0] * len(self.orders), {}
        moved = True
        while moved:
            moved = False
            for s, order in enumerate(self.orders):
                while at[s] < len(order):
                    c = order[at[s]]
                    need = self.need(c)
                    if need is not None and need not in self.sent:
                        break
                    ready = max(free[s], self.sent[need][1] if need else 0.0)
                    self.start[c] = ready + self.late.get(c, 0.0)
                    self.end[c] = free[s] = self.start[c] + self.cost[c]
                    begin = max(self.end[c], link.get((c[0], s), 0.0))
                    if c[0] != "W" and self.goes_on(c):
                        self.sent[c] = (begin, begin + self.wire(c))
                        link[c[0], s] = self.sent[c][1]
                    at[s] += 1
                    moved = True
        assert len(self.end) == len(self.stage), "the order cannot run"
        return self

    def goes_on(self, c: Compute) -> bool:
        """Whether another stage needs the result."""
        follower = {"F": ("F", c[1] + 1, c[2]), "B": ("B", c[1] - 1, c[2])}[c[0]]
        return follower in self.stage and self.stage[follower] != self.stage[c]

    @property
    def window(self) -> float:
        return max(self.end.values()) - min(self.start.values())

    @property
    def work(self) -> float:
        """Mean over the stages."""
        return sum(self.cost.values()) / len(self.orders)

    def places(self) -> Cells:
        """Idle seconds, mean over the stages, interval by interval."""
        cells: Cells = {}

        def add(place: str, reason: str, begin: float, end: float) -> None:
            if end > begin:
                cells[place, reason] = cells.get((place, reason), 0.0) + (end - begin) / len(self.orders)

        begin, end = min(self.start.values()), max(self.end.values())
        for order in self.orders:
            free = begin
            for number, c in enumerate(order):
                place, need, start = "between" if number else "warm-up", self.need(c), self.start[c]
                first = min(max(self.end[need], free), start) if need else free
                second = min(max(self.sent[need][1], first), start) if need else free
                add(place, "peer", free, first)
                add(place, "transfer", first, second)
                add(place, "host", second, start)
                free = self.end[c]
            add("drain", "peer", free, end)
        return cells

    def rows(self, step: int, dp_rank: int, chunks: int, shift: float = 0.0) -> list[tuple[object, ...]]:
        """Canonical rows, kinds counted on each stage in order."""
        p, ops = len(self.orders), []
        chunk = {c: next(i for i, v in enumerate(sorted({x[1] for x in self.orders[s]})) if v == c[1])
                 for c, s in self.stage.items()}  # fmt: skip
        for c, s in self.stage.items():
            ops.append((s, KINDS[c[0]], c, self.start[c], self.end[c]))
            if (need := self.need(c)) is not None:
                begin, end = self.sent[need]
                ops.append((s, f"{TRANSFERS[c[0]]}-recv", c, begin, end))
                ops.append((self.stage[need], f"{TRANSFERS[c[0]]}-send", need, begin, end))
        rows, count = [], {}
        for s, kind, c, begin, end in sorted(ops, key=lambda op: (op[3], op[4])):
            seq = count[s, kind] = count.get((s, kind), -1) + 1
            rows.append((step, dp_rank * p + s, dp_rank, s, kind, seq, c[2], chunk[c], begin + shift, end - begin))
        assert chunks > max(chunk.values())
        return rows


def trace(lanes: Mapping[tuple[int, int], Pipeline], *, chunks: int = 1) -> Trace:
    """The trace of lanes by (step, DP rank)."""
    p, ranks = len(next(iter(lanes.values())).orders), {dp_rank for _, dp_rank in lanes}
    rows = [row for (step, dp_rank), lane in lanes.items() for row in lane.rows(step, dp_rank, chunks)]
    return Trace.from_frame(
        pl.DataFrame(rows, list(SCHEMA), orient="row"), Layout(dp=len(ranks), pp=p, vpp=chunks), name="sim"
    )


def random_lanes(
    seed: int, orders: list[list[Compute]], ranks: int = 3, steps: int = 2, wire: float = 0.003
) -> dict[tuple[int, int], Pipeline]:
    """Lanes with random stages, workers, microbatches and launch delays, and one time for all transfers."""
    draw = random.Random(seed)
    virtual = sorted({c[1] for order in orders for c in order})
    stage = {(kind, v): draw.uniform(0.02, 0.05) for kind in "FBW" for v in virtual}
    worker = {(d, v): draw.choice([1.0, 1.0, 1.5]) for d in range(ranks) for v in virtual}
    lanes = {}
    for step, d in product(range(steps), range(ranks)):
        computes = [c for order in orders for c in order]
        cost = {c: stage[c[0], c[1]] * worker[d, c[1]] * draw.uniform(0.8, 1.2) for c in computes}
        late = {c: draw.choice([0.0, 0.0, 0.004]) for c in computes if c[:2] != ("F", 0) or c[2]}
        lanes[step, d] = Pipeline(orders, cost, lambda _: wire, late).run()
    return lanes


def causes(lanes: Mapping[tuple[int, int], Pipeline]) -> dict[str, float]:
    """Idle seconds by cause: the mean effect of each switch over all 120 orders of switching on."""
    names = ("transfers", "jitter", "workers", "stages", "dependency")
    of: dict[tuple[str, int, int], list[float]] = {}
    for (_, d), lane in lanes.items():
        for (kind, v, _), seconds in lane.cost.items():
            of.setdefault((kind, v, d), []).append(seconds)
    ranks = sorted({d for _, d in lanes})
    level, usual, own = {}, {}, {cell: mean(values) for cell, values in of.items()}
    for kind in sorted({kind for kind, _, _ in of}):
        here = sorted({v for k, v, _ in of if k == kind})
        raw = {v: median(own[kind, v, d] for d in ranks) for v in here}
        usual[kind] = mean(own[kind, v, d] for v in here for d in ranks)
        level |= {(kind, v): raw[v] * usual[kind] / mean(raw.values()) for v in here}
    known: dict[frozenset[str], float] = {}

    def time(on: frozenset[str]) -> float:
        if on not in known:
            known[on] = mean(one(lane, d, on) for (_, d), lane in lanes.items())
        return known[on]

    def one(lane: Pipeline, d: int, on: frozenset[str]) -> float:
        cost = {}
        for (kind, v, k), seconds in lane.cost.items():
            factors = {
                "stages": level[kind, v] / usual[kind],
                "workers": own[kind, v, d] / level[kind, v],
                "jitter": seconds / own[kind, v, d],
            }
            cost[kind, v, k] = usual[kind]
            for name, factor in factors.items():
                cost[kind, v, k] *= factor if name in on else 1
        if "dependency" not in on:
            return max(sum(cost[c] for c in order) for order in lane.orders)
        return Pipeline(lane.orders, cost, lane.wire if "transfers" in on else lambda _: 0.0).run().window

    found = dict.fromkeys(names, 0.0)
    every = list(permutations(names))
    for order in every:
        for at, name in enumerate(order):
            found[name] += (time(frozenset(order[: at + 1])) - time(frozenset(order[:at]))) / len(every)
    idle = mean(lane.window - lane.work for lane in lanes.values())
    return found | {"host": idle - sum(found.values())}
