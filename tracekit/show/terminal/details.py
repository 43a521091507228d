"""The whole `whatif` report: every table, cause and fix behind the answer.

In: a `Report`. Out: what rich prints; every number comes from the report.
"""

from __future__ import annotations

import polars as pl
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.analysis.graph.rules.posting import Posting
from tracekit.base.text import percent, seconds, short, sure, three_digits
from tracekit.job.pipeline_report import PipelineReport
from tracekit.job.pipeline_words import worker_label
from tracekit.report.question import change_text
from tracekit.report.report import Report
from tracekit.show.terminal.maps import LARGEST_MAP, merged_map, steps_line
from tracekit.show.terminal.tables import new_table, section_table, side_by_side, slowdown_text
from tracekit.show.words import fix_table, published_instead
from tracekit.trace.model import Worker

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
    if (lanes := report.pipeline) is not None:
        found_map = merged_map(lanes.attribution.worker_slowdown, lanes.attribution.dp_ranks, LARGEST_MAP[0])
        panels = [_kinds(lanes), _sets("Stage", lanes.by_pp_rank), _sets("DP rank", lanes.by_dp_rank), _workers(lanes)]
        console.print(side_by_side([*panels, *([found_map] if found_map is not None else [])], console))
        console.print(Padding(steps_line(lanes, max(console.width - 60, 10)), (0, 0, 1, 0)))
    if tables := [section_table(table) for table in report.sections(full=True)]:
        console.print(side_by_side(tables, console))
    console.print(_causes(report))
    console.print(section_table(fix_table(report)))
    if lanes is not None:
        console.print(Text("Method", style="bold underline"))
        console.print(_figures(lanes))


def _figures(report: PipelineReport) -> RenderableType:
    """The figures of the published method, and what was inferred."""
    found, trust, verdict = report.attribution, report.trust, report.diagnosis.verdict
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(
        "S", f"{report.slowdown_text}: the step takes as many times as long as if every op took its ideal time"
    )
    grid.add_row(
        "Step time",
        f"recorded {seconds(found.recorded_s)}, original (launch delays removed) {seconds(found.original_s)},"
        f" ideal {seconds(found.ideal_s)}",
    )
    grid.add_row(
        "Lost", f"{three_digits(verdict.lost_gpu_hours)} GPU-hours in these steps, {verdict.share:.1%} of the time"
    )
    if found.straggling:
        grid.add_row("Loss", _who(report))
    figures = f"replay error {trust.replay_error:.2%}, launch delays add {trust.discrepancy:.1%}"
    clamped = found.clamped_transfers + found.clamped_delays
    if clamped:
        figures += f"; {clamped:,} transfers or delays more than 10 ms below zero taken as 0: ops overlapped"
    grid.add_row("Replay", figures)
    if posting := _posting(report):
        grid.add_row("Receives", posting)
    if instead := published_instead(report):
        grid.add_row("Published", f"the published method says {instead}")
    return grid


def _posting(report: PipelineReport) -> str:
    """What bounds the start of a receive, as inferred; empty if it is the published rule."""
    found = report.posting
    if found.rule is Posting.SAME_DIRECTION:
        return ""
    if found.rule is Posting.RECORDED:
        return f"posted {_POSTED[found.rule]}"
    return f"posted {_POSTED[found.rule]} ({found.obeyed:.1%} of {found.telling:,} ops that tell)"


def _who(report: PipelineReport) -> str:
    """How much of the loss is due to few workers, and to the last stage; the larger share first."""
    found = report.attribution
    workers = ", ".join(worker_label(report, worker) for worker in found.slowest_workers[:3])
    more = len(found.slowest_workers) - 3
    named = workers + (f" and {more} more" if more > 0 else "")
    shares = [(found.m_w.removal, f"idealising {named} gives back {percent(found.m_w.removal)} of the loss (M_W)")]
    if found.stages > 1:
        shares.append((found.m_s.removal, f"idealising the last stage gives back {percent(found.m_s.removal)} (M_S)"))
    shares.sort(reverse=True)
    line = ", ".join(text for _, text in shares)
    if shares[0][0] >= _CULPRIT_SHARE:
        return line
    most = max(shares[0][0], 0.0)
    return f"nobody in particular: idealising the slowest workers or the last stage gives back at most {percent(most)}"


def _kinds(report: PipelineReport) -> Table:
    table = new_table("Op kind", "Slowdown", "if ideal", "on path")
    on_path = dict(report.critical_path.select("kind", "recorded_s").iter_rows())
    for row in report.by_kind.head(_TOP).iter_rows(named=True):
        share = percent(on_path[row["kind"]] / report.attribution.recorded_s)
        table.add_row(row["kind"], slowdown_text(row["slowdown"]), change_text(row["saved_s"]), share)
    return table


def _sets(head: str, frame: pl.DataFrame) -> Table:
    """S of each stage or DP rank, by its first column, the costliest first."""
    table = new_table(head, "Slowdown", "if ideal")
    worst = frame.sort("slowdown", descending=True, maintain_order=True).head(_TOP)
    for number, slowdown, saved_s in worst.select(pl.first(), "slowdown", "saved_s").iter_rows():
        table.add_row(str(number), slowdown_text(slowdown), "" if saved_s is None else change_text(saved_s))
    return table


def _workers(report: PipelineReport) -> Table:
    has_hosts = report.by_worker["host"].null_count() < report.by_worker.height
    table = new_table("Rank", *(("host",) if has_hosts else ()), "(dp,pp)", "Slowdown", "on path")
    on_path = {tuple(at): seconds for *at, seconds in report.critical_workers.drop("original_s").iter_rows()}
    for row in report.by_worker.head(_TOP).iter_rows(named=True):
        host = (Text(short(row["host"] or "")),) if has_hosts else ()
        worker = row["dp_rank"], row["pp_rank"]
        share = percent(on_path.get(worker, 0.0) / report.attribution.recorded_s)
        table.add_row(str(row["rank"]), *host, str(Worker(*worker)), slowdown_text(row["slowdown"]), share)
    return table


def _causes(report: Report) -> RenderableType:
    """What is wrong, where, since when, how certain, on what evidence, what to check next."""
    lines: list[RenderableType] = [Text("Causes", style="bold underline")]
    places = report.diagnosis.answer.places
    for number, (cause, place) in enumerate(zip(report.diagnosis.causes, places, strict=True), 1):
        line = Text().append(cause.title, style="bold")
        line.append(f"  {place}" if cause.change is not None or str(cause.where) != "whole job" else "")
        if cause.change is not None:
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
