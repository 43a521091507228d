"""Report errors that the watch survives, and keep their tracebacks for debugging.

In: an error. Out: words; the traceback, appended to `STORE/watch-errors.log`, which is restarted when it is large.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from tracekit.base.contained import Contained
from tracekit.base.errors import TracekitError, UnsafeFileError
from tracekit.base.text import encodable
from tracekit.store.folder import WATCH_ERRORS

#: Size at which the file is restarted, bytes.
MOST_BYTES = 1_000_000


def one_line(error: Exception) -> str:
    """Format an error in one line, with its type unless it is one of tracekit's own or of the system."""
    text = encodable(" ".join(str(error).split()))
    return text if isinstance(error, TracekitError | OSError) else f"{type(error).__name__}: {text:.200}"


def where_traceback_is(store: Path, title: str, error: Exception) -> str:
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
        if status is not None and status.st_size > MOST_BYTES:
            folder.remove(WATCH_ERRORS)
        folder.append(WATCH_ERRORS, "".join(lines).encode(errors="backslashreplace"))
    except (OSError, UnsafeFileError):
        return ""
    return f" (traceback in {store / WATCH_ERRORS})"
