"""A report, built once from a diagnosis and from what its source adds.

In: a `Diagnosis`, and `SourceFigures`: figures, remarks, tables and keys that only such a job has. Out: a `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, json
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN, waste
from tracekit.analysis.diagnosis.first_fix import first_fix
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.means import ratio_margins
from tracekit.base.text import counted
from tracekit.report import fix as fixes
from tracekit.report.conclusions import Finding, Fix, Loss, Patterns, Trust, Verdict
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.outline import Outline, Times
from tracekit.report.plain_data import encoded, shaped
from tracekit.report.question import ByLabel, Question
from tracekit.report.report import REPORT_VERSION, Remark, Report, StepTimes
from tracekit.report.rows import OfLabel, OfStep
from tracekit.report.section import Table
from tracekit.trace.facts import Fact
from tracekit.trace.step_values import StepValues


class SourceFigures(Struct, frozen=True, kw_only=True, eq=False):
    """What the source of a job adds to its report.

    `mean`: the mean step; `slowdown`: S; `daily`: whether enough was recorded to say what a day costs. `overview`: the
    tables of the first screen, `sections`: all tables, `asked`: those that answer custom questions. `trust`, `verdict`,
    `keys`: optional keys of these objects, and of the report. `step_values`: what the loop logs of its steps.
    """

    job: Outline
    times: StepTimes
    mean: Times
    slowdown: float
    daily: bool
    wasted_gpu_hours: float
    remarks: Sequence[tuple[str, str]]
    overview: Sequence[Table]
    sections: Sequence[Table]
    asked: Sequence[Table]
    trust: Mapping[str, Any] = {}
    verdict: Mapping[str, Any] = {}
    keys: Mapping[str, Any] = {}
    step_values: StepValues = {}


def build(
    source: SourceFigures, diagnosis: Diagnosis, questions: Sequence[Question] = (), labels: Sequence[ByLabel] = ()
) -> Report:
    """Return the report. `labels`: every label that S was attributed to."""
    answer, lost = diagnosis.answer, waste(source.slowdown) if source.slowdown else math.nan
    causes = diagnosis.causes
    losses = [
        shaped(Loss, loss, causes=[causes.index(cause) for cause in loss.causes]) for loss in diagnosis.verdict.losses
    ]
    concluded = {
        "who": answer.who,
        "cost": answer.cost,
        "action": answer.action,
        "losses": losses,
        "first_fix": _first_fix(diagnosis),
    }
    content = {
        "report_version": REPORT_VERSION,
        "job": source.job,
        "answer": answer,
        "verdict": shaped(Verdict, diagnosis.verdict, **concluded, **source.verdict),
        "trust": shaped(Trust, diagnosis.trust, **source.trust),
        "step_time_s": source.mean,
        "slowdown": source.slowdown,
        "slowdown_error": slowdown_error(source.times),
        "waste": lost,
        "straggling": source.slowdown >= STRAGGLING_SLOWDOWN,
        "wasted_gpu_hours": max(source.wasted_gpu_hours, 0.0),
        "wasted_gpu_hours_per_day": max(lost * source.job.gpus * 24, 0.0),
        "assumptions": _assumptions(source.job) if source.daily else [],
        "causes": [shaped(Finding, cause) for cause in causes],
        "fixes": [fix_in_report(fix) for fix in diagnosis.fixes],
        "patterns": shaped(Patterns, diagnosis),
        "stalls": diagnosis.stalls,
        "problems": diagnosis.problems,
        "failed": diagnosis.failed,
        "lacks": diagnosis.lacks,
        "questions": questions,
        "by_label": [row for group in labels for row in _of_label(group)],
        "by_kind": [],
        "by_step": _by_step(source, diagnosis.verdict.step_lost_s),
        "critical_path": [],
        "remarks": [Remark(*remark) for remark in _remarks(source, diagnosis)],
        "overview": source.overview,
        "asked": source.asked,
        "sections": source.sections,
        **({} if diagnosis.metrics is None else {"metrics": diagnosis.metrics}),
        **source.keys,
    }
    return json.decode(encoded(content), type=Report)  # as its file says: what is undefined is None


def slowdown_error(times: StepTimes) -> float:
    """Half the width of the 95 % interval of S over the steps, nan if they are too few to tell."""
    return float(ratio_margins(times.original[:, None], times.ideal, times.original)[0])


def _assumptions(job: Outline) -> list[str]:
    """What figures of GPU-hours a day take for granted."""
    traced = "this recording" if job.whole != "step" else f"the {counted(job.steps, 'traced step')}"
    return [f"GPU-hours a day: {counted(job.gpus, 'GPU')} running all day as in {traced}"]


def _first_fix(diagnosis: Diagnosis) -> int | None:
    """The place of the fix to begin with; None if no cause leads, or nothing is known to help."""
    leading = next((loss.causes[0] for loss in diagnosis.verdict.losses if loss.causes), None)
    fix = None if leading is None else first_fix(leading, diagnosis.fixes)
    return next((place for place, each in enumerate(diagnosis.fixes) if each is fix), None)


def fix_in_report(fix: fixes.Fix) -> Fix:
    """Return a fix as a report has it, without figures if they are withheld."""
    unknown = {} if fix.withheld is None else dict.fromkeys(("new_step_s", "saved_s", "saved_gpu_hours_per_day"))
    return shaped(Fix, fix, **unknown)


def _of_label(group: ByLabel) -> Iterator[OfLabel]:
    for share in group.shares:
        value = ",".join(map(str, share.values))
        yield OfLabel(
            ",".join(group.labels), value, share.ops, share.slowdown, share.error, share.added_s, share.removed_s
        )


def _by_step(source: SourceFigures, lost_s: Floats) -> list[OfStep]:
    times = source.times
    slowdown = times.original / np.where(times.ideal > 0, times.ideal, np.nan)
    columns = (times.steps, slowdown, times.recorded, times.original, times.ideal, lost_s)
    rows = (OfStep(*row) for row in zip(*(np.asarray(column).tolist() for column in columns), strict=True))
    logged = source.step_values.items()
    return [replace(row, **{name: values.get(row.step) for name, values in logged}) for row in rows]


def _remarks(source: SourceFigures, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What else a reader must know."""
    yield from (("Missing", lack.sentence) for lack in diagnosis.lacks if lack.fact is Fact.COMPUTE)
    yield from source.remarks
    if diagnosis.metrics is not None:
        yield from (("Metrics", test.sentence) for test in diagnosis.metrics.tests)
    yield from (("" if number else "Plug-ins", problem) for number, problem in enumerate(diagnosis.problems))
