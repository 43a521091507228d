"""How the jobs of a store spent their time: bills, the losses of each window by cause, and the verdict of a run.

In: a store. Out: an account of each job, its `RunVerdict`, the culprits, and the bill of all. A window has its mean
step and what that went to; of the time between two windows, only whether the job began another attempt is known. A
cause is open until as many windows in a row no longer show it as close an incident, and it ends with its job.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.job.job import Job
from tracekit.base.errors import NotStoredError, StoreError
from tracekit.base.paths import command
from tracekit.base.text import short
from tracekit.bill.ledger import KEPT_OR_LOST, LOST_WORK, Bill, Ledger, joined, lost_share, resumed_at
from tracekit.bill.placement import LEAST_DATED_S, Stretch, axis_of
from tracekit.costs import ALL, BillPart, Claim, ClaimedCosts, PlacedLoss, team_of
from tracekit.report.conclusions import Accused, Culprit, RunCause, RunVerdict, State
from tracekit.report.findings import Findings
from tracekit.report.report import Report
from tracekit.store import Incoming, Store
from tracekit.store.incidents import CLEAR_WINDOWS

#: Causes whose advice is looked up.
_MOST_ADVISED = 4
_UNANALYSED, _OUTDATED = "windows that are not analysed", "windows without a report of this version"
#: The ending of a job that did not fail.
_SUCCESS = "ended with exit code 0"


def run_of_job(store: Store, name: str) -> RunVerdict:
    """The verdict of a job in a store, with what to do. Raises StoreError; NotStoredError if it has no window."""
    return advised(store, name, run_of(account_of(store, name)))


def advised(store: Store, name: str, run: RunVerdict) -> RunVerdict:
    """The verdict with what to do about its worst causes, as far as the reports on their windows can be read.

    Advice comes from the reports on the windows that lost most.
    """
    worst, reports = run.alarming[:_MOST_ADVISED], dict[tuple[str, int], Report]()
    with suppress(StoreError):  # a damaged report: `tracekit store check` names it
        reports = store.reports([(name, cause.worst_window) for cause in worst])
    advice = {id(cause): _advice(cause, reports.get((name, cause.worst_window))) for cause in worst}
    return replace(run, causes=[replace(cause, do=advice.get(id(cause))) for cause in run.causes])


def _advice(cause: RunCause, report: Report | None) -> str | None:
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
                run_culprit = replace(culprit, cost_s=cause.lost_s / steps, first_step=cause.first_step)
                culprits.setdefault((culprit.rank, culprit.host, culprit.part), run_culprit)
    if run.windows < 2 or not culprits:
        return None
    trust = f"{run.covered_share:.0%} of the time of the run is judged, in {run.windows:,} windows"
    return Accused(name, trustworthy=True, trust=trust, culprits=tuple(culprits.values()))


def bill_of_store(store: Store) -> Bill:
    """The bill of all jobs in a store; notes say why windows are unknown.

    Raises StoreError if it has no windows.
    """
    with store.reading() as catalogue:
        rows, costs = catalogue.live.all_windows(), catalogue.live.costs()
    if rows.is_empty():
        raise StoreError(f"{store.name}: no job has a window yet, so there is nothing to bill")
    bills = list[Bill]()
    for (job,), of_job in rows.group_by("job", maintain_order=True):
        account = accounted(store, of_job.rows(named=True), costs)
        bills.append(replace(account.bill, runs={str(job): run_of(account)}))
    return joined(bills)


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
    job, first = rows[0]["job"], rows[0]
    costs_of_rows = [costs.get((row["job"], row["number"])) or _unknown(row) for row in rows]
    axis = axis_of(rows, list(map(_length_s, rows, costs_of_rows)))
    parts = zip(rows, (json.loads(row["metadata"]) for row in rows), costs_of_rows, axis.stretches, strict=True)
    windows = [BilledWindow(*part) for part in parts]
    attempts = [list(group) for _, group in groupby(windows, lambda window: window.metadata.get("attempt"))]
    teams = (team_of(window.metadata) for window in windows)
    ledger = Ledger(job, next(filter(None, teams), None), axis.origin_s)
    failed = first["ending"] not in (None, _SUCCESS)
    resumed, at_s = resumed_at([attempt[0].row["first_step"] for attempt in attempts]), 0.0
    losses, gpus = list[BilledLoss](), None
    for number, windows_of_attempt in enumerate(attempts):
        cut_off = failed or number + 1 < len(attempts)
        last = max((position for position, window in enumerate(windows_of_attempt) if window.saves), default=-1)
        for place, window in enumerate(windows_of_attempt):
            row, stretch = window.row, window.stretch
            gpus = _gpus(window, windows)
            gap = (BillPart.UNKNOWN, "between windows") if place else (BillPart.RESTARTS, "down and starting again")
            if not (number or place):
                gap = BillPart.START, "until the first window"
            ledger.add_one(at_s, stretch.start_s, gpus, (*gap, ALL))
            at_s = stretch.until_s
            redone_share, lost_to = float(lost_share(row["first_step"], row["last_step"], resumed[number])), LOST_WORK
            if resumed[number] is None and cut_off and place >= last:
                redone_share = 1.0
                if place == last or not (window.whole and any(other.saves for other in windows)):
                    lost_to = KEPT_OR_LOST  # the checkpoint is somewhere in this window, or cannot be seen
            losses += _bill_window(ledger, window, gpus, lost_to, redone_share)
    notes = [*((NoteAbout.CLOCK, note) for note in axis.notes), *_reasons(store, windows)]
    if gpus is None:
        notes.append((NoteAbout.GPUS, "how many GPUs it has is not known, so it has no GPU-hours"))
    notes = [(about, f"{short(job)}: {words}") for about, words in notes]
    ledger.notes += [words for _, words in notes]
    coverage_note = next((words for about, words in notes if about in (NoteAbout.CLOCK, NoteAbout.VERSION)), None)
    ledger.add_one(at_s, axis.end_s, gpus, (BillPart.UNKNOWN, "after the last window", ALL))
    judged = [window.row["number"] for window in windows if window.judged_s is not None]
    return Account(ledger.bill(axis.end_s), losses, windows, axis.end_s, judged, coverage_note)


def _gpus(window: BilledWindow, windows: Sequence[BilledWindow]) -> int | None:
    """The GPUs of the job, as far as the report on this window knows them; without a report, the ranks, unless another
    window shows that these are no GPUs.
    """
    if isinstance(window.costs, ClaimedCosts):
        return window.costs.gpus
    if any(isinstance(other.costs, ClaimedCosts) and other.costs.gpus is None for other in windows):
        return None
    ranks: int = window.row["world_size"]
    return ranks


def _recorded_s(row: Mapping[str, Any]) -> float:
    seconds: float = row["steps"] * (row["recorded_s"] or 0.0)
    return seconds


def _length_s(row: Mapping[str, Any], costs: ClaimedCosts | str) -> float:
    """Seconds of the steps of a window, as far as known."""
    stated_s = costs.length_s if isinstance(costs, ClaimedCosts) else None
    return _recorded_s(row) if stated_s is None else stated_s


def _unknown(row: Mapping[str, Any]) -> str:
    return _UNANALYSED if row["recorded_s"] is None else _OUTDATED


class NoteAbout(Enum):
    """What a note says of windows: when they ran, that their reports are of another version, why no loss of theirs is
    judged, or that their GPUs are not known.
    """

    CLOCK = auto()
    VERSION = auto()
    JUDGEMENT = auto()
    GPUS = auto()


def _reasons(store: Store, windows: Sequence[BilledWindow]) -> Iterator[tuple[NoteAbout, str]]:
    """Yield why windows are billed as unknown, the first of each reason."""
    first = dict[tuple[NoteAbout, str], int]()
    for window in windows:
        about, costs, problem = NoteAbout.JUDGEMENT, window.costs, window.row["problem"]
        if isinstance(costs, ClaimedCosts):
            reason = costs.doubt and f"is not trusted: {costs.doubt}"
        else:
            reason = f"cannot be analysed: {problem}" if problem else f"is one of the {costs}"
            if costs == _OUTDATED:
                about = NoteAbout.VERSION
                repair = command("store", "repair", "--store", store.path)
                reason += f"; `{repair}` makes reports anew from ops that are still there"
        if reason:
            first.setdefault((about, reason), window.row["number"])
    yield from ((about, f"window {number} {reason}") for (about, reason), number in first.items())


def _bill_window(
    ledger: Ledger, window: BilledWindow, gpus: int | None, lost_to: tuple[BillPart, str], redone_share: float
) -> Iterator[BilledLoss]:
    """Bill a window, of which `redone_share` is lost work; yield its losses, without times if its clock is wrong."""
    costs, stretch = window.costs, window.stretch
    length_s = stretch.until_s - stretch.start_s
    lost_work: Claim = (*lost_to, redone_share * length_s)
    if isinstance(costs, str):
        ledger.add_one(stretch.start_s, stretch.until_s, gpus, lost_work, (BillPart.UNKNOWN, costs, ALL))
        return
    step_s, steps = window.row["recorded_s"] or 0.0, window.row["steps"]
    if length_s < steps * step_s:  # steps that warm up are shorter than the mean one
        steps = length_s / step_s
    steps_kept = steps * (1 - redone_share)
    rest_s = length_s * (1 - redone_share) - steps_kept * step_s
    between = (BillPart.UNKNOWN, "between recorded steps", rest_s if rest_s > LEAST_DATED_S else 0.0)
    unplaced = dict(costs.planned)
    for loss in costs.losses:
        if loss.work is not None:
            unplaced[loss.work] -= loss.planned_s
    planned = [(loss.work or loss.part, loss.cause, steps_kept * loss.planned_s) for loss in costs.losses]
    beyond = [(loss.part, loss.cause, steps_kept * loss.seconds) for loss in costs.losses]
    work = [(part, str(part), steps_kept * max(seconds, 0.0)) for part, seconds in unplaced.items()]
    rest = [(part, cause, steps_kept * seconds if steps_kept else 0.0) for part, cause, seconds in costs.rest]
    spent = ledger.add_one(stretch.start_s, stretch.until_s, gpus, lost_work, between, *work, *planned, *beyond, *rest)
    spent = spent[2 + len(work) :]
    for loss, planned_s, beyond_s in zip(costs.losses, spent, spent[len(planned) :], strict=False):
        cost_s = loss.seconds + loss.planned_s
        redone_s, saved_s = steps * redone_share * cost_s, steps * (cost_s if loss.saved_s is None else loss.saved_s)
        placed = loss if stretch.dated else replace(loss, since=None, until=None)
        billed_s, window_s = planned_s + beyond_s, steps * step_s
        yield BilledLoss(window.row["number"], placed, billed_s, redone_s, window_s, gpus, min(saved_s, window_s))


class BilledLoss(Struct, frozen=True):
    """What window `number` lost to one cause: `billed_s` seconds are on the bill as that; `redone_s` are in steps that
    a later attempt did again, which the bill has as lost work. `window_s`: seconds of all its steps. `gpus`: of the
    job, None if unknown. `saved_s`: seconds that the steps would have saved without this cause alone.
    """

    number: int
    loss: PlacedLoss
    billed_s: float
    redone_s: float
    window_s: float
    gpus: int | None
    saved_s: float


class BilledWindow(Struct, frozen=True):
    """A window in an account. `row`: of the catalogue, with its free `metadata`; `costs`: of its mean step, or why they
    are unknown; `stretch`: when it ran.
    """

    row: dict[str, Any]
    metadata: dict[str, Any]
    costs: ClaimedCosts | str
    stretch: Stretch

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
    def judged_s(self) -> float | None:
        """Seconds of its steps if their losses are known."""
        if isinstance(self.costs, str) or self.costs.doubt:
            return None
        return _recorded_s(self.row)

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it ran, by its own clock, between two times, seconds since the epoch."""
        row = self.row
        if row["started_at"] is None:
            return False
        return bool(row["ended_at"] + (row["recorded_s"] or 0.0) >= since and row["started_at"] <= until)


class Account(Struct, frozen=True):
    """The time of one job, or of a part of it. `windows`: oldest first. `wall_s`: seconds from the begin to the end.
    `judged`: the numbers of the windows of the job whose losses are known, ascending. `coverage_note`: as of
    `RunVerdict`. `whole`: of all windows, for a part.
    """

    bill: Bill
    losses: Sequence[BilledLoss]
    windows: Sequence[BilledWindow]
    wall_s: float
    judged: Sequence[int]
    coverage_note: str | None
    whole: Account | None = None

    def judged_between(self, first: int, last: int) -> int:
        """The number of these windows whose losses are known."""
        return bisect_right(self.judged, last) - bisect_left(self.judged, first)

    def between(self, since: float, until: float) -> Account:
        """The part that its windows between two times make up, seconds since the epoch; all if none is."""
        windows = [window for window in self.windows if window.overlaps(since, until)]
        if len(windows) in (0, len(self.windows)):
            return self
        numbers = {window.row["number"] for window in windows}
        losses = [loss for loss in self.losses if loss.number in numbers]
        wall_s = windows[-1].stretch.until_s - windows[0].stretch.start_s
        return Account(self.bill, losses, windows, wall_s, self.judged, self.coverage_note, self)


def run_of(account: Account) -> RunVerdict:
    """The verdict that the account of a job shows, or of a part of it. What is over is over for the whole job."""
    whole, rows = account.whole or account, [window.row for window in account.windows]
    last_seen = {_place(billed): billed.number for billed in whole.losses}
    moved_to = {place[:3]: place for place in sorted(last_seen, key=lambda place: last_seen[place])}
    losses = dict[tuple[Any, ...], list[BilledLoss]]()
    for billed in account.losses:
        losses.setdefault(_place(billed), []).append(billed)
    ended, causes = _ending(rows[0]), list[RunCause]()
    for place, lost in losses.items():
        clear = whole.judged_between(last_seen[place] + 1, whole.windows[-1].row["number"])
        state = State.OVER if moved_to[place[:3]] != place else _incident_state(clear, has_ended=ended is not None)
        causes.append(_cause(lost, account, state))
    causes.sort(key=lambda cause: -cause.lost_s)
    lost_s, recorded_s = sum(cause.lost_s for cause in causes), sum(part.judged_s or 0.0 for part in account.windows)
    return RunVerdict(
        first_step=min(row["first_step"] for row in rows),
        last_step=max(row["last_step"] for row in rows),
        windows=len(rows),
        wall_s=account.wall_s,
        covered_share=_share(min(recorded_s, account.wall_s), account.wall_s),
        recorded_s=recorded_s,
        lost_s=lost_s,
        lost_share=_share(lost_s, account.wall_s),
        gpu_hours_lost=_gpu_hours(account.losses, _lost_s),
        causes=causes,
        ended=ended,
        notes=account.bill.notes,
        of_windows=None if account.whole is None else len(whole.windows),
        coverage_note=account.coverage_note,
    )


def _gpu_hours(losses: Sequence[BilledLoss], seconds: Callable[[BilledLoss], float]) -> float | None:
    """GPU-hours of these seconds of losses; None if the GPUs of the job are not known."""
    gpu_seconds = [None if billed.gpus is None else seconds(billed) * billed.gpus for billed in losses]
    return None if None in gpu_seconds else sum(filter(None, gpu_seconds)) / 3600


def _place(billed: BilledLoss) -> tuple[Any, ...]:
    """Cause and place of a loss: ranks on hosts, as a restart can move ranks."""
    loss = billed.loss
    return loss.kind, loss.cause, loss.ranks, loss.hosts


def _ending(row: Any) -> str | None:
    """How a watched job ended; None while it runs, and if it was not watched."""
    if row["watched_until_s"] is None:
        return None
    return row["ending"] or "ended"


def _cause(billed: Sequence[BilledLoss], account: Account, state: State) -> RunCause:
    """One cause at one place, oldest loss first. Its times are those of its first and its last slow step."""
    first, last = billed[0], billed[-1]
    worst = max(billed, key=_lost_s)
    lost_s, own_windows = sum(map(_lost_s, billed)), {attempt.number for attempt in billed}
    return RunCause(
        kind=first.loss.kind,
        cause=first.loss.cause,
        ranks=first.loss.ranks,
        hosts=first.loss.hosts,
        lost_s=lost_s,
        lost_share=_share(lost_s, account.wall_s),
        gpu_hours_lost=_gpu_hours(billed, _lost_s),
        first_step=first.loss.first_step,
        last_step=last.loss.last_step,
        since=first.loss.since,
        until=last.loss.until,
        state=state,
        windows=len(own_windows),
        clear_windows=account.judged_between(first.number, last.number) - len(own_windows),
        worst_window=worst.number,
        worst_share=_share(_lost_s(worst), worst.window_s),
        redone_s=sum(attempt.redone_s for attempt in billed),
        saved_s=sum(attempt.saved_s for attempt in billed),
        gpu_hours_saved=_gpu_hours(billed, lambda loss: loss.saved_s),
    )


def _incident_state(clear: int, *, has_ended: bool) -> State:
    """`clear`: windows after the last that showed it."""
    if has_ended:
        return State.OVER if clear else State.ENDED
    return State.OVER if clear >= CLEAR_WINDOWS else State.OPEN


def _lost_s(billed: BilledLoss) -> float:
    return billed.billed_s + billed.redone_s


def _share(seconds: float, total_s: float) -> float:
    return seconds / total_s if total_s > 0 else 0.0
