"""Reading what the ranks of a collected run wrote.

In: a run directory (of `tracekit collect --segments`). Out: per attempt and rank the records and facts. A torn tail is
cut at the last whole record; readers follow the manifest where the launcher lived to write one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.collectors.runtime.words import (
    FACTS_SUFFIX,
    HEADER,
    MAGIC,
    RECORD,
    VERSION,
    rank_stem,
)
from tracekit.errors import FormatError
from tracekit.writing import replacing

#: `RECORD` as numpy sees it.
RECORD_DTYPE = np.dtype(
    [
        ("category", "<u1"),
        ("flags", "<u1"),
        ("name", "<u2"),
        ("step", "<i4"),
        ("microbatch", "<i4"),
        ("chunk", "<i4"),
        ("peer", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("extra", "<i8"),
    ]
)
MANIFEST = "manifest.json"
RUN_FILE = "run.json"
#: A segment or the facts of a rank.
_RANK_FILE = re.compile(r"rank-(\d+)(?:-\d+\.(?:ops|open)|\.facts)$")
_ATTEMPT = re.compile(r"attempt-(\d+)$")


@dataclass(frozen=True, slots=True)
class RankRecording:
    """What one rank wrote in one attempt. `torn_bytes`: cut off at the end of its last segment."""

    rank: int
    records: npt.NDArray[np.void]
    names: dict[int, str]
    facts: dict[str, list[Any]]
    torn_bytes: int

    @property
    def world_size(self) -> int:
        """How many ranks this rank saw."""
        return int(self.facts["process"][0]["world_size"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its counters, where the process lived to write them."""
        summaries = self.facts.get("summary")
        return summaries[-1] if summaries else None


@dataclass(frozen=True, slots=True)
class AttemptRecording:
    """All ranks of one attempt, by rank."""

    attempt: int
    directory: Path
    ranks: dict[int, RankRecording]

    @property
    def world_size(self) -> int:
        """How many ranks the attempt had."""
        return max(recording.world_size for recording in self.ranks.values())

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that wrote nothing."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)


def attempts(directory: str | os.PathLike[str]) -> list[int]:
    """The attempts a run directory holds, ascending."""
    found = (_ATTEMPT.match(entry.name) for entry in Path(directory).iterdir())
    return sorted(int(match.group(1)) for match in found if match)


def write_manifest(directory: Path) -> dict[str, Any]:
    """List what the ranks of one attempt wrote in its manifest. Raises OutputError."""
    files = [path.name for path in sorted(directory.iterdir()) if _RANK_FILE.match(path.name)]
    manifest = {"version": VERSION, "files": {name: (directory / name).stat().st_size for name in files}}
    with replacing(directory / MANIFEST) as temporary:
        Path(temporary).write_text(json.dumps(manifest), encoding="utf-8")
    return manifest


def read_attempt(directory: str | os.PathLike[str], attempt: int) -> AttemptRecording:
    """Read one attempt of a run directory. Raises FormatError where it holds no segments."""
    path = Path(directory) / f"attempt-{attempt:03d}"
    by_rank: dict[int, list[Path]] = {}
    for name in _file_names(path):
        match = _RANK_FILE.match(name)
        if match:
            segments = by_rank.setdefault(int(match.group(1)), [])
            if not name.endswith(FACTS_SUFFIX):
                segments.append(path / name)
    ranks = {}
    for rank in sorted(by_rank):
        recording = _read_rank(path, rank, sorted(by_rank[rank]))
        if recording is not None:
            ranks[rank] = recording
    if not ranks:
        raise FormatError(
            f"{path}: no rank recorded anything; see what the command printed, and whether it trains with torch in"
            " this Python environment"
        )
    return AttemptRecording(attempt, path, ranks)


def _file_names(path: Path) -> list[str]:
    """Names from the manifest; from the directory where the launcher died before it could write one."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return sorted(entry.name for entry in path.iterdir())
    try:
        return sorted(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{manifest}: damaged ({error!r}); delete it to read the files that are there") from None


def _read_rank(directory: Path, rank: int, paths: Sequence[Path]) -> RankRecording | None:
    facts: dict[str, list[Any]] = {}
    for kind, value in _read_facts(directory / (rank_stem(rank) + FACTS_SUFFIX)):
        facts.setdefault(kind, []).append(value)
    if "process" not in facts:
        return None
    parts, torn = [np.empty(0, RECORD_DTYPE)], 0
    for path in paths:
        records, rest = read_segment(path)
        parts.append(records)
        torn += rest
    names = {int(number): str(name) for number, name in facts.get("name", [])}
    return RankRecording(rank, np.concatenate(parts), names, facts, torn)


def _read_facts(path: Path) -> Iterator[tuple[str, Any]]:
    """Kind and value of each whole line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines[:-1]:
        try:
            fact = json.loads(line)
        except ValueError:
            raise FormatError(f"{path}: damaged line {line[:60]!r}; the facts of this rank cannot be read") from None
        yield fact["kind"], fact["value"]


def read_segment(path: Path) -> tuple[npt.NDArray[np.void], int]:
    """The whole records of a segment and the bytes cut off behind them. Raises FormatError where it is none."""
    content = path.read_bytes()
    if len(content) < HEADER.size:
        return np.empty(0, RECORD_DTYPE), len(content)
    magic, version, record_size, *_ = HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION or record_size != RECORD.size:
        raise FormatError(f"{path}: not a segment this tracekit reads (version {version}); upgrade, or record again")
    whole, torn = divmod(len(content) - HEADER.size, RECORD.size)
    return np.frombuffer(content, RECORD_DTYPE, whole, HEADER.size), torn


@dataclass(frozen=True, slots=True)
class Run:
    """What the launcher wrote about a run. `first_step`: the first step that belongs in the trace."""

    command: tuple[str, ...]
    first_step: int


def read_run(directory: Path) -> Run:
    """The run of a run directory. Raises FormatError where its file is damaged."""
    path = directory / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Run(tuple(content["command"]), int(content["options"]["first_step"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: damaged or unreadable ({error}); record the run again") from None


def is_run_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a run directory of `tracekit collect`."""
    return Path(path).is_dir() and (Path(path) / RUN_FILE).exists()


__all__ = [
    "AttemptRecording",
    "RankRecording",
    "Run",
    "attempts",
    "is_run_directory",
    "read_attempt",
    "read_run",
    "read_segment",
    "write_manifest",
]
