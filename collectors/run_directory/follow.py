"""Following what ranks write while they write it.

In: the directory of an attempt, looked at again and again. Out: what is new of each rank since, and, for a range of
steps, an `AttemptRecording` of them. What was handed out is forgotten, so that memory holds the steps that are not over
yet, however long the run. A rank that writes garbage is left out from there, with one line that says so; one that
cannot be read is tried again for a time.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.collectors.run_directory.facts import BadFactError, FactParser
from tracekit.collectors.run_directory.plausible import Trail
from tracekit.collectors.run_directory.segments import (
    RECORD_DTYPE,
    AttemptRecording,
    RankRecording,
    records_in,
    without_torn_steps,
)
from tracekit.collectors.runtime.wire_format import (
    FACTS_SUFFIX,
    HEADER,
    LEFT_OVER_SEGMENT,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    Category,
    Flag,
)
from tracekit.errors import FormatError

#: A rank whose files cannot be read is tried again, later each time, and left out after so long, seconds.
READ_RETRY_S = 300.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_FILE = re.compile(rf"rank-(\d+)(?:-(\d+))?({'|'.join(map(re.escape, (OPEN_SUFFIX, SEALED_SUFFIX, FACTS_SUFFIX)))})$")
#: Facts that ranks add to all the time: so many of them are enough, and `merge` wants no others.
_KEPT_OF = {"device-clock": 64, "dropped": 1}
#: A rank that no other contradicts is believed that its steps jumped once it has finished so many behind it.
_ENOUGH_STEPS = 10
_WHOLE = int(Flag.COMPLETE | Flag.RECORDING)
_NOTHING = np.empty(0, RECORD_DTYPE)


@dataclass(frozen=True, slots=True)
class Notice:
    """A line about a rank. `left_out`: whether it is left out from now on."""

    line: str
    left_out: bool = False


@dataclass(slots=True)
class _File:
    """How far a file was read, and the newest step of a record in it. `lines`: of facts, those that are whole."""

    read: int
    newest_step: int = -1
    lines: int = 0


class _FileName(NamedTuple):
    """What the name of a file says. `rank`: -1 where it is not a rank's. `key`: the same before and after sealing."""

    rank: int
    number: int
    suffix: str
    key: str

    @classmethod
    def of(cls, name: str) -> _FileName:
        match = _FILE.match(name)
        if match is None or (match[2] is None) != (match[3] == FACTS_SUFFIX):
            return cls(-1, -1, "", name)
        return cls(int(match[1]), int(match[2] or -1), match[3], name if match[2] is None else Path(name).stem)


@dataclass(slots=True)
class _Trouble:
    """A rank cannot be read since `since_s`; it is tried again at `again_s`, and then after `wait_s` more."""

    since_s: float
    again_s: float
    wait_s: float


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
    skipped: set[str] = field(default_factory=set)
    trouble: _Trouble | None = None
    _line: bytes = b""
    _last: int = 0
    _left_over: bool = False
    _trail: Trail | None = None
    _held: list[npt.NDArray[np.void]] = field(default_factory=list)

    @classmethod
    def of(cls, recording: RankRecording) -> FollowedRank:
        """A rank that has been read whole. Raises FormatError where its records contradict one another."""
        followed, records = cls(recording.rank), recording.records
        first = int(records["step"][0]) if len(records) else 0  # the steps before it were not recorded, or are gone
        followed._trail = Trail(int(recording.facts["process"][0]["monotonic_ns"]), step=first)
        followed.add_records(records, 0, 0)
        return followed

    def add_facts(self, content: bytes, path: Path, file: _File, parser: FactParser) -> list[Notice]:
        """What a rank added to its facts; a line that is not whole yet waits for its end. Raises FormatError."""
        *lines, self._line = (self._line + content).split(b"\n")
        notices = []
        for line in lines:
            file.lines += 1
            try:
                kind, value = parser.parse(line, path, file.lines, self.rank)
            except BadFactError as error:
                if error.needed:
                    raise
                if error.kind not in self.skipped:  # and not for each that follows
                    notices.append(Notice(f"rank {self.rank}: {error}; facts like this are skipped"))
                self.skipped.add(error.kind)
                continue
            self._add_fact(kind, value, path)
        return notices

    def _add_fact(self, kind: str, value: Any, path: Path) -> None:
        if kind == "process":
            if "process" in self.facts:
                raise FormatError(
                    f"{path}: two processes write as rank {self.rank}: segments of two jobs in one folder"
                )
            self._trail = Trail(int(value["monotonic_ns"]))
        elif kind == "name":
            self.names.setdefault(int(value[0]), value[1])
            return
        self.ended = self.ended or kind == "summary"
        self.facts.setdefault(kind, deque(maxlen=_KEPT_OF.get(kind))).append(value)

    def add_records(self, records: npt.NDArray[np.void], origin: int, first: int, *, left_over: bool = False) -> None:
        """Records in the order in which they were made; of steps from `origin` on, those before `first` are late.

        `left_over`: the launcher saved them of a rank that was killed, so they can be in its own segments too. Records
        whose steps jump are held back until `settle`. Raises FormatError.
        """
        if self._trail is None:
            raise FormatError("garbage: it has written records, and not which process it is")
        self._left_over |= left_over
        if self._left_over:  # a shared folder can show the launcher's file before the end of the rank's own
            records = records[records["number"] > self._last]
        if not len(records):
            return
        real = records[records["category"] != 0]
        self._trail.check_times(real)
        self._trail.check_numbers(records)
        last, self._last = self._last, int(records["number"][-1])
        records = without_torn_steps(records, last)
        records = records[records["category"] != 0]
        if self._held:
            self._hold(records)
        else:
            self._add(records, origin, first)

    def _add(self, records: npt.NDArray[np.void], origin: int, first: int) -> None:
        assert self._trail is not None
        row = self._trail.first_jump(records)
        if row is not None:
            self._hold(records[row:])
            records = records[:row]
        in_time = records["step"] >= first
        self.late += int((~in_time & (records["step"] >= origin)).sum())
        records = records[in_time]
        ends = (records["category"] == Category.STEP) & (records["flags"] & _WHOLE == _WHOLE)
        self.steps.update(records["step"][ends].tolist())
        self.whole = max(self.whole, max(self.steps, default=-1))
        if len(records):
            self.pending.append(records)

    def _hold(self, records: npt.NDArray[np.void]) -> None:
        assert self._trail is not None
        self._held.append(records)
        jumped = int(self._held[0]["step"][0])
        back = records["step"].astype(np.int64) < jumped - self._trail.reach
        if back.any():
            there = int(records["step"][int(back.argmax())])
            raise FormatError(
                f"garbage: its step went from {self._trail.step} to {jumped}, and then to {there} in the next records"
            )

    def settle(self, ranks: Collection[FollowedRank], origin: int, first: int, *, at_end: bool = False) -> None:
        """Decide about records whose steps jumped: others of `ranks` that are there too, or that go on where this one
        was, decide; where none does, its own following steps. Raises FormatError where the jump is garbage.
        """
        while self._held:
            assert self._trail is not None
            jumped, before, reach = int(self._held[0]["step"][0]), self._trail.step, self._trail.reach
            ends = sum(int((part["category"] == Category.STEP).sum()) for part in self._held)
            if not any(other is not self and other.reached >= jumped - reach for other in ranks):
                if any(other is not self and before + 1 < other.whole for other in ranks):
                    raise FormatError(f"garbage: its step went from {before} to {jumped}; no other rank's did")
                if ends < (2 if at_end else _ENOUGH_STEPS):
                    if at_end:
                        raise FormatError(f"garbage: its step went from {before} to {jumped} at the end")
                    return
            self._trail.jump(jumped)
            held, self._held = np.concatenate(self._held), []
            self._add(held, origin, first)

    @property
    def holds_back(self) -> bool:
        """Whether records wait for `settle`."""
        return bool(self._held)

    @property
    def reached(self) -> int:
        """The newest step of a record, held back or not."""
        newest = -1 if self._trail is None else self._trail.step
        return max([newest, *(int(part["step"].max()) for part in self._held)])

    def leave_out(self, why: str) -> None:
        """Have nothing to do with it from now on."""
        self.bad = why
        self.pending.clear()
        self._held.clear()
        self.steps.clear()

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

    `first`: the first step that was not handed out yet. `grew`: whether ranks wrote anything since the last look.
    """

    attempt: int
    directory: Path
    origin: int
    first: int = -1
    ranks: dict[int, FollowedRank] = field(default_factory=dict)
    grew: bool = False
    _files: dict[str, _File] = field(default_factory=dict)
    _names: dict[str, _FileName] = field(default_factory=dict)
    _parser: FactParser = field(default_factory=FactParser)

    def __post_init__(self) -> None:
        self.first = max(self.first, self.origin)

    def update(self, now_s: float, *, at_end: bool = False) -> list[Notice]:
        """Read what is new at `now_s`, seconds on any steady clock; a notice for each rank with which something is
        wrong. Raises OSError where the directory cannot be read.

        `at_end`: nothing comes behind this.
        """
        notices = []
        self.grew = False
        for entry, file in self._listed():
            if (rank := self.ranks.get(file.rank)) is None:
                rank = self.ranks[file.rank] = FollowedRank(file.rank)
            if rank.bad is not None or (rank.trouble is not None and now_s < rank.trouble.again_s):
                continue
            try:
                notices += self._read_on(entry, file, rank)
            except FileNotFoundError:  # sealed under another name since: the next look finds it
                continue
            except OSError as error:
                notices += self._put_off(rank, f"{entry.path}: cannot be read: {error.strerror or error}", now_s)
            except FormatError as error:
                notices.append(self._left_out(rank, str(error)))
        notices += self._recovered(now_s)
        for rank in [rank for rank in self.good.values() if rank.holds_back]:
            try:
                rank.settle(self.good.values(), self.origin, self.first, at_end=at_end)
            except FormatError as error:
                notices.append(self._left_out(rank, str(error)))
        return notices

    def _listed(self) -> list[tuple[os.DirEntry[str], _FileName]]:
        """The files of ranks; facts first, for records refer to them. Its cost is that of a look at an idle job."""
        with os.scandir(self.directory) as entries:
            there = {entry.name: entry for entry in entries}
        self._names = {name: self._names.get(name) or _FileName.of(name) for name in there}
        found = [(there[name], file) for name, file in self._names.items() if file.rank >= 0]
        return sorted(found, key=lambda one: one[1])

    def _left_out(self, rank: FollowedRank, why: str) -> Notice:
        rank.leave_out(why)
        return Notice(f"rank {rank.rank} is left out from step {self.first} on: {why}", left_out=True)

    def _put_off(self, rank: FollowedRank, why: str, now_s: float) -> Iterator[Notice]:
        """A shared folder fails now and then, and comes back."""
        trouble = rank.trouble
        if trouble is None:
            rank.trouble = _Trouble(now_s, now_s + _FIRST_RETRY_S, _FIRST_RETRY_S)
            yield Notice(f"rank {rank.rank}: {why}; it is tried again for {READ_RETRY_S:.0f} s")
        elif now_s - trouble.since_s >= READ_RETRY_S:
            yield self._left_out(rank, f"{why} for {READ_RETRY_S:.0f} s")
        elif now_s >= trouble.again_s:
            trouble.wait_s = min(2 * trouble.wait_s, _LONGEST_RETRY_S)
            trouble.again_s = now_s + trouble.wait_s

    def _recovered(self, now_s: float) -> Iterator[Notice]:
        for rank in self.ranks.values():
            if rank.trouble is not None and rank.bad is None and now_s >= rank.trouble.again_s:
                rank.trouble = None
                yield Notice(f"rank {rank.rank} can be read again")

    def _read_on(self, entry: os.DirEntry[str], name: _FileName, rank: FollowedRank) -> list[Notice]:
        is_segment = name.suffix != FACTS_SUFFIX
        if (known := self._files.get(name.key)) is None:
            known = self._files[name.key] = _File(0)
        if entry.stat().st_size <= known.read:
            return []
        path = Path(entry.path)
        with path.open("rb") as file:
            file.seek(known.read)
            content = file.read()
        if not is_segment:
            known.read += len(content)
            self.grew = True
            return rank.add_facts(content, path, known, self._parser)
        head = HEADER.size if known.read == 0 else 0
        if len(content) < head:
            return []
        records = records_in(content, path, has_header=head > 0)
        # A shared folder can show zeros where bytes are still under way; no record is numbered 0.
        absent = records["number"] == 0
        if absent.any():
            records = records[: int(absent.argmax())]
        known.read += head + len(records) * RECORD.size
        self.grew = self.grew or len(records) > 0
        known.newest_step = max(known.newest_step, int(records["step"].max(initial=-1)))
        rank.add_records(records, self.origin, self.first, left_over=name.number == LEFT_OVER_SEGMENT)
        return []

    @property
    def good(self) -> dict[int, FollowedRank]:
        """The ranks that have told who they are and are not left out."""
        return {number: rank for number, rank in self.ranks.items() if rank.bad is None and "process" in rank.facts}

    @property
    def world_size(self) -> int:
        """How many ranks the attempt has, as most of those seen say; 0 while none has.

        Where as many say one as another, it is the one that is closest to how many ranks have written.
        """
        sizes = [int(rank.facts["process"][0]["world_size"]) for rank in self.good.values()]
        seen = len(self.ranks)
        return max(set(sizes), key=lambda size: (sizes.count(size), -abs(size - seen), size), default=0)

    def leave_out_strangers(self) -> list[Notice]:
        """Leave out ranks that see another number of ranks than the most: they are of another job."""
        size, notices = self.world_size, []
        for rank in self.good.values():
            seen = int(rank.facts["process"][0]["world_size"])
            if seen != size:
                rank.leave_out(f"it saw {seen} ranks, the others {size}: segments of two jobs in one folder")
                notices.append(Notice(f"rank {rank.rank} is left out: {rank.bad}", left_out=True))
        return notices

    def leave_out(self, ranks: Collection[int], why: str) -> list[Notice]:
        """Leave out ranks with which no window can be made."""
        return [self._left_out(self.ranks[number], why) for number in ranks]

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
