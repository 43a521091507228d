"""Background replays of what-if questions, for any number of users.

In: a stored job and a question. Out: immediately, the status of the answer: `Pending` with its phase, `Answer`, or
`Rejected` with a message. Pages poll by repeating the question, so abandoned pages, restarted servers and second
processes need no special handling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tracekit.analysis.diagnosis.price import CONFIDENCE_ERRORS
from tracekit.analysis.whatif.selection import count_selected
from tracekit.analysis.whatif.selection_text import checked_selection
from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError, TracekitError
from tracekit.dashboards.data.queries import Results, Stored
from tracekit.dashboards.data.whatif_query import WhatifQuery
from tracekit.job.pipeline import PipelineJob

#: Replays at the same time; each uses all cores by itself, so more would only take memory.
AT_ONCE = 2
#: Answers kept in memory.
ANSWERS_KEPT = 1024
#: Questions that may wait for their turn.
MOST_WAITING = 64
#: A question not polled for this long is dropped when its turn comes.
ABANDONED_S = 90.0
#: A larger job is not loaded into the server's memory.
MOST_OPS = 40_000_000


class Phase(StrEnum):
    """The phases of a pending question, in order."""

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
    """No answer, with the reason. `selection`: the selection is wrong, so the message belongs to its field."""

    message: str
    selection: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The job under one scenario. `ops`: how many were selected; `slowdown`: T(scenario) / T(ideal).

    `saved_s`: T(original) - T(scenario), seconds a step, +- `error_s`: the replay error and the scatter of the saving
    over the steps (95 %), as in the prices of fixes.
    """

    ops: int
    step_time_s: float
    slowdown: float
    saved_s: float
    error_s: float
    saved_gpu_hours_per_day: float

    @property
    def clear(self) -> bool:
        """True if the change is larger than its error."""
        return abs(self.saved_s) > self.error_s


Status = Pending | Answer | Rejected
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
    """Answers questions about jobs of a store, each once."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="whatif")
        self._runs: OrderedDict[_Key, _Run] = OrderedDict()
        self._keeping = threading.Lock()
        self._loading = threading.Lock()

    def ask(self, stored: Stored, query: WhatifQuery, *, wait_s: float = 0.0) -> Status:
        """Return the status of the answer after at most `wait_s` seconds; start the replay if the question is new."""
        ops = (stored.report or {}).get("job", {}).get("ops", 0)
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
            with self._keeping:  # a retry may succeed
                self._runs.pop(key, None)
        return status

    def _start(self, key: _Key, stored: Stored, query: WhatifQuery) -> _Run | None:
        """Queue a new run; None if too many are waiting."""
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

    def _replayed(self, run: _Run) -> Answer:
        run.status = Pending(Phase.READING)
        with self._loading:  # one trace at a time: two questions about one job read its trace once
            job = self._results.job_of(run.stored)
            run.status = Pending(Phase.BUILDING)
            _ = job.replay
        run.status = Pending(Phase.REPLAYING)
        assert run.stored.report is not None, "only analysed jobs can be asked about"
        return answered(job, run.stored.report, run.query)


def answered(job: PipelineJob, report: dict[str, Any], query: WhatifQuery) -> Answer:
    """Replay the question. `report`: that of the job, whose times are not computed again.

    Raises SelectionError if no op is selected.
    """
    replay = job.replay
    chosen = checked_selection(query.selection, replay.graph, replay.durations)
    times = replay.step_times(query.scenario(chosen))
    known = report["step_time_s"]
    saving = np.array([row["original_s"] for row in report["by_step"]]) - times
    step_time_s = float(times.mean())
    scatter = float(saving.std(ddof=1)) / np.sqrt(len(saving)) if len(saving) > 1 else 0.0
    return Answer(
        ops=count_selected(chosen, replay.graph, replay.durations),
        step_time_s=step_time_s,
        slowdown=step_time_s / known["ideal"],
        saved_s=known["original"] - step_time_s,
        error_s=report["trust"]["replay_error"] * known["recorded"] + CONFIDENCE_ERRORS * float(scatter),
        saved_gpu_hours_per_day=(1 - step_time_s / known["original"]) * report["job"]["layout"]["world_size"] * 24,
    )
