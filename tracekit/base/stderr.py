"""Best-effort writes to stderr, which may be closed from the start, on a full disk, or without a reader.

In: lines. Out: they are on stderr, or nowhere; no line is worth ending the run for. This module also suppresses other
output to stderr, and output to a stdout whose reader has gone.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TextIO

from tracekit.base.text import pace_words

_SPINNER = "|/-\\"
#: Redraw a count at most this often, seconds.
_REDRAW_S = 0.2
#: What takes less, seconds, shows no progress, and nobody is told that it is waited for.
_SHOWN_AFTER_S = 2.0


def open_stderr() -> None:
    """Give a process that was started without stderr a null device, so that no other file gets its descriptor."""
    if sys.stderr is not None:
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    if devnull != 2 and not _is_open(2):
        os.dup2(devnull, 2)
        os.close(devnull)
        devnull = 2
    os.set_inheritable(devnull, True)
    sys.stderr = os.fdopen(devnull, "w", encoding="utf-8", errors="backslashreplace")


def say(text: str, end: str = "\n") -> None:
    """Write `text` to stderr. If that fails once, later writes are discarded."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        _silence_stderr()


#: The same, once in each process.
say_once = lru_cache(maxsize=4096)(say)


class _Stdout(io.FileIO):
    """stdout, whose reader may leave: the rest goes nowhere, and the command ends with the exit code of its result."""

    def write(self, data: Any, /) -> int:
        """Write `data`, or discard it."""
        try:
            return super().write(data)
        except BrokenPipeError:
            silence_stdout()
            return memoryview(data).nbytes


def open_stdout() -> None:
    """Let the reader of a pipe leave (`tracekit ... | head`) without ending the command."""
    before = sys.stdout
    if isinstance(before, io.TextIOWrapper) and _descriptor(before) == 1:
        buffer = io.BufferedWriter(_Stdout(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=before.line_buffering)


def silence_stdout() -> None:
    """Discard what is still buffered: the reader has gone, or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Progress:
    """The line that shows what a command is at, redrawn each second once it has taken `_SHOWN_AFTER_S`."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._began = self._drawn = time.monotonic()
        self._stages: dict[str, float] = {}

    def __call__(self, stage: str) -> None:
        """Show the next stage."""
        self._stage = stage
        self.draw()

    def count(self, stage: str, done: int, total: int, units: str) -> None:
        """Show how far a stage is; its time runs from the first call."""
        now_s = time.monotonic()
        began = self._stages.setdefault(stage, now_s)
        self._stage = f"{stage}: {pace_words(done, total, units, now_s - began)}"
        if now_s - self._drawn >= _REDRAW_S:
            self.draw()

    def draw(self) -> None:
        """Write the line."""
        self._drawn = time.monotonic()
        elapsed = self._drawn - self._began
        if self._stage and elapsed >= _SHOWN_AFTER_S:
            say(f"\r\x1b[K{_SPINNER[int(elapsed) % len(_SPINNER)]} {self._stage} ... {elapsed:.0f} s", end="")

    def clear(self) -> None:
        """Remove the line."""
        if time.monotonic() - self._began >= _SHOWN_AFTER_S:
            say("\r\x1b[K", end="")


#: What shows progress now; the last one counts.
_shown: list[_Progress] = []


def advance(stage: str, done: int, total: int, units: str) -> None:
    """Show that `done` of the `total` units of a stage, such as "files", are done, with the rate and the time that
    remains. Does nothing unless a command shows progress; cheap enough to call in a loop.
    """
    if _shown:
        _shown[-1].count(stage, done, total, units)


@contextmanager
def progress(stage: str = "") -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each stage of the work after the first `stage`; `advance` shows how far
    a stage is.

    On a terminal, a line shows the stage and the time it takes, from two seconds on; elsewhere there is no
    output.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    shown, ended = _Progress(stage), threading.Event()

    def tick() -> None:
        while not ended.wait(1):
            shown.draw()

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    shown.draw()
    _shown.append(shown)
    try:
        yield shown
    finally:
        _shown.remove(shown)
        ended.set()
        ticking.join()
        shown.clear()


@contextmanager
def saying_if_slow(text: str) -> Iterator[None]:
    """Say `text`, once in a process, if what follows takes longer than `_SHOWN_AFTER_S`."""

    def say_above_progress() -> None:
        say_once(f"\r\x1b[K{text}" if _shown else text)

    timer = threading.Timer(_SHOWN_AFTER_S, say_above_progress)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no line comes after what it is about


@contextmanager
def hushed_panics(*, telling: bool = True) -> Iterator[None]:
    """Suppress what polars' threads print to stderr about a damaged file; the error message has it in one line.

    `telling`: lines that Python writes, such as those of `say`, still reach stderr.
    """
    try:
        terminal = os.dup(2)
    except OSError:  # started without stderr
        yield
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    before = sys.stderr
    if telling and _descriptor(before) == 2:
        sys.stderr = os.fdopen(terminal, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    try:
        yield
    finally:
        sys.stderr = before
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(devnull)


def _descriptor(file: TextIO | None) -> int | None:
    """The file descriptor behind `file`, if there is one."""
    try:
        return None if file is None else file.fileno()
    except (OSError, ValueError):  # a buffer in memory
        return None


def _silence_stderr() -> None:
    """Discard what is still buffered for stderr too; otherwise Python exits with its own exit code."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    os.close(devnull)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
