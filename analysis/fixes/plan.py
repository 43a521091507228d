"""A fix before it has a price.

In: what the fix modules propose. Out: `Plan`, which `fixes` replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit.analysis.causes.model import Cause, Where
from tracekit.analysis.evidence.changes import Change
from tracekit.analysis.fixes.model import FixKind
from tracekit.analysis.numeric.arrays import Floats


@dataclass(frozen=True, eq=False)
class Plan:
    """One thing to do. `step_times`: known step times with it, [steps]; None: to be replayed from `change`.

    `extra_s`: seconds it adds to each step. `bound`: it cannot save more than the replay says. `cause`: the one it is
    for, None for what any job could try. `details["assumes"]`: what the price takes for granted, in a few words.
    """

    kind: FixKind
    title: str
    where: Where
    change: Change | None
    step_times: Floats | None = None
    extra_s: float = 0.0
    bound: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: Cause | None = None
