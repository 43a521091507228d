"""Results of the analysis of a hang, in the terms and sentences that terminal, JSON, dashboard and alerts share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from tracekit.trace.dumps import DumpedGroup


class StallClass(StrEnum):
    """Reasons why a rank holds others up."""

    HOST = "host stuck"
    DEVICE = "device or network stuck"
    GONE = "process gone or interpreter locked"
    SILENT = "interpreter locked, or idle in other code"
    MISMATCH = "mismatch"
    PARTNER = "partner"


@dataclass(frozen=True, slots=True)
class HangCulprit:
    """A rank that holds others up.

    `stall` numbers stalls that do not wait for each other, from 0; `waiting` counts the ranks that wait for it,
    directly or not; `since_ns`: time at which the first of them began to wait; `operation`: the one that they wait in.
    """

    rank: int
    stall_class: StallClass
    stall: int
    host: str | None
    group: DumpedGroup
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
    group: DumpedGroup


@dataclass(frozen=True, slots=True)
class StalledGroup:
    """The earliest unfinished operation of a process group, and its members by their state."""

    group: DumpedGroup
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    finished: tuple[int, ...]
    not_issued: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UndecidedStall:
    """A stall whose culprit the dumps do not show: the candidates, and the evidence that would decide between them.

    `alike`: all of them are in the same state, so that there is no rank to look for; `missing` says what there is.
    """

    ranks: tuple[int, ...]
    operation: str
    missing: str
    alike: bool = False


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads have the same stack; `frames` innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangReport:
    """The verdict on one set of dumps. A hang is found if any rank waits (`hung`).

    `stacks`: of all ranks whose dumps have one, smallest groups first: the few that differ from the many. `held_up`:
    how many ranks wait for the culprits and are none; `seen_as`: what is known of how many ranks.
    """

    world_size: int
    dumps: int
    culprits: tuple[HangCulprit, ...]
    undecided: tuple[UndecidedStall, ...]
    waiting: tuple[Waiting, ...]
    groups: tuple[StalledGroup, ...]
    stacks: tuple[StackGroup, ...]
    without_dump: tuple[int, ...]
    taken_ns: int | None
    notes: tuple[str, ...]
    held_up: int = 0
    seen_as: str = "left a dump"

    @property
    def hung(self) -> bool:
        """True if any rank waits for another one, or holds others up."""
        return bool(self.culprits or self.undecided or self.waiting)


#: What to do first about a culprit.
_FIRST = {
    StallClass.HOST: "look at its Python stack (py-spy dump --pid PID on its host): it computes, reads or waits there",
    StallClass.DEVICE: "look for Xid errors (dmesg), nvidia-smi and the network card on its host; restart without it",
    StallClass.GONE: "is its process alive? If not: exit code, OOM killer; if so: py-spy dump --native --pid PID",
    StallClass.SILENT: (
        "py-spy dump --pid PID on its host: a thread that holds the GIL in native code has locked the interpreter"
        " (--native shows where); else it is idle or busy elsewhere, outside this group"
    ),
    StallClass.MISMATCH: "compare these calls: the program calls collectives in different order or size",
    StallClass.PARTNER: "look for the missing receive in its pipeline schedule",
}


def headline(report: HangReport) -> str:
    """The finding, in one line."""
    seen = f"{report.dumps} of {report.world_size} rank{'s' * (report.world_size != 1)} {report.seen_as}"
    if not report.hung:
        return f"NO HANG  no rank waits for another one ({seen})"
    if not report.culprits and report.undecided and all(one.alike for one in report.undecided):
        return f"HANG  {waiting_ranks(len(report.waiting))}, all in the same state: no rank holds them up ({seen})"
    if not report.culprits:
        return f"HANG  {waiting_ranks(len(report.waiting))}; who holds them up is not certain ({seen})"
    held, count = report.held_up, len(report.culprits)
    stalls = len({one.stall for one in report.culprits})
    apart = f" in {stalls} independent stalls" if stalls > 1 else ""
    if held == 0 and count > 1:
        return f"HANG  {count} ranks hold each other up{apart} ({seen})"
    verb = "holds" if count == 1 else "hold"
    return f"HANG  {count} rank{'s' * (count != 1)} {verb} up {held} other{'s' * (held != 1)}{apart} ({seen})"


def waiting_ranks(count: int) -> str:
    """The number of waiting ranks, in words."""
    return "1 rank waits" if count == 1 else f"{count:,} ranks wait"


def first_step(report: HangReport) -> str | None:
    """The first action for the most frequent class of the culprits; None if there are none."""
    classes = Counter(one.stall_class for one in report.culprits).most_common(1)
    return _FIRST[classes[0][0]] if classes else None
