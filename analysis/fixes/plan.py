"""A fix before it is priced.

In: what the fix modules propose. Out: `Plan`, which `price` replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from tracekit.analysis.evidence.subject import Cause
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.finding import Place

#: What the price of a repair assumes.
SPEED_OF_PEERS = "the speed of peers afterwards"
#: Fixes of which a combination has one: replace a machine, or give it less work.
MACHINE = ("machine",)
#: ... and: move layers in one way.
LAYERS = ("layers",)


class Plan(Struct, frozen=True, eq=False):
    """One proposed fix. `step_times`: its step times if known, seconds, [steps]; None: replay `change` to get them.

    `extra_s`: seconds it adds to each step. `bound`: the replay gives an upper bound of the saving. `cause`: the cause
    that it addresses, None for a fix that any job can try. `details["assumes"]`: an assumption of the price.
    `reached`, `around`, `excludes`: as for `PricedFix`. `edit`: `change` as text, see `Fix.edit`; None: as `fix=KIND`.
    """

    kind: str
    title: str
    where: Place
    change: Any
    step_times: Floats | None = None
    extra_s: float = 0.0
    bound: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: Cause | None = None
    reached: str | None = None
    around: bool = False
    excludes: tuple[str, ...] = ()
    edit: str | None = None
