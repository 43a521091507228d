"""The launcher's files in a run directory, next to the segments of the ranks, and their names.

In: files and unwritten records of ranks. Out: the manifest of an attempt, a segment with the unwritten records of a
killed rank. Imports the standard library only: it runs where the training does.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tracekit.base.atomic_write import Kind, replacing, starting_with, write_text
from tracekit.base.errors import OutputError
from tracekit.base.text import printable
from tracekit.collectors.record.inject._tracekit_recorder import REASON_FILE
from tracekit.collectors.record.ring import LeftOver
from tracekit.collectors.record.small_file import read_small
from tracekit.collectors.record.wire_format import (
    HEADER,
    LEFT_OVER_SEGMENT,
    MAGIC,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
    attempt_directory,
    segment_stem,
)

MANIFEST = "manifest.json"
RUN_FILE = "run.json"
#: It holds the command, and a command line can be long; a larger file is not one of ours.
RUN_FILE_BYTES = 4 << 20
_MANIFEST_KIND = Kind("a manifest of `tracekit collect`", starting_with(b'{"version": '))
_SEGMENT_KIND = Kind("a segment of `tracekit collect`", starting_with(MAGIC))
#: A segment or the facts of a rank: its number and, of a segment, that of the segment.
RANK_FILE = re.compile(r"rank-(\d+)(?:-(\d+)\.(?:ops|open)|\.facts)$")
_ATTEMPT = re.compile(r"attempt-(\d+)$")


def attempts(directory: str | os.PathLike[str]) -> list[int]:
    """The attempts a run directory holds, ascending."""
    matches = (_ATTEMPT.match(entry.name) for entry in Path(directory).iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def ranks_in(directory: Path) -> set[int]:
    """The ranks with files in the directory of an attempt."""
    matches = (RANK_FILE.match(entry.name) for entry in directory.iterdir())
    return {int(match.group(1)) for match in matches if match}


def why_unrecorded(directory: Path) -> str | None:
    """The message of the first process that could not be recorded; None if all were."""
    try:
        return printable(read_small(directory / REASON_FILE).decode("utf-8", "replace"))
    except OSError:
        return None


def write_manifest(directory: Path) -> dict[str, Any]:
    """Write the manifest of an attempt: the files of its ranks. Raises OutputError."""
    _check_no_link(directory)
    files = [path.name for path in sorted(directory.iterdir()) if RANK_FILE.match(path.name)]
    manifest = {"version": VERSION, "files": {name: (directory / name).stat().st_size for name in files}}
    write_text(directory / MANIFEST, json.dumps(manifest), _MANIFEST_KIND)
    return manifest


def write_left_over(directory: Path, records: LeftOver) -> None:
    """Write the records that a dead rank left in memory as a segment of their own. Raises OutputError."""
    attempt = attempt_directory(directory, records.attempt)
    _check_no_link(attempt)
    path = attempt / f"{segment_stem(records.rank, LEFT_OVER_SEGMENT)}{SEALED_SUFFIX}"
    head = HEADER.pack(MAGIC, VERSION, RECORD.size, records.rank, records.attempt, records.process_id)
    with replacing(path, _SEGMENT_KIND) as temporary:
        temporary.write_bytes(head + records.records)


def _check_no_link(attempt: Path) -> None:
    if attempt.is_symlink():
        raise OutputError(f"{attempt}: is a link, which is not followed; no rank made it")
