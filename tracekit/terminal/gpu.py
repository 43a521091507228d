"""The report on a GPU-recorded job for a terminal.

In: a `GpuReport`. Out: what rich prints. The first lines answer who, how much, why, and whether to believe it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.analysis.gpu.remedy import ACTIONS
from tracekit.gpu_report import GpuReport
from tracekit.terminal.tables import by_label, new_table, percent, questions, side_by_side, slowdown_text
from tracekit.text import printable, seconds, short

_MOST_RANKS, _FEWEST_RANKS = 16, 8
_MOST_WAITS = 8
_MOST_KERNELS = 5


def print_gpu_report(
    report: GpuReport, console: Console, *, source: str | None = None, asked: Sequence[str] = (), full: bool = False
) -> None:
    """Print the answer, and with `full` all evidence behind it.

    `source`: the recording as arguments of a command, for the suggested next command. `asked`: labels, or several
    joined by commas, whose tables are printed in any case.
    """
    recording = report.recording
    steps = recording.step_spans["step"].n_unique()
    counts = {"rank": len(recording.ranks), "step": steps, "GPU op": recording.gpu_ops.height}
    sizes = "   " + ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    device = f" on {printable(recording.device_name)}" if recording.device_name else ""
    console.print(Text.assemble((short(recording.name), "bold"), sizes, device))
    console.print()
    console.print(_verdict(report))
    console.print()
    if report.replayed.questions_asked:
        console.print(questions(report.replayed.questions_asked, float(report.replayed.original.mean())))
    panels: list[RenderableType] = [_by_rank(report, _MOST_RANKS if full else _FEWEST_RANKS)]
    if full:
        panels += [_waits(report), _kernels(report), _critical_path(report)]
    groups = [group for group in report.replayed.labels_asked if group.labels != ("rank",)]
    panels += [by_label(group) for group in groups if full or ",".join(group.labels) in asked]
    console.print(side_by_side(panels, console))
    if source is not None and not full:
        console.print(Text.assemble(("Next   ", "bold"), f"tracekit whatif {source} --full"), soft_wrap=True)


def _verdict(report: GpuReport) -> Table:
    """Who, why, how much, and whether to trust it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    culprit, replayed = report.culprit, report.replayed
    if culprit is None:
        grid.add_row("Verdict", Text.assemble(("NO CULPRIT", "bold black on green"), f"  {report.verdict}"))
    else:
        grid.add_row(
            "Verdict", Text.assemble(("SLOW RANK", "bold white on dark_red"), f"  {printable(report.verdict)}")
        )
        grid.add_row("Cost", Text(report.cost or ""))
        for number, one in enumerate(culprit.causes):
            grid.add_row("" if number else "Why", Text(f"{one.cause}: {printable(one.evidence)}"))
        if culprit.causes and not report.doubts:
            leading = culprit.causes[0]
            saved = f"saves {seconds(leading.saved_s)} of the {seconds(report.recorded_s)} recorded"
            grid.add_row("Fix", Text(f"{ACTIONS[leading.cause]}: {saved}"))
    times = f"{seconds(report.recorded_s)} recorded, {seconds(float(replayed.ideal.mean()))} with all ranks alike"
    grid.add_row("Recording", Text(f"{times} (S = {replayed.slowdown:.2f})"))
    trusted = Text("yes", "green") if not replayed.doubts else Text("NO", "bold red")
    grid.add_row("Trust", Text.assemble(trusted, f"  {_figures(report)}"))
    for doubt in report.doubts:
        grid.add_row("", Text(printable(doubt)))
    return grid


def _figures(report: GpuReport) -> str:
    """How much of the recording the graph explains."""
    left, matches = report.unexplained, report.matches
    longest = seconds(max(left.communication_gap_s, left.compute_gap_s))
    figures = [
        f"replay error {report.replayed.replay_error:.2%}",
        f"unexplained gaps {report.replayed.discrepancy:.1%}, 99 % of them below {longest}",
        f"{left.inferred:,} of {left.edges:,} dependencies inferred, {left.violations:,} contradicted",
        f"{matches.matched:,} collectives matched, {matches.unmatched:,} kernels not",
    ]
    if report.without_launch:
        figures.append(f"{report.without_launch:,} GPU ops launched outside the recording")
    return "; ".join(figures)


def _by_rank(report: GpuReport, most: int) -> Table:
    """Costliest ranks first."""
    table = new_table("rank", "S alone", "sole delay", "waits", "compute", "transfers", "exposed", "idle", "of")
    slowdown = report.slowdown_by_rank
    rows = list(zip(report.breakdowns, report.waits.wait.tolist(), report.waits.sole_delay.tolist(), strict=True))
    rows.sort(key=lambda row: -row[2])
    for one, wait, sole_delay in rows[:most]:
        span = one.span_s or 1.0
        table.add_row(
            str(one.rank),
            slowdown_text(slowdown[one.rank]) if one.rank in slowdown else "",
            seconds(sole_delay),
            seconds(wait),
            percent(one.compute_s / span),
            percent(one.communication_s / span),
            percent(one.exposed_communication_s / span),
            percent(one.idle_s / span),
            seconds(one.span_s),
        )
    if len(rows) > most:
        table.caption = f"the costliest {most} of {len(rows)}; all with --json"
        table.caption_justify = "left"
    return table


def _waits(report: GpuReport) -> Table:
    """Which rank waits for which, longest first."""
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
    """Time by class of kernels, and the longest unclassified kernels."""
    table = new_table("kernels", "ops", "time", "share")
    times = report.kernel_time
    total = float(times["seconds"].sum()) or 1.0
    for name, ops, time in times.iter_rows():
        table.add_row(name, f"{ops:,}", seconds(time), percent(time / total))
    for name, ops, time in report.unknown_kernels.head(_MOST_KERNELS).iter_rows():
        table.add_row(Text(f"  {short(name)[:_WIDEST_KERNEL]}"), f"{ops:,}", seconds(time), percent(time / total))
    return table


_WIDEST_KERNEL = 40


def _critical_path(report: GpuReport) -> Table:
    """The critical path of the recording, by op class and by rank."""
    table = new_table("On the critical path", "time", "share")
    recorded, replayed = report.recorded_s, report.replayed
    shares = [
        *((short(name), found) for name, found in list(replayed.critical_peers.items())[:_MOST_WAITS]),
        ("unexplained gaps", replayed.critical_delay_s),
        *((f"rank {rank}", found) for rank, found in list(replayed.critical_ranks.items())[:_MOST_WAITS]),
    ]
    for name, found in shares:
        table.add_row(Text(name), seconds(found), percent(found / recorded))
    return table
