"""Decide when a window of a running job is over: after a number of steps or seconds, once its ranks have finished it.

In: the steps that each rank has finished, and the time. Out: the last step of a window that is ready, or nothing yet.
This module reads no clock and no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: Records of a step can be written up to this long after its end, seconds.
SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class WindowSize:
    """`steps` recorded steps, or the steps that end within `seconds`, at least `fewest` of them."""

    steps: int | None = None
    seconds: float | None = None
    fewest: int = 1


@dataclass(frozen=True, slots=True)
class RanksState:
    """Progress of the ranks. `steps`: the finished steps of each rank that belong to no window yet. `newest`: the
    newest finished step of each rank, in a window or not. `ranks`: all ranks that the job should have.
    """

    steps: Mapping[int, Collection[int]]
    newest: Mapping[int, int]
    ranks: Collection[int]

    @property
    def finished(self) -> list[int]:
        """The steps that any rank has finished, in order."""
        return sorted(set().union(*self.steps.values()))

    def behind(self, step: int) -> set[int]:
        """The ranks that have not finished a step."""
        return {rank for rank in self.ranks if self.newest.get(rank, -1) < step}


@dataclass(frozen=True, slots=True)
class ReadyWindow:
    """The steps up to `last` are a window. `late`: ranks that have not finished it; it does not wait for them."""

    last: int
    late: tuple[int, ...]


@dataclass(slots=True)
class WindowCutter:
    """Cuts the steps of a job into windows.

    A window is due when the ranks ahead have finished it. It waits `late_after_s` for the others, then it is ready
    without them. Windows do not wait again for a rank that was late until it has caught up.
    """

    size: WindowSize
    late_after_s: float
    _began_s: float | None = None
    _due: int | None = None
    _due_s: float = 0.0
    _late: set[int] = field(default_factory=set)

    def ready(self, state: RanksState, now_s: float) -> ReadyWindow | None:
        """The window that is ready at `now_s`, seconds on any monotonic clock; None if there is none."""
        finished = state.finished
        if not finished:
            return None
        if self._began_s is None:
            self._began_s = now_s
        if self._due is None:
            self._due, self._due_s = self._last_of(finished, now_s), now_s
        if self._due is None:
            return None
        behind = state.behind(self._due)
        self._late &= behind
        if now_s - self._due_s < (self.late_after_s if behind - self._late else SETTLE_S):
            return None
        return self._end(self._due, behind, now_s)

    def rest(self, state: RanksState, now_s: float) -> ReadyWindow | None:
        """Return the window of the remaining steps at the end of the job; None if there are none."""
        if not state.finished:
            return None
        return self._end(state.finished[-1], state.behind(state.finished[-1]), now_s)

    def _last_of(self, finished: list[int], now_s: float) -> int | None:
        """The last step of the window that has begun; None while it goes on."""
        if self.size.steps is not None:
            # If several windows are over, the analysis is behind: they become one, which takes less time.
            whole = len(finished) // self.size.steps * self.size.steps
            return finished[whole - 1] if whole else None
        assert self._began_s is not None
        assert self.size.seconds is not None
        if now_s - self._began_s < self.size.seconds or len(finished) < self.size.fewest:
            return None
        return finished[-1]

    def _end(self, last: int, behind: set[int], now_s: float) -> ReadyWindow:
        self._late, self._due, self._began_s = behind, None, now_s
        return ReadyWindow(last, tuple(sorted(behind)))
