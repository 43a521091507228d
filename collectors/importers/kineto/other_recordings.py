"""Recognise other recordings of torch that are mistaken for a trace.

In: a path, or the first bytes of a file. Out: what it is and what to do instead, None for anything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tracekit.collectors.importers.kineto.sniff import first_bytes

_PICKLE = b"\x80"
#: Keys of a memory snapshot, at its beginning.
_SNAPSHOT = (b"segments", b"device_traces")
_SNAPSHOT_IS = (
    "a memory snapshot of torch.cuda.memory, which shows what uses memory, not what takes time; record a trace with"
    " torch.profiler.profile, or open the snapshot at pytorch.org/memory_viz"
)
_GRAPH_IS = (
    "an execution trace of torch.profiler.ExecutionTraceObserver, which has no GPU times; give the trace that"
    " export_chrome_trace writes"
)
#: Most files of a folder to inspect.
_MOST_FILES = 1000


def other_recording(path: Path) -> str | None:
    """Return what a file, or a file in a folder, is instead of a trace; None if unknown or unreadable."""
    try:
        found = ((file, what_it_is(first_bytes(file))) for file in (_files(path) if path.is_dir() else [path]))
        return next((what if file == path else f"{file.name} is {what}" for file, what in found if what), None)
    except OSError:
        return None


def what_it_is(head: bytes) -> str | None:
    """Return the kind of recording, other than a trace, that begins with these unpacked bytes; None if unknown."""
    start = head.lstrip()[:4096]
    if start.startswith(_PICKLE) and any(key in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if start.startswith(b"{") and any(b'"' + key + b'"' in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if start.startswith(b"{") and b'"schema"' in start and b'"nodes"' in start:
        return _GRAPH_IS
    return None


def _files(folder: Path) -> Iterator[Path]:
    found = (Path(root) / name for root, _, names in os.walk(folder) for name in sorted(names))
    return (file for file, _ in zip(found, range(_MOST_FILES), strict=False))
