"""When a window of a running job is over: after so many steps or so many seconds, and once its ranks are there.

In: which steps each rank has finished, and the time. Out: the last step of a window that is ready, or nothing yet. It
reads no clock and no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: Records of a step can be written a moment behind its end, seconds.
SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class WindowSize:
    """`steps` recorded steps, or what ends within `seconds` and has `fewest` steps at least."""

    steps: int | None = None
    seconds: float | None = None
    fewest: int = 1


@dataclass(frozen=True, slots=True)
class RanksState:
    """How far ranks are. `steps`: the finished steps of each that were not handed out. `newest`: its newest finished
    step, handed out or not. `ranks`: all that there should be.
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
    """The steps up to `last` are a window. `late`: ranks that have not finished them and are not waited for."""

    last: int
    late: tuple[int, ...]


@dataclass(slots=True)
class WindowCutter:
    """Cuts the steps of a job into windows.

    A window is due when the ranks ahead have finished it. It waits `late_after_s` for the others, then it is ready
    without them; a rank that was late is not waited for again until it has caught up.
    """

    size: WindowSize
    late_after_s: float
    _began_s: float | None = None
    _due: int | None = None
    _due_s: float = 0.0
    _late: set[int] = field(default_factory=set)

    def ready(self, state: RanksState, now_s: float) -> ReadyWindow | None:
        """The window that is ready at `now_s`, seconds on any steady clock; None where none is."""
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
        """What is left at the end of the job; None where nothing is."""
        if not state.finished:
            return None
        return self._end(state.finished[-1], state.behind(state.finished[-1]), now_s)

    def _last_of(self, finished: list[int], now_s: float) -> int | None:
        """The last step of a window that has begun; None while it goes on."""
        if self.size.steps is not None:
            # Where several windows are over, the analysis is behind: they become one, which takes less time.
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
