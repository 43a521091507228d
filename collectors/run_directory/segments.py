"""Reading what the ranks of a collected run wrote.

In: a run directory (of `tracekit collect --segments`). Out: per attempt and rank the records and facts. A torn tail is
cut at the last whole record; the manifest, where the launcher lived to write one, says what must be there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.collectors.run_directory.facts import FactParser
from tracekit.collectors.run_directory.writing import MANIFEST, RANK_FILE, RUN_FILE
from tracekit.collectors.runtime.wire_format import (
    FACTS_SUFFIX,
    HEADER,
    MAGIC,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
    Category,
    rank_stem,
)
from tracekit.errors import FormatError

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
        ("number", "<i8"),
    ]
)
#: What a record's category can be; 0 in a record that was never written.
_CATEGORIES = (0, *map(int, Category))
#: Steps are numbered in 32 bits.
_LARGEST_STEP = 1 << 31


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process among those of all hosts."""

    host: str
    number: int


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

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of the first rank's process, none where it did not tell them."""
        told = self.ranks[min(self.ranks)].facts["process"][0].get("program")
        return tuple(map(str, told)) if isinstance(told, list) else ()

    def processes(self) -> dict[int, ProcessId]:
        """Which process each rank was."""
        facts = {rank: one.facts["process"][0] for rank, one in self.ranks.items()}
        return {
            rank: ProcessId(str(fact["host"]), int(fact["process_id"]))
            for rank, fact in facts.items()
            if "process_id" in fact
        }


def read_attempt(directory: str | os.PathLike[str], attempt: int) -> AttemptRecording:
    """Read one attempt of a run directory. Raises FormatError where it holds no segments."""
    path = Path(directory) / f"attempt-{attempt:03d}"
    by_rank: dict[int, list[Path]] = {}
    for name in _file_names(path):
        match = RANK_FILE.match(name)
        if match:
            segments = by_rank.setdefault(int(match.group(1)), [])
            if not name.endswith(FACTS_SUFFIX):
                segments.append(path / name)
    ranks, parser = {}, FactParser()
    for rank in sorted(by_rank):
        recording = _read_rank(path, rank, sorted(by_rank[rank]), parser)
        if recording is not None:
            ranks[rank] = recording
    if not ranks:
        raise FormatError(
            f"{path}: no rank recorded anything; see what the command printed, and whether it trains with torch in"
            " this Python environment"
        )
    return AttemptRecording(attempt, path, ranks)


def _file_names(path: Path) -> list[str]:
    """The files of ranks. What a manifest lists must be there in full: a folder may have been copied together."""
    sizes = {entry.name: entry.stat().st_size for entry in path.iterdir() if RANK_FILE.match(entry.name)}
    manifest = path / MANIFEST
    if manifest.exists():
        try:
            listed = {str(name): int(size) for name, size in json.loads(manifest.read_text("utf-8"))["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{manifest}: damaged ({error!r:.200}); delete it to read the files that are there"
            ) from None
        for name, size in listed.items():
            sealed = name.replace(OPEN_SUFFIX, SEALED_SUFFIX)  # a rank that outlived the launcher
            if max(sizes.get(name, -1), sizes.get(sealed, -1)) < size:
                raise FormatError(f"{path / name}: missing, or shorter than the {size} bytes it had; copy it again")
    return sorted(sizes)


def _read_rank(directory: Path, rank: int, paths: Sequence[Path], parser: FactParser) -> RankRecording | None:
    facts: dict[str, list[Any]] = {}
    for kind, value in _read_facts(directory / (rank_stem(rank) + FACTS_SUFFIX), rank, parser):
        facts.setdefault(kind, []).append(value)
    if "process" not in facts:
        return None
    parts, torn = [np.empty(0, RECORD_DTYPE)], 0
    for path in paths:
        records, rest = read_segment(path)
        parts.append(records)
        torn += rest
    records = np.concatenate(parts)
    # What the launcher saved of a rank that was killed can be in its own segments too.
    _, first = np.unique(records["number"], return_index=True)
    records = without_torn_steps(records[first])
    names = dict(facts.get("name", []))
    return RankRecording(rank, records[records["category"] != 0], names, facts, torn)


def without_torn_steps(records: npt.NDArray[np.void], last: int = 0) -> npt.NDArray[np.void]:
    """Records, ordered by number, less the ends of steps that began in records which are gone (`--keep`).

    `last`: the number of the record before the first. A step without its end is not whole, so the merge leaves it out.
    """
    gaps = np.flatnonzero(np.diff(records["number"], prepend=last) > 1)
    ends = np.flatnonzero(records["category"] == Category.STEP)
    torn = np.searchsorted(ends, gaps)
    return np.delete(records, ends[torn[torn < len(ends)]])


def _read_facts(path: Path, rank: int, parser: FactParser) -> Iterator[tuple[str, Any]]:
    """Kind and value of each whole line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from None
    for number, line in enumerate(lines[:-1], 1):
        yield parser.parse(line, path, number, rank)


def read_segment(path: Path) -> tuple[npt.NDArray[np.void], int]:
    """The whole records of a segment and the bytes cut off behind them. Raises FormatError where it is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) < HEADER.size:
        return np.empty(0, RECORD_DTYPE), len(content)
    return records_in(content, path), (len(content) - HEADER.size) % RECORD.size


def records_in(content: bytes, path: Path, *, has_header: bool = True) -> npt.NDArray[np.void]:
    """The whole records in a segment, or in a part of one, which has no header. Raises FormatError where it is none."""
    start = HEADER.size if has_header else 0
    if has_header:
        magic, version, record_size, *_ = HEADER.unpack_from(content)
        if magic != MAGIC or version != VERSION or record_size != RECORD.size:
            raise FormatError(
                f"{path}: not a segment this tracekit reads (version {version}); upgrade, or record again"
            )
    records = np.frombuffer(content, RECORD_DTYPE, (len(content) - start) // RECORD.size, start)
    unknown = ~np.isin(records["category"], _CATEGORIES)
    if unknown.any():
        row = int(unknown.argmax())
        raise FormatError(
            f"{path}: damaged, record {row} is of category {records['category'][row]}; copy it again, or record the run"
            " again"
        )
    return records


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"{path}: cannot be read: {error.strerror or error}; copy it again")


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
        command, first_step = tuple(content["command"]), int(content["options"]["first_step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path}: damaged or unreadable ({error!s:.200}); record the run again") from None
    if not 0 <= first_step < _LARGEST_STEP:
        raise FormatError(f"{path}: damaged, first_step is {first_step!s:.40}; record the run again")
    return Run(command, first_step)


def is_run_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a run directory of `tracekit collect`."""
    return Path(path).is_dir() and (Path(path) / RUN_FILE).exists()


__all__ = [
    "AttemptRecording",
    "ProcessId",
    "RankRecording",
    "Run",
    "is_run_directory",
    "read_attempt",
    "read_run",
    "read_segment",
    "records_in",
]
