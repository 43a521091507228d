"""Best-effort writes to stderr: closed before the start, on a full disk, its reader gone.

In: lines. Out: they are on stderr, or nowhere; no line is worth the run it is about. What others would say there, or on
stdout to a reader who has left, is kept back here too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SPINNER = "|/-\\"


def open_stderr() -> None:
    """Give a process that was started without stderr one that goes nowhere, so that no file opened takes its place."""
    if sys.stderr is not None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != 2 and not _is_open(2):
        os.dup2(nowhere, 2)
        os.close(nowhere)
        nowhere = 2
    os.set_inheritable(nowhere, True)
    sys.stderr = os.fdopen(nowhere, "w", encoding="utf-8", errors="backslashreplace")


def say(text: str, end: str = "\n") -> None:
    """Write `text` on stderr. Once that fails, what follows goes nowhere."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        _silence_stderr()


def silence_stdout() -> None:
    """Send what is still buffered nowhere: its reader has left, or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def progress(after_s: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Yields a function that says what is under way.

    On a terminal, a line shows that and for how long, from `after_s` seconds on, until the end. Elsewhere nothing does.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    began, stage, over = time.monotonic(), "", threading.Event()

    def show() -> None:
        elapsed = time.monotonic() - began
        if stage and elapsed >= after_s:
            say(f"\r\x1b[K{_SPINNER[int(elapsed) % len(_SPINNER)]} {stage} ... {elapsed:.0f} s", end="")

    def tick() -> None:
        while not over.wait(1):
            show()

    def tell(what: str) -> None:
        nonlocal stage
        stage = what
        show()

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield tell
    finally:
        over.set()
        ticking.join()
        if time.monotonic() - began >= after_s:
            say("\r\x1b[K", end="")


@contextmanager
def hushed_panics() -> Iterator[None]:
    """Keep what polars prints, from its own threads, about a damaged file off stderr; the error says it in one line."""
    try:
        kept = os.dup(2)
    except OSError:  # started without stderr
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _silence_stderr() -> None:
    """Send what is still buffered nowhere too, or Python leaves with an exit code of its own at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
