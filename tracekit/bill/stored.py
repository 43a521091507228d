"""What a store shows of the time of its jobs: their bills, and what each window lost to whom.

In: a store. Out: an account of each job, and the bill of all. A window has its mean step and what that went to. Of the
time between two windows, only whether the job began another attempt is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.job.job import Job
from tracekit.base.errors import NotStoredError, StoreError
from tracekit.base.text import short
from tracekit.bill.account import Account, BilledLoss, BilledWindow, run_of
from tracekit.bill.ledger import KEPT_OR_LOST, LOST_WORK, Bill, Ledger, joined, lost_share, resumed_at
from tracekit.bill.placement import Stretch, axis_of
from tracekit.costs.claimed import ClaimedCosts
from tracekit.costs.parts import ALL, BillPart, Claim
from tracekit.fleet.rows import team_of
from tracekit.report.findings import Findings
from tracekit.store import Incoming, Store
from tracekit.store.window import known_starts

#: The ending of a job that did not fail.
_SUCCESS = "ended with exit code 0"
#: Twice what a double resolves of seconds since the epoch, and more.
_LEAST_S = 1e-6


class _Window(Struct, frozen=True):
    """A window of a job. `row`: of the catalogue; `attempt`: of which it is a part; `costs`: of its mean step, or why
    they are unknown.
    """

    row: dict[str, Any]
    attempt: Any
    costs: ClaimedCosts | str

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is on its critical path."""
        return isinstance(self.costs, ClaimedCosts) and self.costs.planned[BillPart.CHECKPOINTS] > 0

    @property
    def whole(self) -> bool:
        """Whether all its steps are known."""
        return (
            isinstance(self.costs, ClaimedCosts)
            and self.row["steps"] == self.row["last_step"] - self.row["first_step"] + 1
        )

    @property
    def length_s(self) -> float:
        """Seconds of its steps, as far as known."""
        stated_s = self.costs.length_s if isinstance(self.costs, ClaimedCosts) else None
        return self.row["steps"] * (self.row["recorded_s"] or 0.0) if stated_s is None else stated_s

    @property
    def judged_s(self) -> float | None:
        """Seconds of its steps if their losses are known."""
        if isinstance(self.costs, str) or self.costs.doubt:
            return None
        seconds: float = self.row["steps"] * (self.row["recorded_s"] or 0.0)
        return seconds

    def steps_in(self, length_s: float) -> float:
        """How many of its mean steps fit into seconds of it: steps that warm up are shorter."""
        step_s: float = self.row["recorded_s"] or 0.0
        steps: int = self.row["steps"]
        return length_s / step_s if length_s < steps * step_s else steps


def bill_of_store(store: Store) -> Bill:
    """The bill of all jobs in a store; notes name those that are left out, because what is stored of them is damaged.

    Raises StoreError if it has no windows, or if all jobs are damaged.
    """
    with store.reading() as catalogue:
        rows, costs = catalogue.live.all_windows(), catalogue.live.costs()
    if rows.is_empty():
        raise StoreError(f"{store.name}: no job has a window yet, so there is nothing to bill")
    bills, damaged = list[Bill](), list[StoreError]()
    for (job,), of_job in rows.group_by("job", maintain_order=True):
        try:
            account = accounted(store, of_job.rows(named=True), costs)
            bills.append(replace(account.bill, runs={str(job): run_of(account)}))
        except StoreError as error:
            damaged.append(StoreError(f"{short(str(job))}: left out, {error}"))
    if not bills:
        raise damaged[0]
    return joined([*bills, Bill(bills[0].rows.clear(), {}, tuple(map(str, damaged)))])


def account_of(store: Store, name: str) -> Account:
    """The account of one job. Raises NotStoredError if there is no such job, or no window of it."""
    with store.reading() as catalogue:
        rows, costs = catalogue.live.all_windows(name), catalogue.live.costs(name)
    if rows.is_empty():
        raise NotStoredError(f"{store.name}: no window of job {short(name)!r}")
    return accounted(store, rows.rows(named=True), costs)


def bill_of_job(job: Job) -> Bill:
    """The bill of one trace or log, as of a store that has nothing else. Raises TraceError, see `Job.whatif`."""
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "jobs.store")
        store.append(Incoming(job.trace, job.trace.name, job.source, Findings(job.report)))
        return bill_of_store(store)


def accounted(store: Store, rows: list[dict[str, Any]], costs: Mapping[tuple[str, int], ClaimedCosts]) -> Account:
    """The account of a job from its rows in the catalogue of a store and costs of its windows by name and number."""
    windows = _windows(store, rows, costs)
    job, first = rows[0]["job"], rows[0]
    axis = axis_of(rows, [window.length_s for window in windows])
    stretches = dict(zip((row["number"] for row in rows), axis.stretches, strict=True))
    attempts = [list(some) for _, some in groupby(windows, lambda window: window.attempt)]
    teams = (team_of(json.loads(row["metadata"])) for row in rows)
    ledger = Ledger(job, next(filter(None, teams), None), axis.origin_s)
    ledger.notes += [f"{short(job)}: {note}" for note in axis.notes]
    failed = first["ending"] not in (None, _SUCCESS)
    resumed, at_s = resumed_at([some[0].row["first_step"] for some in attempts]), 0.0
    losses = list[BilledLoss]()
    for number, of_attempt in enumerate(attempts):
        cut_off = failed or number + 1 < len(attempts)
        last = max((at for at, window in enumerate(of_attempt) if window.saves), default=-1)
        for place, window in enumerate(of_attempt):
            row, stretch = window.row, stretches[window.row["number"]]
            gpus = window.costs.gpus if isinstance(window.costs, ClaimedCosts) else row["world_size"]
            gap = (BillPart.UNKNOWN, "between windows") if place else (BillPart.RESTARTS, "down and starting again")
            if not (number or place):
                gap = BillPart.START, "until the first window"
            ledger.add_one(at_s, stretch.start_s, gpus, (*gap, ALL))
            at_s = stretch.until_s
            again, to = float(lost_share(row["first_step"], row["last_step"], resumed[number])), LOST_WORK
            if resumed[number] is None and cut_off and place >= last:
                again = 1.0
                if place == last or not (window.whole and any(one.saves for one in windows)):
                    to = KEPT_OR_LOST  # the checkpoint is somewhere in this window, or cannot be seen
            losses += _book(ledger, window, stretch, gpus, to, again)
    ledger.notes += _reasons(job, windows)
    ledger.add_one(at_s, axis.end_s, gpus, (BillPart.UNKNOWN, "after the last window", ALL))
    billed = [BilledWindow(one.row, stretches[one.row["number"]], one.judged_s) for one in windows]
    judged = [window.row["number"] for window in billed if window.judged_s is not None]
    return Account(ledger.bill(axis.end_s), losses, billed, axis.end_s, judged)


def _windows(
    store: Store, rows: Sequence[dict[str, Any]], costs: Mapping[tuple[str, int], ClaimedCosts]
) -> list[_Window]:
    """The windows of a job with what their steps went to: as the catalogue has it or, where an older version has
    written the window, as its report shows it.
    """
    job = rows[0]["job"]
    without = [(job, row["number"]) for row in rows if (job, row["number"]) not in costs]
    reports = store.reports(without) if without else {}
    windows = []
    for row in rows:
        metadata, which = json.loads(row["metadata"]), (job, row["number"])
        of_window = costs.get(which)
        if of_window is None and which in reports:
            from tracekit.costs.of_report import costs_of  # it knows the detectors

            of_window = costs_of(reports[which], known_starts(row))
        windows.append(_Window(row, metadata.get("attempt"), of_window or _unknown(row)))
    return windows


def _unknown(row: Mapping[str, Any]) -> str:
    """Why nobody knows what the mean step of a window goes to."""
    return "windows that are not analysed" if row["recorded_s"] is None else "windows without a report of this version"


def _reasons(job: str, windows: Sequence[_Window]) -> Iterator[str]:
    """Yield why windows are billed as unknown, the first of each reason."""
    first = dict[str, int]()
    for window in windows:
        costs, problem = window.costs, window.row["problem"]
        if isinstance(costs, ClaimedCosts):
            reason = costs.doubt and f"is not trusted: {costs.doubt}"
        else:
            reason = f"cannot be analysed: {problem}" if problem else f"is one of the {costs}"
        if reason:
            first.setdefault(reason, window.row["number"])
    yield from (f"{short(job)}: window {number} {reason}" for reason, number in first.items())


def _book(
    ledger: Ledger, window: _Window, stretch: Stretch, gpus: int, lost_to: tuple[BillPart, str], again: float
) -> Iterator[BilledLoss]:
    """Bill a window, of which the share `again` is lost work; yield its losses, without times if its clock is wrong."""
    costs, length_s = window.costs, stretch.until_s - stretch.start_s
    lost_work: Claim = (*lost_to, again * length_s)
    if isinstance(costs, str):
        ledger.add_one(stretch.start_s, stretch.until_s, gpus, lost_work, (BillPart.UNKNOWN, costs, ALL))
        return
    step_s, steps = window.row["recorded_s"] or 0.0, window.steps_in(length_s)
    steps_kept = steps * (1 - again)
    rest_s = length_s * (1 - again) - steps_kept * step_s
    between = (BillPart.UNKNOWN, "between recorded steps", rest_s if rest_s > _LEAST_S else 0.0)
    unplaced = dict(costs.planned)
    for loss in costs.losses:
        if loss.work is not None:
            unplaced[loss.work] -= loss.planned_s
    planned = [(loss.work or loss.part, loss.cause, steps_kept * loss.planned_s) for loss in costs.losses]
    beyond = [(loss.part, loss.cause, steps_kept * loss.seconds) for loss in costs.losses]
    work = [(part, str(part), steps_kept * max(seconds, 0.0)) for part, seconds in unplaced.items()]
    rest = [(part, cause, steps_kept * seconds if steps_kept else 0.0) for part, cause, seconds in costs.rest]
    got = ledger.add_one(stretch.start_s, stretch.until_s, gpus, lost_work, between, *work, *planned, *beyond, *rest)
    got = got[2 + len(work) :]
    for loss, planned_s, beyond_s in zip(costs.losses, got, got[len(planned) :], strict=False):
        redone_s = steps * again * (loss.seconds + loss.planned_s)
        placed = loss if stretch.dated else replace(loss, since=None, until=None)
        yield BilledLoss(window.row["number"], placed, planned_s + beyond_s, redone_s, steps * step_s, gpus)
