"""Groups of workers whose clocks can be compared.

In: `Ties`. Out: a number per worker, the same for workers that are tied directly or through others.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.clocks.ties import Ties


def linked_workers(ties: Ties) -> Ints:
    """The lowest number of any worker that each worker is tied to, [stages, dp_ranks]."""
    _, stages, dp_ranks = ties.shape
    groups = [(_seen(group.left), None if group.all_stages else 1) for group in ties.groups]
    links = np.asarray(np.any(np.isfinite(ties.low) | np.isfinite(ties.high), axis=0))
    ends = _seen(ties.ends)
    number = np.arange(stages * dp_ranks).reshape(stages, dp_ranks)
    while True:
        before = number
        for member, axis in groups:
            lowest = np.where(member, number, number.size).min(axis=axis, keepdims=True)
            number = np.where(member, np.minimum(number, lowest), number)
        for stage in range(stages):
            pair = [stage, (stage + 1) % stages]
            number[pair] = np.where(links[stage], number[pair].min(axis=0), number[pair])
        number[[0, -1]] = np.where(ends, number[[0, -1]].min(axis=0), number[[0, -1]])
        # If a member's number was lowered, lower all others that had the old number too.
        number = number.ravel()[number]
        if (number == before).all():
            return number


def _seen(values: Floats) -> np.ndarray:
    """True where any run has a value."""
    return np.asarray(np.isfinite(values).any(axis=0))
