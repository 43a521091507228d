"""Values of the options of `tracekit collect` as people type them.

In: text. Out: numbers; ValueError with what to write instead. Imports the standard library only: both command lines
read their options with it, click's and the one that does without.
"""

from __future__ import annotations

import re

_STEPS = re.compile(r"(\d*):(\d*)$")


def parse_steps(text: str) -> tuple[int, int | None]:
    """`100:200`, `100:` or `:200` -> the first step and the exclusive last one, None where it is open."""
    match = _STEPS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no step range; write 100:200 for the steps 100 to 199")
    first, last = int(match.group(1) or 1), int(match.group(2)) if match.group(2) else None
    if last is not None and last <= first:
        raise ValueError(f"{text!r} is empty; the second step must be larger than the first")
    return first, last
