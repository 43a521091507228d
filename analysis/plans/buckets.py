"""Buckets as DistributedDataParallel makes them: of one size, closed once they have it.

In: MB of the gradients of each layer. Out: layers of each bucket, and the sizes worth trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tracekit.analysis.numeric.arrays import Floats

#: Sizes that are tried at most.
_SIZES = 64
#: The default of DistributedDataParallel, MiB.
DEFAULT_MB = 25.0


def buckets_of_size(gradients_mb: Sequence[float], size_mb: float, first_mb: float) -> tuple[int, ...]:
    """How many layers each bucket holds if it is closed once it has `size_mb`, the first one once it has `first_mb`.

    `gradients_mb`: of the layers, in order of the model; buckets begin with the last.
    """
    buckets, layers, held, limit = [], 0, 0.0, first_mb
    for gradient in reversed(gradients_mb):
        layers, held = layers + 1, held + gradient
        if held >= limit:
            buckets.append(layers)
            layers, held, limit = 0, 0.0, size_mb
    return (*buckets, layers) if layers else tuple(buckets)


def served_until(arrivals: Sequence[float], works: Sequence[float], at_once: int) -> Floats:
    """When each bucket is reduced, if those that arrived first, `at_once` of them, share the link, [buckets].

    All times are seconds of service, during which the link is never idle.
    """
    if at_once == 1:
        return np.cumsum(works)
    rest, waiting, clock = np.array(works), list(range(len(works))), 0.0
    until = np.zeros(len(works))
    while waiting:
        served = [bucket for bucket in waiting if arrivals[bucket] <= clock][:at_once] or waiting[:1]
        coming_s = min((arrivals[bucket] for bucket in waiting if arrivals[bucket] > clock), default=np.inf)
        first = served[int(rest[served].argmin())]
        lasts = float(rest[first]) * len(served)
        if clock + lasts > coming_s:
            rest[served] -= (coming_s - clock) / len(served)
            clock = coming_s
            continue
        rest[served] -= lasts / len(served)
        clock += lasts
        until[first] = clock
        waiting.remove(first)
    return until


def sizes_of(gradients_mb: Sequence[float]) -> list[float]:
    """Sizes of buckets that differ, MB, largest first: those of the last layers together, and of equal parts."""
    whole, least = max(sum(gradients_mb), 0.2), max(max(gradients_mb) / 8, 0.1)
    together = list(accumulate(reversed(gradients_mb)))[:_SIZES]
    sizes = {_rounded_down(size) for size in together if size >= least}
    sizes |= {float(f"{size:.3g}") for size in np.geomspace(least, whole, _SIZES)}
    return sorted(sizes | {DEFAULT_MB}, reverse=True)


def _rounded_down(size_mb: float) -> float:
    """Three digits: a little less closes the same buckets, a little more does not."""
    step = 10.0 ** (np.floor(np.log10(size_mb)) - 2)
    return float(f"{np.floor(size_mb / step) * step:.3g}")
