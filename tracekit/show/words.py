"""The text of a report: rows and tables. Terminal, Markdown, HTML and notebooks each lay them out in their own way.

In: a `Report`. Out: names, sentences and `Table`s, without markup. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from tracekit.analysis.replay.method import Method
from tracekit.base.text import counted, main_clause, percent_sure, seconds, short, with_error
from tracekit.report.section import Table

if TYPE_CHECKING:
    from tracekit.job.pipeline_report import PipelineReport
    from tracekit.report.report import Report
    from tracekit.trace.model import Worker

#: Limits of further causes, clocks and stalls in an answer.
MOST_CAUSES = 3
_MOST_CLOCKS = 3
_MOST_STALLS = 3


def worker_name(report: PipelineReport, worker: Worker) -> str:
    """Rank and node, as far as known: "rank 9 on host-0001"."""
    rank = report.ranks.get(worker)
    if rank is None:
        return "not recorded"
    host = report.hosts.get(rank)
    return f"rank {rank}" if host is None else f"rank {rank} on {short(host)}"


def answer_rows(
    report: Report, gpu_hour: float | None = None, *, most_causes: int = MOST_CAUSES, all_causes: str = "see Causes"
) -> Iterator[tuple[str, str]]:
    """What it costs, who, why, what to do first, what that saves, and whether to believe it. Leaves out what the
    headline already says.

    A row without a name continues the row before. `gpu_hour`: the price of a GPU-hour, in any currency. `most_causes`:
    how many further causes get a row each; the others are only counted. `all_causes`: where a reader finds them.
    """
    answer = report.diagnosis.answer
    lost = answer.cost
    if lost is not None and gpu_hour is not None and report.daily:
        lost += f", {report.diagnosis.verdict.lost_gpu_hours_per_day * gpu_hour:,.0f} a day at {gpu_hour:g} a GPU-hour"
    yield from core_rows({**asdict(answer), "cost": lost})
    others = list(answer.others[:most_causes])
    if left := len(answer.others) - len(others):
        others.append(f"{counted(left, 'more cause' if others else 'cause')}: {all_causes}")
    yield from (("" if number else "Also", cause) for number, cause in enumerate(others))
    if answer.stalls:
        more = len(answer.stalls) - _MOST_STALLS
        yield "Stalls", "; ".join(answer.stalls[:_MOST_STALLS]) + (f"; and {more} more" if more > 0 else "")
    yield trust_row(answer.trust, trustworthy=report.trust.trustworthy)
    yield from report.remarks()


def core_rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Cost, who, why, what to do first, and what that saves, of an answer as plain data."""
    why, saves = answer["why"], answer["saves"]
    rows = {
        "Cost": answer["cost"],
        "Who": answer["who"],
        "Why": None if why is None or main_clause(why) in answer["headline"] else why,
        "Do": answer["action"] or answer["check"],
        "Saves": saves and saves.removeprefix("saves "),
    }
    yield from ((name, words) for name, words in rows.items() if words)


def trust_row(trust: str, *, trustworthy: bool) -> tuple[str, str]:
    """Whether to believe the report, and why."""
    return "Trust", f"{'yes' if trustworthy else 'NO'}: {trust}"


def tables(report: Report) -> Iterator[Table]:
    """Causes, fixes, and what a reader asked for."""
    if report.diagnosis.causes:
        yield cause_table(report)
    yield fix_table(report)
    yield from report.asked_tables()


def cause_table(report: Report) -> Table:
    """The causes, costliest first."""
    rows = []
    for cause, place in zip(report.diagnosis.causes, report.diagnosis.answer.places, strict=True):
        priced = (cause.when, percent_sure(cause.confidence), cause.costs.removeprefix("costs "))
        rows.append((cause.title, place, *(priced if cause.change is not None else ("", "", "")), cause.effect,
                     cause.next_check))  # fmt: skip
    return Table("Causes", ("Cause", "Where", "When", "Sure", "Costs", "Because", "Check"), tuple(rows))


def fix_table(report: Report) -> Table:
    """The fixes, best first; without figures if no saving is promised."""
    whole, rows = report.whole, []
    for fix in report.diagnosis.fixes:
        sure = "-" if fix.confidence is None else percent_sure(fix.confidence)
        a_day = (f"{fix.saved_gpu_hours_per_day:,.1f}",) if report.daily else ()
        if fix.withheld is not None:
            rows.append((f"{fix.title}: no promise, {fix.withheld}", sure, "", "", *("" for _ in a_day)))
            continue
        remarks = [*(["at most"] if fix.bound else []), *([f"assumes {fix.assumes}"] if fix.assumes else [])]
        title = f"{fix.title} ({'; '.join(remarks)})" if remarks else fix.title
        then, saves = seconds(fix.new_step_s), with_error(fix.saved_s, fix.error_s)
        if fix.saves_step_s is not None and fix.unprofiled_step_s is not None:
            then = seconds(fix.unprofiled_step_s - fix.worth_s)
            saves = seconds(fix.worth_s) if fix.bound else fix.saves_step_s.words
        rows.append((title, sure, then, saves, *a_day))
    unprofiled = any(fix.saves_step_s is not None for fix in report.diagnosis.fixes)
    of_step = whole == "step" or unprofiled
    heads = ("Fix", "Sure", "Step then" if unprofiled else f"{whole.capitalize()} then",
             "Saves a step" if of_step else "Saves", *(["GPU-hours a day"] if report.daily else []))  # fmt: skip
    times = "Times without the profiler" if unprofiled else "Times as recorded, with launch delays"
    note = "".join(f"{each}. " for each in (*report.assumptions, *([times] if report.rl is None else []))).rstrip()
    return Table("Fixes", heads, tuple(rows), note if rows else f"No fix saves enough of the {whole} to be named.")


def published_instead(report: PipelineReport) -> str:
    """What the published rules say if that differs; empty if they agree."""
    published = report.published
    if report.method is Method.PUBLISHED or published is None or not published.differs(report.slowdown):
        return ""
    return f"S = {published.slowdown:.2f}: {'; '.join(published.reasons)}"
