"""A bill: rows that divide the wall clock of jobs, and their totals by part, cause, week, team or job.

In: stretches of the wall clock of a job, each with its claims. Out: a `Bill`, whose rows add up to the wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.costs import LEAST_S, BillPart, Claim
from tracekit.report.conclusions import RunVerdict
from tracekit.trace.model import EARLIEST_S, LATEST_S

BILL_VERSION = 1
#: Monday, January 5, 1970, seconds since the epoch: weeks begin on Mondays, 00:00 UTC.
_FIRST_WEEK_S, _WEEK_S = 4 * 86_400, 7 * 86_400
#: What a part of a stretch went to, the stretch, and the seconds of it.
_SPENT = pl.Schema(
    {"part": pl.String, "cause": pl.String, "gpus": pl.Int64}
    | dict.fromkeys(("start_s", "until_s", "seconds"), pl.Float64)
)
_ROWS = pl.Schema(
    {
        "job": pl.String,
        "team": pl.String,
        "week": pl.String,
        "part": pl.String,
        "cause": pl.String,
        "seconds": pl.Float64,
        "gpu_hours": pl.Float64,
    }
)


LOST_WORK = BillPart.RESTARTS, "lost work"
KEPT_OR_LOST = BillPart.UNKNOWN, "kept or lost: no checkpoint shows it"


class Bill(Struct, frozen=True):
    """`rows`: `job`, `team`, `week` (its Monday, UTC), `part`, `cause`, `seconds` of the wall clock, `gpu_hours`; team,
    week and GPU-hours are null where unknown. `wall_s`: the wall clock of each job, seconds. `notes`: what to bear in
    mind. `runs`: the verdict on each job of a store. `overlapping`: causes that share time with others.
    """

    rows: pl.DataFrame
    wall_s: Mapping[str, float]
    notes: tuple[str, ...] = ()
    runs: Mapping[str, RunVerdict] = MappingProxyType({})
    overlapping: Set[str] = frozenset()

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of all jobs whose GPUs are known; None if those of none are."""
        counted = self.rows["gpu_hours"].drop_nulls()
        return None if counted.is_empty() and not self.rows.is_empty() else float(counted.sum())

    @property
    def unit(self) -> str:
        """What jobs are added up in: GPU-hours or, if nothing is known of GPUs, hours."""
        return "hours" if self.gpu_hours is None else "GPU-hours"

    @property
    def total(self) -> float:
        """All jobs, in that unit."""
        return float(self.rows["seconds"].sum()) / 3600 if self.gpu_hours is None else self.gpu_hours

    def by(self, group: str) -> pl.DataFrame:
        """The totals of each part, cause, week, team or job: `hours` and `gpu_hours`; `spent`, its part of the `total`,
        in its unit, and `useful`, of that. Null where unknown.

        Parts and their causes come in the order of the bill, weeks in order of time, others by what is spent.
        """
        keys = ["part", "cause"] if group == "cause" else [group]
        hours, gpu_hours = pl.col("seconds") / 3600, pl.col("gpu_hours")
        spent = hours if self.gpu_hours is None else gpu_hours
        is_known = spent.is_not_null().any()
        totals = self.rows.group_by(keys).agg(
            hours=hours.sum(),
            gpu_hours=pl.when(gpu_hours.is_not_null().any()).then(gpu_hours.sum()),
            spent=pl.when(is_known).then(spent.sum()),
            useful=pl.when(is_known).then(spent.filter(pl.col("part") == BillPart.USEFUL).sum()),
        )
        if "part" in keys:
            order = pl.col("part").replace_strict(
                {str(part): position for position, part in enumerate(BillPart)}, return_dtype=pl.Int8
            )
            return totals.sort(order, "spent", *keys, descending=[False, True, *(False for _ in keys)], nulls_last=True)
        return (
            totals.sort("week")
            if group == "week"
            else totals.sort("spent", group, descending=[True, False], nulls_last=True)
        )

    def output(self, gpu_hour: float | None = None) -> BillOutput:
        """The bill as JSON data. `gpu_hour`: the price of a GPU-hour."""
        jobs = [{"job": job, "wall_s": wall_s} for job, wall_s in self.wall_s.items()]
        return BillOutput(BILL_VERSION, gpu_hour, jobs, self.gpu_hours, self.rows.to_dicts(), self.notes)


class BillOutput(Struct, frozen=True):
    """The output of `tracekit bill --json`."""

    bill_version: int
    gpu_hour: float | None
    jobs: list[dict[str, Any]]
    gpu_hours: float | None
    rows: list[dict[str, Any]]
    notes: tuple[str, ...]


def joined(bills: Sequence[Bill]) -> Bill:
    """One bill of several jobs."""
    wall_s = {job: seconds for bill in bills for job, seconds in bill.wall_s.items()}
    rows = pl.concat([_ROWS.to_frame(), *(bill.rows for bill in bills)])
    runs = {job: run for bill in bills for job, run in bill.runs.items()}
    return Bill(rows, wall_s, tuple(note for bill in bills for note in bill.notes), runs)


class Ledger:
    """Collects what the wall clock of a job went to. `origin_s`: its start, seconds since the epoch, or of another
    clock, by which it has no week; None: unknown.
    """

    def __init__(self, job: str, team: str | None, origin_s: float | None) -> None:
        self._job = {"job": job, "team": team}
        self._origin_s = origin_s
        self._many: list[pl.DataFrame] = []
        self._single: list[tuple[str, str, int | None, float, float, float]] = []
        self.notes: list[str] = []
        self.overlapping = set[str]()

    def add_one(self, start_s: float, until_s: float, gpus: int | None, *claims: Claim) -> list[float]:
        """Divide one stretch from `start_s` to `until_s` after the origin among claims: each gets its seconds, or what
        those before it have left. `gpus`: of the job, None if unknown. Returns what each got, seconds.
        """
        remaining, spent_s = until_s - start_s, list[float]()
        for part, cause, seconds in claims:
            spent = min(remaining, float(seconds))
            remaining -= spent
            if spent > LEAST_S:
                self._single.append((str(part), cause, gpus, start_s, until_s, spent))
            spent_s.append(spent if spent > LEAST_S else 0.0)
        return spent_s

    def add(self, start_s: Any, until_s: Any, gpus: int | None, *claims: Claim) -> None:
        """The same of many stretches: arrays, or numbers."""
        start, until = np.atleast_1d(np.asarray(start_s, np.float64)), np.atleast_1d(np.asarray(until_s, np.float64))
        remaining = until - start
        for part, cause, seconds in claims:
            spent = np.minimum(remaining, seconds)
            remaining, counted = remaining - spent, spent > LEAST_S
            times = {"start_s": start[counted], "until_s": until[counted], "seconds": spent[counted]}
            went_to = {"part": str(part), "cause": cause, "gpus": gpus}
            self._many.append(pl.DataFrame(went_to | times, _SPENT))

    def bill(self, wall_s: float) -> Bill:
        """The bill of the job, whose wall clock is `wall_s` seconds."""
        gpu_hours = (pl.col("seconds") * pl.col("gpus")).sum() / 3600
        rows = (
            self._with_weeks(pl.concat([*self._many, pl.DataFrame(self._single, _SPENT, orient="row")]))
            .group_by("week", "part", "cause", maintain_order=True)
            .agg(pl.col("seconds").sum(), gpu_hours=pl.when(pl.col("gpus").is_not_null().all()).then(gpu_hours))
            .with_columns(pl.lit(value, pl.String).alias(name) for name, value in self._job.items())
            .select(_ROWS.names())
        )
        return Bill(rows, {str(self._job["job"]): wall_s}, tuple(self.notes), overlapping=frozenset(self.overlapping))

    def _with_weeks(self, entries: pl.DataFrame) -> pl.DataFrame:
        """The entries, divided where a week begins."""
        if self._origin_s is None or not EARLIEST_S <= self._origin_s <= LATEST_S:
            return entries.with_columns(week=pl.lit(None, pl.String))
        first_s = self._origin_s - _FIRST_WEEK_S
        week = (pl.col("week") * _WEEK_S).cast(pl.Float64) - first_s
        length = pl.col("until_s") - pl.col("start_s")
        inside = pl.min_horizontal("until_s", week + _WEEK_S) - pl.max_horizontal("start_s", week)
        monday = pl.from_epoch(pl.col("week") * _WEEK_S + _FIRST_WEEK_S).dt.strftime("%Y-%m-%d")
        begin, end = (((pl.col(name) + first_s) / _WEEK_S).floor().cast(pl.Int64) for name in ("start_s", "until_s"))
        return (
            entries.with_columns(week=pl.int_ranges(begin, end + 1))
            .explode("week")
            .filter(inside > 0)
            .with_columns(
                seconds=pl.when(inside < length).then(pl.col("seconds") * inside / length).otherwise("seconds")
            )
            .with_columns(week=monday)
        )


def lost_share(first: Any, last: Any, resumed: int | None) -> Any:
    """The share of the steps `first` to `last`, arrays or numbers, that are done again from step `resumed` on."""
    if resumed is None:
        return np.zeros(np.shape(first))
    redone = np.asarray(last) - np.maximum(first, resumed) + 1
    return np.clip(redone / (np.asarray(last) - first + 1), 0.0, 1.0)


def resumed_at(firsts: Sequence[int | None]) -> list[int | None]:
    """For each attempt the first step that a later one does again, by their first steps (None: it has none).

    None: that is unknown, because no later attempt follows or the script leaves the numbering of steps to the recorder,
    which begins each attempt with the same number.
    """
    resumed: list[int | None] = []
    for index, first in enumerate(firsts):
        later = [number for number in firsts[index + 1 :] if number is not None]
        numbered = first is not None and any(number != first for number in later)
        resumed.append(min(later) if numbered else None)
    return resumed
