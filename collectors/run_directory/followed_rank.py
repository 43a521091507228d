"""One rank of a run: its facts, the records not delivered yet, and checks that they are plausible.

In: new data of the rank's files. Out: records of steps; a FormatError if they are impossible.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import GarbageError, RankRecording, Trail, joined, without_torn_steps
from tracekit.trace.model import LARGEST_SIZE

#: Kinds of facts that ranks keep adding: how many of them to keep while a rank runs, all that `merge` needs.
_KEPT_OF = {"device-clock": 64, "dropped": 1}
#: If no other rank contradicts it, a jump of a rank's steps is accepted once it has finished this many after it.
_ENOUGH_STEPS = 10
#: How often a rank is read again after garbage, per attempt.
MOST_RETURNS = 3
_WHOLE = int(Flag.COMPLETE | Flag.RECORDING)


@dataclass(frozen=True, slots=True)
class Notice:
    """A line about a rank. `left_out`: the rank is left out from now on."""

    line: str
    left_out: bool = False


@dataclass(slots=True)
class FileRead:
    """How far a file was read, and the newest step of a record in it. `lines`: of facts, those that are whole."""

    read: int
    newest_step: int = -1
    lines: int = 0


@dataclass(slots=True)
class Trouble:
    """A rank has been unreadable since `since_s`; the next try is at `again_s`, the one after it `wait_s` later."""

    since_s: float
    again_s: float
    wait_s: float


@dataclass(slots=True)
class FollowedRank:
    """One rank: its facts, and the records not delivered yet.

    `whole`: the newest step that was recorded from begin to end, -1 without any. `late`: records of steps that had been
    delivered. `bad`: why it is left out, None if it is not; `returns`: number of further rereads. `on_trial`: it is
    being reread and not delivered yet. `ended`: it has closed its recorder. `over`: nothing follows what its files
    hold now. They may begin at any step, and a jump of its steps counts unless other ranks contradict it.
    """

    rank: int
    over: bool = False
    whole: int = -1
    late: int = 0
    bad: str | None = None
    ended: bool = False
    facts: dict[str, deque[Any]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    pending: list[npt.NDArray[np.void]] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    trouble: Trouble | None = None
    returns: int = MOST_RETURNS
    on_trial: bool = False
    _line: bytes = b""
    _last: int = 0
    _left_over: bool = False
    _trail: Trail | None = None
    _held: list[npt.NDArray[np.void]] = field(default_factory=list)

    def add_facts(self, content: bytes, path: Path, file: FileRead, parser: FactParser) -> list[Notice]:
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
                if error.kind not in parser.skipped:  # and not for each that follows, of any rank
                    notices.append(Notice(f"rank {self.rank}: {error}; facts like this are skipped"))
                parser.skipped.add(error.kind)
                continue
            self._add_fact(kind, value, path)
        return notices

    def _add_fact(self, kind: str, value: Any, path: Path) -> None:
        if kind == "process":
            if "process" in self.facts:
                if self.over:
                    return
                raise FormatError(
                    f"{path}: two processes write as rank {self.rank}: segments of two jobs in one folder"
                )
            self._trail = Trail(int(value["monotonic_ns"]))
        elif kind == "name":
            self.names.setdefault(int(value[0]), value[1])
            return
        self.ended = self.ended or kind == "summary"
        self.facts.setdefault(kind, deque(maxlen=None if self.over else _KEPT_OF.get(kind))).append(value)

    def add_records(self, records: npt.NDArray[np.void], origin: int, first: int, *, left_over: bool = False) -> None:
        """Records in the order in which they were made; of steps from `origin` on, those before `first` are late.

        `left_over`: the launcher saved them from a killed rank, so they may be in its own segments, too. Records
        whose steps jump are held back until `settle`. Raises FormatError.
        """
        if self._trail is None:
            raise FormatError("garbage: it wrote records, but no fact about its process")
        self._left_over |= left_over
        if self._left_over:  # a shared folder can show the launcher's file before the end of the rank's own
            records = records[records["number"] > self._last]
        if not len(records):
            return
        real = records[records["category"] != 0]
        self._trail.check_times(real)
        self._trail.check_numbers(records)
        if self.over and self._last == 0 and len(real):
            self._trail.step = int(real["step"][0])
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
            later = int(records["step"][int(back.argmax())])
            raise GarbageError(
                f"garbage: its step went from {self._trail.step} to {jumped}, and then to {later} in the next records"
            )

    def settle(self, ranks: Collection[FollowedRank], origin: int, first: int, *, at_end: bool = False) -> None:
        """Decide about records whose steps jumped. Other `ranks` decide, if they jumped too or continue where this one
        was; else its own following steps do. Raises FormatError if the jump is garbage.
        """
        while self._held:
            assert self._trail is not None
            jumped, before, reach = int(self._held[0]["step"][0]), self._trail.step, self._trail.reach
            ends = sum(int((part["category"] == Category.STEP).sum()) for part in self._held)
            if not any(other is not self and other.reached >= jumped - reach for other in ranks):
                if any(other is not self and before + 1 < other.whole for other in ranks):
                    raise GarbageError(f"garbage: its step went from {before} to {jumped}; no other rank's did")
                if not self.over and ends < (2 if at_end else _ENOUGH_STEPS):
                    if at_end:
                        raise GarbageError(f"garbage: its step went from {before} to {jumped} at the end")
                    return
            self._trail.jump(jumped)
            held, self._held = joined(self._held), []
            self._add(held, origin, first)

    @property
    def holds_back(self) -> bool:
        """True if records wait for `settle`."""
        return bool(self._held)

    @property
    def reached(self) -> int:
        """The newest step of a record, held back or not."""
        newest = -1 if self._trail is None else self._trail.step
        return max([newest, *(int(part["step"].max()) for part in self._held)])

    def begin_again(self) -> None:
        """Read the rank again, on trial, from records after the garbage."""
        self.bad, self.on_trial = None, True
        self.returns -= 1
        self._trail, self._last, self.whole = Trail(int(self.facts["process"][0]["monotonic_ns"])), 0, -1

    def leave_out(self, why: str, *, can_pass: bool = False) -> None:
        """Ignore the rank from now on; if `can_pass`, until `begin_again`."""
        self.bad, self.on_trial = why, False
        self.returns = self.returns if can_pass else 0
        self.pending.clear()
        self._held.clear()
        self.steps.clear()

    def recording(self, records: npt.NDArray[np.void]) -> RankRecording:
        """`records` with all that the rank has told about itself."""
        facts = {kind: list(values) for kind, values in self.facts.items()}
        return RankRecording(self.rank, records, dict(self.names), facts)

    def take(self, last: int) -> npt.NDArray[np.void]:
        """Return the records of steps up to `last`; drop them from memory."""
        records = joined(self.pending)
        complete = records["step"] <= last
        rest = records[~complete]
        self.pending = [rest] if len(rest) else []
        self.steps = {step for step in self.steps if step > last}
        return records[complete]


_Rank = Annotated[int, msgspec.Meta(ge=0, lt=LARGEST_SIZE)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SIZE)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
#: Nanoseconds; a sum or difference of two fits into 64 bits.
_Time = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
#: Names are numbered in 16 bits, groups in 31.
_NameNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_GroupNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _ProcessFact(msgspec.Struct):
    world_size: _Size
    host: str
    time_ns: _Time
    monotonic_ns: _Time
    rank: _Rank | None = None
    attempt: _Count | None = None
    process_id: _Count | None = None
    program: list[str] | None = None
    scheduler: dict[str, str] = {}


class _GroupFact(msgspec.Struct):
    number: _GroupNumber
    name: str
    description: str | None
    ranks: Annotated[list[_Rank], msgspec.Meta(min_length=1)]


class _Rows(msgspec.Struct):
    number: _GroupNumber
    sent: list[_Count]
    received: list[_Count]


class _MeshFact(msgspec.Struct):
    names: list[str] | None
    ranks: Annotated[list[Any], msgspec.Meta(min_length=1)]


class _PipelineFact(msgspec.Struct):
    num_stages: _Size
    ranks: Annotated[list[_Rank], msgspec.Meta(min_length=1)]
    group_rank: _Rank


class _Megatron(msgspec.Struct):
    ranks: dict[str, _Rank]
    sizes: dict[str, _Size]
    vpp: _Size


class _Summary(msgspec.Struct):
    steps: _Count = 0
    written: _Count = 0
    dropped: _Count = 0
    unfinished: _Count = 0
    failures: dict[str, _Count] = {}
    off: str | None = None
    gpu_used: bool = False


class _Torch(msgspec.Struct):
    version: str
    device: str | None = None


class _LostHook(msgspec.Struct):
    hook: str
    reason: str
    lacks: str


class _Device(msgspec.Struct):
    model: str | None
    uuid: str | None = None


class _Nccl(msgspec.Struct):
    version: list[int] | None = None
    backends: str = ""


_SCHEMA: dict[str, Any] = {
    "process": _ProcessFact,
    "name": tuple[_NameNumber, str],
    "group": _GroupFact,
    "rows": _Rows,
    "mesh": _MeshFact,
    "pipeline": _PipelineFact,
    "megatron": _Megatron,
    "device-clock": tuple[_Time, _Time, _Time],
    "dropped": _Count,
    "summary": _Summary,
    "torch": _Torch,
    "lost-hook": _LostHook,
    "device": _Device,
    "nccl": _Nccl,
}
#: Kinds without which the records of a rank cannot be understood; a bad one of any other kind can be skipped.
_NEEDED = frozenset({"process", "name", "group", "mesh", "pipeline", "megatron"})
#: Kinds of facts that list the ranks of a group, and that each of these ranks writes in the same words.
_WRITTEN_ALIKE = frozenset({"mesh", "group"})
#: Meshes have a few dimensions.
_DEEPEST = 16


class BadFactError(FormatError):
    """A fact does not fit its kind. `needed`: without it, the records of its rank cannot be understood."""

    def __init__(self, message: str, kind: str, *, needed: bool) -> None:
        super().__init__(message)
        self.kind, self.needed = kind, needed


@dataclass(frozen=True, slots=True)
class FactParser:
    """Parses facts of any ranks; unknown kinds pass, as of a newer recorder. A fact that all ranks of a group write in
    the same words becomes one object, which is kept and processed once instead of once per rank. `skipped`: kinds of
    which a bad fact was reported and skipped.
    """

    skipped: set[str] = field(default_factory=set)
    _shared: dict[bytes, tuple[str, Any]] = field(default_factory=dict)

    def parse(self, line: bytes, path: Path, number: int, rank: int) -> tuple[str, Any]:
        """Kind and value of line `number`, from 1, of `path`, the facts of `rank`.

        Raises BadFactError if it is no fact, or does not fit its kind.
        """
        if (shared := self._shared.get(line)) is not None:
            return shared
        try:
            fact = json.loads(line)
            kind, value = fact["kind"], fact["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadFactError(
                f"{path}: damaged line {number}, {line[:60]!r}: expected a fact; copy it again", "", needed=True
            ) from None
        if problem := _problem(kind, value, rank):
            raise BadFactError(
                f"{path}: line {number}: the fact {kind!r:.40} is {json.dumps(value):.80}: {problem}; copy it again",
                str(kind),
                needed=kind in _NEEDED,
            )
        if kind in _WRITTEN_ALIKE:
            self._shared[line] = (kind, value)
        return kind, value


def _problem(kind: object, value: Any, rank: int) -> str | None:
    """The problem of a fact, with what was expected; None if there is none."""
    if not isinstance(kind, str):
        return "expected text as its kind"
    if (expected := _SCHEMA.get(kind)) is None:
        return None
    try:
        fact = msgspec.convert(value, expected)
    except (msgspec.ValidationError, RecursionError) as error:
        message = str(error)
        return f"{message[:1].lower()}{message[1:]:.200}"
    if isinstance(fact, _ProcessFact):
        return _process_problem(fact, rank)
    if isinstance(fact, _MeshFact) and _shape(fact.ranks) is None:
        return "expected `ranks` as lists of equal lengths, of numbers of ranks"
    if isinstance(fact, _PipelineFact | _GroupFact) and len(set(fact.ranks)) < len(fact.ranks):
        return "expected every rank once"
    return None


def _process_problem(process: _ProcessFact, rank: int) -> str | None:
    if process.rank not in (None, rank):
        return f"expected rank {rank}, as the file is named"
    if rank >= process.world_size:
        return f"expected a `world_size` above its rank {rank}"
    return None


def _shape(nested: Any, depth: int = 0) -> tuple[int, ...] | None:
    """Lengths of nested lists, outermost first; None if they are no table of ranks."""
    if isinstance(nested, int) and not isinstance(nested, bool) and 0 <= nested < LARGEST_SIZE:
        return ()
    if not isinstance(nested, list) or not nested or depth > _DEEPEST:
        return None
    shapes = {_shape(part, depth + 1) for part in nested}
    if len(shapes) != 1 or (inner := shapes.pop()) is None:
        return None
    return (len(nested), *inner)
