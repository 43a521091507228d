"""The text that only reports on pipelines have: sizes, clocks, what is missing.

In: an `AnalysedPipeline`. Out: words, without markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracekit.analysis.attribution.attribution import gaps_text
from tracekit.analysis.detectors.trace_faults import TRACE_FAULTS
from tracekit.analysis.replay import Method
from tracekit.base.text import listed, seconds

if TYPE_CHECKING:
    from tracekit.analysis.job.pipeline_report import AnalysedPipeline
    from tracekit.report.tables import WorkerClock
    from tracekit.trace.model import Worker

#: The number of clocks to name.
_MOST_CLOCKS = 3


def pipeline_sizes(report: AnalysedPipeline) -> str:
    """What was analysed: layout, GPUs, steps, ops."""
    layout = report.layout
    others = ((name, getattr(layout, name)) for name in ("pp", "tp", "cp", "ep", "vpp"))
    sizes = [f"dp {layout.dp}"] + [f"{name} {size}" for name, size in others if size > 1]
    steps, gpus = len(report.attribution.steps), layout.world_size
    return (
        f"{' x '.join(sizes)} on {gpus:,} GPU{'s' if gpus > 1 else ''}, {steps:,} step{'s' if steps > 1 else ''},"
        f" {report.ops:,} ops"
    )


def pipeline_remarks(report: AnalysedPipeline) -> Iterator[tuple[str, str]]:
    """Yield which clocks were off, by which rules the job was analysed, and what is missing from the trace."""
    method = "published: the rules of the OSDI'25 paper, nothing else" if report.method is Method.PUBLISHED else ""
    few, steps = report.evidence_steps, len(report.attribution.steps)
    causes = "" if few is None else f"they, fixes and answers follow from {few:,} of {steps:,} steps, evenly spread"
    remarks = {"Clocks": _clocks(report), "Method": method, "Causes": causes, "Missing": _coverage(report)}
    yield from ((name, words) for name, words in remarks.items() if words)


def _clocks(report: AnalysedPipeline) -> str:
    """Which clocks were off and were corrected, or that some could not be compared; empty if neither applies."""
    clocks = report.clocks
    off = [row for row in clocks.offsets if max(abs(row.offset_s), abs(row.jump_s)) >= TRACE_FAULTS.offset_s]
    if off:
        return f"{listed((_clock(report, row) for row in off), _MOST_CLOCKS)}: corrected in all figures"
    if clocks.untied:
        return f"{clocks.untied} cannot be compared: no op ends on several of them at the same time"
    return ""


def _clock(report: AnalysedPipeline, row: WorkerClock) -> str:
    """How one clock was off."""
    who = worker_label(report, row.worker)
    if row.jump_step is not None:
        way = "forward" if row.jump_s > 0 else "back"
        return f"{who} set {way} by {seconds(abs(row.jump_s))} at step {row.jump_step}"
    way = "ahead" if row.offset_s > 0 else "behind"
    drift = f", drifting by {row.drift * 1e6:+.0f} us/s" if row.drift else ""
    return f"{who} {way} by {seconds(abs(row.offset_s))} \u00b1 {seconds(row.error_s)}{drift}"


def _coverage(report: AnalysedPipeline) -> str:
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
        parts.append(
            f"left out {len(steps)} step{'s' * (len(steps) > 1)} that some DP ranks lack, or whose recording was cut"
        )
    elif parts:
        parts.append("waiting for untraced workers appears as slow communication")
    if gaps := report.attribution.gaps:
        done = "" if report.attribution.slowdown_as_recorded is None else ", reconstructed from their peers"
        parts.append(f"not recorded{done}: {gaps_text(gaps)}")
    if report.replay.graph.inferred_transfers:
        parts.append(
            "transfers between stages: inferred from the computes at both ends, where a stage waited for its input"
        )
    return "; ".join(parts)


def worker_label(report: AnalysedPipeline, worker: Worker) -> str:
    """Rank without its node: "rank 9"; the worker's coordinates if the trace does not name it."""
    rank = report.ranks.get(worker)
    return worker.coordinates if rank is None else f"rank {rank}"
