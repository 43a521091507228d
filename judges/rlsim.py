"""Simulated post-training, token by token, and the truth about it. Knows nothing of tracekit.

A job is drawn with a planted loss. Each engine takes decoding steps of base + per request x running seconds, in which
each running request gets one token; requests start and return from tools between two steps. A loss is priced by running
the same job again without it, an alternative by running it that way.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

PLANTED = ("tail", "queueing", "engines", "tools", "none")
WARM_UP = 2


@dataclass
class SimRequest:
    """A response to decode: its tokens, of which half come before a tool of so many seconds."""

    name: str
    tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True)
class RlSimJob:
    """A loop of post-training. `batches`: the requests of each step; `speeds`: of each engine."""

    batches: tuple[tuple[SimRequest, ...], ...]
    speeds: tuple[float, ...]
    slots: int
    base_s: float
    per_request_s: float
    reward_s: float
    train_s: tuple[float, ...]
    sync_s: float
    staleness: int = 0


@dataclass
class Served:
    """What an engine did with a request: when it started and ended (None: not in time), and what is left of it."""

    request: SimRequest
    start: float
    end: float | None
    remaining: SimRequest


def draw(planted: str, seed: int, staleness: int = 0) -> RlSimJob:
    """A job whose largest loss should be the planted one."""
    chance = random.Random(f"{planted} {seed}")
    engines = chance.choice((3, 4)) if planted == "engines" else chance.choice((2, 3))
    size, steps = engines * chance.randint(10, 24), chance.randint(6, 9)
    slots = chance.randint(4, 7) if planted == "queueing" else 64

    def request(step: int, place: int) -> SimRequest:
        tokens = int(chance.lognormvariate(6.2, 0.95)) if planted == "tail" else int(chance.gauss(700, 60))
        tool_s = chance.expovariate(1 / 8) if planted == "tools" and chance.random() < 0.7 else 0.0
        return SimRequest(f"{step}-{place}", max(20, tokens), tool_s)

    slow = [1 / chance.uniform(1.8, 2.6)] if planted == "engines" else []
    decoding = 700 * 0.009
    return RlSimJob(
        tuple(tuple(request(step, place) for place in range(size)) for step in range(steps)),
        tuple([1.0] * (engines - len(slow)) + slow),
        slots,
        chance.uniform(0.006, 0.012),
        chance.uniform(0.00004, 0.00009),
        0.15,
        tuple(decoding * chance.uniform(*((3.0, 3.2) if planted == "none" else (0.9, 1.1))) for _ in range(steps)),
        0.3,
        staleness,
    )


def in_turn(requests: Sequence[SimRequest], engines: int) -> list[list[SimRequest]]:
    """Requests dealt to engines in turn."""
    return [list(requests[engine::engines]) for engine in range(engines)]


def serve(job: RlSimJob, speed: float, requests: Sequence[SimRequest], until: float = math.inf) -> list[Served]:
    """One engine decodes its requests, from second 0 on."""
    now, waiting, running, in_tool = 0.0, list(requests), [], []
    served: list[Served] = []
    while (waiting or running or in_tool) and now < until:
        running += [entry for back, entry in in_tool if back <= now]
        in_tool = [(back, entry) for back, entry in in_tool if back > now]
        while waiting and len(running) + len(in_tool) < job.slots:
            served.append(Served(waiting[0], now, None, replace(waiting.pop(0))))
            running.append(served[-1])
        if not running:
            now = min(back for back, _ in in_tool)
            continue
        step_s = (job.base_s + job.per_request_s * len(running)) / speed
        # All steps until a request ends, goes to its tool or comes back from it are alike.
        steps = min(_next_part(one.remaining) for one in running)
        if in_tool:
            steps = min(steps, max(1, math.ceil((min(back for back, _ in in_tool) - now) / step_s)))
        if until < math.inf:
            steps = min(steps, max(1, math.ceil((until - now) / step_s - 1e-9)))
        now += steps * step_s
        still = []
        for served_request in running:
            to_tool = served_request.remaining.tool_s > 0 and _next_part(served_request.remaining) == steps
            served_request.remaining.tokens -= steps
            if to_tool:
                in_tool.append((now + served_request.remaining.tool_s, served_request))
                served_request.remaining.tool_s = 0.0
            elif served_request.remaining.tokens == 0:
                served_request.end = now
            else:
                still.append(served_request)
        running = still
    for back, served_request in in_tool:
        served_request.remaining.tool_s = max(0.0, back - now)
    return served + [Served(one, now, None, replace(one)) for one in waiting]


def _next_part(request: SimRequest) -> int:
    return max(1, request.tokens // 2) if request.tool_s > 0 else request.tokens


Dealer = Callable[[Sequence[SimRequest], int], list[list[SimRequest]]]


def generate(job: RlSimJob, deal: Dealer = in_turn) -> list[float]:
    """Seconds of each generation."""
    return [
        max(
            served.end or 0.0
            for speed, requests in zip(job.speeds, deal(batch, len(job.speeds)), strict=True)
            for served in serve(job, speed, requests)
        )
        for batch in job.batches
    ]


def generate_partly(job: RlSimJob, share: float) -> list[float]:
    """Seconds of each generation if it stops once that share of its requests has ended; the next one has the others."""
    stream = iter([request for batch in job.batches for request in batch])
    carried: list[SimRequest] = []
    took = []
    for batch in job.batches:
        requests = carried + [next(stream) for _ in range(len(batch) - len(carried))]
        dealt = in_turn(requests, len(job.speeds))
        ends = sorted(
            one.end or 0.0 for speed, mine in zip(job.speeds, dealt, strict=True) for one in serve(job, speed, mine)
        )
        took.append(ends[math.ceil(round(share * len(batch), 9)) - 1])
        rest = {
            one.request.name: one.remaining
            for speed, mine in zip(job.speeds, dealt, strict=True)
            for one in serve(job, speed, mine, took[-1])
            if one.end is None
        }
        carried = [rest[one.name] for one in requests if one.name in rest]
    return took


def timeline(job: RlSimJob, generations: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Start of each generation, of its training and of its sync, and the end of that."""
    generated, synced = 0.0, []
    for step, took in enumerate(generations):
        back = step - 1 - job.staleness
        start = max(generated, synced[back] if back >= 0 else 0.0)
        generated = start + took
        train = max(generated + job.reward_s, synced[-1] if synced else 0.0)
        synced.append(train + job.train_s[step] + job.sync_s)
        yield start, train, train + job.train_s[step], synced[-1]


def step_s(job: RlSimJob, generations: Sequence[float]) -> float:
    """Mean step without the first two."""
    ends = [end for *_, end in timeline(job, generations)]
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def record(job: RlSimJob, path: Path) -> None:
    """Write what a recorder sees: trajectories in the order in which they end, and phases."""
    lines: list[tuple[float, dict[str, Any]]] = []
    times = list(timeline(job, generate(job)))
    for step, (batch, (start, train, sync, end)) in enumerate(zip(job.batches, times, strict=True)):
        generated = start
        for engine, of_engine in enumerate(in_turn(batch, len(job.speeds))):
            for served in serve(job, job.speeds[engine], of_engine):
                ended = start + (served.end or 0.0)
                generated = max(generated, ended)
                lines.append((ended, {
                    "trajectory": served.request.name, "step": step, "engine": f"engine-{engine}",
                    "submit": round(start, 6), "start": round(start + served.start, 6), "end": round(ended, 6),
                    "tokens": served.request.tokens, "tool_s": round(served.request.tool_s, 6),
                    "version": max(0, step - job.staleness), "status": "completed",
                }))  # fmt: skip
        for phase, role, first, last in (
            ("generate", "rollout", start, generated), ("reward", "reward", generated, generated + job.reward_s),
            ("train", "trainer", train, sync), ("sync", "all", sync, end),
        ):  # fmt: skip
            lines.append((last, {"phase": phase, "role": role, "step": step, "start": first, "end": last}))
    path.write_text("".join(f"{json.dumps(line)}\n" for _, line in sorted(lines, key=lambda line: line[0])))


def losses(job: RlSimJob) -> dict[str, float]:
    """What each loss costs a step: the job runs again without it."""
    took = generate(job)
    whole = step_s(job, took)

    def shortened(batch: Sequence[SimRequest]) -> tuple[SimRequest, ...]:
        lengths = sorted(one.tokens for one in batch)
        longest = lengths[math.ceil(0.95 * (len(lengths) - 1))]
        return tuple(replace(one, tokens=min(one.tokens, longest)) for one in batch)

    def by_load(batch: Sequence[SimRequest], engines: int) -> list[list[SimRequest]]:
        loads, home = [0] * engines, {}
        for request in sorted(batch, key=lambda request: -request.tokens):
            home[request.name] = least = loads.index(min(loads))
            loads[least] += request.tokens
        return [[one for one in batch if home[one.name] == engine] for engine in range(engines)]

    usual = replace(job, speeds=(median(job.speeds),) * len(job.speeds))
    without = {
        "queueing": step_s(job, generate(replace(job, slots=10**9))),
        "tail": step_s(job, generate(replace(job, batches=tuple(map(shortened, job.batches))))),
        "engines": step_s(job, generate(usual, by_load)),
        "tools": step_s(
            job,
            generate(replace(job, batches=tuple(tuple(replace(one, tool_s=0.0) for one in b) for b in job.batches))),
        ),
        "reward": step_s(replace(job, reward_s=0.0), took),
        "sync": step_s(replace(job, sync_s=0.0), took),
    }
    return {loss: whole - other for loss, other in without.items()}


def alternatives(job: RlSimJob) -> dict[str, float]:
    """Step time of each what-if, with as many GPUs as engines on either side."""
    took, engines = generate(job), len(job.speeds)
    ordered = tuple(tuple(sorted(batch, key=lambda request: -request.tokens)) for batch in job.batches)
    times = {f"staleness={lag}": step_s(replace(job, staleness=lag), took) for lag in (1, 2)}
    times["partial=0.9"] = step_s(job, generate_partly(job, 0.9))
    times["longest-first"] = step_s(job, generate(replace(job, batches=ordered)))
    more = replace(job, speeds=(*job.speeds, 1.0, 1.0))
    times[f"engines={engines + 2}"] = step_s(job, generate(more))
    fewer = replace(job, speeds=job.speeds[:-1], train_s=tuple(s * engines / (engines + 1) for s in job.train_s))
    times[f"split={engines - 1}:{engines + 1}"] = step_s(fewer, generate(fewer))
    return times
