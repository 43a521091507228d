"""How many examples a property is tried on.

`HYPOTHESIS_PROFILE=long` draws a hundred times as many, other ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def examples(count: int) -> settings:
    """So many examples, the same ones each time; in the long profile many more."""
    return settings(
        max_examples=count * (100 if LONG else 1),
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
