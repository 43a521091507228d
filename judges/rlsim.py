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
class Request:
    """A response to decode: its tokens, of which half come before a tool of so many seconds."""

    name: str
    tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """A loop of post-training. `batches`: the requests of each step; `speeds`: of each engine."""

    batches: tuple[tuple[Request, ...], ...]
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

    request: Request
    start: float
    end: float | None
    left: Request


def draw(planted: str, seed: int, staleness: int = 0) -> Job:
    """A job whose largest loss should be the planted one."""
    chance = random.Random(f"{planted} {seed}")
    engines = chance.choice((3, 4)) if planted == "engines" else chance.choice((2, 3))
    size, steps = engines * chance.randint(10, 24), chance.randint(6, 9)
    slots = chance.randint(4, 7) if planted == "queueing" else 64

    def request(step: int, place: int) -> Request:
        tokens = int(chance.lognormvariate(6.2, 0.95)) if planted == "tail" else int(chance.gauss(700, 60))
        tool_s = chance.expovariate(1 / 8) if planted == "tools" and chance.random() < 0.7 else 0.0
        return Request(f"{step}-{place}", max(20, tokens), tool_s)

    slow = [1 / chance.uniform(1.8, 2.6)] if planted == "engines" else []
    decoding = 700 * 0.009
    return Job(
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


def in_turn(requests: Sequence[Request], engines: int) -> list[list[Request]]:
    """Requests dealt to engines in turn."""
    return [list(requests[engine::engines]) for engine in range(engines)]


def serve(job: Job, speed: float, requests: Sequence[Request], until: float = math.inf) -> list[Served]:
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
        steps = min(_next_part(one.left) for one in running)
        if in_tool:
            steps = min(steps, max(1, math.ceil((min(back for back, _ in in_tool) - now) / step_s)))
        if until < math.inf:
            steps = min(steps, max(1, math.ceil((until - now) / step_s - 1e-9)))
        now += steps * step_s
        still = []
        for one in running:
            to_tool = one.left.tool_s > 0 and _next_part(one.left) == steps
            one.left.tokens -= steps
            if to_tool:
                in_tool.append((now + one.left.tool_s, one))
                one.left.tool_s = 0.0
            elif one.left.tokens == 0:
                one.end = now
            else:
                still.append(one)
        running = still
    for back, one in in_tool:
        one.left.tool_s = max(0.0, back - now)
    return served + [Served(one, now, None, replace(one)) for one in waiting]


def _next_part(request: Request) -> int:
    return max(1, request.tokens // 2) if request.tool_s > 0 else request.tokens


Dealer = Callable[[Sequence[Request], int], list[list[Request]]]


def generate(job: Job, deal: Dealer = in_turn) -> list[float]:
    """Seconds of each generation."""
    return [
        max(one.end or 0.0 for speed, mine in zip(job.speeds, deal(batch, len(job.speeds)), strict=True)
            for one in serve(job, speed, mine))
        for batch in job.batches
    ]  # fmt: skip


def generate_partly(job: Job, share: float) -> list[float]:
    """Seconds of each generation if it stops once that share of its requests has ended; the next one has the others."""
    stream = iter([request for batch in job.batches for request in batch])
    carried: list[Request] = []
    took = []
    for batch in job.batches:
        requests = carried + [next(stream) for _ in range(len(batch) - len(carried))]
        dealt = in_turn(requests, len(job.speeds))
        ends = sorted(
            one.end or 0.0 for speed, mine in zip(job.speeds, dealt, strict=True) for one in serve(job, speed, mine)
        )
        took.append(ends[math.ceil(round(share * len(batch), 9)) - 1])
        rest = {
            one.request.name: one.left
            for speed, mine in zip(job.speeds, dealt, strict=True)
            for one in serve(job, speed, mine, took[-1])
            if one.end is None
        }
        carried = [rest[one.name] for one in requests if one.name in rest]
    return took


def timeline(job: Job, generations: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Start of each generation, of its training and of its sync, and the end of that."""
    generated, synced = 0.0, []
    for step, took in enumerate(generations):
        back = step - 1 - job.staleness
        start = max(generated, synced[back] if back >= 0 else 0.0)
        generated = start + took
        train = max(generated + job.reward_s, synced[-1] if synced else 0.0)
        synced.append(train + job.train_s[step] + job.sync_s)
        yield start, train, train + job.train_s[step], synced[-1]


def step_s(job: Job, generations: Sequence[float]) -> float:
    """Mean step without the first two."""
    ends = [end for *_, end in timeline(job, generations)]
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def record(job: Job, path: Path) -> None:
    """Write what a recorder sees: trajectories in the order in which they end, and phases."""
    lines: list[tuple[float, dict[str, Any]]] = []
    times = list(timeline(job, generate(job)))
    for step, (batch, (start, train, sync, end)) in enumerate(zip(job.batches, times, strict=True)):
        generated = start
        for engine, mine in enumerate(in_turn(batch, len(job.speeds))):
            for one in serve(job, job.speeds[engine], mine):
                ended = start + (one.end or 0.0)
                generated = max(generated, ended)
                lines.append((ended, {
                    "trajectory": one.request.name, "step": step, "engine": f"engine-{engine}",
                    "submit": round(start, 6), "start": round(start + one.start, 6), "end": round(ended, 6),
                    "tokens": one.request.tokens, "tool_s": round(one.request.tool_s, 6),
                    "version": max(0, step - job.staleness), "status": "completed",
                }))  # fmt: skip
        for phase, role, first, last in (
            ("generate", "rollout", start, generated), ("reward", "reward", generated, generated + job.reward_s),
            ("train", "trainer", train, sync), ("sync", "all", sync, end),
        ):  # fmt: skip
            lines.append((last, {"phase": phase, "role": role, "step": step, "start": first, "end": last}))
    path.write_text("".join(f"{json.dumps(line)}\n" for _, line in sorted(lines, key=lambda one: one[0])))


def losses(job: Job) -> dict[str, float]:
    """What each loss costs a step: the job runs again without it."""
    took = generate(job)
    whole = step_s(job, took)

    def shortened(batch: Sequence[Request]) -> tuple[Request, ...]:
        lengths = sorted(one.tokens for one in batch)
        longest = lengths[math.ceil(0.95 * (len(lengths) - 1))]
        return tuple(replace(one, tokens=min(one.tokens, longest)) for one in batch)

    def by_load(batch: Sequence[Request], engines: int) -> list[list[Request]]:
        loads, home = [0] * engines, {}
        for one in sorted(batch, key=lambda one: -one.tokens):
            home[one.name] = least = loads.index(min(loads))
            loads[least] += one.tokens
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


def alternatives(job: Job) -> dict[str, float]:
    """Step time of each what-if, with as many GPUs as engines on either side."""
    took, engines = generate(job), len(job.speeds)
    ordered = tuple(tuple(sorted(batch, key=lambda one: -one.tokens)) for batch in job.batches)
    found = {f"staleness={lag}": step_s(replace(job, staleness=lag), took) for lag in (1, 2)}
    found["partial=0.9"] = step_s(job, generate_partly(job, 0.9))
    found["longest-first"] = step_s(job, generate(replace(job, batches=ordered)))
    more = replace(job, speeds=(*job.speeds, 1.0, 1.0))
    found[f"engines={engines + 2}"] = step_s(job, generate(more))
    fewer = replace(job, speeds=job.speeds[:-1], train_s=tuple(s * engines / (engines + 1) for s in job.train_s))
    found[f"split={engines - 1}:{engines + 1}"] = step_s(fewer, generate(fewer))
    return found
