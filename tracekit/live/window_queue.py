"""Windows of a running job on their way into its store.

In: analysed windows. Out: the same in a store, in order. While the store cannot be written, they wait; the number that
wait is limited, and those that are dropped are counted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from tracekit.base.errors import OutputError, StoreError, StoreTakenError
from tracekit.base.text import short
from tracekit.live.code_lines import LineAsker
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store
from tracekit.store.catalogue_rows import AnyTrace

#: In the metadata of a window, when its command began, ns since the epoch: a folder is of the same run if that agrees.
RUN_STARTED = "run_started_ns"
#: Limit of windows that could not be stored and wait for another attempt.
MOST_UNSTORED = 8
#: Delay before storing a window is tried again, seconds; it doubles each time, up to a limit.
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
#: Delays between attempts to store the remaining windows at the end of a job, seconds.
END_RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0)


class WindowQueue:
    """The windows of `job` that wait for `store`. `lost`: how many were dropped.

    `tell`: called with each line for the user; `stored`: after each window that is stored.
    """

    def __init__(self, store: Store, job: str, tell: Callable[[str], None], stored: Callable[[], None]) -> None:
        self.lost = 0
        self._store, self._job, self._tell, self._stored = store, job, tell, stored
        self._source: str | None = None
        self._next = 0
        self._waiting: deque[Incoming] = deque()
        self._retry_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._problem: str | None = None
        self._lines = LineAsker(store, job, tell)

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
            self._lines.ask(findings, *answering)
        self._waiting.append(Incoming(trace, self._job, self._source, findings))
        self.store()

    def store(self, *, at_end: bool = False) -> None:
        """Store the waiting windows, oldest first; if one cannot be stored, it and the rest keep waiting.

        `at_end`: the job has ended, and nobody answers any more. Raises StoreTakenError.
        """
        if not at_end and time.monotonic() < self._retry_at:
            return
        while self._waiting and not self._lines.waits(at_end=at_end):
            if (answered := self._lines.answered(self._waiting[0].findings)) is not None:
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
                self._tell("windows are stored again")
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
            self._tell(f"{len(self._waiting)} window{'s' * (len(self._waiting) > 1)} could not be stored")
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
            self._tell(
                f"a window cannot be stored: {problem}; trying again after growing delays, keeping at most"
                f" {MOST_UNSTORED} windows"
            )
            self._problem = problem
        if dropped:
            self._tell(f"{MOST_UNSTORED} windows wait to be stored; the oldest is dropped")
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
