"""Text about a hung NCCL job: messages of PyTorch's watchdogs on stderr, or a report of NCCL's RAS (`ncclras`).

In: a file, or a folder of files, one of each rank or of all. Out: a `FlightRecord`, as of dumps, with what such text
holds: the operation in which a rank waits, and how many it has enqueued and completed, or launched.
"""

from __future__ import annotations

from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.base.text import listed
from tracekit.collectors.importers.nccl_ras import ras_record
from tracekit.collectors.importers.nccl_watchdog import watchdog_record
from tracekit.collectors.importers.other_logs import is_hang_text
from tracekit.trace.dumps import FlightRecord

#: What is read of a file, bytes: the messages are the last ones that a job prints.
_MOST_BYTES = 64 << 20


def read_nccl_text(path: Path) -> FlightRecord | None:
    """Read the text about a hang at a path; None if there is none. Raises FormatError if it names no rank."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    texts = {file.name: text for file in files if (text := _text(file)) is not None}
    if not texts:
        return None
    lines = [line for text in texts.values() for line in text.splitlines()]
    source = listed(texts, 3)
    record = watchdog_record(lines, source) or ras_record(lines, source)
    if record is None:
        raise FormatError(f"{path}: text about NCCL that names no rank; give all that the ranks printed to stderr")
    return record


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - _MOST_BYTES))
            content = opened.read()
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror or error}; check path and permissions") from None
    return content.decode(errors="replace") if is_hang_text(content) else None
