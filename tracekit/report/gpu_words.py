"""What a report on a GPU-recorded job says, row by row: terminal, Markdown and HTML draw these words.

In: a `GpuReport`. Out: names and sentences, without markup. Nothing here is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracekit.analysis.gpu.remedy import EFFECTS, OF_ALL
from tracekit.base.text import printable, seconds, short
from tracekit.report.verdict import LossKind

if TYPE_CHECKING:
    from tracekit.report.gpu import GpuReport


def recording_sizes(report: GpuReport) -> str:
    """What was analysed: ranks, steps, GPU ops and the kind of GPU."""
    recording = report.recording
    steps = recording.step_spans["step"].n_unique()
    counts = {"rank": len(recording.ranks), "step": steps, "GPU op": recording.gpu_ops.height}
    sizes = ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    return f"{sizes} on {printable(recording.device_name)}" if recording.device_name else sizes


def answer_rows(report: GpuReport) -> Iterator[tuple[str, str]]:
    """What it costs, who, why, what to do first, what that saves, and whether to believe it.

    A row without a name goes on with the one before.
    """
    culprit, kind = report.culprit, report.kind
    if lost := report.lost:
        yield "Cost", lost
    if culprit is not None:
        waited = f"the others wait {seconds(culprit.waited_s)} for it in all"
        if kind in OF_ALL:
            costs = f"costs {culprit.saved_s / report.recorded_s:.1%}"
            yield "Also", f"{report.place(culprit.rank)} {costs}: {waited}"
        else:
            yield "Who", f"{report.place(culprit.rank)}: {waited}"
        for number, one in enumerate(culprit.causes):
            yield "" if number or kind in OF_ALL else "Why", f"{EFFECTS[one.cause]}: {printable(one.evidence)}"
    if not report.distrust and (first := report.first) is not None:
        yield "Do", first[0]
        if first[1]:
            yield "Saves", first[1]
    times = f"{seconds(report.recorded_s)} recorded"
    if len(report.recording.ranks) > 1:
        alike = seconds(float(report.replayed.ideal.mean()))
        times += f", {alike} with all ranks alike (S = {report.replayed.slowdown:.2f})"
    yield "Time", times
    trusted = not report.distrust
    yield "Trust", f"{'yes' if trusted else 'NO'}: {_figures(report)}"
    yield from (("", printable(doubt)) for doubt in report.doubts)


def _figures(report: GpuReport) -> str:
    """How much of the recording the graph explains."""
    left, matches = report.unexplained, report.matches
    longest = seconds(max(left.communication_gap_s, left.compute_gap_s))
    figures = [
        f"replay error {report.replayed.replay_error:.2%}",
        f"unexplained gaps {report.replayed.discrepancy:.1%}, 99 % of them below {longest}",
        f"{left.inferred:,} of {left.edges:,} dependencies inferred, {left.violations:,} contradicted",
    ]
    if len(report.recording.ranks) > 1:
        figures.append(f"{matches.matched:,} collectives matched, {matches.unmatched:,} kernels not")
    if report.without_launch:
        figures.append(f"{report.without_launch:,} GPU ops launched outside the recording")
    return "; ".join(figures)


def rank_table(report: GpuReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads, and a row for each rank, the one that the others wait for first; a rank alone waits for nobody."""
    slowdown, several = report.slowdown_by_rank, len(report.recording.ranks) > 1
    found = list(zip(report.breakdowns, report.waits.wait.tolist(), report.waits.sole_delay.tolist(), strict=True))
    found.sort(key=lambda row: -row[2])
    rows = []
    for one, wait, sole_delay in found:
        alone = f"{slowdown[one.rank]:.3f}" if one.rank in slowdown else ""
        parts = (one.compute_s, one.communication_s, one.exposed_communication_s, one.idle_s)
        shares = [f"{part / (one.span_s or 1.0) * 100:.0f} %" for part in parts]
        waits = (alone, seconds(sole_delay), seconds(wait)) if several else ()
        rows.append((str(one.rank), *waits, *shares, seconds(one.span_s)))
    waits = ("S alone", "sole delay", "waits") if several else ()
    return ("rank", *waits, "compute", "transfers", "exposed", "idle", "of"), rows


def kernel_rows(report: GpuReport) -> list[tuple[str, ...]]:
    """Class of kernels, ops, time and share of it, most first."""
    times = report.kernel_time
    total = float(times["seconds"].sum()) or 1.0
    return [(name, f"{ops:,}", seconds(time), f"{time / total * 100:.0f} %") for name, ops, time in times.iter_rows()]


def path_rows(report: GpuReport) -> list[tuple[str, ...]]:
    """What the critical path of the recording consists of: class of ops, time, share."""
    replayed = report.replayed
    parts = [*replayed.critical_peers.items(), ("unexplained gaps", replayed.critical_delay_s)]
    return [(short(name), seconds(time), f"{time / report.recorded_s * 100:.0f} %") for name, time in parts]


def headline(report: GpuReport) -> tuple[LossKind, str]:
    """The kind of loss, and the first line without it."""
    return report.kind, printable(report.verdict)
