"""Runs of post-training for users of the library, and the report on them.

In: logs, or recorded phases and trajectories. Out: `RlJob`, and from it an `Analysis`, with a `Report`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from tracekit.analysis.attribution.by_label import SpentPart, SpentPhases, kept_steps
from tracekit.analysis.attribution.patterns import StepTimes
from tracekit.analysis.diagnosis.diagnosis import diagnose
from tracekit.analysis.diagnosis.of_rl import RlAssessment
from tracekit.analysis.diagnosis.price import fix_named
from tracekit.analysis.evidence.rl_subject import RlSubject
from tracekit.analysis.job.build import Analysed
from tracekit.analysis.job.job import Analysis, Exported, Job, PathLike, Progress, ReportOptions
from tracekit.analysis.job.questions import answered
from tracekit.analysis.rl.account import RlAccount
from tracekit.analysis.rl.rl_run import CONTRADICTION, WARM_UP, Gpus, LoggedRun, PostTrainingRun, Scenario
from tracekit.analysis.rl.timed import Generations, TimedRun
from tracekit.analysis.whatif.selection_text import checked_text
from tracekit.base.errors import FormatError, SelectionError, TraceError
from tracekit.base.text import counted, listed, percent, ranks_text, seconds, short, three_digits, with_error
from tracekit.collectors.importers.rl_logs import read_rl
from tracekit.report.questions import ByLabel, Question, question_table
from tracekit.report.rl_step import Generation
from tracekit.report.tables import (
    TONES,
    BarTimeline,
    LegendEntry,
    Outline,
    Picture,
    Section,
    Series,
    SeriesLine,
    Table,
    TimelineBar,
)
from tracekit.trace.model import Format
from tracekit.trace.op import OpTrace
from tracekit.trace.post_training import POST_TRAINING, PhaseLog, run_of, trace_of

if TYPE_CHECKING:
    from tracekit.analysis.replay.graph_replay import GraphReplay

#: How an edit begins that names a fix of the report.
_FIX = "fix="
#: An engine that differs from the median speed by this share is mentioned, and this many of them.
_UNEVEN, _MOST_NAMED = 0.05, 3
_FIX_MEANS = "fix=NAME: that fix of the report, all else as recorded."
#: The most steps and requests in a picture.
_MOST_STEPS, _MOST_REQUESTS = 200, 600
#: What a bar of a request is: the engines take turns, so that neighbours differ.
_LEGEND = [
    LegendEntry("decoding, even engines", 0),
    LegendEntry("decoding, odd engines", 1),
    LegendEntry("decoding, in the tail", 5),
    LegendEntry("waiting to start", 3),
]


@dataclass(frozen=True, repr=False)
class RlJob(Job):
    """A run of post-training. `trace`: its phases and requests as ops. `gpus`, `slots`: as for `TimedRun`."""

    trace: OpTrace
    gpus: Gpus | None = None
    slots: int | None = None

    @classmethod
    def read(cls, paths: Sequence[Path], written_by: Format | None = None, **stated: Any) -> RlJob:
        """Read the files of one run. `stated`: `gpus`, `slots`. Raises FormatError."""
        return cls(trace_of(read_rl(paths, written_by), paths[0].name), **stated)

    def __repr__(self) -> str:
        return f"<Job {short(self.trace.name)}: {len(self.trace.steps):,} steps of post-training>"

    @property
    def source(self) -> str:
        return "a run of post-training (docs/rl.md)"

    @property
    def replay(self) -> GraphReplay:
        """None of its kind: requests on engines are replayed, not ops. Raises SelectionError."""
        raise self._not_for("a graph of ops")

    @cached_property
    def evidence(self) -> RlSubject:
        """What diagnosis and prices are made from. Raises FormatError for a run without enough whole steps."""
        log = run_of(self.trace)
        try:
            run = LoggedRun(log) if isinstance(log, PhaseLog) else TimedRun(log, self.gpus, self.slots)
        except FormatError as error:
            raise FormatError(f"{short(self.trace.name)}: {error}") from None
        return RlSubject(run, None if self.gpus is None else self.gpus.rollout + self.gpus.trainer)

    def validate(self) -> None:
        _ = self.evidence

    def analyse(self, asked: ReportOptions, progress: Progress | None = None) -> Analysis:
        """See `Job.analyse`. `asked.fix`: alternatives, such as "staleness=1", "partial=0.9", "fix=NAME" of a fix; by
        default the usual ones.
        """
        for option, value in (
            ("--keep", asked.keep),
            ("--by", asked.by),
            ("--expert-loads", asked.expert_loads),
            ("--gpu or --precision", asked.hardware),
        ):
            if value:
                raise self._not_for(option)
        self.refuse_pipeline_options(asked)
        asked.refuse_measured(self.trace.name, self.source)
        if progress is not None:
            progress("replaying the steps")
        evidence = self.evidence
        alternatives = [Scenario.parse(text) for text in asked.fix if _FIX not in text]
        account = evidence.run.account(alternatives) if alternatives else evidence.account
        unpriced = {price.scenario for price in account.what_if if price.saved_s is None}
        return AnalysedRun(
            evidence=evidence,
            diagnosis=diagnose(RlAssessment(evidence, account), asked.metrics),
            asked=asked,
            questions=tuple(self.answer(text) for text in asked.fix if text not in unpriced),
            name=self.trace.name,
            account=account,
        ).analysis()

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """See `Job.answer`. `selection`: as `fix` of `whatif`; several, joined by " + ", go together.

        Raises SelectionError for one that has no price, with the reason.
        """
        if keep:
            raise self._not_for("--keep")
        evidence, selection = self.evidence, checked_text(selection)
        if evidence.run.doubt:
            raise SelectionError(f"{selection}: no price, {evidence.run.doubt}")
        parts = selection.split(" + ") if _FIX in selection else [selection]
        changes = [self._change(text.strip()) for text in parts]
        for change in changes:
            if isinstance(change, Scenario) and (price := evidence.run.price(change)).saved_s is None:
                raise SelectionError(f"{selection}: no price, {price.assumes}")
        saving = evidence.unchanged - evidence.step_times(changes)
        error_s = evidence.saving_error_s(saving, changes)
        gpus = evidence.gpus if evidence.daily else None
        return answered(f"fix {selection}", self.trace.ops.height, evidence.recorded_s, saving, error_s, gpus)

    def build(self) -> None:
        _ = self.evidence

    def _change(self, text: str) -> Any:
        """What an alternative changes, or the fix that it names."""
        if not text.startswith(_FIX):
            return Scenario.parse(text)
        return fix_named(self.analysis.diagnosis.fixes, text.removeprefix(_FIX)).plan.change

    def spent(self, ignored: Collection[int] = ()) -> SpentPhases:
        if flagged := self.evidence.account.flagged:
            raise TraceError(f"{short(self.trace.name)}: {flagged}")
        run, unlike = self.evidence.run, self.evidence.account.unlike
        differing = [] if unlike is None else sorted(set(unlike.numbers) - set(ignored))
        counted_steps = kept_steps(run.steps.tolist(), [*ignored, *differing])
        parts = {SpentPart("kind", name): took[counted_steps] for name, took in run.phases.items()}
        return SpentPhases(
            run.steps[counted_steps].tolist(),
            run.recorded[counted_steps],
            parts,
            self.trace.ops.height / len(self.trace.steps),
            "" if unlike is None or not differing else "; ".join(group.words for group in unlike.steps),
            WARM_UP if self.evidence.account.job.format == Format.TRAJECTORIES else 0,
        )

    def identity(self) -> dict[str, Any]:
        return {"source": self.source, "engines": self.trace.sizes["world_size"] - 1}

    def attribute_by(self, *labels: str) -> ByLabel:
        raise self._not_for(f"S by {', '.join(labels)}")

    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        """See `Job.export`: the recorded timeline alone."""
        from tracekit.trace.chrome import MOST_SLICES, DrawnTimeline, write_op_chrome

        ops, marked = self.trace.ops, self.trace.steps.tolist()
        chosen = ops if steps is None else ops.filter(ops["step"].is_in(list(steps)))
        if chosen.is_empty():
            raise SelectionError(
                f"{short(self.trace.name)} has none of these steps; it has {marked[0]} to {marked[-1]}"
            )
        if chosen.height > MOST_SLICES:
            raise SelectionError(f"{chosen.height:,} slices are too many for a browser; choose fewer --steps")
        recorded = DrawnTimeline("recorded", chosen.select("start", "duration"), np.zeros(0, np.int64))
        written = write_op_chrome(path, self.trace.name, chosen, [recorded])
        return Exported(chosen["step"].n_unique(), len(marked), written)

    def redacted(self) -> RlJob:
        facts = dict(self.trace.metadata[POST_TRAINING])
        if engines := facts.get("engines"):
            facts["engines"] = [f"engine-{number}" for number in range(len(engines))]
        return replace(self, trace=replace(self.trace, name="job", metadata={POST_TRAINING: facts}))

    def _not_for(self, what: str) -> SelectionError:
        return SelectionError(f"{what} is for pipelines and op traces; {short(self.trace.name)} is {self.source}")


class AnalysedRun(Analysed, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed run. `account`: where the mean step went, and the alternatives asked for;
    `questions`: the fixes and alternatives that have a price.
    """

    evidence: RlSubject
    name: str
    account: RlAccount

    @property
    def times(self) -> StepTimes:
        """See `Analysed.times`."""
        evidence = self.evidence
        return StepTimes(evidence.steps, evidence.run.recorded, evidence.unchanged, evidence.ideal)

    def _remarks(self) -> Iterator[tuple[str, str]]:
        account = self.account
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
            log = account.replayed_s is None
            lacks = "a whole record" if log else "the time of generation, training or sync"
            yield "Left out", f"{ranks_text(left_out, name='step')} without {lacks}"
        if restarts := account.restarts:
            yield "Restart", f"{ranks_text(restarts, name='step')} logged again: from there on, the last attempt counts"

    def _overview(self) -> Iterator[Table]:
        """Yield phases, losses and prices."""
        account = self.account

        def table_row(name: str, value_s: float) -> tuple[str, str, str]:
            return name, seconds(value_s), percent(value_s / account.step_s)

        rest = [] if account.unaccounted_s is None else [table_row("unaccounted", account.unaccounted_s)]
        phases = (*(table_row(short(row.phase, 30), row.seconds) for row in account.phases), *rest)
        yield Table("Phases", ("Phase", "a step", "share"), phases)
        losses = tuple(table_row(row.loss, row.lost_s) for row in account.losses)
        if losses:
            notes = [] if account.generation is not None else ["those within the generation need trajectories"]
            if negative := [name for name, cost, _ in losses if cost.startswith("-")]:
                notes.append(f"below 0 ({listed(negative)}): without it, the step would take longer")
            yield Table("Losses", ("Loss", "costs a step", "share"), losses, "; ".join(notes) or None)
        if (prices := _prices(account)).rows or prices.note:
            yield prices

    def _sections(self) -> Iterator[Section]:
        yield from _pictures_of(self.evidence.run, [phase.phase for phase in self.account.phases])
        yield from self._overview()

    def _answers(self) -> list[Table]:
        """See `Analysed`; the table of alternatives has the others."""
        named = [question for question in self.questions if _FIX in question.question]
        return [question_table(named, "step", daily=self.evidence.daily, fix_means=_FIX_MEANS)] if named else []

    def _keys(self) -> dict[str, Any]:
        keys = structs.asdict(self.account) | {"wasted_gpu_hours": self.diagnosis.verdict.lost_gpu_hours}
        del keys["job"]
        return keys

    def _outline(self) -> Outline:
        job, phases = self.account.job, self.account.phases
        on = f", {counted(job.trajectories, 'trajectory')} on {counted(job.engines, 'engine')}" if job.engines else ""
        return Outline(
            name=self.name,
            source="rl",
            whole="step",
            sizes=f"{job.format}, {counted(job.steps, 'step')}{on}",
            gpus=self.evidence.gpus,
            ranks=job.engines,
            ops=job.trajectories + (len(phases) + 1) * job.steps,
            **structs.asdict(job),
        )


def _step(account: RlAccount) -> Iterator[str]:
    measured = f"from sync to sync, the mean of {account.job.steps - WARM_UP} after the first {WARM_UP}"
    yield f"{seconds(account.step_s)} {'as logged' if account.trainer_wait_s is None else measured}"
    if account.generation_s is not None:
        yield f"generation {seconds(account.generation_s)}"
    if account.trainer_wait_s is not None:
        yield f"the trainer waits {seconds(account.trainer_wait_s)}"
    if account.staleness:
        yield f"weights lag behind by {counted(account.staleness, 'step')}"
    if not account.flagged and sum(row.seconds for row in account.phases) > account.step_s * (1 + CONTRADICTION):
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


def _pictures_of(run: PostTrainingRun, phases: Sequence[str]) -> list[Picture]:
    """The pictures of a run. `phases`: their names, the longest first."""
    steps = len(run.recorded)
    drawn = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_STEPS)).astype(int))
    lines = [
        SeriesLine(short(name, 30), number % len(TONES), run.phases[name][drawn].tolist())
        for number, name in enumerate(phases)
    ]
    few = f"{len(drawn)} of {steps} steps" if len(drawn) < steps else None
    places = run.steps[drawn].astype(float).tolist()
    over_steps = [Series("Phases over steps", "step", "s", places, lines, stacked=True, note=few)] if lines else []
    return [*over_steps, *([] if run.generations is None else [_requests(run.generations)])]


def _requests(generations: Generations) -> BarTimeline:
    """The requests of the longest generation, by engine and start."""
    ran, longest = generations.ran, int(generations.recorded.argmax())
    rows, tail = np.flatnonzero(ran.step == longest), generations.longest()[longest]
    rows = rows[np.lexsort((ran.start[rows], ran.engine[rows]))]
    drawn = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_REQUESTS)).astype(int))].tolist()
    first = float(ran.submit[rows].min())

    def bars() -> Iterator[TimelineBar]:
        for row, request in enumerate(drawn):
            submit_s, start_s, end_s = (float(times[request]) - first for times in (ran.submit, ran.start, ran.end))
            engine, tokens = int(ran.engine[request]), float(ran.tokens[request])
            words = f"{short(generations.names[engine])}: {tokens:,.0f} tokens, {{}}"
            what = 2 if tokens > tail else engine % 2
            yield TimelineBar(row, 3, submit_s, start_s, words.format(seconds(start_s - submit_s)))
            yield TimelineBar(row, what, start_s, end_s, words.format(seconds(end_s - start_s)))

    title, axis = "Requests of the longest generation", "since the first was submitted"
    return BarTimeline(title, axis, [""] * len(drawn), _LEGEND, list(bars()), [])
