"""Report errors that the watch survives, and keep their tracebacks for debugging.

In: an error. Out: words; the traceback, appended to `STORE/watch-errors.log`, which is started anew when it is large.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from tracekit.base.errors import TracekitError
from tracekit.base.text import encodable

FILE = "watch-errors.log"
#: Size from which on the file is started anew, bytes.
MOST_BYTES = 1_000_000


def said(error: Exception) -> str:
    """The message of an error in one line, with its type unless it is one of tracekit's own or of the system."""
    text = encodable(" ".join(str(error).split()))
    return text if isinstance(error, TracekitError | OSError) else f"{type(error).__name__}: {text:.200}"


def where_traceback_is(store: Path, title: str, error: Exception) -> str:
    """Keep the traceback of an unexpected error in the folder `store`; returns the end of a line that says where."""
    if isinstance(error, TracekitError):
        return ""
    path = store / FILE
    try:
        full = path.exists() and path.stat().st_size > MOST_BYTES
        with path.open("w" if full else "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())} {title}\n")
            file.writelines([*traceback.format_exception(error), "\n"])
    except OSError:
        return ""
    return f" (traceback in {path})"
