"""A figure that is estimated, with the interval that holds it in nine cases of ten."""

from __future__ import annotations

from msgspec import Struct


class Estimate(Struct, frozen=True):
    """`value`, and its 90 % interval from `low` to `high`."""

    value: float
    low: float
    high: float

    def over(self, number: float) -> Estimate:
        """Return the estimate divided by a number above 0."""
        return Estimate(self.value / number, self.low / number, self.high / number)
