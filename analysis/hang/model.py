"""Results of the analysis of a hang, in the terms that terminal, JSON and alerts share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tracekit.trace.dumps import ProcessGroup


class StallClass(StrEnum):
    """Reasons why a rank holds others up."""

    HOST = "host stuck"
    DEVICE = "device or network stuck"
    GONE = "process gone or interpreter locked"
    MISMATCH = "mismatch"
    PARTNER = "partner"


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that holds others up.

    `stall` numbers stalls that do not wait for each other, from 0; `waiting` counts the ranks that wait for it,
    directly or not; `since_ns`: time at which the first of them began to wait; `operation`: the one that they wait in.
    """

    rank: int
    stall_class: StallClass
    stall: int
    host: str | None
    group: ProcessGroup
    operation: str
    since_ns: int
    waiting: int
    evidence: tuple[str, ...]
    phase: str | None = None
    stack: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that only waits: its earliest unfinished operation, and the first few ranks that hold that up."""

    rank: int
    waits_for: tuple[int, ...]
    operation: str
    group: ProcessGroup


@dataclass(frozen=True, slots=True)
class StalledGroup:
    """The earliest unfinished operation of a process group, and its members by their state."""

    group: ProcessGroup
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    finished: tuple[int, ...]
    not_issued: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Undecided:
    """A stall whose culprit the dumps do not show: the candidates, and the evidence that would decide between them."""

    ranks: tuple[int, ...]
    operation: str
    missing: str


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads have the same stack; `frames` innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangReport:
    """The verdict on one set of dumps. A hang is found if any rank waits (`hung`).

    `stacks`: of all ranks whose dumps have one, smallest groups first: the few that differ from the many.
    """

    world_size: int
    dumps: int
    culprits: tuple[Culprit, ...]
    undecided: tuple[Undecided, ...]
    waiting: tuple[Waiting, ...]
    groups: tuple[StalledGroup, ...]
    stacks: tuple[StackGroup, ...]
    without_dump: tuple[int, ...]
    taken_ns: int | None
    notes: tuple[str, ...]

    @property
    def hung(self) -> bool:
        """True if any rank waits for another one, or holds others up."""
        return bool(self.culprits or self.undecided or self.waiting)
