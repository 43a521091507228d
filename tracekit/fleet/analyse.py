"""One trace of a study: read it, analyse it, write its rows next to the study. Executors run this.

In: a `Task`. Out: an `TaskOutcome`, and a file with the rows (`results`). Any problem with a trace becomes an outcome
and never ends the run.
"""

from __future__ import annotations

import errno
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tracekit.base.errors import FormatError, OutputError, TracekitError, UnsafeFileError
from tracekit.base.stderr import hushed_panics
from tracekit.base.text import printable
from tracekit.fleet.exclusions import Exclusion, Rule
from tracekit.fleet.executor import Task, TaskOutcome
from tracekit.fleet.fetch import Fetched, fetched
from tracekit.fleet.results import result_name, write_result
from tracekit.fleet.study import Study

_LONGEST_REASON = 400


class _Clock(NamedTuple):
    """A moment on the wall clock, and in processor time of this process, seconds."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> _Clock:
        return cls(time.perf_counter(), time.process_time())


def analyse(task: Task) -> TaskOutcome:
    """Read and analyse a source, unless its content has been analysed before."""
    began = _Clock.now()
    try:
        with fetched(task.source) as local:
            outcome = TaskOutcome(task.source.url, local.digest, local.stamp if local.settled else "")
            study = Study(Path(task.study))
            if study.has(local.digest, task.analysis):
                return replace(outcome, reused=True)
            outcome = _analysed(task, local, study, outcome, began)
            return replace(outcome, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    except OSError as error:
        return TaskOutcome(task.source.url, rule=str(Rule.UNREADABLE), reason=_reason(error))


def _analysed(task: Task, local: Fetched, study: Study, outcome: TaskOutcome, began: _Clock) -> TaskOutcome:
    from tracekit.fleet.rows import exclusion_rows, rows_of
    from tracekit.sources.load import load_trace
    from tracekit.store import Store
    from tracekit.store.folder import is_store_folder

    read = analysed = _Clock.now()
    try:
        if is_store_folder(Path(local.path)):
            Store(Path(local.path)).jobs()  # says why it could not be searched
        with hushed_panics(telling=False):
            job = load_trace(local.path, layout=local.layout)
        if local.changed(task.source):
            return replace(outcome, digest=None, stamp="", rule=str(Rule.CHANGED),
                           reason="another trace replaced it while it was being read")  # fmt: skip
        read = _Clock.now()
        rows = rows_of(job, local.digest, task.analysis)
    except TracekitError as error:
        rule = Rule.NO_TRACE if isinstance(error, FormatError) else Rule.INVALID
        # The path differs between copies, the reason does not.
        reason = str(error).replace(f"{local.path}: ", "")
        rows = {"exclusions": exclusion_rows(local.digest, task.analysis, [Exclusion(rule, _short(reason))])}
    analysed = _Clock.now()
    try:
        write_result(study.contained, result_name(local.digest, task.analysis), rows)
    except (OSError, OutputError, UnsafeFileError) as error:
        return replace(outcome, digest=None, stamp="", rule=str(Rule.NOT_STORED), reason=_reason(error))
    written = _Clock.now()
    return replace(
        outcome,
        read_s=read.wall_s - began.wall_s,
        analyse_s=analysed.wall_s - read.wall_s,
        write_s=written.wall_s - analysed.wall_s,
        cpu_s=written.cpu_s - began.cpu_s,
        analyse_cpu_s=analysed.cpu_s - read.cpu_s,
    )


def _reason(error: OSError | TracekitError) -> str:
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return error.strerror or str(error)
    return _short(str(error))


def _short(text: str) -> str:
    return printable(text)[:_LONGEST_REASON]
