"""The bill of a store: what its windows say of each job.

In: a store. Out: the bill of all its jobs. A window has its mean step and what that went to. Of the time between two
windows, only whether the job began another attempt is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from tracekit.analysis.job.job import Job
from tracekit.base.errors import StoreError
from tracekit.base.text import short
from tracekit.bill.costs import ClaimedCosts, costs_of
from tracekit.bill.ledger import (
    ALL,
    KEPT_OR_LOST,
    LOST_WORK,
    Bill,
    BillPart,
    Claim,
    Ledger,
    joined,
    lost_share,
    resumed_at,
)
from tracekit.fleet.rows import team_of
from tracekit.report.findings import Findings
from tracekit.report.report import Report
from tracekit.store import Incoming, Store

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


def bill_of_store(store: Store) -> Bill:
    """The bill of all jobs in a store; notes name those that are left out, because what is stored of them is damaged.

    Raises StoreError if it has no windows, or if all jobs are damaged.
    """
    with store.reading() as catalogue:
        rows = catalogue.live.all_windows()
    if rows.is_empty():
        raise StoreError(f"{store.name}: no job has a window yet, so there is nothing to bill")
    bills, damaged = list[Bill](), list[StoreError]()
    for (job,), of_job in rows.group_by("job", maintain_order=True):
        try:
            bills.append(_bill(store, of_job.rows(named=True)))
        except StoreError as error:
            damaged.append(StoreError(f"{short(str(job))}: left out, {error}"))
    if not bills:
        raise damaged[0]
    return joined([*bills, Bill(bills[0].rows.clear(), {}, tuple(map(str, damaged)))])


def bill_of_job(job: Job) -> Bill:
    """The bill of one trace or log, as of a store that has nothing else. Raises TraceError, see `Job.whatif`."""
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "jobs.store")
        store.append(Incoming(job.trace, job.trace.name, job.source, Findings(job.report)))
        return bill_of_store(store)


def _bill(store: Store, rows: list[dict[str, Any]]) -> Bill:
    job, first = rows[0]["job"], rows[0]
    reports = store.reports([(job, row["number"]) for row in rows])
    metadata = [json.loads(row["metadata"]) for row in rows]
    windows = [
        _Window(row, facts.get("attempt"), _costs(row, reports.get((job, row["number"]))))
        for row, facts in zip(rows, metadata, strict=True)
    ]
    attempts = [list(some) for _, some in groupby(windows, lambda window: window.attempt)]
    timed = all(row["started_at"] is not None for row in rows)
    origin_s = min(first["started_at"], first["began_s"] or first["started_at"]) if timed else None
    ledger = Ledger(job, next(filter(None, map(team_of, metadata)), None), origin_s)
    failed = first["ending"] not in (None, _SUCCESS)
    resumed, at_s = resumed_at([some[0].row["first_step"] for some in attempts]), 0.0
    for number, of_attempt in enumerate(attempts):
        cut_off = failed or number + 1 < len(attempts)
        last = max((at for at, window in enumerate(of_attempt) if window.saves), default=-1)
        for place, window in enumerate(of_attempt):
            row, costs, start_s = window.row, window.costs, at_s
            gpus, known_s = row["world_size"], None
            if isinstance(costs, ClaimedCosts):
                gpus, known_s = costs.gpus, costs.length_s
            length_s = row["steps"] * (row["recorded_s"] or 0.0) if known_s is None else known_s
            if origin_s is not None:
                start_s = max(at_s, row["started_at"] - origin_s)
                length_s = max(0.0, row["ended_at"] - origin_s + (row["recorded_s"] or 0.0) - start_s)
                if row["started_at"] - origin_s < at_s - (row["recorded_s"] or 0.0):
                    before = f"window {row['number']} begins before window {row['number'] - 1} ends"
                    ledger.notes.append(f"{short(job)}: {before}: it counts from then on; compare the clocks")
            gap = (BillPart.UNKNOWN, "between windows") if place else (BillPart.RESTARTS, "down and starting again")
            ledger.add(
                at_s, start_s, gpus, (*(gap if number or place else (BillPart.START, "until the first window")), ALL)
            )
            at_s = start_s + length_s
            again, to = float(lost_share(row["first_step"], row["last_step"], resumed[number])), BillPart.RESTARTS
            if resumed[number] is None and cut_off and place >= last:
                again = 1.0
                if place == last or not (window.whole and any(one.saves for one in windows)):
                    to = BillPart.UNKNOWN  # the checkpoint is somewhere in this window, or cannot be seen
            lost = LOST_WORK if to is BillPart.RESTARTS else KEPT_OR_LOST
            ledger.add(start_s, at_s, gpus, (*lost, again * length_s), *_claims(window, 1 - again, length_s))
    ledger.notes += _reasons(job, windows)
    until_s = at_s
    if origin_s is not None and first["watched_until_s"] is not None:
        until_s = max(at_s, first["watched_until_s"] - origin_s)
        ledger.add(at_s, until_s, gpus, (BillPart.UNKNOWN, "after the last window", ALL))
    return ledger.bill(until_s)


def _costs(row: dict[str, Any], report: Report | None) -> ClaimedCosts | str:
    """What the mean step of a window goes to, or why that is unknown."""
    if report is not None:
        return costs_of(report)
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


def _claims(window: _Window, share: float, length_s: float) -> list[Claim]:
    """What the `share` of a window of `length_s` seconds that is not lost went to."""
    costs, step_s, steps = window.costs, window.row["recorded_s"] or 0.0, window.row["steps"] * share
    if isinstance(costs, str):
        return [(BillPart.UNKNOWN, costs, ALL)]
    if length_s * share < steps * step_s:  # the steps that warm up are shorter than the mean
        steps = length_s * share / step_s
    rest_s = length_s * share - steps * step_s
    planned: list[Claim] = [(part, str(part), seconds) for part, seconds in costs.planned.items()]
    claims = [(part, cause, steps * seconds) for part, cause, seconds in (*planned, *costs.claims)]
    return [(BillPart.UNKNOWN, "between recorded steps", rest_s if rest_s > _LEAST_S else 0.0), *claims]
