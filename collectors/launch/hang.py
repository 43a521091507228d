"""Watches a running command for hangs, and has them explained.

In: the pulses of the ranks. Out: where no rank has issued or finished anything for `hang_after_s` seconds, a folder
with a dump per rank and a report, whose first lines are printed. The launcher never waits here: each `tick` does one
short thing. The command goes on, unless it is to be stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracekit.collectors.runtime.wire_format import (
    FACTS_SUFFIX,
    HANG_DUMP,
    HANG_REQUEST,
    PULSE,
    PULSE_SUFFIX,
    STACKS_SUFFIX,
    rank_stem,
)
from tracekit.stderr import say
from tracekit.text import printable

#: How long ranks have to answer, seconds; who has not by then is looked at from outside.
ANSWER_S = 3.0
#: How often the pulses are read within `hang_after_s`: a large job has thousands.
LOOKS = 40
#: A rank known to be busy with a long phase is no hang for so many times `hang_after_s`.
LONG_PHASE = 10
#: Phases that end by themselves and take as long as they take.
_LONG_PHASES = frozenset({"checkpoint", "compilation"})
_LINES = 10


@dataclass(frozen=True, slots=True)
class _Pulse:
    count: int
    process_id: int
    signal: int
    world_size: int


@dataclass(slots=True)
class HangWatcher:
    """Follows one run directory. `reports`: where the folders with reports are to be put; `stop`: ask for the end of
    the command after a report.
    """

    directory: Path
    hang_after_s: float
    reports: Path
    stop: bool = False
    now: Callable[[], float] = time.monotonic
    found: list[Path] = field(default_factory=list)
    _pulses: dict[int, _Pulse] = field(default_factory=dict)
    _attempt: Path | None = None
    _moved: float = 0.0
    _asked: float | None = None
    _looked: bool = False
    _folder: Path | None = None
    _analysis: subprocess.Popen[bytes] | None = None
    _said: bool = False
    _number: int = 0
    _patience_until: float = 0.0
    _failed: bool = False
    _due: float = 0.0

    def tick(self) -> bool:
        """Look once; called a few times a second while the command runs. Whether the command is to end.

        Raises nothing: a watch that fails says so and is over, the command goes on.
        """
        if self._failed:
            return False
        try:
            return self._look()
        except Exception as error:
            self._failed = True
            say(f"tracekit: watching for hangs has ended: {type(error).__name__}: {printable(str(error))}")
            return False

    def _look(self) -> bool:
        if self._analysis is not None:
            return self._analysis.poll() is not None and self._conclude()
        if self._asked is not None:
            self._collect()
        else:
            self._follow()
        return False

    def _follow(self) -> None:
        if self.now() < self._due:
            return
        self._due = self.now() + self.hang_after_s / LOOKS
        attempt = max(self.directory.glob("attempt-*"), default=None)
        pulses = {} if attempt is None else _read_pulses(attempt)
        now = self.now()
        if attempt != self._attempt or pulses != self._pulses or not pulses:
            if self._said:
                say("tracekit: the job moves again")
            self._attempt, self._pulses, self._moved, self._said = attempt, pulses, now, False
            self._patience_until = 0.0
        elif not self._said and now - self._moved >= self.hang_after_s and now >= self._patience_until:
            self._ask(now)

    def _ask(self, now: float) -> None:
        assert self._attempt is not None
        self._number += 1
        self._folder = self.directory / f"hang-{self._number:03d}"
        try:
            self._folder.mkdir()
        except FileExistsError:  # the launcher of another node has asked
            self._patience_until = now + self.hang_after_s
            return
        request = self._attempt / HANG_REQUEST
        partial = request.with_name(f".{request.name}")
        partial.write_text(str(self._folder), encoding="utf-8")
        partial.rename(request)
        self._asked, self._looked = now, False

    def _collect(self) -> None:
        """Wait for the answers; then look from outside at the ranks of this host that owe one."""
        assert self._folder is not None
        assert self._asked is not None
        missing = [rank for rank in self._pulses if not (self._folder / HANG_DUMP.format(rank=rank)).exists()]
        waited = self.now() - self._asked
        if missing and waited < ANSWER_S:
            return
        if missing and not self._looked:
            self._looked = True
            for rank in missing:
                self._ask_for_stack(rank)
            return
        for rank in missing:
            self._look_from_outside(rank)
        self._asked = None
        command = [sys.executable, "-m", "tracekit", "hang", str(self._folder), "--out", str(self._folder)]
        self._analysis = subprocess.Popen(  # noqa: S603  our own command
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _ask_for_stack(self, rank: int) -> None:
        """Have a process write its stacks without the interpreter's lock; only one that said it would."""
        pulse = self._pulses[rank]
        if (
            pulse.signal
            and self._host_of(rank) == socket.gethostname()
            and _state_of(pulse.process_id) not in (None, "T")
        ):
            os.kill(pulse.process_id, pulse.signal)

    def _look_from_outside(self, rank: int) -> None:
        """An answer in the place of a rank that gives none: what the system says about its process."""
        assert self._folder is not None
        assert self._attempt is not None
        host = self._host_of(rank)
        if host != socket.gethostname():
            return  # another launcher's
        words = {
            None: "its process has ended",
            "Z": "its process has ended",
            "T": "its process is stopped (SIGSTOP, or a debugger)",
            "t": "its process is stopped (SIGSTOP, or a debugger)",
        }
        state = words.get(
            _state_of(self._pulses[rank].process_id),
            "its process lives and does not answer: the interpreter is locked, or waits in a system call",
        )
        stack = _last_stack(self._attempt / f"{rank_stem(rank)}{STACKS_SUFFIX}")
        about = {"rank": rank, "host": host, "process": state, "stack": stack}
        content = {"version": "2.10", "entries": [], "tracekit": about}
        (self._folder / HANG_DUMP.format(rank=rank)).write_text(json.dumps(content), encoding="utf-8")

    def _host_of(self, rank: int) -> str | None:
        assert self._attempt is not None
        try:
            facts = (self._attempt / f"{rank_stem(rank)}{FACTS_SUFFIX}").read_text(encoding="utf-8")
        except OSError:
            return None
        for line in facts.splitlines():
            fact = json.loads(line)
            if fact["kind"] == "process":
                return str(fact["value"]["host"])
        return None

    def _conclude(self) -> bool:
        """Say what was found: a hang, a long phase, or that nobody waits. Whether the command is to end."""
        assert self._folder is not None
        self._analysis = None
        try:
            report = json.loads((self._folder / "report.json").read_text(encoding="utf-8"))
            text = (self._folder / "report.txt").read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            report, text = {"hang": True, "culprits": []}, ["the dumps could not be analysed"]
        idle_s = self.now() - self._moved
        if _read_pulses(self._attempt) != self._pulses:  # it was slow, and moves
            return False
        busy = [one for one in report["culprits"] if one.get("phase") in _LONG_PHASES]
        patient = report["culprits"] and len(busy) == len(report["culprits"])
        if not report["hang"] or (patient and idle_s < LONG_PHASE * self.hang_after_s):
            self._patience_until = self.now() + self.hang_after_s
            whom = "; ".join(f"rank {one['rank']} is in a {one['phase']}" for one in busy[:3]) or "no rank waits"
            say(f"tracekit: no operation for {idle_s:.0f} s, which is no hang: {printable(whom)}")
            return False
        self._said = True
        kept = self.reports / f"hang-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        try:
            shutil.copytree(self._folder, kept)
        except OSError:
            kept = self._folder
        self.found.append(kept)
        say(f"tracekit: no operation for {idle_s:.0f} s; report: {printable(str(kept / 'report.txt'))}")
        for line in text[:_LINES]:
            say(printable(line))
        if self.stop:
            say("tracekit: stopping the command (--on-hang stop)")
        return self.stop


def _read_pulses(attempt: Path | None) -> dict[int, _Pulse]:
    pulses: dict[int, _Pulse] = {}
    for path in () if attempt is None else attempt.glob(f"rank-*{PULSE_SUFFIX}"):
        content = path.read_bytes()
        if len(content) == PULSE.size:
            pulses[int(path.stem.removeprefix("rank-"))] = _Pulse(*PULSE.unpack(content))
    return pulses


def _state_of(process_id: int) -> str | None:
    """The state letter of a process (proc(5)); None where there is none."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


def _last_stack(path: Path) -> list[str] | None:
    """The stack of the main thread in the last answer of `faulthandler`, innermost first."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    frames: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread", "Current thread")):
            frames = []  # the main thread comes last
        elif line.startswith("  File "):
            frames.append(_frame(line))
    return frames or None


def _frame(line: str) -> str:
    parts: list[Any] = line.strip().removeprefix("File ").split(", line ")
    number, _, function = parts[-1].partition(" in ")
    return f"{parts[0].strip(chr(34))}:{number} {function}"
