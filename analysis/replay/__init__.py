"""Replay of a graph: corrected clocks, the own cost of each op, its ideal cost, and the kernel that runs them.

`Method` is here because it names the rules without importing what follows them.
"""

from __future__ import annotations

from enum import StrEnum

from tracekit.base.errors import SelectionError
from tracekit.base.text import quoted


class Method(StrEnum):
    """The rules by which costs are measured.

    `tracekit`: removes clock offsets before all measurements, reconstructs members of collectives that were not
    recorded, and compares ops that only some workers or steps have (garbage collection, checkpoints, ...) with the
    workers and steps without them. `published`: only the rules of "Understanding Stragglers in Large Model Training"
    (OSDI'25); reproduces its numbers.
    """

    TRACEKIT = "tracekit"
    PUBLISHED = "published"

    @classmethod
    def named(cls, name: object) -> Method:
        """The method of that name. Raises SelectionError."""
        if not isinstance(name, str) or name not in tuple(cls):
            raise SelectionError(f"unknown method {quoted(name, 40)}; expected one of {', '.join(cls)}")
        return cls(name)
