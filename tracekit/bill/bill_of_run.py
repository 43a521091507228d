"""The bill of a run directory: what `tracekit collect` recorded of a command and its attempts.

In: a run directory. Out: its bill. All times are on one axis, the monotonic clock of the first host, which no change of
the wall clock moves. Only an attempt on another host, or after the host has started again, is placed by the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.errors import FormatError, TracekitError
from tracekit.bill.ledger import KEPT_OR_LOST, LOST_WORK, Bill, Ledger, lost_share, resumed_at
from tracekit.collectors.merge.merge import epoch_ns, merge_attempt, records_on_one_clock
from tracekit.collectors.record.wire_format import HANG_REQUEST, Category, Flag
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.launchers import attempts, how_ended, is_dead, running_launchers
from tracekit.collectors.run_directory.segments import AttemptRecording, ClockFit, read_clocks, read_run
from tracekit.collectors.run_directory.steering import name_of_job
from tracekit.costs import ALL, BillPart, Claim, ClaimedCosts, team_of
from tracekit.costs.of_report import PLANNED, costs_of
from tracekit.report.findings import Unanalysed


class _Attempt(Struct, frozen=True):
    """What an attempt recorded; all times in ns since the epoch, on the axis of the run.

    `clock_ns`: when the monotonic clock of `host` was 0. `steps`: `step`, `start_ns` and `end_ns` over all ranks, and
    whether all `recorded` it, in order of time. `work`: `rank`, `part`, `start_ns` and `end_ns` of data loading,
    checkpoints and evaluations; those of a rank do not overlap. `costs`: of its steps, or why they are unknown.
    `hung`: its launcher found that it makes no progress, and nothing was recorded afterwards.
    """

    number: int
    gpus: int
    host: str
    clock_ns: int
    begins_ns: int
    last_ns: int
    steps: pl.DataFrame
    work: pl.DataFrame
    costs: ClaimedCosts | str
    hung: bool

    @property
    def kept_until_ns(self) -> int | None:
        """When its last checkpoint was complete on all ranks that write them; None if none was recorded."""
        saves = self.work.filter(part=BillPart.CHECKPOINTS)
        ends = saves.group_by("rank").agg(pl.col("end_ns").max())["end_ns"].to_list()
        return min(ends, default=None)


def bill_of_run(directory: Path) -> Bill:
    """The bill of a run directory. Raises FormatError if none of its attempts can be read."""
    run, clocks = read_run(directory), read_clocks(directory)
    billed, notes, numbers, team = list[_Attempt](), list[str](), attempts(directory), None
    missing = {*range(max(numbers, default=0))}.difference(numbers)
    unread = {number: FormatError("its folder is missing") for number in missing}
    for number in numbers:
        try:
            recording = read_attempt(directory, number)
            attempt = _attempt_of(recording, run.options.first_step, clocks, billed[-1] if billed else None, notes)
        except FormatError as error:
            unread[number] = error
            continue
        billed.append(attempt)
        notes += recording.left_out
        team = team or team_of(recording.scheduler)
    notes += [f"attempt {number} cannot be read: {error}" for number, error in sorted(unread.items())]
    if not billed:
        raise next(iter(unread.values()), FormatError(f"{directory}: no attempt has begun; bill it once one has"))
    first, last = billed[0], billed[-1]
    origin_ns = min(first.begins_ns, run.started_ns or first.begins_ns)
    end_ns = max(last.last_ns, run.ended_ns or last.last_ns)
    if (run.started_ns or origin_ns, run.ended_ns or end_ns) != (origin_ns, end_ns):
        notes.append("the clock went back while the command ran: the bill has what its ranks recorded")
    ledger = Ledger(name_of_job(directory), team, origin_ns / 1e9)
    ledger.notes += notes
    launchers = running_launchers(directory)
    killed, ending = bool(launchers) and all(map(is_dead, launchers)), how_ended(directory)
    if launchers and not killed:
        ledger.notes.append("the run has not ended: its bill ends with its last record")
    failed = killed or (ending is not None and ending.failed)
    saves = any(attempt.kept_until_ns is not None for attempt in billed)
    firsts = [int(attempt.steps["step"][0]) if attempt.steps.height else None for attempt in billed]
    page = _Page(ledger, origin_ns, saves)
    unread_claim: Claim = (BillPart.UNKNOWN, "an attempt that cannot be read", ALL)
    begin: Claim = (BillPart.START, "before the first process", ALL)
    page.add(
        first, origin_ns, first.begins_ns, unread_claim if min(unread, default=first.number) < first.number else begin
    )
    for index, (attempt, resumed) in enumerate(zip(billed, resumed_at(firsts), strict=True)):
        after = None if attempt is last else billed[index + 1]
        until_ns = end_ns if after is None else after.begins_ns
        last_ns = min(attempt.last_ns, until_ns)
        page.attempt(attempt, last_ns, resumed, is_first=attempt is first, cut_off=after is not None or failed)
        gap: Claim = (
            (BillPart.UNKNOWN, "after the last record", ALL) if after is None else (BillPart.RESTARTS, "down", ALL)
        )
        if any(attempt.number < number and (after is None or number < after.number) for number in unread):
            gap = unread_claim
        page.add(attempt, last_ns, until_ns, (BillPart.IDLE, "hang", ALL) if attempt.hung else gap)
    return ledger.bill((end_ns - origin_ns) / 1e9)


class _Page(Struct):
    """Writes attempts into a ledger that begins at `origin_ns`. `saves`: checkpoints of the run are recorded."""

    ledger: Ledger
    origin_ns: int
    saves: bool

    def add(self, attempt: _Attempt, start_ns: Any, until_ns: Any, *claims: Claim) -> None:
        """Divide stretches of an attempt, as `Ledger.add`."""
        start, until = ((np.asarray(time, np.int64) - self.origin_ns) / 1e9 for time in (start_ns, until_ns))
        self.ledger.add(start, until, attempt.gpus, *claims)

    def attempt(self, attempt: _Attempt, last_ns: int, resumed: int | None, *, is_first: bool, cut_off: bool) -> None:
        """Add an attempt up to its last record. `resumed`: the first step that a later attempt does again, if known.
        `cut_off`: it did not end by itself.
        """
        part = BillPart.START if is_first else BillPart.RESTARTS
        steps = attempt.steps.filter(pl.col("start_ns") < last_ns)
        edges = np.minimum(np.maximum.accumulate([attempt.begins_ns, *steps["end_ns"], last_ns]), last_ns)
        if not steps.height:
            self.add(attempt, attempt.begins_ns, last_ns, (part, "without a step", ALL))
            return
        costs = attempt.costs
        if steps["start_ns"][0] <= attempt.begins_ns:  # else its first steps were deleted since
            costs = _after_step(costs, int(steps["step"][0]))
            self.add(attempt, edges[0], edges[1], (part, "until the first step has ended", ALL))
            steps, edges = steps[1:], edges[1:]
        # Each step lasts from the end of the one before; behind the last is what did not become a step.
        start, until, worked = edges[:-1], edges[1:], _planned_seconds(attempt.work, edges)
        number, start_ns, recorded = (steps[name].to_numpy() for name in ("step", "start_ns", "recorded"))
        redone_s = np.append(lost_share(number, number, resumed), 1.0) * (until - start) / 1e9
        if resumed is None:  # all that is not in its last checkpoint
            redone_s = cut_off * (until - np.maximum(start, attempt.kept_until_ns or 0)).clip(min=0) / 1e9
        certain = resumed is not None or (self.saves and bool(recorded[redone_s[:-1] > 0].all()))
        missing = np.where(recorded, (start_ns - start[:-1]).clip(min=0) / 1e9, ALL)

        def planned(rows: slice) -> Iterator[Claim]:
            return ((part, str(part), seconds[rows]) for part, seconds in worked.items())

        claims: list[Claim] = [(*(LOST_WORK if certain else KEPT_OR_LOST), redone_s[:-1]), *planned(slice(-1))]
        claims += [(BillPart.UNKNOWN, "steps that were not recorded", missing)]
        if isinstance(costs, str):
            claims += [(BillPart.UNKNOWN, "steps that cannot be analysed", ALL)]
            self.ledger.notes += [f"attempt {attempt.number} cannot be analysed: {costs}"] * (len(number) > 0)
        else:
            claims += costs.claims
            self.ledger.overlapping |= {loss.cause for loss in costs.losses if loss.overlaps}
            if costs.doubt:
                self.ledger.notes.append(f"the analysis of attempt {attempt.number} is not trusted: {costs.doubt}")
        self.add(attempt, start[:-1], until[:-1], *claims)
        rest: Claim = (BillPart.UNKNOWN, "after the last step", ALL)
        self.add(attempt, start[-1:], until[-1:], (*LOST_WORK, redone_s[-1:]), *planned(slice(-1, None)), rest)


def _after_step(costs: ClaimedCosts | str, step: int) -> ClaimedCosts | str:
    """The costs without what was lost up to the end of a step alone, which is billed as a whole."""
    if isinstance(costs, str):
        return costs
    return replace(
        costs, losses=tuple(loss for loss in costs.losses if loss.last_step is None or loss.last_step > step)
    )


def _planned_seconds(work: pl.DataFrame, edges: Any) -> dict[BillPart, Floats]:
    """Seconds of checkpoints, evaluation and data loading in each stretch between two edges, [stretches] each: those of
    the rank that spends most on them, for which the others wait.
    """
    start, end = (work[name].to_numpy() for name in ("start_ns", "end_ns"))
    first = np.searchsorted(edges, start, side="right") - 1
    count = np.maximum(np.searchsorted(edges, end, side="left") - first, 0)
    row = np.repeat(np.arange(len(work)), count)
    stretch = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    inside = (stretch >= 0) & (stretch < len(edges) - 1)
    row, stretch = row[inside], stretch[inside]
    seconds = (np.minimum(end[row], edges[stretch + 1]) - np.maximum(start[row], edges[stretch])) / 1e9
    total = pl.col("seconds").sum().over("at", "rank")
    busiest = (
        work[row]
        .with_columns(at=pl.Series(stretch), seconds=pl.Series(seconds))
        .filter(pl.col("rank") == pl.col("rank").sort_by(total).last().over("at"))
    )
    by_part = {part: busiest.filter(part=part) for part in PLANNED.values()}
    return {
        part: np.zeros(len(edges) - 1) + np.bincount(work_of_part["at"], work_of_part["seconds"], len(edges) - 1)
        for part, work_of_part in by_part.items()
    }


def _attempt_of(
    recording: AttemptRecording,
    first_step: int,
    clocks: Mapping[str, ClockFit],
    before: _Attempt | None,
    notes: list[str],
) -> _Attempt:
    reference, _, records = records_on_one_clock(recording, clocks)
    host, clock_ns = str(reference["host"]), epoch_ns(reference)
    processes = [rank.facts["process"][0] for rank in recording.ranks.values()]
    begins_ns = min(int(process["monotonic_ns"]) for process in processes if process["host"] == host)
    ends_ns = max([begins_ns, *records["end_ns"].top_k(1)])
    if before is not None:
        if before.host == host and before.clock_ns + begins_ns > before.begins_ns:
            clock_ns = before.clock_ns  # it has not started again
            if clock_ns + begins_ns < before.last_ns:
                overlap = f"attempt {recording.attempt} begins before the last record of attempt {before.number}"
                notes.append(f"{overlap}: from then on it counts")
        elif clock_ns + begins_ns < before.last_ns:
            notes.append(f"the clock went back before attempt {recording.attempt}: the time between is unknown")
            clock_ns = before.last_ns - begins_ns
    records = records.with_columns(pl.col("start_ns", "end_ns") + clock_ns)
    request = recording.directory / HANG_REQUEST
    is_step = pl.col("category") == Category.STEP.name.lower()
    recorded = (pl.col("flags") & int(Flag.RECORDING) > 0).all()
    steps = (
        records.filter(is_step)
        .group_by("step")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), recorded=recorded)
    )
    return _Attempt(
        number=recording.attempt,
        gpus=recording.world_size,
        host=host,
        clock_ns=clock_ns,
        begins_ns=clock_ns + begins_ns,
        last_ns=clock_ns + ends_ns,
        steps=steps.sort("end_ns"),
        work=_planned_work(records.filter(~is_step)),
        costs=_costs(recording, first_step, clocks),
        hung=request.exists() and request.stat().st_mtime_ns > clock_ns + ends_ns,
    )


def _planned_work(records: pl.DataFrame) -> pl.DataFrame:
    """Data loading, checkpoints and evaluations, of hooks or of spans with these names. What lies inside another is
    part of that.
    """
    parts = {str(kind): str(part) for kind, part in PLANNED.items()}
    hooks = [name.replace("-", "_") for name in parts]
    covered_ns = pl.col("end_ns").cum_max().shift(1).over("rank")
    return (
        records.filter(pl.col("category").is_in([*hooks, "span"]) & pl.col("name").is_in(list(parts)))
        .sort("start_ns", "end_ns", descending=[False, True])
        .select("rank", "end_ns", part=pl.col("name").replace_strict(parts, return_dtype=pl.String),
                start_ns=pl.max_horizontal("start_ns", covered_ns))
        .filter(pl.col("start_ns") < pl.col("end_ns"))
    )  # fmt: skip


def _costs(recording: AttemptRecording, first_step: int, clocks: Mapping[str, ClockFit]) -> ClaimedCosts | str:
    try:
        merged = merge_attempt(recording, name="", first_step=first_step, clocks=clocks)
    except TracekitError as error:
        return str(error)
    stored = PipelineJob(merged.trace).stored()
    return stored.problem if isinstance(stored, Unanalysed) else costs_of(stored.report)
