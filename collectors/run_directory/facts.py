"""The schema of a rank's facts, kind by kind, and the only place that checks it.

In: a line of a `.facts` file. Out: kind and value, as plain JSON data that the merge can rely on; else a FormatError
that names file, line, kind and what was expected. Unknown kinds pass: a newer recorder may write more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tracekit.base.errors import FormatError
from tracekit.trace.model import LARGEST_SIZE

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
    """Parses facts of any ranks. A fact that all ranks of a group write in the same words becomes one object, which is
    kept and processed once instead of once per rank. `skipped`: kinds of which a bad fact was reported and skipped.
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
    shapes = {_shape(one, depth + 1) for one in nested}
    if len(shapes) != 1 or (inner := shapes.pop()) is None:
        return None
    return (len(nested), *inner)
