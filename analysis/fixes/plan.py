"""A fix before it is priced.

In: what the fix modules propose. Out: `Plan`, which `price` replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from tracekit.analysis.causes.model import Cause, Where
from tracekit.analysis.evidence.changes import Change
from tracekit.analysis.fixes.model import FixKind
from tracekit.analysis.numeric.arrays import Floats


class Plan(Struct, frozen=True, eq=False):
    """One proposed fix. `step_times`: its step times if known, seconds, [steps]; None: replay `change` to get them.

    `extra_s`: seconds it adds to each step. `bound`: the replay gives an upper bound of the saving. `cause`: the cause
    that it addresses, None for a fix that any job can try. `details["assumes"]`: what the price assumes, in a few
    words.
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
