"""The whole `whatif` report: every table, cause and fix behind the answer.

In: a `Report`. Out: what rich prints; every number comes from the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.analysis.graph.rules.posting import Posting
from tracekit.base.text import percent, seconds, short, sure, three_digits
from tracekit.dashboards.terminal.maps import LARGEST_MAP, merged_map, steps_line
from tracekit.dashboards.terminal.tables import (
    labelled,
    new_table,
    section_panel,
    section_table,
    side_by_side,
    slowdown_text,
)
from tracekit.dashboards.words import fix_table, published_instead, worker_label
from tracekit.report.question import change_text
from tracekit.report.report import Report
from tracekit.report.rows import Contribution

#: The number of rows in a table that names culprits.
_TOP = 8
#: Workers or a stage count as the culprit from this share of the loss on.
_CULPRIT_SHARE = 0.3
_POSTED = {
    Posting.EARLY: "ahead of the computes before them",
    Posting.ANY_DIRECTION: "behind the previous compute of any direction",
    Posting.BATCHED: "in batches between computes, which wait for them",
    Posting.RECORDED: "in the order in which the host asked and waited, as recorded",
}


def print_details(report: Report, console: Console) -> None:
    """Print all evidence behind the answer."""
    if report.by_worker:
        grid = report.worker_grid()
        if (worker_map := merged_map(grid.slowdown, grid.dp_ranks, LARGEST_MAP[0])) is not None:
            console.print(Padding(worker_map, (0, 0, 1, 0)))
        console.print(Padding(steps_line(report, max(console.width - 60, 10)), (0, 0, 1, 0)))
    if parts := [section_panel(part, console) for part in report.parts]:
        console.print(Padding(side_by_side(parts, console), (0, 0, 1, 0)))
    console.print(_causes(report))
    console.print(section_table(fix_table(report)))
    if report.by_worker:
        console.print()
        console.print(Text("Method", style="bold underline"))
        console.print(Padding(labelled(_figures(report)), (0, 0, 1, 0)))
        stages = {str(row.pp_rank): row for row in report.by_pp_rank or ()}
        dp_ranks = {str(row.dp_rank): row for row in report.by_dp_rank or ()}
        panels = [_kinds(report), _sets("Stage", stages), _sets("DP rank", dp_ranks), _workers(report)]
        console.print(side_by_side(panels, console))


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """The figures of the published method, and what was inferred."""
    times, trust, verdict = report.step_time_s, report.trust, report.verdict
    yield "S", f"{report.slowdown_text}: the step takes as many times as long as if every op took its ideal time"
    original = f"original (launch delays removed) {seconds(times.original)}"
    yield "Step time", f"recorded {seconds(times.recorded)}, {original}, ideal {seconds(times.ideal)}"
    lost = three_digits(verdict.lost_gpu_hours)
    yield "Lost", f"{lost} GPU-hours in these steps, {verdict.share:.1%} of the time"
    if report.straggling:
        yield "Loss", _who(report)
    figures = f"replay error {trust.replay_error or 0.0:.2%}, launch delays add {trust.discrepancy or 0.0:.1%}"
    if clamped := (trust.clamped_transfers or 0) + (trust.clamped_delays or 0):
        figures += f"; {clamped:,} transfers or delays more than 10 ms below zero taken as 0: ops overlapped"
    yield "Replay", figures
    yield "Receives", _posting(report)
    if instead := published_instead(report):
        yield "Published", f"the published method says {instead}"


def _posting(report: Report) -> str:
    """What bounds the start of a receive, as inferred; empty if it is the published rule."""
    posting = report.posting
    if not posting or posting.rule is Posting.SAME_DIRECTION:
        return ""
    if posting.rule is Posting.RECORDED:
        return f"posted {_POSTED[posting.rule]}"
    return f"posted {_POSTED[posting.rule]} ({posting.obeyed:.1%} of {posting.telling:,} ops that tell)"


def _who(report: Report) -> str:
    """How much of the loss is due to few workers, and to the last stage; the larger share first."""
    rows = report.worker_grid().rows
    slowest = report.slowest_workers or []
    workers = ", ".join(worker_label(rows[worker]) for worker in slowest[:3])
    more = len(slowest) - 3
    named = workers + (f" and {more} more" if more > 0 else "")
    few, last = report.m_w or 0.0, report.m_s or 0.0
    shares = [(few, f"idealising {named} gives back {percent(few)} of the loss (M_W)")]
    if len(report.by_pp_rank or ()) > 1:
        shares.append((last, f"idealising the last stage gives back {percent(last)} (M_S)"))
    shares.sort(reverse=True)
    line = ", ".join(text for _, text in shares)
    if shares[0][0] >= _CULPRIT_SHARE:
        return line
    most = max(shares[0][0], 0.0)
    return f"no few workers: idealising the slowest workers or the last stage gives back at most {percent(most)}"


def _kinds(report: Report) -> Table:
    table = new_table("Op kind", "Slowdown", "if ideal", "on path")
    on_path = {row.kind: row.recorded_s for row in report.critical_path}
    for row in report.by_kind[:_TOP]:
        share = percent(on_path.get(row.kind, 0.0) / report.step_time_s.recorded)
        table.add_row(str(row.kind), slowdown_text(row.slowdown or 0.0), change_text(row.saved_s or 0.0), share)
    return table


def _sets(head: str, rows: Mapping[str, Contribution]) -> Table:
    """S of each stage or DP rank by its number, the costliest first."""
    table = new_table(head, "Slowdown", "if ideal")
    worst = sorted(rows.items(), key=lambda row: row[1].slowdown or 0.0, reverse=True)[:_TOP]
    for number, row in worst:
        saved = "" if row.saved_s is None else change_text(row.saved_s)
        table.add_row(number, slowdown_text(row.slowdown or 0.0), saved)
    return table


def _workers(report: Report) -> Table:
    rows = report.by_worker or []
    has_hosts = any(row.host is not None for row in rows)
    table = new_table("Rank", *(("host",) if has_hosts else ()), "(dp,pp)", "Slowdown", "on path")
    on_path = {(row.dp_rank, row.pp_rank): row.recorded_s for row in report.critical_workers or ()}
    for row in rows[:_TOP]:
        host = (Text(short(row.host or "")),) if has_hosts else ()
        share = percent(on_path.get((row.dp_rank, row.pp_rank), 0.0) / report.step_time_s.recorded)
        table.add_row(str(row.rank), *host, str(row.worker), slowdown_text(row.slowdown), share)
    return table


def _causes(report: Report) -> RenderableType:
    """What is wrong, where, since when, how certain, on what evidence, what to check next."""
    lines: list[RenderableType] = [Text("Causes", style="bold underline")]
    for number, (cause, place) in enumerate(zip(report.findings, report.answer.places, strict=True), 1):
        line = Text().append(cause.title, style="bold")
        line.append(f"  {place}" if cause.priced or cause.where_text != "whole job" else "")
        if cause.priced:
            line.append(f", {cause.when}, {sure(cause.confidence)}: {cause.costs}")
            if cause.saved_when_acting_s is not None:
                line.append(f", {seconds(cause.saved_when_acting_s)} in each of those steps")
        lines.append(_hanging(f" {number}.", line))
        for name, text in (("because", cause.effect), ("check", cause.next_check)):
            if text:
                lines.append(_hanging(f"    {name:<7}", Text(text), style="dim"))
    return Group(*lines, Text())


def _hanging(head: str, text: Text, style: str = "") -> RenderableType:
    """`head`, then `text`, with all its lines indented to the same column."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(head, text, style=style)
    return grid
