"""A report, built once from a diagnosis and from what its source adds.

In: a `Diagnosis`, and `SourceFigures`: figures, remarks, tables and keys that only such a job has. Out: a `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN, waste
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.analysis.numeric.means import ratio_margins
from tracekit.base.text import counted
from tracekit.report.conclusions import Patterns, Trust
from tracekit.report.hardware import MetricsInReport
from tracekit.report.questions import ByLabel, Question
from tracekit.report.report import REPORT_VERSION, Remark, Report, StepTimes
from tracekit.report.tables import OfLabel, OfStep, Outline, Section, Table, Times
from tracekit.trace.facts import Fact, StepValues


class SourceFigures(Struct, frozen=True, kw_only=True, eq=False):
    """What the source of a job adds to its report.

    `mean`: the mean step; `slowdown`: S; `daily`: whether enough was recorded to say what a day costs. `overview`: the
    tables of the first screen, `sections`: all tables and pictures, `asked`: those that answer custom questions.
    `trust`, `verdict`, `keys`: optional keys of these objects, and of the report. `step_values`: what the loop logs of
    its steps.
    """

    job: Outline
    times: StepTimes
    mean: Times
    slowdown: float
    daily: bool
    wasted_gpu_hours: float
    remarks: Sequence[tuple[str, str]]
    overview: Sequence[Table]
    sections: Sequence[Section]
    asked: Sequence[Section]
    trust: Mapping[str, Any] = {}
    verdict: Mapping[str, Any] = {}
    keys: Mapping[str, Any] = {}
    step_values: StepValues = {}


def build(
    source: SourceFigures, diagnosis: Diagnosis, questions: Sequence[Question] = (), labels: Sequence[ByLabel] = ()
) -> Report:
    """Return the report. `labels`: every label that S was attributed to."""
    lost = waste(source.slowdown) if source.slowdown else math.nan
    trust = diagnosis.trust
    return Report(
        report_version=REPORT_VERSION,
        job=source.job,
        answer=diagnosis.answer,
        verdict=replace(diagnosis.verdict, **source.verdict),
        trust=Trust(
            number(trust.replay_error),
            number(trust.discrepancy),
            number(trust.unexplained),
            trust.trustworthy,
            list(trust.reasons),
            **source.trust,
        ),
        step_time_s=source.mean,
        slowdown=number(source.slowdown),
        slowdown_error=number(slowdown_error(source.times)),
        waste=number(lost),
        straggling=bool(source.slowdown >= STRAGGLING_SLOWDOWN),
        wasted_gpu_hours=number(max(source.wasted_gpu_hours, 0.0)),
        wasted_gpu_hours_per_day=number(max(lost * source.job.gpus * 24, 0.0)),
        assumptions=_assumptions(source.job) if source.daily else [],
        findings=[cause.finding for cause in diagnosis.causes],
        fixes=[priced.fix for priced in diagnosis.fixes],
        patterns=Patterns(diagnosis.time, diagnosis.space),
        stalls=list(diagnosis.stalls),
        problems=list(diagnosis.problems),
        failed=list(diagnosis.failed),
        lacks=list(diagnosis.lacks),
        questions=list(questions),
        by_label=[row for group in labels for row in _of_label(group)],
        by_step=_by_step(source, diagnosis.headline.step_lost_s),
        remarks=[Remark(*remark) for remark in _remarks(source, diagnosis)],
        overview=list(source.overview),
        asked=list(source.asked),
        sections=list(source.sections),
        **{"by_kind": [], "critical_path": [], **_metrics(diagnosis), **source.keys},
    )


def _metrics(diagnosis: Diagnosis) -> dict[str, MetricsInReport]:
    return {} if diagnosis.metrics is None else {"metrics": diagnosis.metrics}


def slowdown_error(times: StepTimes) -> float:
    """Half the width of the 95 % interval of S over the steps, nan if they are too few to tell."""
    return float(ratio_margins(times.original[:, None], times.ideal, times.original)[0])


def _assumptions(job: Outline) -> list[str]:
    """What figures of GPU-hours a day take for granted."""
    traced = "this recording" if job.whole != "step" else f"the {counted(job.steps, 'traced step')}"
    return [f"GPU-hours a day: {counted(job.gpus, 'GPU')} running all day as in {traced}"]


def _of_label(group: ByLabel) -> Iterator[OfLabel]:
    for share in group.shares:
        value = ",".join(map(str, share.values))
        figures = number(share.slowdown), number(share.error), share.added_s, share.removed_s
        yield OfLabel(",".join(group.labels), value, share.ops, *figures)


def _by_step(source: SourceFigures, lost_s: Floats) -> list[OfStep]:
    times = source.times
    slowdown = times.original / np.where(times.ideal > 0, times.ideal, np.nan)
    columns = (times.steps, slowdown, times.recorded, times.original, times.ideal, lost_s)
    logged = source.step_values.items()
    return [
        OfStep(
            step,
            number(factor),
            recorded,
            original,
            ideal,
            number(lost),
            **{name: number(values.get(step)) for name, values in logged},
        )
        for step, factor, recorded, original, ideal, lost in zip(
            *(np.asarray(column).tolist() for column in columns), strict=True
        )
    ]


def _remarks(source: SourceFigures, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What else a reader must know."""
    yield from (("Missing", lack.sentence) for lack in diagnosis.lacks if lack.fact is Fact.COMPUTE)
    yield from source.remarks
    if diagnosis.metrics is not None:
        yield from (("Metrics", test.sentence) for test in diagnosis.metrics.tests)
    yield from (("" if number else "Plug-ins", problem) for number, problem in enumerate(diagnosis.problems))
