"""Values that the script logs of its steps, such as tokens and loss.

In: what the script passes to `tracekit.log`. Out: a record for each number of the host; anything else is left out, and
reported once.
"""

from __future__ import annotations

import math
import struct
import time
from numbers import Real
from typing import TYPE_CHECKING, Any

from .inject._tracekit_recorder import warn
from .wire_format import NONE, Category

if TYPE_CHECKING:
    from .session import Session


class LoggedValues:
    """The values of one rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._refused = False

    def add(self, values: dict[str, Any], step: int) -> None:
        """Keep the values of a step; None is no value."""
        session, now = self._session, time.monotonic_ns()
        for name, value in values.items():
            if value is None:
                continue
            try:
                bits = _bits(value, is_count=name == "tokens")
            except Exception as error:  # whatever the user's object raises
                if not self._refused and session.recorder.first_of_all_ranks("value-refused"):
                    warn(
                        f"rank {session.rank}: tracekit.log({name}=...) in step {step}: {type(error).__name__}:"
                        f" {error!s:.200}; such values are left out; training continues"
                    )
                self._refused = True
                continue
            session.recorder.add((Category.VALUE, 0, session.name(name), step, NONE, NONE, NONE, now, now, bits))


def _bits(value: Any, is_count: bool) -> int:
    """The bits of a number as a float of 64. Raises if it is no finite number of the host, or no possible count."""
    if getattr(value, "is_cpu", False):  # any other tensor would make the host wait for its device
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"a {type(value).__name__}; expected a number in the memory of the host")
    number = float(value)
    if not math.isfinite(number) or (is_count and not 0 <= number <= 1 << 53):
        raise ValueError(f"{number}; expected a {'count from 0 to 2^53' if is_count else 'finite number'}")
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)
