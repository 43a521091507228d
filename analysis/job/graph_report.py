"""The report on an op trace; `recording_report` adds what only a recording of GPUs shows.

In: `GraphSubject`, its diagnosis, who costs what, the critical path. Out: `Analysis`, with a `Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from msgspec import Struct

from tracekit.analysis.attribution.by_label import Share
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.evidence.culprit import culprit_of
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.job import experts
from tracekit.analysis.job.analysis import Analysis, ReportOptions
from tracekit.analysis.job.build import SourceFigures, build, slowdown_error
from tracekit.analysis.job.recording_tables import (
    MOST_WAITS,
    WIDEST_NAME,
    on_path,
)
from tracekit.analysis.numeric.arrays import number
from tracekit.base.text import counted, of_whole, seconds, short
from tracekit.report.conclusions import CauseOfCulprit, RankToBlame
from tracekit.report.experts import Experts, Overlap
from tracekit.report.hardware import OnGpu, hardware_table
from tracekit.report.outline import Outline, Times
from tracekit.report.plain_data import Number
from tracekit.report.question import ByLabel, Question, label_table, question_table
from tracekit.report.report import StepTimes, slowdown_with_error
from tracekit.report.rows import Contribution, OfRank, OnPath
from tracekit.report.section import Section, Table

#: The most rows of ranks on a first screen.
FEWEST_RANKS = 8


class AnalysedGraph(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Everything that is known of an analysed job of any shape. `evidence`: its graph and replay.

    `critical_peers` (by the label `critical_label`, peer or kind), `critical_kinds`, `critical_ranks`: mean seconds per
    step on the critical path of the recorded job, largest first; `critical_delay_s`: while nothing on it ran.
    `labels`: those that jobs are usually attributed to, and those of `asked`.
    """

    #: What the critical path consists of where no op runs.
    between: ClassVar[str] = "launch delays"

    name: str
    evidence: GraphSubject
    diagnosis: Diagnosis
    asked: ReportOptions
    questions: tuple[Question, ...]
    labels: tuple[ByLabel, ...]
    critical_label: str
    critical_peers: Mapping[str, float]
    critical_kinds: Mapping[str, float]
    critical_ranks: Mapping[int, float]
    critical_delay_s: float

    def analysis(self) -> Analysis:
        """The report."""
        return Analysis(build(self._source(), self.diagnosis, self.questions, self.labels), self.diagnosis)

    @cached_property
    def mean(self) -> Times:
        """The mean step."""
        times = self.evidence.times
        return Times(*(float(each.mean()) for each in (times.recorded, times.original, times.ideal)))

    @cached_property
    def times(self) -> StepTimes:
        """The times of each step."""
        times = self.evidence.times
        return StepTimes(self.evidence.steps, times.recorded, times.original, times.ideal)

    @cached_property
    def shares_by_rank(self) -> Mapping[int, Share]:
        """What each rank costs alone, as recorded while all others are ideal."""
        return {int(share.values[0]): share for share in self._shares("rank")}

    def _shares(self, label: str) -> tuple[Share, ...]:
        """What each value of a label costs; empty if the job was not attributed to it."""
        return next((group.shares for group in self.labels if group.labels == (label,)), ())

    @cached_property
    def on_gpus(self) -> Sequence[OnGpu]:
        """What the job takes on the GPUs that were asked for."""
        if self.asked.hardware is None:
            return ()
        from tracekit.analysis.hardware.on_other_gpus import on_other_gpus

        return on_other_gpus(self.evidence, self.asked.hardware)

    def _source(self) -> SourceFigures:
        evidence = self.evidence
        overlap = experts.overlap_of(evidence, self.asked)
        loads = experts.asked_experts(evidence, self.asked, self.diagnosis.causes)
        times = evidence.times
        return SourceFigures(
            job=self._outline(),
            times=self.times,
            mean=self.mean,
            slowdown=evidence.slowdown,
            daily=evidence.daily,
            wasted_gpu_hours=float((times.original - times.ideal).sum()) * evidence.gpus / 3600,
            remarks=[*self._remarks(), *experts.remarks(overlap, loads, self.asked)],
            overview=self._overview(),
            sections=list(self._sections(loads)),
            asked=self._asked_tables(overlap, loads),
            trust=self._trust(),
            verdict=self._verdict(),
            keys=self._keys(overlap, loads),
        )

    def _outline(self) -> Outline:
        steps, ops = len(self.evidence.steps), self.evidence.ops.height
        return self._outline_of({"step": steps, "op": ops}, source="ops", steps=steps, ops=ops)

    def _outline_of(self, counts: Mapping[str, int], **own: Any) -> Outline:
        """The outline, with the number of ranks and other `counts` in words."""
        evidence, device = self.evidence, own.get("gpu")
        numbers = {"rank": len(evidence.ranks), **counts}
        sizes = ", ".join(counted(count, name) for name, count in numbers.items() if count)
        return Outline(
            name=self.name,
            whole="recording" if evidence.whole == "recording" else "step",
            sizes=f"{sizes} on {short(device, WIDEST_NAME)}" if device else sizes,
            gpus=evidence.gpus,
            ranks=len(evidence.ranks),
            **own,
        )

    def _remarks(self) -> Iterator[tuple[str, str]]:
        """Yield what else a reader must know."""
        yield from ()

    def _overview(self) -> list[Table]:
        """The tables of the first screen."""
        return [self._critical_path()]

    def _sections(self, loads: Experts | None) -> Iterator[Section]:
        if len(self.evidence.ranks) > 1:
            yield self._method()
        yield from self._tables_of_source()
        yield self._critical_path()
        yield from (label_table(group) for group in self._usual_labels if group not in self._labels_wanted)
        if not self.asked.wants_experts:
            yield from experts.loads(loads)

    def _method(self) -> Table:
        """The times that S is made of, and what the worst ranks cost alone."""
        times = {"recorded": self.mean.recorded, "launch delays removed": self.mean.original,
                 "and all ranks alike": self.mean.ideal}  # fmt: skip
        slowdown = slowdown_with_error(self.evidence.slowdown, slowdown_error(self.times))
        rows = ((name, seconds(time_s)) for name, time_s in times.items())
        worst = sorted(self.shares_by_rank.items(), key=lambda each: -each[1].slowdown)[:FEWEST_RANKS]
        alone = ((f"S, rank {rank} alone", f"{share.slowdown:.3f}") for rank, share in worst)
        return Table("Method", (f"Times of a {self.evidence.whole}", "mean"), (*rows, ("S", slowdown), *alone))

    def _tables_of_source(self) -> Iterator[Table]:
        """Yield the tables that only some sources have."""
        yield from ()

    @property
    def _usual_labels(self) -> Sequence[ByLabel]:
        """The labels whose tables are shown unasked."""
        return self.labels

    @property
    def _labels_wanted(self) -> list[ByLabel]:
        """The labels that a reader asked for."""
        return [group for group in self.labels if ",".join(group.labels) in self.asked.by]

    def _asked_tables(self, overlap: Overlap | None, loads: Experts | None) -> list[Section]:
        evidence, answers = self.evidence, []
        if self.questions:
            answers.append(question_table(self.questions, evidence.whole, daily=evidence.daily))
        labels = [label_table(group, peers=not evidence.alone) for group in self._labels_wanted]
        gpus = [hardware_table(self.on_gpus)] if self.on_gpus else []
        return [*gpus, *answers, *labels, *experts.asked_tables(overlap, loads, self.asked)]

    def _critical_path(self) -> Table:
        """The critical path of the recorded job, by op class and by rank."""
        recorded_s = self.mean.recorded
        parts = [
            *((short(name), spent_s) for name, spent_s in list(self.critical_peers.items())[:MOST_WAITS]),
            (self.between, self.critical_delay_s),
            *((f"rank {rank}", spent_s) for rank, spent_s in list(self.critical_ranks.items())[:MOST_WAITS]),
        ]
        rows = tuple((name, seconds(spent_s), f"{spent_s / recorded_s * 100:.0f}%") for name, spent_s in parts)
        return Table("Critical path", ("On the critical path", of_whole(self.evidence.whole), "share"), rows)

    def _trust(self) -> dict[str, Any]:
        return {"notes": []}

    def _verdict(self) -> dict[str, Any]:
        return {"culprit": self._rank_to_blame()}

    def _keys(self, overlap: Overlap | None, loads: Experts | None) -> dict[str, Any]:
        evidence = self.evidence
        paths = [*self.critical_peers.items(), (None, self.critical_delay_s)]
        keys: dict[str, Any] = {
            "gaps": list(evidence.graph.ops.gaps),
            "critical_path": [on_path(self.critical_label, name, spent) for name, spent in paths],
            "critical_kinds": [OnPath(kind=kind, recorded_s=spent) for kind, spent in self.critical_kinds.items()],
            "critical_ranks": [OnPath(rank=rank, recorded_s=spent) for rank, spent in self.critical_ranks.items()],
            "by_rank": [
                OfRank(rank, *self._cost_alone(rank), evidence.hosts.get(rank)) for rank in sorted(self.shares_by_rank)
            ],
            "by_kind": [
                Contribution(
                    kind=str(share.values[0]),
                    ops=share.ops,
                    slowdown=number(share.slowdown),
                    slowdown_error=number(share.error),
                    saved_s=number(share.removed_s),
                )
                for share in self._shares("kind")
            ],
        }
        keys |= self._keys_of_source()
        if self.on_gpus:
            keys["gpus"] = [*self.on_gpus, *keys.get("gpus", ())]
        asked = {"overlap": overlap, "experts": loads}
        return keys | {name: answer for name, answer in asked.items() if answer is not None}

    def _keys_of_source(self) -> dict[str, Any]:
        """The keys that only some sources have."""
        return {}

    def _cost_alone(self, rank: int) -> tuple[Number, Number]:
        """S of a rank alone, and its error."""
        share = self.shares_by_rank.get(rank)
        return (None, None) if share is None else (number(share.slowdown), number(share.error))

    def _rank_to_blame(self) -> RankToBlame | None:
        """The rank that stands out, with the findings on it; None if there is none."""
        culprit = culprit_of(self.evidence)
        if culprit is None:
            return None
        causes = [
            CauseOfCulprit(
                cause.kind,
                cause.saved_s,
                "; ".join(figure.words for figure in cause.evidence),
                cause.effect,
                cause.suggested_fix,
            )
            for cause in self.diagnosis.causes
            if cause.where.ranks == (culprit.rank,)
        ]
        host = self.evidence.hosts.get(culprit.rank)
        waits = number(culprit.sole_delay_s), number(culprit.waited_s)
        return RankToBlame(culprit.rank, host, culprit.saved_s, *waits, causes)
