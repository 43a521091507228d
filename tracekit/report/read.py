"""Reading a report from a file: what is no whole report of this version, with figures that a job can have, is refused.

In: a file, or its bytes. Out: a `Report`, or a FormatError of one sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.report.report import REPORT_VERSION, Report

#: Shares are at most 1, but for rounding.
_ROUNDING = 1e-6
#: Texts have fewer characters: longer ones take a renderer minutes to wrap.
_LONGEST_TEXT = 100_000


class _Versioned(Struct, frozen=True):
    """What reports of all versions have."""

    report_version: int


def read_report(source: str | os.PathLike[str] | bytes) -> Report:
    """Read a report from a file, or from the bytes of one.

    Raises FormatError for anything but a whole report of this version with possible figures.
    """
    name = "the report" if isinstance(source, bytes) else os.fsdecode(source)
    try:
        content = source if isinstance(source, bytes) else Path(name).read_bytes()
    except OSError as error:
        raise FormatError(f"{name}: cannot be read: {error.strerror or error}") from None
    report = decoded(content, name)
    if (problem := next(_impossible(report), None)) is not None:
        raise FormatError(f"{name}: {problem}, which no job can have: it was edited; print it again with --json")
    return report


def decoded(content: bytes, name: str) -> Report:
    """The report in `content`, called `name` in errors. Raises FormatError."""
    try:
        version = msgspec.json.decode(content, type=_Versioned).report_version
        if version != REPORT_VERSION:
            raise FormatError(
                f"{name}: a report of version {version}, and this tracekit reads version {REPORT_VERSION}; analyse the"
                " trace again, with --json"
            )
        return msgspec.json.decode(content, type=Report)
    except msgspec.ValidationError as error:
        raise FormatError(f"{name}: not a report as tracekit writes it ({error}); print it again with --json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not whole JSON ({error}); copy the report again") from None


def _impossible(report: Report) -> Iterator[str]:
    """Yield the figures and texts that no job can have, in words."""
    mean, verdict, run = report.step_time_s, report.verdict, report.run or None
    times = {"a step time": (mean.recorded, mean.original, mean.ideal)}
    times |= {f"a time of step {row.step}": (row.recorded_s, row.original_s, row.ideal_s) for row in report.by_step}
    for name, values in times.items():
        if (least := min(values)) < 0:
            yield f"{name} of {least:g} s"
    slowdowns = {"S": report.slowdown} | {f"S of worker {row.worker}": row.slowdown for row in report.by_worker or ()}
    for name, slowdown in slowdowns.items():
        if slowdown is not None and slowdown <= 0:
            yield f"{name} = {slowdown:g}"
    shares = {"a lost share": verdict.share, "a confidence": verdict.confidence or 0.0}
    shares |= {f"a confidence of {finding.kind}": finding.confidence for finding in report.findings}
    shares |= {f"a confidence of the fix {fix.kind}": fix.confidence or 0.0 for fix in report.fixes}
    if run is not None:
        shares |= {"a lost share of the run": run.lost_share, "a covered share of the run": run.covered_share}
    for name, share in shares.items():
        if not -_ROUNDING <= share <= 1 + _ROUNDING:
            yield f"{name} of {share:.0%}"
    yield from _mismatched(report)
    for text in _texts(report):
        if len(text) > _LONGEST_TEXT:
            yield f"a text of {len(text):,} characters, {text[:20]!r}"


def _mismatched(report: Report) -> Iterator[str]:
    """Yield figures that contradict each other, and what refers to something that is not in the report, in words."""
    causes, answer, mean = len(report.findings), report.answer, report.step_time_s
    if report.slowdown is not None and not math.isclose(report.slowdown * mean.ideal, mean.original, rel_tol=_ROUNDING):
        yield f"S = {report.slowdown:g} of steps of {mean.original:g} s that would take {mean.ideal:g} s"
    if not report.by_step:
        yield "a report without a step"
    if {len(answer.causes), len(answer.places)} != {causes}:
        yield f"an answer on {len(answer.causes)} causes at {len(answer.places)} places, and {causes} causes"
    workers = report.by_worker or []
    cells = len({row.dp_rank for row in workers}) * len({row.pp_rank for row in workers})
    if len({row.worker for row in workers}) != cells:
        yield f"a map of {cells} workers, {len(workers)} of which have a figure"
    named = [cause for loss in report.verdict.losses for cause in loss.causes]
    if not all(0 <= cause < causes for cause in named):
        yield f"losses by the causes {named} of {causes}"
    if not 0 <= (first := report.verdict.first_fix or 0) < max(len(report.fixes), 1):
        yield f"a first fix {first} of {len(report.fixes)}"
    for section in (*report.overview, *report.asked, *report.sections):
        if not section.is_whole:
            yield f"a section {section.title!r:.40} whose parts do not fit together"


def _texts(content: Any) -> Iterator[str]:
    """Every text in a report."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Struct):
        for name in content.__struct_fields__:
            yield from _texts(getattr(content, name))
    elif isinstance(content, list | tuple):
        for each in content:
            yield from _texts(each)
    elif isinstance(content, dict):
        yield from _texts([*content, *content.values()])
