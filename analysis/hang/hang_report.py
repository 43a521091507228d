"""Results of the analysis of a hang, in the terms and sentences that terminal, JSON, dashboard and alerts share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field, to_builtins


class StallClass(StrEnum):
    """Reasons why a rank holds others up."""

    HOST = "host stuck"
    DEVICE = "device or network stuck"
    GONE = "process gone or interpreter locked"
    SILENT = "interpreter locked, or idle in other code"
    MISMATCH = "mismatch"
    PARTNER = "partner"


class HangCulprit(Struct, frozen=True):
    """A rank that holds others up, in an `operation` of a process group, which may have no name.

    `since_s`: when the first of them began to wait, before the dumps were taken, `since_unix_ns` by the clock; None if
    unknown. `stall` numbers stalls that do not wait for each other, from 0; `waiting` counts the ranks that wait for
    it, directly or not.
    """

    rank: int
    host: str | None
    stall_class: StallClass = field(name="class")
    group: str
    operation: str
    since_s: float | None
    since_unix_ns: int | None
    stall: int
    waiting: int
    phase: str | None
    evidence: tuple[str, ...]
    stack: tuple[str, ...] | None


class WaitingRank(Struct, frozen=True):
    """A rank that only waits: its earliest unfinished operation, and the first few ranks that hold that up."""

    rank: int
    waits_for: tuple[int, ...] = field(name="for")
    operation: str
    group: str


class HungGroup(Struct, frozen=True):
    """The earliest unfinished operation of a process group, and its ranks by their state."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    finished: tuple[int, ...]
    not_issued: tuple[int, ...]
    unknown: tuple[int, ...]


class UndecidedStall(Struct, frozen=True):
    """A stall whose culprit the dumps do not show: the candidates, and the evidence that would decide between them.

    `alike`: all of them are in the same state, so that there is no rank to look for; `missing` says what there is.
    """

    ranks: tuple[int, ...]
    operation: str
    missing: str
    alike: bool = False


class StackGroup(Struct, frozen=True):
    """Ranks whose main threads have the same stack; `frames` innermost first."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


class HangReport(Struct, frozen=True):
    """The verdict on one set of dumps, as `tracekit hang --json` prints it and report.json holds it (docs/hang.md).

    Stores keep it: a field that is added has a default.

    `hang`: any rank waits for another one, or holds others up. `first_step`: what to do first, None without culprits.
    `stacks`: of all ranks whose dumps have one, smallest groups first: the few that differ from the many.
    """

    hang: bool
    headline: str
    first_step: str | None
    world_size: Annotated[int, Meta(ge=0)]
    dumps: int
    culprits: tuple[HangCulprit, ...]
    undecided: tuple[UndecidedStall, ...]
    waiting: tuple[WaitingRank, ...]
    groups: tuple[HungGroup, ...]
    stacks: tuple[StackGroup, ...]
    without_dump: tuple[int, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        plain: dict[str, Any] = to_builtins(self)
        return plain


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


def headline(
    seen: str, culprits: Sequence[HangCulprit], undecided: Sequence[UndecidedStall], waiting: int, held_up: int
) -> str:
    """The finding, in one line. `seen`: what is known of how many ranks; `waiting`: how many ranks do; `held_up`: how
    many wait for the culprits and are none.
    """
    if not (culprits or undecided or waiting):
        return f"NO HANG  no rank waits for another one ({seen})"
    if not culprits and undecided and all(stall.alike for stall in undecided):
        return f"HANG  {waiting_ranks(waiting)}, all in the same state: no rank holds them up ({seen})"
    if not culprits:
        return f"HANG  {waiting_ranks(waiting)}; who holds them up is not certain ({seen})"
    count, stalls = len(culprits), len({culprit.stall for culprit in culprits})
    apart = f" in {stalls} independent stalls" if stalls > 1 else ""
    if held_up == 0 and count > 1:
        return f"HANG  {count} ranks hold each other up{apart} ({seen})"
    verb = "holds" if count == 1 else "hold"
    return f"HANG  {count} rank{'s' * (count != 1)} {verb} up {held_up} other{'s' * (held_up != 1)}{apart} ({seen})"


def waiting_ranks(count: int) -> str:
    """The number of waiting ranks, in words."""
    return "1 rank waits" if count == 1 else f"{count:,} ranks wait"


def first_step(culprits: Sequence[HangCulprit]) -> str | None:
    """The first action for the most frequent class of the culprits; None if there are none."""
    classes = Counter(culprit.stall_class for culprit in culprits).most_common(1)
    return _FIRST[classes[0][0]] if classes else None
