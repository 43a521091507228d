"""What recording costs the host of a rank: a profiler's own time, which a job does not spend in production.

In: nothing. Out: `ProfilerCost`. Imports nothing, as it leaves the process that reads a file.
"""

from __future__ import annotations

from typing import NamedTuple


class ProfilerCost(NamedTuple):
    """What recording one event costs the host, seconds: an `operator`, a Python `function`, a `call` of the runtime, a
    `launch` with the calls around it that no recording shows.

    `before_launch`, `in_launch`: what of a launch lies before the call and within it. `stacks`: whether functions were
    recorded.
    """

    operator: float
    function: float
    call: float
    launch: float
    before_launch: float
    in_launch: float
    stacks: bool

    @property
    def words(self) -> str:
        """How it was found out."""
        parts = [("an operator", self.operator), ("a launch", self.launch), ("a Python function", self.function)]
        each = ", ".join(f"{1e6 * cost:.1f} us {what}" for what, cost in parts if cost)
        wider = "" if self.stacks else "; without stacks, less of it shows, so the interval is wider"
        return (
            f"recording costs the host {each}, by the shortest gaps between events; without that, the hosts' work was"
            f" replayed with the GPU's as recorded{wider}"
        )
