"""Cut a running recording into windows, analyse them and store them.

In: a run directory of `tracekit collect`, read repeatedly. Out: windows of one job in a store. The windows of an
elastic attempt follow those of the previous one. Failures to read, analyse or store something are reported in a line,
and the rest continues.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.contained import Contained
from tracekit.base.errors import FormatError, StoreError, TracekitError, UnsafeFileError
from tracekit.base.paths import command
from tracekit.base.text import encodable, ranks_text, short, steps_text
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.run_directory.follow import READ_RETRY_S, AttemptFollower
from tracekit.collectors.run_directory.followed_rank import Notice
from tracekit.collectors.run_directory.launchers import (
    Ending,
    attempts,
    have_ended,
    how_ended,
    is_dead,
    last_sign_ns,
    running_launchers,
)
from tracekit.collectors.run_directory.segments import (
    AttemptRecording,
    ClockFit,
    LaunchedRun,
    is_run_directory,
    read_clocks,
    read_run,
)
from tracekit.live.windows import RUN_STARTED, RanksState, ReadyWindow, WindowCutter, WindowQueue, WindowSize
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Store
from tracekit.store.folder import WATCH_ERRORS
from tracekit.trace.canonical import Trace

if TYPE_CHECKING:
    from tracekit.analysis.metrics.samples import MetricSource

#: A run that announces no end counts as ended once nothing was written for this long, seconds.
QUIET_S = 300.0
#: Limit of lines about ranks per look.
MOST_NOTICES = 8
#: Samples of a host's clock from which a window's times are put on the common clock; one is taken every 10 s.
CLOCK_SAMPLES = 64
#: Size at which the file of tracebacks is restarted, bytes.
MOST_LOG_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options for cutting a run into windows and storing them.

    `late_after_s`: how long a window waits for ranks that are behind. `consume`: remove segments of stored steps.
    `metrics`: what to ask about the machines of culprits.
    """

    directory: Path
    store: Path
    name: str
    size: WindowSize
    late_after_s: float = 10.0
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    consume: bool = False
    metrics: MetricSource | None = None


@dataclass(slots=True)
class Counts:
    """Counts of failures since the watch began: windows that could not be merged (`failed`) or are stored without
    findings (`unanalysed`), ranks that were left out, records that came late.
    """

    failed: int = 0
    unanalysed: int = 0
    left_out: int = 0
    late_records: int = 0


class LiveRun:
    """The windows of one run. `log` is called with each line for the user."""

    def __init__(self, options: LiveOptions, log: Callable[[str], None]) -> None:
        self.options, self.counts = options, Counts()
        self._log = log
        self._run: LaunchedRun | None = None
        self._follower: AttemptFollower | None = None
        self._cutter = WindowCutter(options.size, options.late_after_s)
        self._finished = -1
        self._unread_since: float | None = None
        self._heard_s, self._beats = time.monotonic(), dict[str, int]()
        self._resume: tuple[int, int] | None = None
        self._clocks: dict[str, ClockFit] = {}
        self._why_clocks: str | None = None
        self.queue = WindowQueue(Store(options.store), options.name, log, self._remove_spent)

    def poll(self) -> None:
        """Read what is new, and analyse and store the windows that are over.

        If the folder cannot be read, later calls try again; raises FormatError once that has failed for `READ_RETRY_S`.
        """
        try:
            self.queue.store()
            self._poll()
            while (window := self._cutter.ready(self._state(), time.monotonic())) is not None:
                self._window(window)
        except OSError as error:
            self._retry_reading(error)
            return
        if self._unread_since is not None:
            self._unread_since = None
            self._log(f"{self.options.directory} can be read again")

    def _poll(self) -> None:
        if not self._begin():
            return
        attempt = self._resume[0] if self._resume is not None else 0
        for number in attempts(self.options.directory):
            if self._follower is not None and number > self._follower.attempt:
                self._update(at_end=True)
                self._finish_attempt()
            if self._follower is None and number > self._finished and number >= attempt:
                self._follow(number)
        if self._follower is not None:
            self._update()

    def _retry_reading(self, error: OSError) -> None:
        problem = f"{self.options.directory}: cannot be read: {error.strerror or error}"
        if self._unread_since is None:
            self._unread_since = time.monotonic()
            self._log(f"{problem}; trying again for {READ_RETRY_S:.0f} s")
        elif time.monotonic() - self._unread_since >= READ_RETRY_S:
            raise FormatError(f"{problem}, for {READ_RETRY_S:.0f} s; watch it again once it can be read")

    def ended(self) -> bool:
        """True if the run has ended: every launcher has announced its end, or none is alive and no rank has written
        anything for `QUIET_S`.
        """
        if not (running := running_launchers(self.options.directory)):
            return have_ended(self.options.directory)
        now_s, beats = time.monotonic(), {path.name: last_sign_ns(path) for path in running if not is_dead(path)}
        if self._follower is None or beats != self._beats:
            self._heard_s, self._beats = now_s, beats
        if now_s - self._heard_s < QUIET_S:
            return False
        self._log(
            f"no launcher of the run is alive, and no rank has written anything for {QUIET_S:.0f} s: the run has ended"
        )
        return True

    def _ending(self) -> Ending | None:
        """The end of the job; None if its launchers have not announced it."""
        ending = how_ended(self.options.directory)
        if running_launchers(self.options.directory) and (ending is None or not ending.failed):
            return Ending("ended: its launcher died", failed=True)
        return ending

    def finish(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Store the last steps of the ended job as a window, however few they are, and note its end.

        If that fails, tries again as in `WindowQueue.finish`; `wait` sleeps meanwhile. Raises StoreError if windows or
        the end of the job are not in the store even then.
        """
        if self._follower is not None:
            try:
                self._update(at_end=True)
            except OSError as error:
                self._log(f"{self.options.directory}: cannot be read at the end: {error.strerror or error}")
        self._finish_attempt()
        if (ending := self._ending()) is not None and ending.failed:
            self._log(f"the job {ending.words}")
        if (problem := self.queue.finish(None if ending is None else ending.words, wait)) is None:
            return
        options = self.options
        retry = command("watch", options.directory, "--store", options.store, "--name", options.name)
        raise StoreError(
            f"the store does not know that job {short(options.name)!r} has ended: {problem}; run `{retry}` once it can"
            " be written"
        )

    # ---- following

    def _begin(self) -> bool:
        """True once the run has begun; its job is then noted in the store."""
        if self._run is not None:
            return True
        if not is_run_directory(self.options.directory):
            return False
        self._run = read_run(self.options.directory)
        self._resume = self.queue.begin(" ".join(self._run.command), self._run.started_ns)
        return True

    def _follow(self, attempt: int) -> None:
        assert self._run is not None
        origin = self._run.options.first_step
        if self._resume is not None and self._resume[0] == attempt:
            origin = max(origin, self._resume[1] + 1)
        directory = self.options.directory / f"attempt-{attempt:03d}"
        self._follower = AttemptFollower(attempt, directory, origin)
        self._cutter = WindowCutter(self.options.size, self.options.late_after_s)

    def _update(self, *, at_end: bool = False) -> None:
        assert self._follower is not None
        self._notice(self._follower.update(time.monotonic(), at_end=at_end))
        if self._follower.grew:
            self._heard_s = time.monotonic()
        self._notice(self._follower.leave_out_strangers())

    def _notice(self, notices: Iterable[Notice]) -> None:
        all_notices = list(notices)
        for notice in all_notices[:MOST_NOTICES]:
            self._log(f"{notice.line}; the others go on" if notice.left_out else notice.line)
        if more := all_notices[MOST_NOTICES:]:  # an unknown version or a failing folder concerns many ranks
            self._log(f"and {len(more)} more lines like these, about other ranks")
        left_out = sum(notice.left_out for notice in all_notices)
        self.counts.left_out += left_out
        if left_out and self._follower is not None and not self._follower.good:
            self._log("every rank is left out; there will be no windows until the job is restarted")

    def _state(self) -> RanksState:
        if self._follower is None:
            return RanksState({}, {}, ())
        good = self._follower.good
        return RanksState(
            steps={number: rank.steps for number, rank in good.items()},
            newest={number: rank.whole for number, rank in good.items()},
            ranks=range(self._follower.world_size),
        )

    def _finish_attempt(self) -> None:
        if (window := self._cutter.rest(self._state(), time.monotonic())) is not None:
            self._window(window)
        self._finished = self._follower.attempt if self._follower is not None else self._finished
        self._follower = None

    # ---- windows

    def _window(self, window: ReadyWindow) -> None:
        assert self._follower is not None
        first = self._follower.first
        recording = self._follower.take(window.last)
        returned = self._follower.readmit()
        self.counts.late_records = sum(rank.late for rank in self._follower.ranks.values())
        title = steps_text(first, window.last)
        if missing := recording.missing_ranks if recording.ranks else ():
            self._log(f"{title}: {len(missing)} of {recording.world_size} ranks are missing: {ranks_text(missing)}")
        self._notice(returned)
        self._read_clocks()
        trace = self._merged(recording, window, missing)
        if isinstance(trace, Exception):
            error = trace
            if (faulty := self._faulty(recording, window)) is not None:
                trace = self._merged(_without_ranks(recording, {faulty}), window, {*missing, faulty})
            if faulty is None or isinstance(trace, Exception):
                self.counts.failed += 1
                self._log(
                    f"{title}: cannot be analysed: {_one_line(error)}{log_traceback(self.options.store, title, error)}"
                )
                return
            self._notice(self._follower.leave_out([faulty], f"with it, {title} cannot be analysed: {_one_line(error)}"))
        self._add(PipelineJob(trace), title)

    def _add(self, job: Job, title: str) -> None:
        answering = None
        if self._run is not None and self._run.options.stacks and self._follower is not None:
            answering = self._follower.directory, self._follower.good
        self.queue.add(job.trace, self._findings(job, title), answering)

    def _remove_spent(self) -> None:
        if self.options.consume and self._follower is not None:
            self._follower.remove_spent()

    def _faulty(self, recording: AttemptRecording, window: ReadyWindow) -> int | None:
        """The one rank that keeps a window from being merged; None if it is not one rank alone.

        Found by bisection.
        """

        def merges_without(ranks: Collection[int]) -> bool:
            merged = self._merged(_without_ranks(recording, ranks), window, {*recording.missing_ranks, *ranks})
            return isinstance(merged, Trace)

        suspects = sorted(recording.ranks)
        if len(suspects) < 2:
            return None
        while len(suspects) > 1:
            halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            cured = [half for half in halves if len(half) < len(recording.ranks) and merges_without(half)]
            if len(cured) != 1:
                return None
            (suspects,) = cured
        return suspects[0]

    def _findings(self, job: Job, title: str) -> Findings | Unanalysed:
        """Return the findings of the analysis. A bug in it costs the findings of this window only."""
        try:
            return job.stored(metrics=self.options.metrics)
        except Exception as error:  # any bug
            self.counts.unanalysed += 1
            why = f"the analysis failed, which is a bug of tracekit ({_one_line(error)})"
            self._log(
                f"{title}: {why}; the window is stored without findings: report the bug with the output of"
                f" `tracekit store export`{log_traceback(self.options.store, title, error)}"
            )
            return Unanalysed(why)

    def _merged(self, recording: AttemptRecording, window: ReadyWindow, missing: Iterable[int]) -> Trace | Exception:
        """The trace of a window, or the error: merging can stumble over garbage anywhere."""
        assert self._run is not None
        try:
            return merge_attempt(
                recording,
                name=self.options.name,
                first_step=self._run.options.first_step,
                options=self.options.layout,
                clocks=self._clocks,
                metadata={
                    "command": list(self._run.command),
                    "missing_ranks": sorted({*missing}),
                    "late_ranks": list(window.late),
                    **({} if self._run.started_ns is None else {RUN_STARTED: self._run.started_ns}),
                },
                running=True,
            ).trace
        except Exception as error:
            return error

    def _read_clocks(self) -> None:
        """Read the clocks of the hosts; if that fails, keep the previous ones and report it once."""
        try:
            self._clocks = read_clocks(self.options.directory, CLOCK_SAMPLES)
        except (OSError, FormatError) as error:
            if str(error) != self._why_clocks:
                self._log(f"clocks are corrected as before: {error}")
            self._why_clocks = str(error)
        else:
            self._why_clocks = None


def _without_ranks(recording: AttemptRecording, ranks: Collection[int]) -> AttemptRecording:
    return replace(recording, ranks={rank: recorded for rank, recorded in recording.ranks.items() if rank not in ranks})


def _one_line(error: Exception) -> str:
    """Format an error in one line, with its type unless it is one of tracekit's own or of the system."""
    text = encodable(" ".join(str(error).split()))
    return text if isinstance(error, TracekitError | OSError) else f"{type(error).__name__}: {text:.200}"


def log_traceback(store: Path, title: str, error: Exception) -> str:
    """Append an unexpected error's traceback to the log in the folder `store`; return the end of a line about it."""
    if isinstance(error, TracekitError):
        return ""
    folder = Contained(store)
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} {title}\n",
        *traceback.format_exception(error),
        "\n",
    ]
    try:
        status = folder.status(WATCH_ERRORS)
        if status is not None and status.st_size > MOST_LOG_BYTES:
            folder.remove(WATCH_ERRORS)
        folder.append(WATCH_ERRORS, "".join(lines).encode(errors="backslashreplace"))
    except (OSError, UnsafeFileError):
        return ""
    return f" (traceback in {store / WATCH_ERRORS})"
