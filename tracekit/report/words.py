"""The text of a report, row by row. Terminal, Markdown, HTML and notebooks each lay it out in their own way.

In: a `Report`. Out: names and sentences, without markup. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tracekit.analysis.detectors.clock_error import SMALLEST_OFFSET_S
from tracekit.analysis.graph.gaps import gaps_text
from tracekit.analysis.replay.method import Method
from tracekit.base.text import cost, main_clause, percent_sure, seconds, short, with_error

if TYPE_CHECKING:
    from tracekit.report.pipeline import ClockOffset, PipelineReport
    from tracekit.report.report import Report
    from tracekit.trace.model import Worker

#: Limits of further causes, clocks and stalls in an answer.
MOST_CAUSES = 3
_MOST_CLOCKS = 3
_MOST_STALLS = 3
#: Heads of the tables of causes and fixes.
CAUSE_HEADS = ("Cause", "Where", "When", "Sure", "Costs", "Because", "Check")
FIX_HEADS = ("Fix", "Sure", "Step then", "Saves a step", "GPU-hours a day")


def pipeline_sizes(report: PipelineReport) -> str:
    """What was analysed: layout, GPUs, steps, ops."""
    layout = report.layout
    sizes = [f"dp {layout.dp}"] + [f"{name} {size}" for name, size in _other_sizes(report) if size > 1]
    steps, gpus = len(report.attribution.steps), layout.world_size
    return (
        f"{' x '.join(sizes)} on {gpus:,} GPU{'s' if gpus > 1 else ''}, {steps:,} step{'s' if steps > 1 else ''},"
        f" {report.ops:,} ops"
    )


def _other_sizes(report: PipelineReport) -> Iterable[tuple[str, int]]:
    layout = report.layout
    return (("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep), ("vpp", layout.vpp))


def worker_name(report: PipelineReport, worker: Worker) -> str:
    """Rank and node, as far as known: "rank 9 on host-0001"."""
    rank = report.ranks.get(worker)
    if rank is None:
        return "not recorded"
    host = report.hosts.get(rank)
    return f"rank {rank}" if host is None else f"rank {rank} on {short(host)}"


def worker_label(report: PipelineReport, worker: Worker) -> str:
    """Rank without its node: "rank 9"; the worker's coordinates if the trace does not name it."""
    rank = report.ranks.get(worker)
    return worker.coordinates if rank is None else f"rank {rank}"


def answer_rows(
    report: Report, gpu_hour: float | None = None, *, most_causes: int = MOST_CAUSES
) -> Iterator[tuple[str, str]]:
    """What it costs, who, why, what to do first, what that saves, and whether to believe it. Leaves out what the
    headline already says.

    A row without a name continues the row before. `gpu_hour`: the price of a GPU-hour, in any currency. `most_causes`:
    how many further causes get a row each; the others are only counted.
    """
    answer = report.diagnosis.answer
    lost = answer.cost
    if lost is not None and gpu_hour is not None:
        lost += f", {report.diagnosis.verdict.lost_gpu_hours_per_day * gpu_hour:,.0f} a day at {gpu_hour:g} a GPU-hour"
    why = None if answer.why is None or main_clause(answer.why) in answer.headline else answer.why
    saves = answer.saves and answer.saves.removeprefix("saves ")
    rows = {"Cost": lost, "Who": answer.who, "Why": why, "Do": answer.action or answer.check, "Saves": saves}
    yield from ((name, words) for name, words in rows.items() if words)
    others = list(answer.others[:most_causes])
    if left := len(answer.others) - len(others):
        others.append(f"{left} {'more ' if others else ''}cause{'s' * (left > 1)}: --full")
    yield from (("" if number else "Also", cause) for number, cause in enumerate(others))
    if answer.stalls:
        more = len(answer.stalls) - _MOST_STALLS
        yield "Stalls", "; ".join(answer.stalls[:_MOST_STALLS]) + (f"; and {more} more" if more > 0 else "")
    yield "Trust", f"{'yes' if report.trust.trustworthy else 'NO'}: {answer.trust}"
    yield from report.remarks()


def pipeline_remarks(report: PipelineReport) -> Iterator[tuple[str, str]]:
    """Yield which clocks were off, by which rules the job was analysed, and what is missing from the trace."""
    method = "published: the rules of the OSDI'25 paper, nothing else" if report.method is Method.PUBLISHED else ""
    remarks = {"Clocks": _clocks(report), "Method": method, "Missing": _coverage(report)}
    yield from ((name, words) for name, words in remarks.items() if words)


def cause_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each cause, as `CAUSE_HEADS`."""
    for cause, place in zip(report.diagnosis.causes, report.diagnosis.answer.places, strict=True):
        priced = cause.change is not None
        yield (
            cause.title,
            place,
            cause.when if priced else "",
            percent_sure(cause.confidence) if priced else "",
            cost(cause.saved_s, cause.alone_s, report.whole).removeprefix("costs ") if priced else "",
            cause.effect,
            cause.next_check,
        )


def fix_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each fix, as `FIX_HEADS`; without figures if no saving is promised."""
    for fix in report.diagnosis.fixes:
        sure = "-" if fix.confidence is None else percent_sure(fix.confidence)
        if fix.withheld is not None:
            yield f"{fix.title}: no promise, {fix.withheld}", sure, "", "", ""
            continue
        remarks = [*(["at most"] if fix.bound else []), *([f"assumes {fix.assumes}"] if fix.assumes else [])]
        saved = with_error(fix.saved_s, fix.error_s)
        yield (
            f"{fix.title} ({'; '.join(remarks)})" if remarks else fix.title,
            sure,
            seconds(fix.new_step_s),
            saved,
            f"{fix.saved_gpu_hours_per_day:,.1f}",
        )


def _clocks(report: PipelineReport) -> str:
    """Which clocks were off and were corrected, or that some could not be compared; empty if neither applies."""
    clocks = report.clocks
    off = [row for row in clocks.offsets if max(abs(row.offset_s), abs(row.jump_s)) >= SMALLEST_OFFSET_S]
    parts = [_clock(report, row) for row in off[:_MOST_CLOCKS]]
    if parts:
        more = f" and {len(off) - _MOST_CLOCKS} more" if len(off) > _MOST_CLOCKS else ""
        return f"{', '.join(parts)}{more}: corrected in all figures"
    if clocks.untied:
        return f"{clocks.untied} cannot be compared: no op ends on several of them at the same time"
    return ""


def _clock(report: PipelineReport, row: ClockOffset) -> str:
    """How one clock was off."""
    who = worker_label(report, row.worker)
    if row.jump_step is not None:
        way = "forward" if row.jump_s > 0 else "back"
        return f"{who} set {way} by {seconds(abs(row.jump_s))} at step {row.jump_step}"
    way = "ahead" if row.offset_s > 0 else "behind"
    drift = f", drifting by {row.drift * 1e6:+.0f} us/s" if row.drift else ""
    return f"{who} {way} by {seconds(abs(row.offset_s))} \u00b1 {seconds(row.error_s)}{drift}"


def published_instead(report: PipelineReport) -> str:
    """What the published rules say if that differs; empty if they agree."""
    published = report.published
    if report.method is Method.PUBLISHED or published is None or not published.differs(report.slowdown):
        return ""
    return f"S = {published.slowdown:.2f}: {'; '.join(published.reasons)}"


def _coverage(report: PipelineReport) -> str:
    """What is missing from the trace; empty if nothing is."""
    coverage, parts = report.coverage, []
    if coverage.workers_traced < coverage.workers_expected:
        shown = "; ".join(worker.coordinates for worker in coverage.missing_workers[:4])
        more = coverage.workers_expected - coverage.workers_traced - 4
        parts.append(
            f"{coverage.workers_traced} of {coverage.workers_expected} workers traced (missing {shown}"
            + (f" and {more} more)" if more > 0 else ")")
        )
    elif not coverage.complete:
        parts.append(
            f"{coverage.worker_steps_traced} of {coverage.worker_steps_expected} worker-steps traced: some workers lack"
            " some steps"
        )
    if report.dropped_lanes:
        ranks = sorted({dp_rank for _, dp_rank in report.dropped_lanes})
        parts.append(
            f"left out {len(report.dropped_lanes)} DP-rank-steps that lack a stage (DP rank"
            f" {', '.join(map(str, ranks[:6]))}{' ...' if len(ranks) > 6 else ''})"
        )
    if steps := report.left_out_steps:
        parts.append(f"left out {len(steps)} step{'s' * (len(steps) > 1)} that some DP ranks lack")
    elif parts:
        parts.append("waiting for untraced workers appears as slow communication")
    if gaps := report.attribution.gaps:
        done = "" if report.attribution.slowdown_as_recorded is None else ", reconstructed from their peers"
        parts.append(f"not recorded{done}: {gaps_text(gaps)}")
    return "; ".join(parts)
