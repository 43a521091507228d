"""The state of running ranks: their pulses, and what the system knows of their processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tracekit.collectors.runtime.wire_format import FACTS_SUFFIX, PULSE, PULSE_SUFFIX, rank_stem


@dataclass(frozen=True, slots=True)
class Pulse:
    """`count` grows while the rank moves. `signal` makes it write its stacks; 0: none does."""

    count: int
    process_id: int
    signal: int
    world_size: int


def read_pulses(attempt: Path) -> dict[int, Pulse]:
    """The pulse of each rank that has begun. Raises OSError."""
    pulses: dict[int, Pulse] = {}
    for path in attempt.glob(f"rank-*{PULSE_SUFFIX}"):
        content = path.read_bytes()
        if len(content) == PULSE.size:
            pulses[int(path.stem.removeprefix("rank-"))] = Pulse(*PULSE.unpack(content))
    return pulses


def all_began(pulses: Mapping[int, Pulse]) -> bool:
    """Whether every rank of the job has a pulse; never where another node's are written elsewhere."""
    return bool(pulses) and len(pulses) == max(pulse.world_size for pulse in pulses.values())


def host_of(attempt: Path, rank: int) -> str | None:
    """The host on which a rank runs; None if unknown."""
    try:
        facts = (attempt / f"{rank_stem(rank)}{FACTS_SUFFIX}").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in facts.splitlines():
        fact = json.loads(line)
        if fact["kind"] == "process":
            return str(fact["value"]["host"])
    return None


def state_of(process_id: int) -> str | None:
    """The state letter of a process (proc(5)); None if there is none."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None
