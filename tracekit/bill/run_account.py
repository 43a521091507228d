"""The verdict of a run: what each cause at each place cost a job over all its windows, from when to when.

In: the account of a job in a store. Out: a `RunVerdict`. A cause is open until as many windows in a row no longer
show it as close an incident, and it ends with its job.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from tracekit.base.errors import StoreError
from tracekit.bill.stored import Account, BilledLoss, account_of
from tracekit.report.answer import Culprit
from tracekit.report.nodes import Accused
from tracekit.report.report import Report
from tracekit.report.run import RunCause, RunVerdict, State
from tracekit.store import Store
from tracekit.store.incidents import CLEAR_WINDOWS

#: Causes whose advice is looked up.
_MOST_ADVISED = 4


def run_of_job(store: Store, name: str) -> RunVerdict:
    """The verdict of a job in a store, with what to do. Raises StoreError; NotStoredError if it has no window."""
    return advised(store, name, run_of(account_of(store, name)))


def advised(store: Store, name: str, run: RunVerdict) -> RunVerdict:
    """The verdict with what to do about its worst causes, as far as the reports on their windows can be read."""
    worst, reports = run.alarming[:_MOST_ADVISED], dict[tuple[str, int], Report]()
    with suppress(StoreError):  # a damaged report: `tracekit store check` names it
        reports = store.reports([(name, cause.worst_window) for cause in worst])
    advice = {id(cause): _advice(cause, reports.get((name, cause.worst_window))) for cause in worst}
    return replace(run, causes=[replace(cause, do=advice.get(id(cause))) for cause in run.causes])


def _advice(cause: RunCause, report: Report | None) -> str | None:
    """What the report on a window says to do about a cause."""
    if report is None:
        return None
    for position, account in enumerate(report.answer.accounts):
        if (account.kind, account.ranks) == (cause.cause, cause.ranks):
            action = report.answer.action if position == 0 else None
            return action or account.fix or account.check or None
    return None


def accused_of_run(store: Store, name: str) -> Accused | None:
    """The ranks that the causes of a run of several windows are on, costliest cause first, each as in the window that
    lost most to it; `cost_s` is of the mean step of the run. None if its windows name nobody.
    """
    run = run_of(account_of(store, name))
    on_ranks = [cause for cause in run.alarming if cause.ranks]
    reports = store.reports([(name, cause.worst_window) for cause in on_ranks])
    steps, culprits = run.last_step - run.first_step + 1, dict[tuple[Any, ...], Culprit]()
    for cause in on_ranks:
        report = reports.get((name, cause.worst_window))
        for culprit in () if report is None else report.answer.culprits:
            if culprit.rank in cause.ranks:
                of_run = replace(culprit, cost_s=cause.lost_s / steps, first_step=cause.first_step)
                culprits.setdefault((culprit.rank, culprit.host, culprit.part), of_run)
    if run.windows < 2 or not culprits:
        return None
    trust = f"{run.covered_share:.0%} of the time of the run is judged, in {run.windows:,} windows"
    return Accused(name, trustworthy=True, trust=trust, culprits=tuple(culprits.values()))


def run_of(account: Account) -> RunVerdict:
    """The verdict that the account of a job shows, or of a part of it. What is over is over for the whole job."""
    whole, rows = account.whole or account, [window.row for window in account.windows]
    last_seen = {_place(billed): billed.number for billed in whole.losses}
    moved_to = {place[:3]: place for place in sorted(last_seen, key=lambda place: last_seen[place])}
    of_place = dict[tuple[Any, ...], list[BilledLoss]]()
    for billed in account.losses:
        of_place.setdefault(_place(billed), []).append(billed)
    ended, causes = _ending(rows[0]), list[RunCause]()
    judged = [window.row["number"] for window in whole.windows if window.judged_s is not None]
    for place, lost in of_place.items():
        clear = len(judged) - bisect_right(judged, last_seen[place])
        state = State.OVER if moved_to[place[:3]] != place else _state(clear, has_ended=ended is not None)
        causes.append(_cause(lost, account.wall_s, state))
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


def _cause(billed: Sequence[BilledLoss], wall_s: float, state: State) -> RunCause:
    """One cause at one place, oldest loss first. Its times are those of its first and its last slow step."""
    first, last = billed[0], billed[-1]
    worst = max(billed, key=_lost_s)
    lost_s = sum(map(_lost_s, billed))
    return RunCause(
        kind=first.loss.kind,
        cause=first.loss.cause,
        ranks=first.loss.ranks,
        hosts=first.loss.hosts,
        lost_s=lost_s,
        lost_share=_share(lost_s, wall_s),
        gpu_hours_lost=sum(_lost_s(one) * one.gpus for one in billed) / 3600,
        first_step=first.loss.first_step,
        last_step=last.loss.last_step,
        since=first.loss.since,
        until=last.loss.until,
        state=state,
        windows=len(billed),
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
