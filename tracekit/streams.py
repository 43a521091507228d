"""What is said on stderr, whatever became of it: closed before the start, on a full disk, its reader gone.

In: lines. Out: they are on stderr, or nowhere; no line is worth the run it is about.
"""

from __future__ import annotations

import os
import sys


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
