"""The verdict on a job in a store, with what to do about its causes, and the ranks that these are on.

In: a store. Out: a `RunVerdict`, or the culprits. Advice comes from the reports on the windows that lost most.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from tracekit.base.errors import StoreError
from tracekit.bill.account import run_of
from tracekit.bill.stored import account_of
from tracekit.report.answer import Culprit
from tracekit.report.nodes import Accused
from tracekit.report.report import Report
from tracekit.report.run import RunCause, RunVerdict
from tracekit.store import Store

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
