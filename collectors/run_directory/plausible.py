"""Find impossible records of a rank: numbers, steps and times that contradict their neighbours.

In: the newest records of a rank, in order of creation, and the `Trail` of earlier ones. Out: nothing if they agree,
else a FormatError with the contradiction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.record.wire_format import Category, Flag

#: Looking a member up takes longer than comparing the records of a step with it.
_STEP, _DEVICE_CLOCK = int(Category.STEP), int(Flag.DEVICE_CLOCK)
#: A rank numbers its records from 1, and never makes this many.
_MOST_RECORDS = 1 << 48
#: Records are made as ops end. Even one that was held back is not this late, ns.
_FAR_NS = 600 * 1_000_000_000
#: A step begins when the one before it ends: their times are two readings of one clock, at most this far apart, ns.
_SAME_NS = 1_000_000
#: The step of a rank's next record is at most this many times as far away as its last two steps were apart.
_NEAR_STEPS = 16


class GarbageError(FormatError):
    """A record contradicts its neighbours, and no clock is to blame: later records may be valid."""


@dataclass(slots=True)
class Trail:
    """State after a rank's last record. `born_ns`: when its process began, by its own clock.

    `stride`: distance of its last two steps, since a script can number steps as it likes.
    """

    born_ns: int
    number: int = 0
    step: int = 0
    stride: int = 1
    ended_step: int | None = None
    end_ns: int | None = None
    newest_ns: int | None = None
    newest_device_ns: int | None = None

    @property
    def reach(self) -> int:
        """The largest distance to the step of the next record."""
        return _NEAR_STEPS * self.stride

    def check_numbers(self, records: npt.NDArray[np.void]) -> None:
        """Check that the numbers of records rise. Raises FormatError."""
        numbers = records["number"]
        ahead = np.concatenate([[self.number], numbers[:-1]])
        wrong = (numbers <= ahead) | (numbers > _MOST_RECORDS)
        if wrong.any():
            row = int(wrong.argmax())
            raise GarbageError(f"garbage: record {numbers[row]} follows record {ahead[row]}")
        self.number = int(numbers[-1])

    def check_times(self, records: npt.NDArray[np.void]) -> None:
        """Check that ops end after they begin, and about in the order of the records. Raises FormatError."""
        back = records["end_ns"] < records["start_ns"]
        if back.any():
            worst = records[back][0]
            raise _stepped(f"in step {worst['step']}", int(worst["end_ns"]) - int(worst["start_ns"]))
        on_device = records["flags"] & _DEVICE_CLOCK != 0
        self._check_steps(records[(records["category"] == _STEP) & ~on_device])
        host, device = records[~on_device], records[on_device]
        early = host["start_ns"] < self.born_ns - _FAR_NS
        if early.any():
            worst = host[early][0]
            raise _far(int(worst["step"]), int(worst["start_ns"]) - self.born_ns, "before its process began")
        self.newest_ns = _in_order(host, self.newest_ns)
        self.newest_device_ns = _in_order(device, self.newest_device_ns)

    def _check_steps(self, steps: npt.NDArray[np.void]) -> None:
        """Check that each step begins when the previous one ends."""
        for number, start_ns, end_ns in zip(
            steps["step"].tolist(), steps["start_ns"].tolist(), steps["end_ns"].tolist(), strict=True
        ):
            follows = self.ended_step is not None and number == self.ended_step + 1
            if follows and self.end_ns is not None and abs(start_ns - self.end_ns) > _SAME_NS:
                raise _stepped(f"between steps {self.ended_step} and {number}", start_ns - self.end_ns)
            self.ended_step, self.end_ns = number, end_ns

    def first_jump(self, records: npt.NDArray[np.void]) -> int | None:
        """The first row whose step is out of reach of the steps before it; None if there is none.

        The rows before it count. Raises FormatError for steps that go back.
        """
        steps = records["step"].astype(np.int64)
        newest = np.maximum.accumulate(np.concatenate([[self.step], steps]))
        ahead = newest[:-1]
        odd = (steps < ahead - self.reach) | (steps < 0) | (steps > ahead + self.reach)
        row = int(odd.argmax()) if odd.any() else None
        if row is not None and steps[row] < ahead[row]:
            raise GarbageError(f"garbage: a record of step {steps[row]} follows one of step {ahead[row]}")
        ends = sorted(set(steps[:row][records["category"][:row] == _STEP].tolist()))
        if len(ends) > 1:
            self.stride = ends[-1] - ends[-2]
        self.step = int(newest[len(steps) if row is None else row])
        return row

    def jump(self, step: int) -> None:
        """Continue at `step`, as other ranks confirm."""
        self.step, self.stride = step, max(1, step - self.step)


def _in_order(records: npt.NDArray[np.void], newest_ns: int | None) -> int | None:
    """The newest end of the records. Raises FormatError if one ends long before an earlier one."""
    if not len(records):
        return newest_ns
    ends = records["end_ns"]
    newest = np.maximum.accumulate(ends)
    if newest_ns is not None:
        newest = np.maximum(newest, newest_ns)
    back = newest.astype(np.float64) - ends > _FAR_NS
    if back.any():
        row = int(back.argmax())
        raise _far(int(records["step"][row]), int(ends[row]) - int(newest[row]), "before an earlier record")
    return int(newest[-1])


def _stepped(where: str, by_ns: int) -> FormatError:
    way = "back" if by_ns < 0 else "forward"
    return FormatError(f"{where} its clock stepped {way} by {abs(by_ns) / 1e9:.3g} s")


def _far(step: int, by_ns: int, what: str) -> FormatError:
    return FormatError(f"garbage: an op of step {step} lies {abs(by_ns) / 1e9:.3g} s {what}, or its clock stepped back")
