"""Windows of a running job: when one is over, after a number of steps or seconds, and how it gets into its store.

In: the steps that each rank has finished, and the time; analysed windows. Out: the last step of a window that is ready,
or nothing yet, from a `WindowCutter`, which reads no clock and no file; from a `WindowQueue`, the same windows in a
store, in order. While the store cannot be written, they wait; the number that wait is limited, and those that are
dropped are counted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base.errors import OutputError, StoreError, StoreTakenError
from tracekit.base.text import short
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store

if TYPE_CHECKING:
    from tracekit.live.code_lines import LineAsker
    from tracekit.store.catalogue_rows import AnyTrace


#: Records of a step can be written up to this long after its end, seconds.
SETTLE_S = 0.3
#: In the metadata of a window, when its command began, ns since the epoch: a folder is of the same run if that agrees.
RUN_STARTED = "run_started_ns"
#: Limit of windows that could not be stored and wait for another attempt.
MOST_UNSTORED = 8
#: Delay before storing a window is tried again, seconds; it doubles each time, up to a limit.
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
#: Delays between attempts to store the remaining windows at the end of a job, seconds.
END_RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0)


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
        unfinished = state.behind(self._due)
        self._late &= unfinished
        if now_s - self._due_s < (self.late_after_s if unfinished - self._late else SETTLE_S):
            return None
        return self._end(self._due, unfinished, now_s)

    def rest(self, state: RanksState, now_s: float) -> ReadyWindow | None:
        """Return the window of the remaining steps at the end of the job; None if there are none."""
        if not state.finished:
            return None
        return self._end(state.finished[-1], state.behind(state.finished[-1]), now_s)

    def _last_of(self, finished: list[int], now_s: float) -> int | None:
        """The last step of the window that has begun; None while it goes on."""
        if self.size.steps is not None:
            # If several windows are over, the analysis is behind: they become one, which takes less time.
            complete = len(finished) // self.size.steps * self.size.steps
            return finished[complete - 1] if complete else None
        assert self._began_s is not None
        assert self.size.seconds is not None
        if now_s - self._began_s < self.size.seconds or len(finished) < self.size.fewest:
            return None
        return finished[-1]

    def _end(self, last: int, unfinished: set[int], now_s: float) -> ReadyWindow:
        self._late, self._due, self._began_s = unfinished, None, now_s
        return ReadyWindow(last, tuple(sorted(unfinished)))


class WindowQueue:
    """The windows of `job` that wait for `store`. `lost`: how many were dropped.

    `log`: called with each line for the user; `stored`: after each window that is stored.
    """

    def __init__(self, store: Store, job: str, log: Callable[[str], None], stored: Callable[[], None]) -> None:
        self.lost = 0
        self._store, self._job, self._log, self._stored = store, job, log, stored
        self._source: str | None = None
        self._next = 0
        self._waiting: deque[Incoming] = deque()
        self._retry_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._problem: str | None = None
        self._lines: LineAsker | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the store knows the job."""
        return self._source is not None

    def begin(self, source: str, started_ns: int | None = None) -> tuple[int, int] | None:
        """Note the job in the store. Returns attempt and last step of its newest window there; None if it has none.

        `started_ns`: when the command of the run began, ns since the epoch. Raises StoreError if the windows of the job
        are those of another run.
        """
        newest = None
        if self._store.is_store():
            with self._store.reading() as catalogue:  # not from the window's ops, which may have been pruned
                if catalogue.holds(self._job):
                    window = catalogue.window(self._job)
                    metadata = json.loads(catalogue.job_row(self._job, window.number)["metadata"])
                    stored_ns = metadata.get(RUN_STARTED)
                    if None not in (stored_ns, started_ns) and stored_ns != started_ns:
                        raise StoreError(
                            f"{self._store.name}: has job {short(self._job)!r} of another run; choose another --name"
                        )
                    newest = int(metadata.get("attempt", 0)), window.last_step
        self._source, self._next = source, self._store.begin_watch(self._job, source)
        return newest

    def add(
        self, trace: AnyTrace, findings: Findings | Unanalysed, answering: tuple[Path, Collection[int]] | None
    ) -> None:
        """Store a window once those before it are stored. `answering`: the folder of the attempt and the recorded ranks
        of a run whose ranks answer questions for lines of code; None if they do not.
        """
        assert self._source is not None, "see `begin`"
        if isinstance(findings, Findings) and answering is not None and not self._waiting:  # else it waited long enough
            from tracekit.live.code_lines import LineAsker  # few jobs sample their stacks

            self._lines = self._lines or LineAsker(self._store, self._job, self._log)
            self._lines.ask(findings, *answering)
        self._waiting.append(Incoming(trace, self._job, self._source, findings))
        self.store()

    def store(self, *, at_end: bool = False) -> None:
        """Store the waiting windows, oldest first; if one cannot be stored, it and the rest keep waiting.

        `at_end`: the job has ended, and nobody answers any more. Raises StoreTakenError.
        """
        if not at_end and time.monotonic() < self._retry_at:
            return
        while self._waiting and not (self._lines and self._lines.waits(at_end=at_end)):
            if self._lines and (answered := self._lines.answered(self._waiting[0].findings)) is not None:
                self._waiting[0] = replace(self._waiting[0], findings=answered)
            try:
                self._next = self._store.append(self._waiting[0], expected=self._next) + 1
            except StoreTakenError:
                raise
            except (StoreError, OutputError) as error:
                self._put_off(str(error))
                return
            self._waiting.popleft()
            self._retry_s = FIRST_RETRY_S
            if self._problem is not None:
                self._log("windows are stored again")
                self._problem = None
            self._stored()

    def finish(self, ending: str | None, wait: Callable[[float], object]) -> str | None:
        """Store the waiting windows and the end of the job. `ending`: as in `Store.end_watch`.

        If that fails, tries again after each of `END_RETRIES_S`; `wait` sleeps meanwhile. Returns why it failed at
        last, None if all is stored.
        """
        for delay_s in END_RETRIES_S:
            if self._end(ending) is None:
                return None
            wait(delay_s)
        if (problem := self._end(ending)) is not None and self._waiting:
            self.lost += len(self._waiting)
            self._log(f"{len(self._waiting)} window{'s' * (len(self._waiting) > 1)} could not be stored")
        return problem

    def _end(self, ending: str | None) -> str | None:
        """Store all that waits, and the end of the job. Returns why that failed."""
        self.store(at_end=True)
        if self._waiting or not self.has_begun:
            return self._problem
        try:
            self._store.end_watch(self._job, ending)
        except (StoreError, OutputError) as error:
            return str(error)
        return None

    def _put_off(self, problem: str) -> None:
        dropped = max(0, len(self._waiting) - MOST_UNSTORED)
        for _ in range(dropped):
            self._waiting.popleft()
        self.lost += dropped
        if problem != self._problem:
            self._log(
                f"a window cannot be stored: {problem}; trying again after growing delays, keeping at most"
                f" {MOST_UNSTORED} windows"
            )
            self._problem = problem
        if dropped:
            self._log(f"{MOST_UNSTORED} windows wait to be stored; the oldest is dropped")
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
