"""Read a finished attempt.

In: the directory of an attempt. Out: an `AttemptRecording` of all its ranks. A torn tail is cut at the last whole
record; the manifest, if the launcher lived to write one, lists the required files. A rank that wrote garbage is left
out, by the rules of `follow.py`, so that it distorts no number and does not affect the other ranks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.collectors.record.small_file import open_to_read
from tracekit.collectors.record.wire_format import OPEN_SUFFIX, SEALED_SUFFIX, attempt_directory
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.segments import AttemptRecording, joined
from tracekit.collectors.run_directory.writing import MANIFEST, RANK_FILE, why_unrecorded


def read_attempt(directory: str | os.PathLike[str], attempt: int) -> AttemptRecording:
    """Read one attempt of a run directory. Raises FormatError if it holds no segments, or garbage alone."""
    path = attempt_directory(Path(directory), attempt)
    _check_complete(path)
    follower = AttemptFollower(attempt, path, 0, over=True)
    skipped = tuple(notice.line for notice in follower.update(0.0) if not notice.left_out)
    follower.leave_out_strangers()
    bad = {number: why for number, rank in sorted(follower.ranks.items()) if (why := rank.bad) is not None}
    if not follower.good:
        if bad:
            raise FormatError(bad[min(bad)])
        why = why_unrecorded(path.parent) or "check that the command trains with torch in this Python environment"
        raise FormatError(f"{path}: no rank recorded anything; {why}")
    ranks = {number: rank.recording(joined(rank.pending)) for number, rank in sorted(follower.good.items())}
    left_out = tuple(f"rank {number} is left out: {why}; the other ranks are read" for number, why in bad.items())
    return AttemptRecording(attempt, path, ranks, (*left_out, *skipped))


def _check_complete(path: Path) -> None:
    """Raise FormatError unless all files of the manifest are complete: a folder may have been copied partially."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return
    sizes = {entry.name: entry.stat().st_size for entry in path.iterdir() if RANK_FILE.match(entry.name)}
    try:
        with open_to_read(manifest) as file:
            listed = {str(name): int(size) for name, size in json.load(file)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{manifest}: damaged ({error!r:.200}); delete it to read the files that are there") from None
    for name, size in listed.items():
        sealed = name.replace(OPEN_SUFFIX, SEALED_SUFFIX)  # a rank that outlived the launcher
        if max(sizes.get(name, -1), sizes.get(sealed, -1)) < size:
            raise FormatError(f"{path / name}: missing, or shorter than the {size} bytes it had; copy it again")
