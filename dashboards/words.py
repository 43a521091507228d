"""The text of a report: rows and tables. Terminal, Markdown, HTML and notebooks each lay them out in their own way.

In: a `Report`. Out: names, sentences and `Table`s, without markup. Nothing is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tracekit.analysis.replay.method import Method
from tracekit.base.text import counted, main_clause, percent_sure, seconds, short, with_error
from tracekit.dashboards.run_words import run_rows, since_words
from tracekit.report.answer import Answer
from tracekit.report.conclusions import Fix
from tracekit.report.report import Report
from tracekit.report.rows import OfWorker
from tracekit.report.section import Section, Table

#: Limits of further causes, clocks and stalls in an answer.
MOST_CAUSES = 3
_MOST_CLOCKS = 3
_MOST_STALLS = 3
#: Two methods agree if their S differ by at most this share.
_LARGEST_DIFFERENCE = 0.01
#: How a cell begins that holds a figure, or none where others have one.
_FIGURE = re.compile(r"-?$|(at most )?[-+]?\d")


def worker_name(worker: OfWorker) -> str:
    """Rank and node, as far as known: "rank 9 on host-0001"."""
    if worker.rank is None:
        return "not recorded"
    return f"rank {worker.rank}" if worker.host is None else f"rank {worker.rank} on {short(worker.host)}"


def worker_label(worker: OfWorker) -> str:
    """Rank without its node: "rank 9"; the worker's coordinates if the trace does not name it."""
    return worker.worker.coordinates if worker.rank is None else f"rank {worker.rank}"


def answer_rows(
    report: Report, gpu_hour: float | None = None, *, most_causes: int = MOST_CAUSES, all_causes: str = "see Causes"
) -> Iterator[tuple[str, str]]:
    """What it costs, who, why, what to do first, what that saves, and whether to believe it. Leaves out what the
    headline already says.

    A row without a name continues the row before. `gpu_hour`: the price of a GPU-hour, in any currency. `most_causes`:
    how many further causes get a row each; the others are only counted. `all_causes`: where a reader finds them.
    """
    yield from run_rows(report)
    answer, lost = report.answer, ""
    if gpu_hour is not None and report.daily:
        lost = f", {report.verdict.lost_gpu_hours_per_day * gpu_hour:,.0f} a day at {gpu_hour:g} a GPU-hour"
    yield from core_rows(answer, lost, since_words(report))
    others = list(answer.others[:most_causes])
    if more := len(answer.others) - len(others):
        others.append(f"{counted(more, 'more cause' if others else 'cause')}: {all_causes}")
    yield from (("" if number else "Also", cause) for number, cause in enumerate(others))
    if answer.stalls:
        more = len(answer.stalls) - _MOST_STALLS
        yield "Stalls", "; ".join(answer.stalls[:_MOST_STALLS]) + (f"; and {more} more" if more > 0 else "")
    yield trust_row(answer.trust, trustworthy=report.trust.trustworthy)
    yield from ((remark.name, remark.words) for remark in report.remarks)


def core_rows(answer: Answer, money: str = "", since: str = "") -> Iterator[tuple[str, str]]:
    """Cost, who, why, what to do first, and what that saves. `money`, `since`: the ends of the sentences about the cost
    and the culprit.
    """
    why, saves = answer.why, answer.saves
    rows = {
        "Cost": answer.cost and answer.cost + money,
        "Who": answer.who and answer.who + since,
        "Why": None if why is None or main_clause(why) in answer.headline else why,
        "Do": answer.action or answer.check,
        "Saves": saves and saves.removeprefix("saves "),
    }
    yield from ((name, words) for name, words in rows.items() if words)


def trust_row(trust: str, *, trustworthy: bool) -> tuple[str, str]:
    """Whether to believe the report, and why."""
    return "Trust", f"{'yes' if trustworthy else 'NO'}: {trust}"


def tables(report: Report) -> Iterator[Section]:
    """Causes, fixes, and what a reader asked for."""
    if report.findings:
        yield cause_table(report)
    yield fix_table(report)
    yield from report.asked


def cause_table(report: Report) -> Table:
    """The causes, costliest first."""
    rows = []
    for cause, place in zip(report.findings, report.answer.places, strict=True):
        priced = (cause.when, percent_sure(cause.confidence), cause.costs.removeprefix("costs "))
        rows.append((cause.title, place, *(priced if cause.priced else ("", "", "")), cause.effect,
                     cause.next_check))  # fmt: skip
    return Table("Causes", ("Cause", "Where", "When", "Sure", "Costs", "Because", "Check"), tuple(rows))


def fix_table(report: Report) -> Table:
    """The fixes, best first; without figures if no saving is promised."""
    whole = report.job.whole
    unprofiled = any(fix.saves_step_s is not None for fix in report.fixes)
    of_step = whole == "step" or unprofiled
    heads = ("Fix", "Sure", "Step after" if unprofiled else f"{whole.capitalize()} after",
             "Saves a step" if of_step else "Saves", *(["GPU-hours a day"] if report.daily else []))  # fmt: skip
    rows = tuple((*_fix_row(fix), *_a_day(fix, report)) for fix in report.fixes)
    if not rows:
        return Table("Fixes", heads, rows, f"No fix saves enough of the {whole} to be named.")
    delays = ["Times as recorded, with launch delays"] if report.trust.discrepancy else []
    notes = (*report.assumptions, *(["Times without the profiler"] if unprofiled else delays))
    return Table("Fixes", heads, rows, "".join(f"{note}. " for note in notes).rstrip())


def _fix_row(fix: Fix) -> tuple[str, str, str, str]:
    """What to do, how sure its cause is, the step after it, and what it saves."""
    sure = "-" if fix.confidence is None else percent_sure(fix.confidence)
    if fix.withheld is not None or fix.new_step_s is None or fix.saved_s is None:
        return f"{fix.title}: no promise, {fix.withheld}", sure, "", ""
    remarks = [*(["at most"] if fix.bound else []), *([f"assumes {fix.assumes}"] if fix.assumes else [])]
    title = f"{fix.title} ({'; '.join(remarks)})" if remarks else fix.title
    if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
        saves = seconds(fix.worth_s) if fix.bound else fix.saves_step_s.words
        return title, sure, seconds(fix.unprofiled_step_s - fix.worth_s), saves
    return title, sure, seconds(fix.new_step_s), with_error(fix.saved_s, fix.error_s)


def _a_day(fix: Fix, report: Report) -> tuple[str, ...]:
    """The cell of GPU-hours a day, if there is such a column."""
    if not report.daily:
        return ()
    return ("" if fix.saved_gpu_hours_per_day is None else f"{fix.saved_gpu_hours_per_day:,.1f}",)


def figure_columns(table: Table) -> list[int]:
    """The positions of the columns that contain figures; the first column is the row's subject."""
    columns = enumerate(zip(*table.rows, strict=True))
    return [number for number, column in columns if number and all(map(_FIGURE.match, column))]


def published_instead(report: Report) -> str:
    """What the published rules say if that differs; empty if they agree."""
    method = report.method
    if not method or method.name is Method.PUBLISHED or not method.published_slowdown or not report.slowdown:
        return ""
    if abs(report.slowdown / method.published_slowdown - 1) <= _LARGEST_DIFFERENCE:
        return ""
    return f"S = {method.published_slowdown:.2f}: {'; '.join(method.differs_because)}"
