"""Runs of post-training for users of the library.

In: logs, or recorded phases and trajectories. Out: `RlJob`, and from it an `Analysis`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.analysis.attribution.spent import SpentPart, SpentPhases, kept_steps
from tracekit.analysis.diagnosis.diagnose import diagnose
from tracekit.analysis.diagnosis.of_rl import RlAssessment
from tracekit.analysis.diagnosis.price import fix_named
from tracekit.analysis.evidence.rl_subject import RlSubject
from tracekit.analysis.job.analysis import Analysis, ReportOptions
from tracekit.analysis.job.job import Exported, Job, PathLike, Progress
from tracekit.analysis.job.questions import answered
from tracekit.analysis.job.rl_report import AnalysedRun
from tracekit.analysis.rl.logged import LoggedRun
from tracekit.analysis.rl.scenario import Gpus, Scenario
from tracekit.analysis.rl.timed import TimedRun
from tracekit.base.errors import FormatError, SelectionError, TraceError
from tracekit.base.text import short
from tracekit.collectors.importers.rl.reader import read_rl
from tracekit.report.question import ByLabel, Question
from tracekit.trace.op import OpTrace
from tracekit.trace.post_training import POST_TRAINING, Format, PhaseLog, run_of, trace_of

if TYPE_CHECKING:
    from tracekit.analysis.replay.graph_replay import GraphReplay

#: How an edit begins that names a fix of the report.
_FIX = "fix="


@dataclass(frozen=True, repr=False)
class RlJob(Job):
    """A run of post-training. `trace`: its phases and requests as ops. `gpus`, `slots`: as for `TimedRun`."""

    trace: OpTrace
    gpus: Gpus | None = None
    slots: int | None = None

    @classmethod
    def read(cls, paths: Sequence[Path], written_by: Format | None = None, **stated: Any) -> RlJob:
        """Read the files of one run. `known`: `gpus`, `slots`. Raises FormatError."""
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
            ("--layers", asked.layers),
            ("--expert-loads", asked.expert_loads),
            ("--gpu", asked.hardware),
        ):
            if value:
                raise self._not_for(option)
        self.refuse_bubbles(asked)
        asked.refuse_measured(self.trace.name, self.source)
        if progress is not None:
            progress("replaying the steps")
        evidence = self.evidence
        alternatives = [Scenario.parse(text) for text in asked.fix if _FIX not in text]
        account = evidence.run.account(alternatives) if alternatives else evidence.account
        unpriced = {price.scenario for price in account.what_if if price.saved_s is None}
        return AnalysedRun(
            name=self.trace.name,
            evidence=evidence,
            account=account,
            diagnosis=diagnose(RlAssessment(evidence, account), asked.metrics),
            questions=tuple(self.answer(text) for text in asked.fix if text not in unpriced),
        ).analysis()

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """See `Job.answer`. `selection`: as `fix` of `whatif`; several, joined by " + ", go together.

        Raises SelectionError for one that has no price, with the reason.
        """
        if keep:
            raise self._not_for("--keep")
        evidence = self.evidence
        if evidence.run.doubt:
            raise SelectionError(f"{selection}: no price, {evidence.run.doubt}")
        parts = selection.split(" + ") if _FIX in selection else [selection]
        changes = [self._change(text.strip()) for text in parts]
        for change in changes:
            if isinstance(change, Scenario) and (price := evidence.run.price(change)).saved_s is None:
                raise SelectionError(f"{selection}: no price, {price.assumes}")
        saving = evidence.unchanged - evidence.step_times(changes)
        error_s = evidence.saving_error_s(saving, changes)
        return answered(f"fix {selection}", self.trace.ops.height, evidence.recorded_s, saving, error_s, evidence.gpus)

    def build(self) -> None:
        _ = self.evidence

    def _change(self, text: str) -> Any:
        """What an alternative changes, or the fix that it names."""
        if not text.startswith(_FIX):
            return Scenario.parse(text)
        return fix_named(self.analysis.diagnosis.fixes, text.removeprefix(_FIX)).change

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
        )

    def attribute_by(self, *labels: str) -> ByLabel:
        raise self._not_for(f"S by {', '.join(labels)}")

    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        """See `Job.export`: the recorded timeline alone."""
        from tracekit.trace.chrome import MOST_SLICES, OpTimeline, write_op_chrome

        ops, marked = self.trace.ops, self.trace.steps.tolist()
        chosen = ops if steps is None else ops.filter(ops["step"].is_in(list(steps)))
        if chosen.is_empty():
            raise SelectionError(
                f"{short(self.trace.name)} has none of these steps; it has {marked[0]} to {marked[-1]}"
            )
        if chosen.height > MOST_SLICES:
            raise SelectionError(f"{chosen.height:,} slices are too many for a browser; choose fewer --steps")
        times = chosen["start"].to_numpy(), chosen["duration"].to_numpy()
        recorded = OpTimeline("recorded", *times, np.zeros(0, np.int64))
        written = write_op_chrome(path, self.trace.name, chosen, [recorded])
        return Exported(chosen["step"].n_unique(), len(marked), written)

    def redacted(self) -> RlJob:
        facts = dict(self.trace.metadata[POST_TRAINING])
        if engines := facts.get("engines"):
            facts["engines"] = [f"engine-{number}" for number in range(len(engines))]
        return replace(self, trace=replace(self.trace, name="job", metadata={POST_TRAINING: facts}))

    def _not_for(self, what: str) -> SelectionError:
        return SelectionError(f"{what} is for pipelines and op traces; {short(self.trace.name)} is {self.source}")
