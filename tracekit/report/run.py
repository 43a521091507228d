"""The verdict of a run: what all windows of a job lost, by cause and place.

In: what `tracekit.bill` adds up of a store. Out: `RunVerdict`, which reports, pages, commands and tables show. It is a
ledger: its causes add up to what the windows lost, and they are rows of the bill.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from tracekit.report.verdict import LossKind

#: A cause that costs less than this share of the step is not a headline by itself.
SMALLEST_ALARMING_SHARE = 0.05
#: The cause of what is left of a straggler's loss once its causes are named.
UNEXPLAINED = "unexplained"


class State(StrEnum):
    """Whether a cause still acts on its job."""

    OPEN = "open"
    OVER = "over"
    ENDED = "ended-with-the-job"


class RunCause(Struct, frozen=True):
    """What one cause at one place cost a run. `kind`: of the loss; `ranks`: global ranks, none for the whole job;
    `hosts`: of these ranks, as far as known.

    `lost_share`: of the time of the whole run. `first_step`, `last_step`: the first and the last step that it slowed
    down; `since`, `until`: when the first began and the last ended, seconds since the epoch, None where unknown.
    `windows`: how many show it; `clear_windows`: how many between the first and the last of these do not;
    `worst_window`: the one that lost most to it, and `worst_share`: of its time. `redone_s`: the part of `lost_s` in
    steps that a later attempt did again: the bill has it as lost work. `do`: what to do about it first, as the report
    on `worst_window` says; None if it says nothing, or was not asked.
    """

    kind: LossKind | None
    cause: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    lost_s: float
    lost_share: float
    gpu_hours_lost: float
    first_step: int | None
    last_step: int | None
    since: float | None
    until: float | None
    state: State
    windows: int
    worst_window: int
    worst_share: float
    redone_s: float
    clear_windows: int = 0
    do: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether it says who or why."""
        return self.kind is not None and self.cause not in (UNEXPLAINED, str(self.kind))


class RunVerdict(Struct, frozen=True):
    """What a run lost in all its windows.

    `recorded_s`: seconds of the recorded steps whose losses are known; `covered_share`: these, of the time of the whole
    run, `wall_s`. `lost_share`: of that time, too. `causes`: worst first. `ended`: how the job ended, None while it
    runs and if unknown. `notes`: what the times cannot be trusted for. `of_windows`: how many the job has, for the
    verdict on a part of its run; None for the whole run.
    """

    first_step: int
    last_step: int
    windows: int
    wall_s: float
    covered_share: float
    recorded_s: float
    lost_s: float
    lost_share: float
    gpu_hours_lost: float
    causes: Sequence[RunCause]
    ended: str | None
    notes: Sequence[str]
    of_windows: int | None = None

    @property
    def alarming(self) -> tuple[RunCause, ...]:
        """The causes to tell a person about, worst first: those that cost enough of a window to be its headline."""
        return tuple(one for one in self.causes if one.kind and one.worst_share >= SMALLEST_ALARMING_SHARE)
