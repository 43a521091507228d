"""A report as a file: recognised, read, and refused where it says what no job can have.

In: a file with the JSON object (docs/report-schema.md), as `tracekit whatif --json` wrote it, a program wrote it again,
or somebody edited it. Out: a `Report` that every renderer can show, or an error.
"""

from __future__ import annotations

import math
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.limits import ROUNDING
from tracekit.base.paths import Look, read_whole
from tracekit.base.text import counted, short
from tracekit.report.conclusions import EvidenceFigure
from tracekit.report.report import Remark, Report, Versioned, decoded
from tracekit.report.tables import LegendEntry, OnPath, SeriesLine, UsualBand

#: What a terminal may obey; lines and tabs are harmless.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Fields with names as they were recorded or typed, which every renderer escapes, and structs whose names are ours.
_NAMES = frozenset(
    {"name", "names", "op", "call", "value", "labels", "peer", "group", "host", "hosts", "device", "gpu", "gpu_uuid",
     "gpu_uuids", "selection", "warnings", "question"}
)  # fmt: skip
_NAMED_BY_US = (Remark, EvidenceFigure, SeriesLine, UsualBand, LegendEntry)
#: Texts have fewer characters: longer ones take a renderer minutes to wrap.
_LONGEST_TEXT = 100_000
#: More is not read of a file, bytes.
_LARGEST_FILE = 256 << 20
#: The beginning of a JSON object.
_FIRST_KEY = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"(\w+)"')


def is_report(look: Look) -> bool:
    """Whether a file is a JSON object with a version of a report, in any order of its keys; a damaged one if that is
    the first.
    """
    first = _FIRST_KEY.match(look.text)
    if first is None or first[1].decode() not in Report.__struct_encode_fields__:
        return False
    try:
        return first[1] == b"report_version" or msgspec.json.decode(_content(look.path), type=Versioned) is not None
    except (FormatError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _content(path: Path) -> bytes:
    """The JSON in a file, unpacked and without a byte-order mark. Raises FormatError."""
    return read_whole(path, _LARGEST_FILE, "print the report again with --json").removeprefix(BOM_UTF8)


def read_report(source: str | os.PathLike[str] | bytes) -> Report:
    """Read a report from a file, or from the bytes of one.

    Raises FormatError for anything but a whole report of this version with possible figures.
    """
    name = "the report" if isinstance(source, bytes) else os.fsdecode(source)
    report = decoded(source if isinstance(source, bytes) else _content(Path(name)), name)
    if (problem := next(_impossible(report), None)) is not None:
        raise FormatError(f"{name}: {problem}, which no job can have: it was edited; print it again with --json")
    return report


def _impossible(report: Report) -> Iterator[str]:
    """Yield what no job can have although each figure by itself is in its range, in words."""
    for name, figure, expected in _equal(report):
        if not math.isclose(figure, expected, rel_tol=ROUNDING):
            yield f"{name} = {figure:g} instead of {expected:g}"
    for name, figure, most in _bounded(report):
        if figure > most * (1 + ROUNDING):
            yield f"{name} = {figure:g} of at most {most:g}"
    yield from _unmatched(report)
    for text, is_name in _texts(report):
        if len(text) > _LONGEST_TEXT:
            yield f"a text of {len(text):,} characters, {text[:20]!r}"
        if not is_name and (control := _CONTROL.search(text)):
            yield f"a text with the control character {control[0]!r}, {text[:20]!r}"


def _equal(report: Report) -> Iterator[tuple[str, float, float]]:
    """Yield figures in words, and what they are equal to in every report."""
    mean, slowdown, whole_s = report.step_time_s, report.slowdown, _whole_s(report)
    if slowdown is not None:
        yield "S x ideal", slowdown * mean.ideal, mean.original
        yield "1 - waste", 1 - (report.waste or 0.0), 1 / slowdown
    for account in report.answer.accounts:
        yield f"share x step of {account.kind}", account.share * whole_s, account.cost_s * report.steps_in_whole
    for fix in report.fixes:
        if fix.new_step_s is not None and fix.saved_s is not None:
            yield f"new_step_s + saved_s of {fix.kind}", fix.new_step_s + fix.saved_s, whole_s


def _whole_s(report: Report) -> float:
    """The step that losses and savings are a part of: of a pipeline, only they tell, as it includes stalls between
    steps, and as causes can follow from a few of the steps.
    """
    verdict = report.verdict
    if report.job.source != "pipeline":
        return report.step_time_s.recorded
    if verdict.share > 0:
        return verdict.lost_s / verdict.share
    sums = ((fix.new_step_s or 0.0) + fix.saved_s for fix in report.fixes if fix.saved_s is not None)
    return next(sums, report.step_time_s.recorded)


def _bounded(report: Report) -> Iterator[tuple[str, float, float]]:
    """Yield figures in words, and what they are at most in every report. A step may lose more than it takes."""
    mean, verdict = report.step_time_s, report.verdict
    longest_s = max(_whole_s(report), mean.recorded, mean.original)
    for name, given_back in (("m_w", report.m_w), ("m_s", report.m_s)):
        yield f"{name} x waste", (given_back or 0.0) * (report.waste or 0.0), 1.0
    yield "seconds lost of a step", max(verdict.lost_s, verdict.headline_s), longest_s
    for loss in verdict.losses:
        yield f"seconds lost to {loss.kind} of a step", max(loss.lost_s, loss.explained_s), longest_s
    for finding in report.findings:
        yield f"seconds that {finding.kind} costs of a step", max(finding.saved_s, finding.alone_s), longest_s
    for row in report.by_step:
        yield f"seconds lost in step {row.step}", row.lost_s or 0.0, longest_s * len(report.by_step)
    for question in report.questions:
        yield f"seconds that {short(question.question)} saves of a step", question.saved_s, longest_s


def _unmatched(report: Report) -> Iterator[str]:
    """Yield what lacks its counterpart in the report, in words."""
    causes, answer, verdict, fixes = len(report.findings), report.answer, report.verdict, len(report.fixes)
    if not report.by_step:
        yield "a report without a step"
    if (verdict.lost_s > 0) != (verdict.share > 0) or (verdict.lost_s > 0 and not verdict.losses):
        yield f"{verdict.lost_s:g} s lost, {verdict.share:.0%} of the time, of {counted(len(verdict.losses), 'kind')}"
    if {len(answer.causes), len(answer.places)} != {causes}:
        yield f"an answer on {len(answer.causes)} causes at {len(answer.places)} places, and {causes} causes"
    workers = report.by_worker or []
    cells = len({row.dp_rank for row in workers}) * (1 + max((row.pp_rank for row in workers), default=-1))
    if len(mapped := {row.worker for row in workers}) != cells or not mapped.issuperset(report.slowest_workers or ()):
        yield f"a map of {cells} workers, {len(workers)} of which have a figure"
    named = [cause for loss in verdict.losses for cause in loss.causes]
    if not all(cause < causes for cause in named):
        yield f"losses by the causes {named} of {causes}"
    if verdict.first_fix is not None and verdict.first_fix >= fixes:
        yield f"a first fix {verdict.first_fix} of {fixes}"
    for section in (*report.overview, *report.asked, *report.sections):
        if not section.is_whole:
            yield f"a section {section.title!r:.40} whose parts do not fit together"


def _texts(content: Any, *, is_name: bool = False) -> Iterator[tuple[str, bool]]:
    """Every text in a report, and whether it is a name from outside."""
    if isinstance(content, str):
        yield content, is_name
    elif isinstance(content, Struct):
        for field in content.__struct_fields__:
            escaped = field in _NAMES and not isinstance(content, _NAMED_BY_US)
            escaped |= field == "kind" and isinstance(content, OnPath)
            yield from _texts(getattr(content, field), is_name=escaped)
    elif isinstance(content, list | tuple):
        for each in content:
            yield from _texts(each, is_name=is_name)
    elif isinstance(content, dict):
        yield from _texts([*content, *content.values()], is_name=is_name)
