"""The verdict of a run: what each cause at each place cost a job over all its windows, from when to when.

In: the account of a job in a store. Out: a `RunVerdict`. A cause is open until as many windows in a row no longer
show it as close an incident, and it ends with its job.
"""

from __future__ import annotations

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
    """The verdict that the account of a job shows."""
    windows, wall_s = account.windows, sum(account.bill.wall_s.values())
    of_place = dict[tuple[Any, ...], list[BilledLoss]]()
    for billed in account.losses:
        loss = billed.loss
        of_place.setdefault((loss.kind, loss.cause, loss.ranks, loss.hosts), []).append(billed)
    ended = _ending(windows[0])
    moved_to = {key[:3]: key for key in sorted(of_place, key=lambda key: of_place[key][-1].number)}
    causes = [
        _cause(billed, account.judged, wall_s, has_ended=ended is not None, has_moved=moved_to[key[:3]] != key)
        for key, billed in of_place.items()
    ]
    causes.sort(key=lambda cause: -cause.lost_s)
    lost_s = sum(cause.lost_s for cause in causes)
    return RunVerdict(
        first_step=min(row["first_step"] for row in windows),
        last_step=max(row["last_step"] for row in windows),
        windows=len(windows),
        wall_s=wall_s,
        covered_share=_share(account.recorded_s, wall_s),
        recorded_s=account.recorded_s,
        lost_s=lost_s,
        lost_share=_share(lost_s, wall_s),
        gpu_hours_lost=sum(cause.gpu_hours_lost for cause in causes),
        causes=causes,
        ended=ended,
        notes=account.bill.notes,
    )


def _ending(row: Any) -> str | None:
    """How a job that was watched has ended; None while it runs, and if nobody watched it."""
    if row["watched_until_s"] is None:
        return None
    return row["ending"] or "ended"


def _cause(
    billed: Sequence[BilledLoss], judged: Sequence[int], wall_s: float, *, has_ended: bool, has_moved: bool
) -> RunCause:
    """One cause at one place: ranks on hosts, as a restart can move ranks. `judged`: the windows that would show it.
    `has_moved`: whether a later window shows it for the same ranks on other hosts.
    """
    first, last = billed[0], billed[-1]
    worst = max(billed, key=_lost_s)
    lost_s = sum(map(_lost_s, billed))
    sinces = [one.loss.since for one in billed if one.loss.since is not None]
    untils = [one.loss.until for one in billed if one.loss.until is not None]
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
        since=min(sinces, default=None),
        until=max(untils, default=None),
        state=State.OVER if has_moved else _state(sum(number > last.number for number in judged), has_ended=has_ended),
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
