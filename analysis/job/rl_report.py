"""The report on a run of post-training.

In: `RlSubject`, its diagnosis, its account. Out: `Analysis`, with a `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.evidence.rl_subject import RlSubject
from tracekit.analysis.job.analysis import Analysis
from tracekit.analysis.job.build import SourceFigures, build
from tracekit.analysis.job.rl_picture import pictures_of
from tracekit.analysis.rl.account import Generation, RlAccount
from tracekit.analysis.rl.loop import WARM_UP
from tracekit.analysis.rl.rl_run import CONTRADICTION
from tracekit.base.text import counted, listed, percent, ranks_text, seconds, short, three_digits, with_error
from tracekit.report.outline import Outline, Times
from tracekit.report.question import Question, question_table
from tracekit.report.report import StepTimes
from tracekit.report.rows import OfRank
from tracekit.report.section import Table

#: An engine that differs from the median speed by this share is mentioned, and this many of them.
_UNEVEN, _MOST_NAMED = 0.05, 3
_FIX_MEANS = "fix=NAME: that fix of the report, all else as recorded."


class AnalysedRun(Struct, frozen=True, eq=False):
    """Everything that is known of an analysed run. `account`: where the mean step went, and the alternatives asked for;
    `questions`: the fixes and alternatives that have a price.
    """

    name: str
    evidence: RlSubject
    account: RlAccount
    diagnosis: Diagnosis
    questions: tuple[Question, ...]

    def analysis(self) -> Analysis:
        """The report."""
        return Analysis(build(self._source(), self.diagnosis, self.questions), self.diagnosis)

    def _source(self) -> SourceFigures:
        evidence, tables = self.evidence, list(_sections(self.account))
        recorded_s, original_s = evidence.recorded_s, evidence.unchanged_s
        mean = Times(recorded_s, original_s, float(evidence.ideal.mean()))
        return SourceFigures(
            job=self._outline(),
            times=StepTimes(evidence.steps, evidence.run.recorded, evidence.unchanged, evidence.ideal),
            mean=mean,
            slowdown=original_s / mean.ideal if mean.ideal else math.nan,
            daily=evidence.daily,
            wasted_gpu_hours=self.diagnosis.verdict.lost_gpu_hours,
            remarks=list(_remarks(self.account)),
            overview=tables,
            sections=[*pictures_of(evidence.run, [phase.phase for phase in self.account.phases]), *tables],
            asked=self._asked_tables(),
            keys={
                "by_rank": [OfRank(rank, None, None, None) for rank in range(self.account.job.engines + 1)],
                **{name: getattr(self.account, name) for name in RlAccount.__struct_fields__ if name != "job"},
            },
        )

    def _outline(self) -> Outline:
        job, phases = self.account.job, self.account.phases
        on = f", {counted(job.trajectories, 'trajectory')} on {counted(job.engines, 'engine')}" if job.engines else ""
        return Outline(
            name=self.name,
            source="rl",
            whole="step",
            sizes=f"{job.format}, {counted(job.steps, 'step')}{on}",
            gpus=self.evidence.gpus,
            steps=job.steps,
            ranks=job.engines,
            ops=job.trajectories + (len(phases) + 1) * job.steps,
            format=job.format,
            trajectories=job.trajectories,
            engines=job.engines,
            basis=job.basis,
        )

    def _asked_tables(self) -> list[Table]:
        """The fixes that were named; `sections` have the other alternatives."""
        named = [question for question in self.questions if "fix=" in question.question]
        return [question_table(named, "step", daily=self.evidence.daily, fix_means=_FIX_MEANS)] if named else []


def _remarks(account: RlAccount) -> Iterator[tuple[str, str]]:
    yield "Step", "; ".join(_step(account))
    if account.generation is not None:
        yield "Engines", "; ".join(_engines(account.generation))
    if account.sides is not None:
        yield "Sides", account.sides.words
    if account.unlike is not None and account.unlike.words:
        without = f"; without them the mean step takes {seconds(account.unlike.usual_s)}"
        yield "Steps", "; ".join(account.unlike.words) + without * bool(account.unlike.steps)
    if account.tools is not None:
        yield "Tools", account.tools.words
    if left_out := account.left_out:
        parts = "the step or its generation" if account.replayed_s is None else "generation, training or sync"
        yield "Left out", f"{ranks_text(left_out, name='step')} without the time of {parts}"
    if restarts := account.restarts:
        yield "Restart", f"{ranks_text(restarts, name='step')} logged again: from there on, the last attempt counts"


def _sections(account: RlAccount) -> Iterator[Table]:
    """Phases, losses and prices."""

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
    if (prices := _prices(account)).rows or prices.note:
        yield prices


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
    """The alternatives with a price; why the others have none is a note."""
    rows = []
    for price in account.what_if:
        if price.step_s is not None and price.saved_s is not None and price.high_s is not None:
            old = "-" if price.oldest_sample_steps is None else counted(price.oldest_sample_steps, "step")
            saved = with_error(price.saved_s, price.high_s - price.step_s)
            share = percent(price.saved_s / account.step_s)
            rows.append((short(price.scenario, 34), seconds(price.step_s), saved, share, old))
    notes = [f"{price.scenario}: {price.assumes}" for price in account.what_if if price.assumes and not account.doubt]
    heads = ("What if", "step", "saved", "of the step", "oldest sample")
    return Table("Alternatives", heads, tuple(rows), ". ".join(notes) or None)
