"""The time of one job, window by window, and the verdict of its run: what each cause at each place cost it.

In: windows with what each lost. Out: a `RunVerdict`. A cause is open until as many windows in a row no longer show it
as close an incident, and it ends with its job.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from tracekit.bill.ledger import Bill
from tracekit.bill.placement import Stretch
from tracekit.costs.claimed import PlacedLoss
from tracekit.report.run import RunCause, RunVerdict, State
from tracekit.store.incidents import CLEAR_WINDOWS


class BilledLoss(Struct, frozen=True):
    """What window `number` lost to one cause: `billed_s` seconds are on the bill as that; `redone_s` are in steps that
    a later attempt did again, which the bill has as lost work. `window_s`: seconds of all its steps.
    """

    number: int
    loss: PlacedLoss
    billed_s: float
    redone_s: float
    window_s: float
    gpus: int


class BilledWindow(Struct, frozen=True):
    """A window in an account: `row` of the catalogue; when it began and ended, seconds after the origin of the bill;
    and the seconds of its steps, None if their losses are not known.
    """

    row: Mapping[str, Any]
    stretch: Stretch
    judged_s: float | None

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it ran, by its own clock, between two times, seconds since the epoch."""
        row = self.row
        if row["started_at"] is None:
            return False
        return bool(row["ended_at"] + (row["recorded_s"] or 0.0) >= since and row["started_at"] <= until)


class Account(Struct, frozen=True):
    """The time of one job, or of a part of it. `windows`: oldest first. `wall_s`: seconds from the begin to the end.
    `judged`: the numbers of the windows of the job whose losses are known, ascending. `whole`: of all windows, for a
    part.
    """

    bill: Bill
    losses: Sequence[BilledLoss]
    windows: Sequence[BilledWindow]
    wall_s: float
    judged: Sequence[int]
    whole: Account | None = None

    def judged_between(self, first: int, last: int) -> int:
        """How many of the windows with these numbers have losses that are known."""
        return bisect_right(self.judged, last) - bisect_left(self.judged, first)

    def between(self, since: float, until: float) -> Account:
        """The part that its windows between two times make up, seconds since the epoch; all if none is."""
        windows = [window for window in self.windows if window.overlaps(since, until)]
        if len(windows) in (0, len(self.windows)):
            return self
        numbers = {window.row["number"] for window in windows}
        losses = [loss for loss in self.losses if loss.number in numbers]
        wall_s = windows[-1].stretch.until_s - windows[0].stretch.start_s
        return Account(self.bill, losses, windows, wall_s, self.judged, self)


def run_of(account: Account) -> RunVerdict:
    """The verdict that the account of a job shows, or of a part of it. What is over is over for the whole job."""
    whole, rows = account.whole or account, [window.row for window in account.windows]
    last_seen = {_place(billed): billed.number for billed in whole.losses}
    moved_to = {place[:3]: place for place in sorted(last_seen, key=lambda place: last_seen[place])}
    of_place = dict[tuple[Any, ...], list[BilledLoss]]()
    for billed in account.losses:
        of_place.setdefault(_place(billed), []).append(billed)
    ended, causes = _ending(rows[0]), list[RunCause]()
    for place, lost in of_place.items():
        clear = whole.judged_between(last_seen[place] + 1, whole.windows[-1].row["number"])
        state = State.OVER if moved_to[place[:3]] != place else _state(clear, has_ended=ended is not None)
        causes.append(_cause(lost, account, state))
    causes.sort(key=lambda cause: -cause.lost_s)
    lost_s, recorded_s = sum(cause.lost_s for cause in causes), sum(each.judged_s or 0.0 for each in account.windows)
    return RunVerdict(
        first_step=min(row["first_step"] for row in rows),
        last_step=max(row["last_step"] for row in rows),
        windows=len(rows),
        wall_s=account.wall_s,
        covered_share=_share(min(recorded_s, account.wall_s), account.wall_s),
        recorded_s=recorded_s,
        lost_s=lost_s,
        lost_share=_share(lost_s, account.wall_s),
        gpu_hours_lost=sum(cause.gpu_hours_lost for cause in causes),
        causes=causes,
        ended=ended,
        notes=account.bill.notes,
        of_windows=None if account.whole is None else len(whole.windows),
    )


def _place(billed: BilledLoss) -> tuple[Any, ...]:
    """Cause and place of a loss: ranks on hosts, as a restart can move ranks."""
    loss = billed.loss
    return loss.kind, loss.cause, loss.ranks, loss.hosts


def _ending(row: Any) -> str | None:
    """How a job that was watched has ended; None while it runs, and if nobody watched it."""
    if row["watched_until_s"] is None:
        return None
    return row["ending"] or "ended"


def _cause(billed: Sequence[BilledLoss], account: Account, state: State) -> RunCause:
    """One cause at one place, oldest loss first. Its times are those of its first and its last slow step."""
    first, last = billed[0], billed[-1]
    worst = max(billed, key=_lost_s)
    lost_s, shown = sum(map(_lost_s, billed)), {one.number for one in billed}
    return RunCause(
        kind=first.loss.kind,
        cause=first.loss.cause,
        ranks=first.loss.ranks,
        hosts=first.loss.hosts,
        lost_s=lost_s,
        lost_share=_share(lost_s, account.wall_s),
        gpu_hours_lost=sum(_lost_s(one) * one.gpus for one in billed) / 3600,
        first_step=first.loss.first_step,
        last_step=last.loss.last_step,
        since=first.loss.since,
        until=last.loss.until,
        state=state,
        windows=len(shown),
        clear_windows=account.judged_between(first.number, last.number) - len(shown),
        worst_window=worst.number,
        worst_share=_share(_lost_s(worst), worst.window_s),
        redone_s=sum(one.redone_s for one in billed),
    )


def _state(clear: int, *, has_ended: bool) -> State:
    """`clear`: windows after the last that showed it."""
    if has_ended:
        return State.OVER if clear else State.ENDED
    return State.OVER if clear >= CLEAR_WINDOWS else State.OPEN


def _lost_s(billed: BilledLoss) -> float:
    return billed.billed_s + billed.redone_s


def _share(seconds: float, of_s: float) -> float:
    return seconds / of_s if of_s > 0 else 0.0
