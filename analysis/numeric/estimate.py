"""A figure that is estimated, with the interval that holds it in nine cases of ten."""

from __future__ import annotations

from msgspec import Struct

from tracekit.base.text import seconds


class Estimate(Struct, frozen=True):
    """`value`, and its 90 % interval from `low` to `high`."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The value of a time, and its interval."""
        return f"{seconds(self.value)} ({seconds(self.low)} to {seconds(self.high)})"
