"""Parse option values of `tracekit collect`.

In: text. Out: numbers, or a ValueError with the expected form. Imports the standard library only, because the command
line without click also uses it.
"""

from __future__ import annotations

import os
import re

from tracekit.base.errors import SelectionError
from tracekit.base.text import bytes_of
from tracekit.collectors.record.wire_format import IDLE, RecordingSchedule

#: Number of consecutive steps that `--overhead` records, and then leaves out.
OVERHEAD_STEPS = 10
#: Below this limit, segments would be replaced all the time, bytes.
SMALLEST_KEPT = 1_000_000
_STEPS = re.compile(r"(\d*):(\d*)$")


def stacks_allowed() -> bool:
    """Whether a watch may ask for lines of code, where no option says so: unless $TRACEKIT_STACKS is 0."""
    return os.environ.get("TRACEKIT_STACKS") != "0"


def parse_steps(text: str) -> tuple[int, int | None]:
    """`100:200`, `100:` or `:200` -> first step and exclusive last step, None if open."""
    match = _STEPS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a step range; write 100:200 for steps 100 to 199")
    first, last = int(match.group(1) or 1), int(match.group(2)) if match.group(2) else None
    if last is not None and last <= first:
        raise ValueError(f"{text!r} contains no step; the second number must be larger than the first")
    return first, last


def parse_size(text: str) -> int:
    """`500MB`, `2GB` or `1TB` -> bytes, by powers of ten."""
    size = bytes_of(text)
    if size is None:
        raise ValueError(f"{text!r} is not a size; write it like 500MB or 2GB")
    if size < SMALLEST_KEPT:
        raise ValueError(f"{text!r} is too small; keep at least {SMALLEST_KEPT // 1_000_000}MB per rank")
    return size


def schedule_options(
    steps: tuple[int, int | None], every: int, length: int, *, idle: bool, overhead: bool
) -> RecordingSchedule:
    """The steps to record, from the options about steps. Raises SelectionError if they exclude each other."""
    if length > every:
        raise SelectionError(f"--for {length} is larger than --every {every}; lower --for, or leave both out")
    if idle and (every > 1 or steps != (1, None)):
        raise SelectionError("--idle records only what `tracekit attach` asks for; leave out --steps and --every")
    if overhead and (every > 1 or idle):
        raise SelectionError("--overhead chooses the steps to record itself; leave out --every and --idle")
    if idle:
        return IDLE
    if overhead:
        every, length = 2 * OVERHEAD_STEPS, OVERHEAD_STEPS
    return RecordingSchedule(steps[0], steps[1], every, length)
