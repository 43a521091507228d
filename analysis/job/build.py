"""A report, built once from a diagnosis and from what its source adds; overlap and experts, measured on request.

In: a `Diagnosis`, and figures, remarks, tables and keys that only such a job has. Out: a `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN, waste
from tracekit.analysis.detectors.detector import detector_of
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.analysis.numeric.statistics import ratio_margins
from tracekit.base.text import counted, seconds
from tracekit.report.conclusions import Patterns, Trust
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
from tracekit.report.report import REPORT_VERSION, Remark, Report, StepTimes
from tracekit.report.tables import Maybe, OfLabel, OfStep, Outline, Section, ShareGrid, Table, Times
from tracekit.trace.facts import Fact, StepValues

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.analysis.evidence.subject import Cause
    from tracekit.analysis.job.job import ReportOptions

#: Rows of a table.
_MOST_ROWS = 20
_LATE_PEER = "Loads are equal, and one rank comes late to all-to-alls"
_SOURCES = {"splits": "rows of the all-to-alls", "loads": "the log of loads", "kernel-times": "times of kernels only"}


def build(
    evidence: Subject,
    diagnosis: Diagnosis,
    asked: ReportOptions,
    *,
    job: Outline,
    times: StepTimes,
    with_delays_s: Maybe[float] = UNSET,
    wasted_gpu_hours: float | None = None,
    remarks: Iterable[tuple[str, str]],
    overview: Sequence[Table],
    sections: Iterable[Section],
    questions: Sequence[Question],
    answers: Sequence[Table] | None = None,
    labels: Sequence[ByLabel] = (),
    peers: bool = True,
    on_gpus: Sequence[OnGpu] = (),
    overlap: Overlap | None = None,
    experts: Experts | None = None,
    step_values: StepValues | None = None,
    trust: Mapping[str, Any] | None = None,
    verdict: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any],
) -> Report:
    """Return the report.

    `with_delays_s`: the mean step replayed with launch delays; `wasted_gpu_hours`: what is lost, by default by S.
    `overview`: tables of the first screen, `sections`: all tables and pictures. `answers`: tables of the `questions`
    that a reader asked, by default one. `labels`: every label that S was attributed to; `peers`: whether other ranks
    were recorded. `step_values`: what the loop logs of its steps. `trust`, `verdict`, `keys`: optional keys of these
    objects, and of the report.
    """
    mean = mean_times(times, with_delays_s)
    slowdown = mean.original / mean.ideal if mean.ideal else math.nan
    lost = waste(slowdown) if slowdown else math.nan
    if wasted_gpu_hours is None and job.gpus is not None:
        wasted_gpu_hours = float((times.original - times.ideal).sum()) * job.gpus / 3600
    wasted_per_day = evidence.gpu_hours_per_day(max(lost, 0.0))
    loads = list(loads_sections(experts))
    if answers is None:
        answers = [question_table(questions, evidence.whole, daily=evidence.daily)] if questions else []
    of_gpus = [hardware_table(on_gpus)] if on_gpus else []
    of_labels = [label_table(group, peers=peers) for group in labels if is_asked(group, asked)]
    of_overlap = [] if overlap is None else _overlap_tables(overlap)
    answered: dict[str, Any] = {"overlap": overlap, "experts": experts, "metrics": diagnosis.metrics}
    if on_gpus:
        answered["gpus"] = [*on_gpus, *keys.get("gpus", ())]
    own = {"by_kind": [], "critical_path": [], **keys}
    return Report(
        report_version=REPORT_VERSION,
        job=job,
        answer=diagnosis.answer,
        verdict=replace(diagnosis.verdict, **(verdict or {})),
        trust=Trust(
            number(diagnosis.trust.replay_error),
            number(diagnosis.trust.discrepancy),
            number(diagnosis.trust.unexplained),
            diagnosis.trust.trustworthy,
            list(diagnosis.trust.reasons),
            **(trust or {}),
        ),
        step_time_s=mean,
        slowdown=number(slowdown),
        slowdown_error=number(slowdown_error(times)),
        waste=number(lost),
        straggling=bool(slowdown >= STRAGGLING_SLOWDOWN),
        wasted_gpu_hours=None if wasted_gpu_hours is None else number(max(wasted_gpu_hours, 0.0)),
        wasted_gpu_hours_per_day=None if wasted_per_day is None else number(wasted_per_day),
        assumptions=_assumptions(job) if evidence.daily else [],
        findings=[cause.finding for cause in diagnosis.causes],
        fixes=[priced.fix for priced in diagnosis.fixes],
        patterns=Patterns(diagnosis.time, diagnosis.space),
        stalls=list(diagnosis.stalls),
        problems=list(diagnosis.problems),
        failed=list(diagnosis.failed),
        lacks=list(diagnosis.lacks),
        questions=list(questions),
        by_label=[row for group in labels for row in _of_label(group)],
        by_step=_by_step(times, diagnosis.headline.step_lost_s, step_values or {}),
        remarks=[Remark(*remark) for remark in _remarks(diagnosis, [*remarks, *_words(overlap, experts, asked)])],
        overview=list(overview),
        asked=[*of_gpus, *answers, *of_labels, *of_overlap, *(loads if asked.wants_experts else ())],
        sections=[*sections, *(() if asked.wants_experts else loads)],
        **own | {name: value for name, value in answered.items() if value is not None},
    )


def mean_times(times: StepTimes, with_delays_s: Maybe[float] = UNSET) -> Times:
    """The mean step. `with_delays_s`: replayed with launch delays."""
    recorded, original, ideal = (float(times_s.mean()) for times_s in (times.recorded, times.original, times.ideal))
    return Times(recorded, original, ideal, with_delays_s)


def slowdown_error(times: StepTimes) -> float:
    """Half the width of the 95 % interval of S over the steps, nan if they are too few to tell."""
    return float(ratio_margins(times.original[:, None], times.ideal, times.original)[0])


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


def _remarks(diagnosis: Diagnosis, of_source: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What else a reader must know."""
    yield from (("Missing", lack.sentence) for lack in diagnosis.lacks if lack.fact is Fact.COMPUTE)
    yield from of_source
    if diagnosis.metrics is not None:
        yield from (("Metrics", test.sentence) for test in diagnosis.metrics.tests)
    yield from (("" if number else "Plug-ins", problem) for number, problem in enumerate(diagnosis.problems))


def experts_of_job(evidence: GraphSubject | None, asked: ReportOptions, findings: Sequence[Cause]) -> Experts | None:
    """The loads of the experts and the price of plans; if nobody asked, uneven loads with the price of equal ones, None
    if there are none.
    """
    if (evidence is None or evidence.exchanges is None) and not asked.wants_experts:
        return None  # as of most jobs: they need none of these modules
    from tracekit.analysis.detectors.uneven_experts import other_causes
    from tracekit.analysis.evidence.graph_subject import experts_of, uneven_experts
    from tracekit.analysis.experts.balance import ExpertJob
    from tracekit.analysis.experts.expert_loads import ExpertLoads, RebalancePlan

    if not asked.wants_experts:
        if evidence is None or uneven_experts(evidence) is None:
            return None
        return experts_of(evidence).experts_with([RebalancePlan.parse("balanced")])
    loads = (ExpertLoads(ExpertJob()) if evidence is None else experts_of(evidence)).experts_with(asked.plans)
    if evidence is not None:
        loads.causes.extend(other_causes(evidence, findings))
    return loads


def _words(overlap: Overlap | None, experts: Experts | None, asked: ReportOptions) -> Iterator[tuple[str, str]]:
    """Yield a sentence each."""
    if overlap is not None:
        yield "Overlap", _hidden(overlap)
    if experts is not None and asked.wants_experts:
        yield "Experts", experts_sentence(experts)


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


def loads_sections(experts: Experts | None) -> Iterator[Section]:
    """Yield the loads of experts, if they are known, as a picture and a table, and the prices of plans."""
    if experts is not None and experts.layers:
        yield _grid(experts.layers)
        rows = [(str(row.layer), f"{row.max_over_mean:.2f}", f"{row.deviation:.2f}") for row in experts.layers]
        yield _table("Layers of experts", ("layer", "max over mean", "± over steps"), rows)
    if experts is not None and experts.rebalance:
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
