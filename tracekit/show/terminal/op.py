"""The report on a job of any shape for a terminal.

In: an `OpReport`. Out: what rich prints.
"""

from __future__ import annotations

import json

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.analysis.attribution.attribution import waste
from tracekit.analysis.attribution.chance import SMALLEST_UNEXPLAINED
from tracekit.base.text import printable, seconds, short
from tracekit.report.op import OpReport
from tracekit.show.terminal.tables import by_label, new_table, percent, questions, side_by_side
from tracekit.trace.op import OpTrace

_TOP = 8
#: The number of characters to show of a metadata value.
_LONGEST = 300


def print_op_report(report: OpReport, console: Console) -> None:
    """Print the whole report."""
    counts = {"rank": report.ranks, "step": len(report.steps), "op": report.ops}
    sizes = "   " + ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in counts.items())
    console.print(Text.assemble((short(report.name), "bold"), sizes))
    console.print()
    console.print(_verdict(report))
    console.print()
    if report.questions_asked:
        console.print(questions(report.questions_asked))
    panels: list[RenderableType] = [_critical_path(report), *map(by_label, report.labels_asked)]
    console.print(side_by_side(panels, console))


def print_op_trace(trace: OpTrace, console: Console) -> None:
    """Print the content of an op trace: its sizes, where its dependencies come from, ops per kind."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold", max_width=24)
    grid.add_column(overflow="fold")
    ops = trace.ops
    grid.add_row("Job", Text(short(trace.name)))
    grid.add_row("Kind", "op trace (docs/op-trace.md)")
    grid.add_row("Rules", Text(printable(", ".join(trace.rules))))
    grid.add_row("Axes", Text(printable(", ".join(trace.axes)) or "none"))
    grid.add_row("Groups", f"{len(trace.groups):,}")
    grid.add_row("Ranks", f"{ops['rank'].n_unique():,}" if "rank" in ops.columns else "none")
    if "step" in ops.columns:
        grid.add_row("Steps", f"{ops['step'].n_unique():,}")
    grid.add_row("Ops", f"{ops.height:,}")
    for name, value in trace.metadata.items():
        text = json.dumps(value)
        grid.add_row(Text(short(name)), Text(text if len(text) < _LONGEST else text[:_LONGEST] + " ..."))
    console.print(grid)


def _verdict(report: OpReport) -> Table:
    original, ideal = float(report.original.mean()), float(report.ideal.mean())
    grid = Table.grid(padding=(0, 2, 0, 0))
    if report.of_recording:
        unknown = "the op trace does not say who holds the others up: `tracekit whatif` on the recording does"
        grid.add_row("Verdict", Text(printable(report.verdict or unknown)))
        grid.add_row("Slowdown", f"S = {report.slowdown:.2f}")
        return _with_times(grid, report)
    if report.straggling or report.parts.headline:
        verdict = Text.assemble(("STRAGGLER", "bold white on dark_red"), f"  S = {report.slowdown:.2f}: ")
        verdict.append(f"{seconds(original - ideal)} of every {seconds(original)} step ({waste(report.slowdown):.1%})")
        if report.parts.noise_s >= SMALLEST_UNEXPLAINED * original:
            verdict.append(f"; {seconds(report.parts.noise_s)} of it are the noise of its ops")
    else:
        verdict = Text.assemble(("NO STRAGGLER", "bold black on green"), f"  S = {report.slowdown:.2f}")
        rest = report.parts.words(original)
        verdict.append("" if rest is None else f": {rest}")
    grid.add_row("Verdict", verdict)
    return _with_times(grid, report)


def _with_times(grid: Table, report: OpReport) -> Table:
    original, ideal = float(report.original.mean()), float(report.ideal.mean())
    times = f"recorded {seconds(float(report.recorded.mean()))}, original {seconds(original)}, ideal {seconds(ideal)}"
    grid.add_row("Step time", times)
    figures = f"replay error {report.replay_error:.2%}, launch delays add {report.discrepancy:.1%}"
    trusted = Text("yes", "green") if not report.doubts else Text("NO", "bold red")
    grid.add_row("Trust", Text.assemble(trusted, f"  {figures}", *(f"; {printable(doubt)}" for doubt in report.doubts)))
    return grid


def _critical_path(report: OpReport) -> Table:
    """The critical path of the recorded step, by op class and by rank."""
    recorded = float(report.recorded.mean())
    table = new_table("On the critical path", "of a step", "share")
    for peer, found in list(report.critical_peers.items())[:_TOP]:
        table.add_row(Text(short(peer)), seconds(found), percent(found / recorded))
    table.add_row("launch delays", seconds(report.critical_delay_s), percent(report.critical_delay_s / recorded))
    for rank, found in list(report.critical_ranks.items())[:_TOP]:
        table.add_row(f"rank {rank}", seconds(found), percent(found / recorded))
    return table
