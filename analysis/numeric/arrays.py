"""Short names for array types in signatures, and figures that may be undefined.

In: floats. Out: those that JSON has.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def number(value: float | None) -> float | None:
    """A figure as JSON has it: None if it is unknown, undefined or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None
