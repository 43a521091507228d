"""What-if questions replayed in the background, for any number of people at once.

In: a stored job and a question. Out: at once what is known of the answer: `Pending` with what is under way,
`WhatifAnswer`, or `Rejected` in words. Asking again is how progress is watched, so a page that is left, a server that
is restarted and a second process need no care: who still wants the answer asks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError, TracekitError
from tracekit.base.time_limit import time_limit
from tracekit.dashboards.browser.data.queries import Results, Stored
from tracekit.dashboards.browser.data.whatif_query import QueryAction, WhatifQuery
from tracekit.report.report import Report

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job

#: Replays at the same time; each uses all cores by itself, so more would only take memory.
AT_ONCE = 2
#: Answers kept in memory.
ANSWERS_KEPT = 1024
#: Questions that may wait for their turn.
MOST_WAITING = 64
#: A question that nobody has asked again for so long is dropped when its turn comes.
ABANDONED_S = 90.0
#: A question may take so long once its job is loaded.
LONGEST_S = 120.0
#: A larger job is not loaded into the server's memory.
MOST_OPS = 40_000_000


class Phase(StrEnum):
    """What is under way for a question, in order."""

    WAITING = "waiting for its turn"
    READING = "reading the trace"
    BUILDING = "building the graph"
    REPLAYING = "replaying"


@dataclass(frozen=True, slots=True)
class Pending:
    """No answer yet."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Rejected:
    """No answer, and why. `selection`: the selection is to blame, so the words belong to its field."""

    message: str
    selection: bool = False


@dataclass(frozen=True, slots=True)
class WhatifAnswer:
    """The job after an edit. `ops`: how many were selected.

    `saved_s`: of the recorded step, `recorded_s`, seconds, +- `error_s`: the replay error and the scatter of the saving
    over the steps (95 %), as in the prices of fixes. `slowdown`: only of the question of the paper, S of the ideal job
    with these ops as recorded; its seconds are without launch delays, beside T(original).
    """

    ops: int
    recorded_s: float
    step_time_s: float
    saved_s: float
    error_s: float
    saved_gpu_hours_per_day: float
    slowdown: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the change is larger than its error."""
        return abs(self.saved_s) > self.error_s


Status = Pending | WhatifAnswer | Rejected
_Key = tuple[str, float, WhatifQuery]


@dataclass(slots=True)
class _Run:
    """One question under way; `status` changes as it proceeds."""

    stored: Stored
    query: WhatifQuery
    asked_at: float
    status: Status = field(default_factory=lambda: Pending(Phase.WAITING))
    done: threading.Event = field(default_factory=threading.Event)


class Replays:
    """Answers questions on jobs of a store, each once."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="whatif")
        self._runs: OrderedDict[_Key, _Run] = OrderedDict()
        self._keeping = threading.Lock()
        self._loading = threading.Lock()

    def ask(self, stored: Stored, query: WhatifQuery, *, wait_s: float = 0.0) -> Status:
        """What is known of the answer now, or after at most `wait_s` seconds; starts the replay when it is new."""
        job = None if stored.report is None else stored.report.job
        ops = 0 if job is None else job.ops or job.gpu_ops or 0
        if ops > MOST_OPS:
            return Rejected(
                f"The job has {ops:,} ops, more than the {MOST_OPS:,} that this server loads; ask with"
                f" `{self._by_hand(stored.name)}` where there is memory for it."
            )
        key = (stored.name, stored.imported_at, query)
        with self._keeping:
            run = self._runs.get(key) or self._start(key, stored, query)
            if run is None:
                return Rejected(f"{MOST_WAITING} questions are waiting already; ask again in a minute.")
            run.asked_at = time.monotonic()
            self._runs.move_to_end(key)
        run.done.wait(wait_s)
        status = run.status
        if isinstance(status, Rejected) and not status.selection:
            with self._keeping:  # what went wrong may be over the next time
                self._runs.pop(key, None)
        return status

    def _start(self, key: _Key, stored: Stored, query: WhatifQuery) -> _Run | None:
        """A new run in its queue; None where too many wait."""
        if sum(not run.done.is_set() for run in self._runs.values()) >= MOST_WAITING:
            return None
        run = _Run(stored, query, time.monotonic())
        self._runs[key] = run
        for old in [old for old, other in self._runs.items() if other.done.is_set()][:-ANSWERS_KEPT]:
            del self._runs[old]
        self._pool.submit(self._answer, key, run)
        return run

    def _answer(self, key: _Key, run: _Run) -> None:
        if time.monotonic() - run.asked_at > ABANDONED_S:
            with self._keeping:
                self._runs.pop(key, None)
            return
        try:
            run.status = self._replayed(run)
        except SelectionError as error:
            run.status = Rejected(str(error), selection=True)
        except TracekitError as error:
            run.status = Rejected(str(error))
        except MemoryError:
            run.status = Rejected(
                f"The job does not fit into this server's memory; ask with `{self._by_hand(run.stored.name)}`."
            )
        except Exception:
            logging.getLogger(__name__).exception("a replay failed")
            run.status = Rejected("An error of tracekit itself; the server's log has the details.")
        finally:
            run.done.set()

    def _by_hand(self, name: str) -> str:
        return command("whatif", "--store", self._results.path, "--job", name)

    def _replayed(self, run: _Run) -> WhatifAnswer:
        run.status = Pending(Phase.READING)
        with self._loading:  # one trace at a time: two people who ask about one job read it once
            job = self._results.job_of(run.stored)
            run.status = Pending(Phase.BUILDING)
            job.build()
        run.status = Pending(Phase.REPLAYING)
        assert run.stored.report is not None, "only analysed jobs can be asked about"
        with time_limit(LONGEST_S):
            return answered(job, run.stored.report, run.query)


def answered(job: Job, report: Report, query: WhatifQuery) -> WhatifAnswer:
    """Replay the question. `report`: that of the job. Raises SelectionError for a selection without a single op."""
    keep = query.action is QueryAction.KEEP
    question = job.answer(query.edit, keep=keep)
    return WhatifAnswer(
        ops=question.ops,
        recorded_s=question.step_time_s + question.saved_s,
        step_time_s=question.step_time_s,
        saved_s=question.saved_s,
        error_s=question.error_s,
        saved_gpu_hours_per_day=question.saved_gpu_hours_per_day,
        slowdown=question.step_time_s / report.step_time_s.ideal if keep else None,
    )
