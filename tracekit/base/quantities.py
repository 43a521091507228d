"""Types of the figures in a report, with the ranges that they can have.

In: nothing. Out: types that msgspec checks as it decodes a report, and that the JSON Schema states. A figure outside
its range is refused by the path of its key.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tracekit.base.text import LAST_MOMENT

#: A sum or a difference may miss its range by so much.
ROUNDING = 1e-6
#: The largest whole number of a table; larger figures overflow once they are scaled.
_LARGEST = 2**63 - 1
_LARGEST_INT32 = 2**31 - 1

#: A figure of either sign: what a fix saves, or how far a clock is ahead.
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
#: An undefined figure is null.
Number = Finite | None
#: A figure that is never negative, in any unit.
Amount = Annotated[float, Meta(ge=-ROUNDING, le=_LARGEST)]
#: How long something takes.
Seconds = Amount
#: Seconds since 1970.
Moment = Annotated[float, Meta(ge=0, le=LAST_MOMENT)]
#: A share of a whole, or how sure something is.
Proportion = Annotated[float, Meta(ge=-ROUNDING, le=1 + ROUNDING)]
#: A waste, 1 - 1/S, or another figure that is 1 at most and can be negative.
AtMostOne = Annotated[float, Meta(ge=-_LARGEST, le=1 + ROUNDING)]
#: S: how many times as long something takes.
Slowdown = Annotated[float, Meta(gt=0, le=_LARGEST)]
#: How many, or the place in a list.
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
#: The number of a rank, of a pipeline stage or of a training step.
Ordinal = Annotated[int, Meta(ge=0, le=_LARGEST_INT32)]
