"""The report on a job recorded on its GPUs, as a person reads it in a terminal.

In: a `GpuReport`. Out: what rich prints.
"""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.gpu_report import GpuReport
from tracekit.terminal_tables import new_table, percent, side_by_side
from tracekit.text import printable, seconds, short

_MOST_RANKS = 16
_MOST_WAITS = 8
_MOST_KERNELS = 5


def print_gpu_report(report: GpuReport, console: Console) -> None:
    """Print the whole report."""
    recording = report.recording
    sizes = f"   {len(recording.ranks)} ranks, {recording.gpu_ops.height:,} GPU ops"
    console.print(Text.assemble((short(recording.name), "bold"), sizes))
    console.print()
    panels: list[RenderableType] = [_by_rank(report), _waits(report), _kernels(report)]
    console.print(side_by_side(panels, console))
    for note in recording.notes:
        console.print(Text(printable(note)))


def _by_rank(report: GpuReport) -> Table:
    """Costliest ranks first."""
    table = new_table("rank", "sole delay", "waits", "compute", "communication", "exposed", "idle", "of")
    rows = list(zip(report.breakdowns, report.waits.wait.tolist(), report.waits.sole_delay.tolist(), strict=True))
    rows.sort(key=lambda row: -row[2])
    for one, wait, sole_delay in rows[:_MOST_RANKS]:
        table.add_row(
            str(one.rank),
            seconds(sole_delay),
            seconds(wait),
            percent(one.compute_s / one.span_s),
            percent(one.communication_s / one.span_s),
            percent(one.exposed_communication_s / one.span_s),
            percent(one.idle_s / one.span_s),
            seconds(one.span_s),
        )
    if len(rows) > _MOST_RANKS:
        table.caption = f"the costliest {_MOST_RANKS} of {len(rows)}; all with --json"
        table.caption_justify = "left"
    return table


def _waits(report: GpuReport) -> Table:
    """Who waits for whom, longest first."""
    table = new_table("waits", "for rank", "in collectives", "group")
    found = [
        (float(group.waited[at, by]), rank, other, group.group)
        for group in report.waits.by_group
        for at, rank in enumerate(report.waits.ranks)
        for by, other in enumerate(report.waits.ranks)
        if group.waited[at, by] > 0
    ]
    for waited, rank, other, group in sorted(found, key=lambda row: -row[0])[:_MOST_WAITS]:
        table.add_row(f"rank {rank}", str(other), seconds(waited), Text(short(group)))
    return table


def _kernels(report: GpuReport) -> Table:
    """Time by class of kernels, and the longest that no class knows."""
    table = new_table("kernels", "ops", "time", "share")
    times = report.kernel_time
    total = float(times["seconds"].sum())
    for name, ops, time in times.iter_rows():
        table.add_row(name, f"{ops:,}", seconds(time), percent(time / total))
    for name, ops, time in report.unknown_kernels.head(_MOST_KERNELS).iter_rows():
        table.add_row(Text(f"  {short(name)}"), f"{ops:,}", seconds(time), percent(time / total))
    return table
