"""The report on an analysed job, with what its kind adds; overlap and experts, measured on request.

In: a `Diagnosis`, and figures, remarks, tables and keys that only such a job has. Out: an `Analysis`, with a `Report`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import VERDICT, waste
from tracekit.analysis.attribution.patterns import StepTimes
from tracekit.analysis.detectors.detector import detector_of
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.job.job import Analysis, ReportOptions
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.analysis.numeric.statistics import ratio_margins
from tracekit.base.text import counted, seconds
from tracekit.report.conclusions import Trust
from tracekit.report.hardware import OnGpu, hardware_table
from tracekit.report.questions import (
    ByLabel,
    CauseOfImbalance,
    Experts,
    LayerLoads,
    Overlap,
    Question,
    Rebalanced,
    label_table,
    question_table,
)
from tracekit.report.report import REPORT_VERSION, Remark, Report
from tracekit.report.tables import Maybe, OfLabel, OfStep, Outline, Section, ShareGrid, Table, Times
from tracekit.trace.facts import Fact, StepValues

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.analysis.evidence.subject import Cause

#: Rows of a table.
_MOST_ROWS = 20
_LATE_PEER = "Loads are equal, and one rank comes late to all-to-alls"
_SOURCES = {"splits": "rows of the all-to-alls", "loads": "the log of loads", "kernel-times": "times of kernels only"}


class Analysed(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Everything that is known of an analysed job, and the report on it: kinds of jobs differ in what they override.

    `questions`: the answers to those of `asked`; `labels`: every label that S was attributed to, asked or not.
    """

    evidence: Subject
    diagnosis: Diagnosis
    asked: ReportOptions
    questions: Sequence[Question] = ()
    labels: Sequence[ByLabel] = ()

    @abstractmethod
    def _outline(self) -> Outline:
        """Which job."""

    @property
    @abstractmethod
    def times(self) -> StepTimes:
        """The times of each step."""

    @cached_property
    def mean(self) -> Times:
        """The mean step."""
        times = self.times
        return Times(*(float(times_s.mean()) for times_s in (times.recorded, times.original, times.ideal)))

    @property
    def slowdown_error(self) -> float:
        """Half the width of the 95 % interval of S over the steps, nan if they are too few to tell."""
        times = self.times
        return float(ratio_margins(times.original[:, None], times.ideal, times.original)[0])

    def _remarks(self) -> Iterator[tuple[str, str]]:
        """Yield what else a reader must know of such a job."""
        yield from ()

    @abstractmethod
    def _overview(self) -> Iterable[Table]:
        """The tables of the first screen."""

    @abstractmethod
    def _sections(self) -> Iterator[Section]:
        """Yield all tables and pictures, but for those that were asked for."""

    def _answers(self) -> Sequence[Table]:
        """The tables of the questions that a reader asked."""
        evidence = self.evidence
        return [question_table(self.questions, evidence.whole, daily=evidence.daily)] if self.questions else []

    @abstractmethod
    def _keys(self) -> dict[str, Any]:
        """The keys that only reports on such jobs have, or that do not follow from `times`. `trust` and `verdict`: only
        their optional keys; `step_values`: what the loop logs of its steps.
        """

    def _on_gpus(self) -> Sequence[OnGpu]:
        """What the job takes on the GPUs that were asked for."""
        if self.asked.hardware is None:
            return ()
        from tracekit.analysis.hardware.on_other_gpus import on_other_gpus

        return on_other_gpus(self.evidence, self.asked.hardware)

    def _all_remarks(self, overlap: Maybe[Overlap], experts: Maybe[Experts]) -> Iterator[tuple[str, str]]:
        diagnosis = self.diagnosis
        yield from (("Missing", lack.sentence) for lack in self.evidence.lacks if lack.fact is Fact.COMPUTE)
        yield from self._remarks()
        if overlap:
            yield "Overlap", _hidden(overlap)
        if experts and self.asked.wants_experts:
            yield "Experts", experts_sentence(experts)
        if diagnosis.metrics is not None:
            yield from (("Metrics", test.sentence) for test in diagnosis.metrics.tests)
        yield from (("" if number else "Plug-ins", problem) for number, problem in enumerate(diagnosis.problems))

    def analysis(self) -> Analysis:
        """Return the report, and what it was made of. Raises SelectionError for a schedule that does not exist."""
        diagnosis, asked, times, mean, job = self.diagnosis, self.asked, self.times, self.mean, self._outline()
        keys = {"by_kind": [], "critical_path": [], "overlap": UNSET, "experts": UNSET, **self._keys()}
        overlap, experts, on_gpus = keys["overlap"], keys["experts"], self._on_gpus()
        slowdown = mean.original / mean.ideal if mean.ideal else math.nan
        lost = waste(slowdown) if slowdown else math.nan
        wasted_gpu_hours = None if job.gpus is None else float((times.original - times.ideal).sum()) * job.gpus / 3600
        wasted_gpu_hours = keys.pop("wasted_gpu_hours", wasted_gpu_hours)
        wasted_per_day = self.evidence.gpu_hours_per_day(max(lost, 0.0))
        if on_gpus:
            keys["gpus"] = [*on_gpus, *keys.get("gpus", ())]
        loads = list(loads_sections(experts))
        of_gpus = [hardware_table(on_gpus)] if on_gpus else []
        of_labels = [
            label_table(group, peers=not self.evidence.alone) for group in self.labels if is_asked(group, asked)
        ]
        of_overlap = _overlap_tables(overlap) if overlap else []
        report = Report(
            report_version=REPORT_VERSION,
            job=job,
            answer=diagnosis.answer,
            verdict=replace(diagnosis.verdict, **keys.pop("verdict", {})),
            trust=Trust(
                number(diagnosis.trust.replay_error),
                number(diagnosis.trust.discrepancy),
                number(diagnosis.trust.unexplained),
                diagnosis.trust.trustworthy,
                list(diagnosis.trust.reasons),
                **keys.pop("trust", {}),
            ),
            step_time_s=keys.pop("step_time_s", mean),
            slowdown=number(slowdown),
            slowdown_error=number(self.slowdown_error),
            waste=number(lost),
            straggling=bool(slowdown >= VERDICT.straggling),
            wasted_gpu_hours=None if wasted_gpu_hours is None else number(max(wasted_gpu_hours, 0.0)),
            wasted_gpu_hours_per_day=None if wasted_per_day is None else number(wasted_per_day),
            assumptions=_assumptions(job) if self.evidence.daily else [],
            findings=[cause.finding for cause in diagnosis.causes],
            fixes=[priced.fix for priced in diagnosis.fixes],
            patterns=diagnosis.patterns,
            stalls=list(diagnosis.stalls),
            problems=list(diagnosis.problems),
            failed=list(diagnosis.failed),
            lacks=list(self.evidence.lacks),
            questions=list(self.questions),
            by_label=[row for group in self.labels for row in _of_label(group)],
            by_step=_by_step(times, diagnosis.headline.step_lost_s, keys.pop("step_values", {})),
            remarks=[Remark(*remark) for remark in self._all_remarks(overlap, experts)],
            overview=list(self._overview()),
            asked=[*of_gpus, *self._answers(), *of_labels, *of_overlap, *(loads if asked.wants_experts else ())],
            sections=[*self._sections(), *(() if asked.wants_experts else loads)],
            metrics=diagnosis.metrics or UNSET,
            **keys,
        )
        return Analysis(report, diagnosis)


def is_asked(group: ByLabel, asked: ReportOptions) -> bool:
    """Whether a reader asked for the attribution to these labels."""
    return any(group.labels == tuple(label.strip() for label in text.split(",")) for text in asked.by)


def _assumptions(job: Outline) -> list[str]:
    """What figures of GPU-hours a day take for granted; nothing if there are none."""
    if job.gpus is None:
        return []
    traced = "this recording" if job.whole != "step" else f"the {counted(job.steps, 'traced step')}"
    return [f"GPU-hours a day: {counted(job.gpus, 'GPU')} running all day as in {traced}"]


def _of_label(group: ByLabel) -> Iterator[OfLabel]:
    for share in group.shares:
        value = ",".join(map(str, share.values))
        figures = number(share.slowdown), number(share.error), share.added_s, share.removed_s
        yield OfLabel(",".join(group.labels), value, share.ops, *figures)


def _by_step(times: StepTimes, lost_s: Floats, step_values: StepValues) -> list[OfStep]:
    slowdown = times.original / np.where(times.ideal > 0, times.ideal, np.nan)
    columns = (times.steps, slowdown, times.recorded, times.original, times.ideal, lost_s)
    return [
        OfStep(
            step,
            number(factor),
            recorded,
            original,
            ideal,
            number(lost),
            **{name: number(values.get(step)) for name, values in step_values.items()},
        )
        for step, factor, recorded, original, ideal, lost in zip(
            *(np.asarray(column).tolist() for column in columns), strict=True
        )
    ]


def experts_of_job(evidence: GraphSubject | None, asked: ReportOptions, findings: Sequence[Cause]) -> Maybe[Experts]:
    """The loads of the experts and the price of plans; if nobody asked, uneven loads with the price of equal ones, and
    no key if there are none.
    """
    if (evidence is None or evidence.exchanges is None) and not asked.wants_experts:
        return UNSET  # as of most jobs: they need none of these modules
    from tracekit.analysis.detectors.uneven_experts import other_causes
    from tracekit.analysis.evidence.graph_subject import experts_of, uneven_experts
    from tracekit.analysis.experts.balance import ExpertJob
    from tracekit.analysis.experts.expert_loads import ExpertLoads, RebalancePlan

    if not asked.wants_experts:
        if evidence is None or uneven_experts(evidence) is None:
            return UNSET
        return experts_of(evidence).experts_with([RebalancePlan.parse("balanced")])
    loads = (ExpertLoads(ExpertJob()) if evidence is None else experts_of(evidence)).experts_with(asked.plans)
    if evidence is not None:
        loads.causes.extend(other_causes(evidence, findings))
    return loads


def experts_sentence(experts: Experts) -> str:
    """Where loads were read, and why ranks wait for each other."""
    source = "unknown" if experts.source is None else f"by {_SOURCES[experts.source]}"
    why = [f"{_because(cause)} ({seconds(cause.saved_s)} a step)" for cause in experts.causes]
    even = ["no uneven loads that cost 1% of a step"] if experts.fits and not experts.cut else []
    return "; ".join([f"loads {source}", *(why or even), *experts.notes])


def _because(cause: CauseOfImbalance) -> str:
    title = _LATE_PEER if cause.cause == "late-peer" else detector_of(cause.cause).title
    places = (("rank", cause.rank), ("in most layers expert", cause.expert))
    named = [f"{name} {value}" for name, value in places if value is not None]
    return f"{title}: {', '.join(named)}" if named else title


def _hidden(overlap: Overlap) -> str:
    total = sum(row.communication_s for row in overlap.ranks) or 1.0
    hidden, waits = sum(row.both_s for row in overlap.ranks), sum(row.wait_s for row in overlap.ranks)
    taxes = [row.sm_tax_at_most_s for row in overlap.ranks if row.sm_tax_at_most_s]
    at_most = "at most " if overlap.ranks[0].wait_basis == "minimum" else ""
    tax = f"; hiding cost at most {seconds(sum(taxes))} of SM time" if taxes else ""
    waiting = f"{at_most}{seconds(waits)} of it is waiting, not transfer"
    return f"{hidden / total:.1%} of communication is hidden; {waiting}{tax}"


def _overlap_tables(overlap: Overlap) -> list[Table]:
    """What communication compute hides, by rank, by collective and by pair."""
    ranks = [
        (str(row.rank), *map(seconds, (row.compute_s, row.communication_s, row.exposed_s, row.wait_s)),
         f"{row.hidden_share:.1%}", "-" if row.sm_tax_at_most_s is None else seconds(row.sm_tax_at_most_s))
        for row in overlap.ranks
    ]  # fmt: skip
    names = [
        (row.name, f"{row.ops:,}", *map(seconds, (row.seconds, row.exposed_s, row.wait_s)))
        for row in overlap.collectives
    ]
    pairs = [(f"{row.communication} under {row.compute}", seconds(row.seconds)) for row in overlap.pairs]
    heads = ("rank", "compute", "communication", "exposed", "waiting", "hidden", "SM tax <=")
    tables = [
        _table("Overlap", heads, ranks),
        _table("Collectives", ("Collective", "ops", "time", "exposed", "waiting"), names),
    ]
    return [*tables, _table("What hides what", ("Communication under compute", "time"), pairs)] if pairs else tables


def loads_sections(experts: Maybe[Experts]) -> Iterator[Section]:
    """Yield the loads of experts, if they are known, as a picture and a table, and the prices of plans."""
    if experts and experts.layers:
        yield _grid(experts.layers)
        rows = [(str(row.layer), f"{row.max_over_mean:.2f}", f"{row.deviation:.2f}") for row in experts.layers]
        yield _table("Layers of experts", ("layer", "max over mean", "± over steps"), rows)
    if experts and experts.rebalance:
        why = [f"{row.plan}: {row.unknown}" for row in experts.rebalance if row.unknown]
        yield _table("Other loads", ("Plan", "step", "saves", "dropped"), list(map(_price, experts.rebalance)), *why)


def _grid(layers: Sequence[LayerLoads]) -> ShareGrid:
    """Tokens of each rank over the mean, in each layer."""
    means = [sum(row.tokens_by_rank) / len(row.tokens_by_rank) or 1.0 for row in layers]
    return ShareGrid(
        title="Loads of experts",
        down="layer",
        across="rank",
        rows=[str(row.layer) for row in layers],
        columns=[str(rank) for rank in range(len(layers[0].tokens_by_rank))],
        values=[[tokens / mean - 1 for tokens in row.tokens_by_rank] for row, mean in zip(layers, means, strict=True)],
        unit="tokens",
    )


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *notes: str) -> Table:
    """A table of the first rows, with the number of all if these are not all."""
    rest = (f"{_MOST_ROWS} of {len(rows):,}; all with --json",) if len(rows) > _MOST_ROWS else ()
    return Table(title, heads, tuple(rows[:_MOST_ROWS]), "\n".join((*notes, *rest)) or None)


def _price(row: Rebalanced) -> tuple[str, ...]:
    plan = row.plan if row.chunks is None else f"{row.plan}: {row.chunks}"
    dropped = "-" if row.dropped_share is None else f"{row.dropped_share:.1%}"
    if row.step_time_s is None or row.saved_s is None:
        bounds = "unknown" if row.low_s is None else f"{seconds(row.low_s)} to {seconds(row.high_s or 0.0)}"
        return plan, bounds, "", dropped
    error = "" if not row.error_s else f" ± {seconds(row.error_s)}"
    times = f"{seconds(row.step_time_s + row.saved_s)} to {seconds(row.step_time_s)}"
    return plan, times, f"{seconds(row.saved_s)}{error}", dropped
