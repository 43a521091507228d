"""Watches a running command for hangs, and has them analysed.

In: the pulses of the ranks. Out: once no rank has issued or finished anything for `hang_after_s` seconds, a folder with
a dump per rank and a report, whose first lines are printed. The launcher never waits here: each `tick` does one short
thing. A separate process, started once the ranks have stood still for half that time, gathers the answers of the ranks
and analyses them. The command continues, unless it is to be stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tracekit.analysis.hang.hang_report import HangReport
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.launch.hang_answers import (
    Departures,
    Pulse,
    all_began,
    find_departure,
    read_pulses,
    write_departure,
)
from tracekit.collectors.record.small_file import MOST_DUMP_BYTES, read_small, write_whole
from tracekit.collectors.record.wire_format import HANG_REQUEST

#: Reads of the pulses per `hang_after_s` once all ranks have begun: a large job has thousands of ranks.
LOOKS = 40
#: A rank in a known long phase counts as hanging only after this many times `hang_after_s`.
LONG_PHASE = 10
#: Phases that can take long and end by themselves.
_LONG_PHASES = frozenset({"checkpoint", "compilation"})
#: Time limit of the analysis after the command has ended, seconds.
AFTERWARDS_S = 60.0
_LINES = 10
_LEFT = "operations fail because a rank left"
#: Errors with files that other processes write, on a disk that can be full.
_FAILURES = (OSError, ValueError, LookupError, TypeError)


class ExplainerProcess:
    """Turns dumps into reports, next to the launcher: `command`, which reads a line of JSON per report to make."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, unless it runs: it imports the analysis and waits."""
        if not self.alive():
            self._process = subprocess.Popen(  # noqa: S603  no shell; tracekit itself
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # a Ctrl-C is meant for the command
            )

    def explain(self, folder: Path, attempt: Path | None, ended_ns: Mapping[int, int]) -> None:
        """Request report.txt, then report.json, in `folder`. Raises OSError.

        The answers of `attempt` are gathered there first; None: the dumps are there. `ended_ns`: process id -> when it
        was seen to end.
        """
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        about = {
            "folder": str(folder),
            "attempt": None if attempt is None else str(attempt),
            "ended_ns": list(ended_ns.items()),
        }
        self._process.stdin.write(json.dumps(about) + "\n")
        self._process.stdin.flush()

    def alive(self) -> bool:
        """Whether a report can still be expected."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@dataclass(slots=True)
class HangWatcher:
    """Follows one run directory. `reports`: where to put the folders with reports; `stop`: stop the command after a
    report; `keep`: called with each report. `folders`: those with the reports so far.
    """

    directory: Path
    hang_after_s: float
    reports: Path
    explainer: ExplainerProcess
    stop: bool = False
    now: Callable[[], float] = time.monotonic
    keep: Callable[[HangText], None] = lambda _: None
    folders: list[Path] = field(default_factory=list)
    _pulses: dict[int, Pulse] = field(default_factory=dict)
    _departures: Departures = field(default_factory=Departures)
    _attempt: Path | None = None
    _moved: float = 0.0
    _departed: bool = False
    _said: bool = False
    _folder: Path | None = None
    _number: int = 0
    _patience_until: float = 0.0
    _failed: bool = False
    _due: float = 0.0

    def tick(self) -> bool:
        """Look once; called a few times a second while the command runs. Returns whether to stop the command.

        A watch that fails reports it and stops; the command continues.
        """
        if self._failed:
            return False
        try:
            if self._folder is None:
                self._follow()
            elif (self._folder / "report.json").exists() or not self.explainer.alive():
                return self._conclude(self._folder)
        except _FAILURES as error:
            self._fail(error)
        return False

    def command_ended(self, exit_code: int) -> None:
        """If the command failed because a rank left without an error, report which one."""
        if exit_code == 0 or self.folders or self._failed:
            return
        try:
            self._explain_departure()
        except _FAILURES as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        say(f"tracekit: hang detection has stopped: {type(error).__name__}: {printable(str(error))}")

    def _explain_departure(self) -> None:
        """Report which rank left, once the command has ended; the report may be under way."""
        folder, attempt = self._folder, self._newest_attempt()
        if folder is None:
            folder = self._next_folder()
            if attempt is None or folder is None:
                return
            if not write_departure(attempt, folder, self._departures.ended_ns):
                return
            self.explainer.explain(folder, None, {})
        end = self.now() + AFTERWARDS_S
        while not (folder / "report.json").exists() and self.explainer.alive() and self.now() < end:
            time.sleep(0.05)
        report = read_report(folder)
        if report is not None and report.report.culprits:
            self._tell(folder, report, _LEFT)

    def _follow(self) -> None:
        now = self.now()
        if now < self._due:
            return
        attempt = self._newest_attempt()
        if self._departed and attempt == self._attempt:  # this attempt has been reported
            return
        pulses = {} if attempt is None else read_pulses(attempt)
        # Look at each tick while ranks begin: the time of a departure is unknown if it precedes the following.
        if all_began(pulses):
            self._due = now + self.hang_after_s / LOOKS
        self._departures.follow(pulse.process_id for pulse in pulses.values())
        if attempt is None or attempt != self._attempt or pulses != self._pulses or not pulses:
            if self._said:
                say("tracekit: the job is making progress again")
            self._attempt, self._pulses, self._moved, self._said = attempt, pulses, now, False
            self._patience_until, self._departed = 0.0, False
        elif not self._said and self._rank_left(attempt):
            self._departed = True
            self._ask(attempt, now)
        elif not self._said and now >= self._patience_until:
            if now - self._moved >= self.hang_after_s / 2:
                self.explainer.start()
            if now - self._moved >= self.hang_after_s:
                self._ask(attempt, now)

    def _rank_left(self, attempt: Path) -> bool:
        """True if a rank left without an error and others failed because of that: waiting longer is pointless."""
        ended_ns = self._departures.ended_ns
        if not any(pulse.process_id in ended_ns for pulse in self._pulses.values()):
            return False
        return find_departure(attempt, self._pulses, ended_ns) is not None

    def _newest_attempt(self) -> Path | None:
        attempts = self.directory.glob("attempt-*")
        return max((path for path in attempts if not path.is_symlink()), default=None)

    def _next_folder(self) -> Path | None:
        """A new folder for dumps; None if the launcher of another node has made it."""
        self._number += 1
        folder = self.directory / f"hang-{self._number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            return None
        return folder

    def _ask(self, attempt: Path, now: float) -> None:
        folder = self._next_folder()
        if folder is None:
            self._patience_until = now + self.hang_after_s
            return
        write_whole(attempt / HANG_REQUEST, folder.name.encode())
        self._folder = folder
        self.explainer.explain(folder, attempt, self._departures.ended_ns)

    def _conclude(self, folder: Path) -> bool:
        """Report the finding: a hang, a long phase, or no waiting. Returns whether to end the command."""
        self._folder = None
        report = read_report(folder)
        moves = self._attempt is not None and read_pulses(self._attempt) != self._pulses
        if moves and not self._departed:  # the job was slow, not hanging
            return False
        idle_s = self.now() - self._moved
        if report is None:
            self._patience_until = self.now() + self.hang_after_s
            where = printable(str(self._copy_of(folder)))
            say(f"tracekit: no operation for {idle_s:.0f} s; the ranks' answers, in {where}, could not be analysed")
            return False
        if (why := self._why_no_hang(report.report, idle_s)) is not None:
            self._patience_until = self.now() + self.hang_after_s
            say(f"tracekit: no operation for {idle_s:.0f} s, but the job does not hang: {printable(why)}")
            return False
        self._said = True
        self._tell(folder, report, _LEFT if self._departed else f"no operation for {idle_s:.1f} s")
        if self.stop:
            say("tracekit: stopping the command (--on-hang stop)")
        return self.stop

    def _why_no_hang(self, report: HangReport, idle_s: float) -> str | None:
        """Why no rank moves although the job does not hang: no rank waits, or a long phase; None if it hangs."""
        if not report.hang:
            return "no rank is waiting"
        busy = [f"rank {row.rank} is in a {row.phase}" for row in report.culprits if row.phase in _LONG_PHASES]
        patient = busy and len(busy) == len(report.culprits) and idle_s < LONG_PHASE * self.hang_after_s
        return "; ".join(busy[:3]) if patient else None

    def _tell(self, folder: Path, report: HangText, why: str) -> None:
        """Write the report next to the trace, print its first lines, and keep it."""
        copy = self._copy_of(folder)
        self.folders.append(copy)
        say(f"tracekit: {why}; report: {printable(str(copy / 'report.txt'))}")
        for line in report.lines[:_LINES]:
            say(printable(line))
        self.keep(report)

    def _copy_of(self, folder: Path) -> Path:
        """Copy the folder next to the trace; return the copy, or the folder itself if that fails."""
        copy = self.reports / f"hang-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        try:
            shutil.copytree(folder, copy, symlinks=True)
        except OSError:
            return folder
        return copy


@dataclass(frozen=True, slots=True)
class HangText:
    """A report, and the same as a terminal shows it."""

    report: HangReport
    lines: tuple[str, ...]


def read_report(folder: Path) -> HangText | None:
    """The report in a folder; None if there is none."""
    try:
        report = msgspec.convert(json.loads(read_small(folder / "report.json", MOST_DUMP_BYTES)), HangReport)
        text = read_small(folder / "report.txt", MOST_DUMP_BYTES).decode()
        return HangText(report, tuple(text.splitlines()))
    except FileNotFoundError:
        return None
