"""Which steps of a window a loss slows down, and when these ran.

In: a report, and when some of its steps began. Out: the first and the last slow step of each loss. A fault that begins
or ends within a window is told from one that lasts throughout by what each step loses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.costs.claimed import PlacedLoss
from tracekit.report.report import Report

#: A step is slow if it loses this share of what the usual slow one loses.
_SLOW_SHARE = 0.5


def when_slow(report: Report, step_starts: Mapping[int, float]) -> Callable[[PlacedLoss], PlacedLoss]:
    """A function that adds to a loss of the report which steps it slows down, and when these ran.

    A loss with a `first_step` begins there. `step_starts`: as in `costs_of`.
    """
    rows = report.by_step
    if not rows:
        return lambda loss: loss
    steps = np.array([row.step for row in rows])
    took_s = np.array([row.recorded_s for row in rows])
    slow = _slow(np.array([row.lost_s or 0.0 for row in rows]))
    starts = _starts(steps, step_starts)

    def timed(loss: PlacedLoss) -> PlacedLoss:
        in_it = np.flatnonzero(slow & (steps >= (steps[0] if loss.first_step is None else loss.first_step)))
        if not len(in_it):
            in_it = np.arange(len(steps))
        first, last = int(in_it[0]), int(in_it[-1])
        loss = replace(loss, first_step=int(steps[first]), last_step=int(steps[last]))
        if starts is None:
            return loss
        return replace(loss, since=float(starts[first]), until=float(starts[last] + took_s[last]))

    return timed


def _slow(lost_s: Floats) -> Bools:
    """Whether each step is slow. Half of what is lost is lost in steps that lose as much as the usual slow one: a
    single long step among slow ones does not hide them.
    """
    most_first = np.sort(lost_s.clip(min=0.0))[::-1]
    total = np.cumsum(most_first)
    usual_s = most_first[np.searchsorted(total, total[-1] / 2)]
    return np.asarray(lost_s >= _SLOW_SHARE * usual_s, np.bool_)


def _starts(steps: Ints, step_starts: Mapping[int, float]) -> Floats | None:
    """When each step began, as far as that is known; None if it is of none."""
    if not step_starts:
        return None
    timed = sorted(step_starts)
    return np.interp(steps, timed, [step_starts[step] for step in timed])
