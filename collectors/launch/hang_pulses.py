"""The state of running ranks: their pulses, and the kernel's view of their processes."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tracekit.collectors.record.small_file import MOST_BYTES, open_regular, read_small
from tracekit.collectors.record.wire_format import FACTS_SUFFIX, PULSE, PULSE_SUFFIX, rank_stem


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life of a rank. `count` grows while it moves. `signal` makes it write its stacks; 0: none does."""

    count: int
    process_id: int
    signal: int
    world_size: int


def read_pulses(attempt: Path) -> dict[int, Pulse]:
    """The pulse of each rank that has begun."""
    pulses: dict[int, Pulse] = {}
    for path in attempt.glob(f"rank-{'[0-9]' * 6}*{PULSE_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, struct.error):  # no pulse, or not whole yet
            pulses[int(path.stem.removeprefix("rank-"))] = Pulse(*PULSE.unpack(read_small(path)))
    return pulses


def all_began(pulses: Mapping[int, Pulse]) -> bool:
    """True if every rank of the job has a pulse; False if other nodes write theirs elsewhere."""
    return bool(pulses) and len(pulses) == max(pulse.world_size for pulse in pulses.values())


def host_of(attempt: Path, rank: int) -> str | None:
    """The host on which a rank runs; None if unknown."""
    try:
        with open(open_regular(attempt / f"{rank_stem(rank)}{FACTS_SUFFIX}"), "rb") as file:
            fact = json.loads(file.readline(MOST_BYTES))  # the first one describes the process
        return str(fact["value"]["host"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def state_of(process_id: int) -> str | None:
    """The state letter of a process (proc(5)); None if there is none."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


def handles(process_id: int, number: int) -> bool:
    """True if a process has a handler for a signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8", errors="replace")
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return number > 0 and bool(caught >> (number - 1) & 1)
