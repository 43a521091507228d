"""How many examples a property is tried on.

`HYPOTHESIS_PROFILE=short` draws a quarter of them; `long` a hundred times as many, other ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE")
LONG = PROFILE == "long"
SHARES = {"short": 0.25, "long": 100}


def examples(count: int) -> settings:
    """So many examples, the same ones each time; fewer in the short profile, many more in the long one."""
    return settings(
        max_examples=max(1, int(count * SHARES.get(PROFILE or "", 1))),
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
