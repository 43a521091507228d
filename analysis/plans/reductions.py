"""What reductions of gradients cost, and how a backward and they slow each other down, from one recording.

In: the buckets of a recorded step: bytes, seconds of service alone and beside the backward, and when each was ready.
Out: a `Reduction`. Its rates follow from what no plan changes: a bucket needs the same service, fixed_s + per_mb_s x
MiB, wherever it runs. Beside a backward it gets `reduce_rate` of a second in each second.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.model import Reduction

#: Sizes of gradients are in MiB, as DistributedDataParallel counts.
MB = 1 << 20
#: Reductions show what a byte costs if their sizes differ by this factor.
SIZES_APART = 1.5
#: Rates that are tried, and how much the errors of rates that explain a recording equally well differ.
_RATES, _ALIKE = np.linspace(0.02, 1.0, 99), 1e-3
#: A backward that reductions slow down further would be at a standstill.
LEAST_RATE = 0.05


class FittedReduction(Struct, frozen=True):
    """The cost of a reduction. `error`: of its line, relative; `unsure_s`: how much the step time of other buckets may
    be off because several rates explain the recording.
    """

    cost: Reduction
    error: float
    unsure_s: float


class Buckets(Struct, frozen=True, eq=False):
    """Buckets of a step, [buckets]: MiB, seconds of service alone and beside the backward, and seconds from the start
    of the last backward until each was ready.
    """

    size_mb: Floats
    alone_s: Floats
    beside_s: Floats
    ready_s: Floats

    @classmethod
    def of(cls, rows: list[tuple[float, float, float, float]]) -> Buckets:
        """The buckets of recorded rows (bytes, alone, beside, ready), without those of no length."""
        size, alone, beside, ready = np.array([row for row in rows if row[1] + row[2] > 0], float).reshape(-1, 4).T
        return cls(size / MB, alone, beside, ready)

    def compute_rate(self, delay_s: float) -> float:
        """How fast the backward computes while gradients are reduced, if that delays it by `delay_s`."""
        beside_s = float(self.beside_s.sum())
        return float(np.clip(1 - delay_s / beside_s, LEAST_RATE, 1.0)) if beside_s > 0 else 1.0

    def fitted(self, compute_rate: float | None) -> FittedReduction | None:
        """The cost; None if sizes are too close. `compute_rate`: None to leave contention out.

        Of rates that explain the recording equally well, the one closest to a constant sum: what the reduction gets,
        the backward loses. Then buckets that overlap more gain nothing, and none are proposed for that.
        """
        sizes = self.size_mb
        if not len(sizes) or sizes.max() < SIZES_APART * sizes.min():
            return None
        shared = compute_rate is not None and self.beside_s.sum() > 0
        rates = _RATES if shared else np.ones(1)
        lines = [_line(sizes, self.alone_s + rate * self.beside_s) for rate in rates]
        errors = np.array([error for _, _, error in lines])
        alike = np.flatnonzero(errors <= errors.min() + _ALIKE)
        chosen = int(alike[np.abs(rates[alike] - (1 - (compute_rate or 0.0))).argmin()])
        fixed_s, per_mb_s, error = lines[chosen]
        cost = Reduction(fixed_s, per_mb_s, compute_rate if shared and compute_rate else 1.0, float(rates[chosen]))
        spread = float(np.abs(rates[alike] - rates[chosen]).max())
        return FittedReduction(cost, error, spread * float(self.beside_s.sum()))

    def computed_until(self, gradients_mb: Floats, compute_rate: float) -> Floats:
        """Seconds that the backward of the last layer, the last two, ... takes alone, [layers].

        Buckets show when their layers were computed; within a bucket, time follows the gradients.
        """
        order = np.argsort(self.ready_s, kind="stable")
        ready_s, size_mb = self.ready_s[order], np.cumsum(self.size_mb[order])
        recorded_s, first_s = float(ready_s[-1]), float(ready_s[0])
        alone_s = max(recorded_s - (1 - compute_rate) * float(self.beside_s.sum()), first_s)
        later = (ready_s - first_s) * ((alone_s - first_s) / max(recorded_s - first_s, 1e-12))
        at_mb = np.cumsum(gradients_mb[::-1]) * (size_mb[-1] / gradients_mb.sum())
        computed_s = np.interp(at_mb, np.concatenate([[0.0], size_mb]), np.concatenate([[0.0], first_s + later]))
        return np.asarray(computed_s)


def _line(sizes_mb: Floats, takes_s: Floats) -> tuple[float, float, float]:
    """The line a + b x MiB through these times, neither below 0, and its mean relative error."""
    rows = np.stack([np.ones(len(sizes_mb)), sizes_mb], axis=1) / np.maximum(takes_s, 1e-12)[:, None]
    lines = []
    for columns in ([0, 1], [0], [1]):
        line = np.zeros(2)
        line[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        lines.append((float(line[0]), float(line[1]), float(np.abs(rows @ line - 1).mean())))
    return min((line for line in lines if min(line[:2]) >= 0), key=lambda line: line[2])
