"""Following what ranks write while they write it.

In: the directory of an attempt, looked at again and again. Out: what is new of each rank since, and, for a range of
steps, an `AttemptRecording` of them. What was handed out is forgotten, so that memory holds the steps that are not over
yet, however long the run. A rank that writes garbage is left out from there, with one line that says so.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.collectors.run_directory.segments import (
    RECORD_DTYPE,
    AttemptRecording,
    FactParser,
    RankRecording,
    check_process,
    names_of,
    records_in,
    without_torn_steps,
)
from tracekit.collectors.runtime.wire_format import (
    FACTS_SUFFIX,
    HEADER,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    Category,
    Flag,
)
from tracekit.errors import FormatError

_FILE = re.compile(r"rank-(\d+)(?:-\d+)?(\.\w+)$")
#: Facts that ranks add to all the time: so many of them are enough, and `merge` wants no others.
_KEPT_OF = {"device-clock": 64, "dropped": 1}
_WHOLE = int(Flag.COMPLETE | Flag.RECORDING)
_NOTHING = np.empty(0, RECORD_DTYPE)


@dataclass(slots=True)
class _File:
    """How far a file was read, and the newest step of a record in it."""

    read: int
    newest_step: int = -1


@dataclass(slots=True)
class FollowedRank:
    """One rank: its facts, and the records that were not handed out yet.

    `whole`: the newest step that was recorded from begin to end, -1 without any. `late`: records of steps that had been
    handed out. `bad`: why it is left out, None where it is not. `ended`: whether it has closed its recorder.
    """

    rank: int
    whole: int = -1
    late: int = 0
    bad: str | None = None
    ended: bool = False
    facts: dict[str, deque[Any]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    pending: list[npt.NDArray[np.void]] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    _line: bytes = b""
    _last: int = 0

    def add_facts(self, content: bytes, path: Path, parser: FactParser) -> None:
        """What a rank added to its facts; a line that is not whole yet waits for its end. Raises FormatError."""
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            self._add_fact(*parser.parse(line, path), path)

    def _add_fact(self, kind: str, value: Any, path: Path) -> None:
        if kind == "process":
            if "process" in self.facts:
                raise FormatError(
                    f"{path}: two processes write as rank {self.rank}: segments of two jobs in one folder"
                )
            check_process(value, path)
        elif kind == "name":
            for number, name in names_of([value], path).items():
                self.names.setdefault(number, name)
            return
        self.ended = self.ended or kind == "summary"
        self.facts.setdefault(kind, deque(maxlen=_KEPT_OF.get(kind))).append(value)

    def add_records(self, records: npt.NDArray[np.void], origin: int, first: int) -> None:
        """Records in the order in which they were made; of steps from `origin` on, those before `first` are late."""
        # What the launcher saved of a rank that was killed can be in its own segments too.
        records = records[records["number"] > self._last]
        if not len(records):
            return
        last, self._last = self._last, int(records["number"].max())
        records = without_torn_steps(records, last)
        records = records[records["category"] != 0]
        back = records["end_ns"] < records["start_ns"]
        if back.any():
            worst = records[back][0]
            raise FormatError(
                f"rank {self.rank}: in step {worst['step']} its clock stepped back by"
                f" {(int(worst['start_ns']) - int(worst['end_ns'])) / 1e9:.3g} s"
            )
        in_time = records["step"] >= first
        self.late += int((~in_time & (records["step"] >= origin)).sum())
        records = records[in_time]
        ends = (records["category"] == Category.STEP) & (records["flags"] & _WHOLE == _WHOLE)
        self.steps.update(records["step"][ends].tolist())
        self.whole = max(self.whole, max(self.steps, default=-1))
        self.pending.append(records)

    def take(self, last: int) -> npt.NDArray[np.void]:
        """The records of steps up to `last`; they are forgotten."""
        records = np.concatenate([_NOTHING, *self.pending])
        taken = records["step"] <= last
        rest = records[~taken]
        self.pending = [rest] if len(rest) else []
        self.steps = {step for step in self.steps if step > last}
        return records[taken]


@dataclass(slots=True)
class AttemptFollower:
    """Follows the ranks of the attempt in `directory`, from step `origin` on.

    `first`: the first step that was not handed out yet.
    """

    attempt: int
    directory: Path
    origin: int
    first: int = -1
    ranks: dict[int, FollowedRank] = field(default_factory=dict)
    _files: dict[str, _File] = field(default_factory=dict)
    _parser: FactParser = field(default_factory=FactParser)

    def __post_init__(self) -> None:
        self.first = max(self.first, self.origin)

    def update(self) -> list[str]:
        """Read what is new; a line for each rank that is left out from now on."""
        told = []
        for path in sorted(self.directory.iterdir()):
            match = _FILE.match(path.name)
            if match is None or match[2] not in (OPEN_SUFFIX, SEALED_SUFFIX, FACTS_SUFFIX):
                continue
            rank = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
            if rank.bad is not None:
                continue
            try:
                self._read_on(path, match[2], rank)
            except FileNotFoundError:  # sealed under another name since: the next look finds it
                continue
            except OSError as error:
                rank.bad = f"{path}: cannot be read: {error.strerror or error}"
            except FormatError as error:
                rank.bad = str(error)
            if rank.bad is not None:
                rank.pending.clear()
                told.append(f"rank {rank.rank} is left out from step {self.first} on: {rank.bad}")
        return told

    def _read_on(self, path: Path, suffix: str, rank: FollowedRank) -> None:
        is_segment = suffix != FACTS_SUFFIX
        known = self._files.setdefault(path.stem if is_segment else path.name, _File(0))
        if path.stat().st_size <= known.read:
            return
        with path.open("rb") as file:
            file.seek(known.read)
            content = file.read()
        if not is_segment:
            known.read += len(content)
            rank.add_facts(content, path, self._parser)
            return
        head = HEADER.size if known.read == 0 else 0
        if len(content) < head:
            return
        whole = (len(content) - head) // RECORD.size
        records = records_in(content, path, has_header=head > 0)
        known.read += head + whole * RECORD.size
        known.newest_step = max(known.newest_step, int(records["step"].max(initial=-1)))
        rank.add_records(records, self.origin, self.first)

    @property
    def good(self) -> dict[int, FollowedRank]:
        """The ranks that have told who they are and are not left out."""
        return {number: rank for number, rank in self.ranks.items() if rank.bad is None and "process" in rank.facts}

    @property
    def world_size(self) -> int:
        """How many ranks the attempt has, as most of those seen say; 0 while none has."""
        sizes = [int(rank.facts["process"][0]["world_size"]) for rank in self.good.values()]
        return max(set(sizes), key=lambda size: (sizes.count(size), size), default=0)

    def leave_out_strangers(self) -> list[str]:
        """Leave out ranks that see another number of ranks than the most: they are of another job; a line for each."""
        size, told = self.world_size, []
        for rank in self.good.values():
            seen = int(rank.facts["process"][0]["world_size"])
            if seen != size:
                rank.bad = f"it saw {seen} ranks, the others {size}: segments of two jobs in one folder"
                rank.pending.clear()
                told.append(f"rank {rank.rank} is left out: {rank.bad}")
        return told

    def take(self, last: int) -> AttemptRecording:
        """The steps up to `last` of all ranks that recorded one of them whole; they are forgotten."""
        taken = {}
        for number, rank in sorted(self.good.items()):
            any_whole = any(step <= last for step in rank.steps)
            records = rank.take(last)
            if any_whole:
                facts = {kind: list(values) for kind, values in rank.facts.items()}
                taken[number] = RankRecording(number, records, dict(rank.names), facts, 0)
        self.first = last + 1
        return AttemptRecording(self.attempt, self.directory, taken)

    def remove_spent(self) -> None:
        """Remove the sealed segments of which every record has been handed out."""
        for path in self.directory.glob(f"rank-*{SEALED_SUFFIX}"):
            known = self._files.get(path.stem)
            if known is not None and known.newest_step < self.first and known.read >= path.stat().st_size:
                path.unlink(missing_ok=True)
                del self._files[path.stem]
