"""Read a finished attempt.

In: the directory of an attempt. Out: an `AttemptRecording` of all its ranks. A torn tail is cut at the last whole
record; the manifest, if the launcher lived to write one, lists the required files. A rank that wrote garbage is left
out, by the rules of `follow.py`, so that it distorts no number and does not affect the other ranks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.errors import FormatError
from tracekit.collectors.run_directory.facts import BadFactError, FactParser
from tracekit.collectors.run_directory.followed_rank import FollowedRank
from tracekit.collectors.run_directory.segments import (
    AttemptRecording,
    RankRecording,
    joined,
    read_segment,
    unreadable,
    without_torn_steps,
)
from tracekit.collectors.run_directory.writing import MANIFEST, RANK_FILE, why_unrecorded
from tracekit.collectors.runtime.small_file import open_to_read
from tracekit.collectors.runtime.wire_format import FACTS_SUFFIX, OPEN_SUFFIX, SEALED_SUFFIX, rank_stem


def read_attempt(directory: str | os.PathLike[str], attempt: int) -> AttemptRecording:
    """Read one attempt of a run directory. Raises FormatError if it holds no segments, or garbage alone."""
    path = Path(directory) / f"attempt-{attempt:03d}"
    by_rank: dict[int, list[Path]] = {}
    for name in _file_names(path):
        match = RANK_FILE.match(name)
        if match:
            segments = by_rank.setdefault(int(match.group(1)), [])
            if not name.endswith(FACTS_SUFFIX):
                segments.append(path / name)
    ranks, bad, skipped, parser = dict[int, RankRecording](), dict[int, FormatError](), dict[str, str](), FactParser()
    for rank in sorted(by_rank):
        try:
            recording = _read_rank(path, rank, sorted(by_rank[rank]), parser, skipped)
        except FormatError as error:
            bad[rank] = error
            continue
        if recording is not None:
            ranks[rank] = recording
    bad |= _garbage(ranks)
    good = {rank: one for rank, one in ranks.items() if rank not in bad}
    if bad and not good:
        raise bad[min(bad)]
    if not good:
        why = why_unrecorded(path.parent) or "check that the command trains with torch in this Python environment"
        raise FormatError(f"{path}: no rank recorded anything; {why}")
    left_out = [f"rank {rank} is left out: {bad[rank]}; the other ranks are read" for rank in sorted(bad)]
    return AttemptRecording(attempt, path, good, (*left_out, *skipped.values()))


def _garbage(ranks: Mapping[int, RankRecording]) -> dict[int, FormatError]:
    """The ranks with impossible records, or of another job than most ranks, with the reason."""
    sizes = Counter(one.world_size for one in ranks.values())
    most = max(sizes, key=lambda size: (sizes[size], -abs(size - len(ranks)), size), default=0)
    bad, followed = dict[int, FormatError](), dict[int, FollowedRank]()
    for rank, one in ranks.items():
        if one.world_size != most:
            bad[rank] = FormatError(
                f"it saw {one.world_size} ranks, the others {most}: segments of two jobs in one folder"
            )
            continue
        try:
            followed[rank] = FollowedRank.of(one)
        except FormatError as error:
            bad[rank] = error
    for rank, follower in followed.items():
        try:
            follower.settle(followed.values(), 0, 0)  # accept what no other rank contradicts
        except FormatError as error:
            bad[rank] = error
    return bad


def _file_names(path: Path) -> list[str]:
    """The files of ranks. All files of a manifest must be complete: a folder may have been copied partially."""
    sizes = {entry.name: entry.stat().st_size for entry in path.iterdir() if RANK_FILE.match(entry.name)}
    manifest = path / MANIFEST
    if manifest.exists():
        try:
            with open_to_read(manifest) as file:
                listed = {str(name): int(size) for name, size in json.load(file)["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{manifest}: damaged ({error!r:.200}); delete it to read the files that are there"
            ) from None
        for name, size in listed.items():
            sealed = name.replace(OPEN_SUFFIX, SEALED_SUFFIX)  # a rank that outlived the launcher
            if max(sizes.get(name, -1), sizes.get(sealed, -1)) < size:
                raise FormatError(f"{path / name}: missing, or shorter than the {size} bytes it had; copy it again")
    return sorted(sizes)


def _read_rank(
    directory: Path, rank: int, paths: Sequence[Path], parser: FactParser, skipped: dict[str, str]
) -> RankRecording | None:
    facts: dict[str, list[Any]] = {}
    for kind, value in _read_facts(directory / (rank_stem(rank) + FACTS_SUFFIX), rank, parser, skipped):
        facts.setdefault(kind, []).append(value)
    if "process" not in facts:
        return None
    parts, torn = [], 0
    for path in paths:
        records, rest = read_segment(path)
        parts.append(records)
        torn += rest
    records = joined(parts)
    # Records that the launcher saved from a killed rank can be in the rank's own segments, too.
    _, first = np.unique(records["number"], return_index=True)
    records = without_torn_steps(records[first])
    names = dict(facts.get("name", []))
    return RankRecording(rank, records[records["category"] != 0], names, facts, torn)


def _read_facts(path: Path, rank: int, parser: FactParser, skipped: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Kind and value of each whole line, without bad facts that are not needed: one line per kind in `skipped`."""
    try:
        with open_to_read(path) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield parser.parse(line, path, number, rank)
        except BadFactError as error:
            if error.needed:
                raise
            skipped.setdefault(error.kind, f"rank {rank}: {error}; facts like this are skipped")
