"""A run of post-training by hand: one engine, three requests a step, exact in binary.

A decoding step takes 0.25 s + 0.25 s for each running request. Requests of 2, 4 and 8 tokens, all from second 0 on:
2 steps with 3 running (1 s each), 2 with 2 (0.75 s), 4 with 1 (0.5 s), so they end at 2, 3.5 and 5.5 s. The reward
takes 0.5 s, the training 4 s, the sync 1 s: a step takes 11 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEP_S, GENERATION_S = 11.0, 5.5
ENDS = {2: 2.0, 4: 3.5, 8: 5.5}


def request(name: str, step: int, start: float, end: float, tokens: int, **more: Any) -> dict[str, Any]:
    """A trajectory as a line has it."""
    times = {"submit": start, "start": start, "end": end}
    return {"trajectory": name, "step": step, "engine": "a", **times, "tokens": tokens, "version": step} | more


def lines(steps: int = 4, *, reward_s: float = 0.5, sync_s: float = 1.0) -> list[dict[str, Any]]:
    """The run, with its trajectories in order of their ends; other rewards and syncs shorten the step."""
    rewarded = GENERATION_S + reward_s
    phases = (("generate", 0.0, 5.5), ("reward", 5.5, rewarded), ("train", rewarded, rewarded + 4.0),
              ("sync", rewarded + 4.0, rewarded + 4.0 + sync_s))  # fmt: skip
    found = []
    for step in range(steps):
        at = step * phases[-1][2]
        found += [request(f"{step}-{n}", step, at, at + ENDS[tokens], tokens) for n, tokens in enumerate(ENDS)]
        found += [{"phase": name, "step": step, "start": at + a, "end": at + b} for name, a, b in phases]
    return found


def write(path: Path, written: Iterable[Any]) -> Path:
    """Lines of JSON."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in written))
    return path
