"""The report on a run of post-training.

In: `RlSubject`, its diagnosis, its account. Out: `RlReport`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.evidence.rl_subject import RlSubject
from tracekit.analysis.rl.account import Generation, LossTime, PhaseTime, Price, RlAccount
from tracekit.analysis.rl.loop import WARM_UP
from tracekit.analysis.rl.rl_run import CONTRADICTION
from tracekit.base.text import counted, listed, percent, ranks_text, seconds, short, three_digits, with_error
from tracekit.report.question import question_table
from tracekit.report.report import COMMON_TABLES, Report, StepTimes
from tracekit.report.section import Table

#: An engine that differs from the median speed by this share is mentioned, and this many of them.
_UNEVEN, _MOST_NAMED = 0.05, 3
_FIX_MEANS = "fix=NAME: that fix of the report, all else as recorded."


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RlReport(Report):
    """The report on a run of post-training. `account`: where the mean step went, and the alternatives asked for."""

    table_names: ClassVar[tuple[str, ...]] = (*COMMON_TABLES, "phases", "losses", "alternatives")
    evidence: RlSubject
    account: RlAccount

    @property
    def sizes(self) -> str:
        job = self.account.job
        on = f", {counted(job.trajectories, 'trajectory')} on {counted(job.engines, 'engine')}" if job.engines else ""
        return f"{job.format}, {counted(job.steps, 'step')}{on}"

    @property
    def gpus(self) -> int:
        return self.evidence.gpus

    @property
    def daily(self) -> bool:
        return self.evidence.daily

    @property
    def whole(self) -> str:
        return "step"

    @property
    def rl(self) -> RlReport:
        return self

    @property
    def times_s(self) -> dict[str, float]:
        evidence = self.evidence
        return {
            "recorded": evidence.recorded_s,
            "original": evidence.unchanged_s,
            "ideal": float(evidence.ideal.mean()),
        }

    @property
    def steps_traced(self) -> int:
        return self.account.job.steps

    def step_times(self) -> StepTimes:
        evidence = self.evidence
        return StepTimes(evidence.steps, evidence.run.recorded, evidence.unchanged, evidence.ideal)

    @property
    def workers(self) -> pl.DataFrame:
        schema = {"dp_rank": pl.Int64, "pp_rank": pl.Int64, "rank": pl.Int64, "host": pl.String, "slowdown": pl.Float64}
        return pl.DataFrame(schema=schema)

    @property
    def phases(self) -> pl.DataFrame:
        """The mean seconds of each phase in a step, the longest first."""
        return _frame(self.account.phases, PhaseTime)

    @property
    def losses(self) -> pl.DataFrame:
        """What each loss costs."""
        return _frame(self.account.losses, LossTime)

    @property
    def alternatives(self) -> pl.DataFrame:
        """The price of each alternative."""
        return _frame(self.account.what_if, Price)

    def remarks_of_source(self) -> Iterator[tuple[str, str]]:
        yield "Step", "; ".join(_step(self.account))
        if self.account.generation is not None:
            yield "Engines", "; ".join(_engines(self.account.generation))
        if self.account.sides is not None:
            yield "Sides", self.account.sides.words
        if self.account.unlike is not None and self.account.unlike.words:
            without = f"; without them the mean step takes {seconds(self.account.unlike.usual_s)}"
            yield "Steps", "; ".join(self.account.unlike.words) + without * bool(self.account.unlike.steps)
        if self.account.tools is not None:
            yield "Tools", self.account.tools.words
        if left_out := self.account.left_out:
            parts = "the step or its generation" if self.account.replayed_s is None else "generation, training or sync"
            yield "Left out", f"{ranks_text(left_out, name='step')} without the time of {parts}"
        if restarts := self.account.restarts:
            yield "Restart", f"{ranks_text(restarts, name='step')} logged again: from there on, the last attempt counts"

    def sections(self, *, full: bool = False) -> Iterator[Table]:
        """See `Report.sections`: phases, losses and prices, all of them always."""
        del full
        account = self.account

        def row(name: str, value_s: float) -> tuple[str, str, str]:
            return name, seconds(value_s), percent(value_s / account.step_s)

        rest = [] if account.unaccounted_s is None else [row("unaccounted", account.unaccounted_s)]
        phases = (*(row(short(one.phase, 30), one.seconds) for one in account.phases), *rest)
        yield Table("Phases", ("Phase", "a step", "share"), phases)
        losses = tuple(row(one.loss, one.lost_s) for one in account.losses)
        if losses:
            notes = [] if account.generation is not None else ["those within the generation need trajectories"]
            if negative := [name for name, cost, _ in losses if cost.startswith("-")]:
                notes.append(f"below 0 ({listed(negative)}): without it, the step would take longer")
            yield Table("Losses", ("Loss", "costs a step", "share"), losses, "; ".join(notes) or None)
        if account.what_if:
            yield _prices(account)

    def asked_tables(self) -> Iterator[Table]:
        """See `Report.asked_tables`: the fixes that were named; `sections` have the other alternatives."""
        if named := [one for one in self.questions_asked if "fix=" in one.question]:
            yield question_table(named, self.whole, daily=self.daily, fix_means=_FIX_MEANS)

    def details(self) -> dict[str, Any]:
        account, job = self.account, self.account.job
        ops = job.trajectories + (len(account.phases) + 1) * job.steps
        return {
            "job": {"source": "rl", "steps": job.steps, "ranks": job.engines, "ops": ops},
            "trust": {},
            "wasted_gpu_hours": self.diagnosis.verdict.lost_gpu_hours,
            "by_kind": [],
            "critical_path": [],
            "by_rank": [
                {"rank": rank, "slowdown": None, "slowdown_error": None, "host": None}
                for rank in range(job.engines + 1)
            ],
            "rl": account,
        }


def _frame(rows: list[Any], shape: type[Any]) -> pl.DataFrame:
    from tracekit.report.plain_data import frame_of

    return frame_of(rows, shape)


def _step(account: RlAccount) -> Iterator[str]:
    measured = f"from sync to sync, the mean of {account.job.steps - WARM_UP} after the first {WARM_UP}"
    yield f"{seconds(account.step_s)} {'as logged' if account.trainer_wait_s is None else measured}"
    if account.generation_s is not None:
        yield f"generation {seconds(account.generation_s)}"
    if account.trainer_wait_s is not None:
        yield f"the trainer waits {seconds(account.trainer_wait_s)}"
    if account.staleness:
        yield f"weights lag behind by {counted(account.staleness, 'step')}"
    if not account.flagged and sum(one.seconds for one in account.phases) > account.step_s * (1 + CONTRADICTION):
        yield "phases overlap, so that their shares add up to more than 100%"
    if account.unaccounted_s is None:
        yield "logged as the sum of its phases, so time outside them is unknown"


def _engines(generation: Generation) -> Iterator[str]:
    base, more = (three_digits(value * 1e3) for value in (generation.base_s, generation.per_request_s))
    yield f"a decoding step takes {base} ms + {more} ms for each running request"
    if generation.slots is not None:
        yield f"{counted(generation.slots, 'slot')} an engine"
    uneven = sorted((speed, name) for name, speed in generation.speeds.items() if abs(speed - 1) > _UNEVEN)
    for speed, name in uneven[:_MOST_NAMED]:
        yield f"{short(name, 30)} at {three_digits(speed)} times the median speed"
    if len(uneven) > _MOST_NAMED:
        yield f"{len(uneven) - _MOST_NAMED} more are uneven"


def _prices(account: RlAccount) -> Table:
    rows = []
    for one in account.what_if:
        price = ("-", "-", "-", "-")
        if one.step_s is not None and one.saved_s is not None and one.high_s is not None:
            old = "-" if one.oldest_sample_steps is None else counted(one.oldest_sample_steps, "step")
            saved = with_error(one.saved_s, one.high_s - one.step_s)
            price = (seconds(one.step_s), saved, percent(one.saved_s / account.step_s), old)
        rows.append((short(one.scenario, 34), *price))
    notes = [f"{one.scenario}: {one.assumes}" for one in account.what_if if one.assumes and not account.doubt]
    heads = ("What if", "step", "saved", "of the step", "oldest sample")
    return Table("Alternatives", heads, tuple(rows), ". ".join(notes) or None)
