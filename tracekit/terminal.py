"""The `whatif` report as a person reads it in a terminal.

In: a `Report`. Out: text on a rich console, laid out for its width. Draws only; every number comes from the report.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY
from tracekit.analysis.causes.rules_outside import SMALLEST_OFFSET_S
from tracekit.analysis.graph.gaps import gaps_text
from tracekit.analysis.graph.rules.posting import Posting
from tracekit.analysis.replay.method import Method
from tracekit.analysis.verdict import LossKind
from tracekit.model import Worker
from tracekit.report import ClockOffset, Report
from tracekit.store import StoredJob
from tracekit.terminal_tables import by_label, new_table, percent, questions, saving_text, side_by_side, slowdown_text
from tracekit.text import cost, printable, seconds, short
from tracekit.trace import Trace, share_of_samples

#: Rows of a table that names culprits.
_TOP = 8
#: From this share of the loss on, workers or a stage count as the culprit.
_CULPRIT_SHARE = 0.3
_POSTED = {
    Posting.EARLY: "ahead of the computes before them",
    Posting.ANY_DIRECTION: "behind the previous compute of any direction",
    Posting.BATCHED: "in batches between computes, which wait for them",
}
_LARGEST_MAP = (24, 32)
#: Colour-blind safe, light to dark as the slowdown grows (ColorBrewer YlOrBr order).
_HEAT = ("grey35", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02")
_GLYPHS = "·░▒▓▆█"
_LOSS_STYLE = "bold white on dark_red"
_VERDICT_STYLE = {LossKind.BALANCED: "bold black on green", LossKind.CONTRADICTION: "bold black on yellow"}
_SPARKS = "▁▂▃▄▅▆▇█"


def print_report(report: Report, console: Console) -> None:
    """Print the whole report."""
    console.print(_headline(report))
    console.print()
    console.print(_verdict(report))
    console.print()
    if report.questions_asked:
        console.print(questions(report.questions_asked, report.attribution.original_s))
    for group in report.labels_asked:
        console.print(by_label(group))
    panels = [_kinds(report), _stages(report), _dp_ranks(report), _workers(report), _worker_map(report)]
    console.print(side_by_side(panels, console))
    console.print(Padding(_steps(report, console.width), (0, 0, 1, 0)))
    console.print(_causes(report))
    console.print(_fixes(report))


def print_trace(trace: Trace, console: Console) -> None:
    """Print what a trace holds: identity, layout, coverage, ops per kind."""
    coverage, layout = trace.coverage(), trace.layout
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold", max_width=24)
    grid.add_column(overflow="fold")
    grid.add_row("Job", Text(short(trace.name)))
    grid.add_row("Layout", ", ".join(f"{name} {size}" for name, size in layout.to_dict().items()))
    grid.add_row("Steps", f"{len(trace.steps)}, from {trace.steps[0]} to {trace.steps[-1]}")
    grid.add_row(
        "Workers",
        f"{coverage.workers_traced} of {coverage.workers_expected} traced, {coverage.worker_steps_traced} of"
        f" {coverage.worker_steps_expected} worker-steps",
    )
    grid.add_row("Ops", f"{trace.ops.height:,}")
    for name, value in trace.metadata.items():
        text = _gpus(value) if name == "gpus" else json.dumps(value)
        grid.add_row(Text(short(name)), Text(text if len(text) < 300 else text[:300] + " ..."))
    console.print(grid)
    console.print()
    table = new_table("Op kind", "ops", "mean", "longest")
    by_kind = trace.ops.group_by("kind").agg(
        pl.len().alias("ops"), pl.col("duration").mean().alias("mean"), pl.col("duration").max().alias("longest")
    )
    for kind, ops, mean, longest in by_kind.sort("kind").iter_rows():
        table.add_row(kind, f"{ops:,}", seconds(mean), seconds(longest))
    console.print(table)


def _gpus(gpus: Any) -> str:
    """The GPUs of the ranks in a line, with those that were throttled; as JSON where it is nothing of the kind."""
    if not isinstance(gpus, dict) or not all(isinstance(gpu, dict) for gpu in gpus.values()):
        return json.dumps(gpus)
    if not gpus:
        return json.dumps(gpus)
    models = Counter(str(gpu.get("model")) for gpu in gpus.values())
    hosts = len({str(gpu.get("host")) for gpu in gpus.values()})
    text = f"{', '.join(f'{count} x {model}' for model, count in sorted(models.items()))} on {hosts} host(s)"
    throttled = [
        f"rank {rank} {share:.0%} of samples ({', '.join(_names(gpu.get('reasons')))})"
        for rank, gpu in gpus.items()
        if (share := share_of_samples(gpu.get("throttled"))) is not None and share > 0
    ]
    if throttled:
        text += f"; throttled: {', '.join(throttled[:_TOP])}{' ...' if len(throttled) > _TOP else ''}"
    return printable(text)


def _names(found: object) -> list[str]:
    """The names in free metadata that counts things by name, or lists them."""
    return [str(name) for name in found] if isinstance(found, dict | list) else []


def print_jobs(path: Path, jobs: Sequence[StoredJob], console: Console) -> None:
    """Print the jobs of a store, newest first."""
    if not jobs:
        console.print(Text(f"{printable(str(path))}: no job yet; add one with `tracekit import TRACE`"))
        return
    several = any(job.windows > 1 for job in jobs)
    heads = ["Job", "dp", "pp", "GPUs", "steps", "ops", *(["windows"] if several else []), "imported (UTC)"]
    table = new_table(*heads)
    for job in jobs:
        grid = ("-", "-") if job.layout is None else (f"{job.layout.dp:,}", f"{job.layout.pp:,}")
        sizes = (job.ranks, job.steps, job.ops, *([job.windows] if several else []))
        shown = (*grid, *(f"{size:,}" for size in sizes))
        table.add_row(Text(short(job.name)), *shown, f"{job.imported_at:%Y-%m-%d %H:%M}")
    console.print(table)


def _headline(report: Report) -> Text:
    layout = report.layout
    sizes = [f"dp {layout.dp}"] + [f"{name} {size}" for name, size in _other_sizes(report) if size > 1]
    line = Text(short(report.name), style="bold")
    line.append(
        f"   {' x '.join(sizes)} on {layout.world_size} GPUs, {len(report.attribution.steps)} steps,"
        f" {report.ops:,} ops",
        style="dim",
    )
    return line


def _other_sizes(report: Report) -> Iterable[tuple[str, int]]:
    layout = report.layout
    return (("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep), ("vpp", layout.vpp))


def _verdict(report: Report) -> RenderableType:
    """What it costs, who costs it, whether to believe it."""
    found, trust = report.attribution, report.trust
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    verdict = report.diagnosis.verdict
    grid.add_row(
        "Verdict",
        Text.assemble((verdict.kind.upper(), _VERDICT_STYLE.get(verdict.kind, _LOSS_STYLE)), f"  {verdict.sentence}"),
    )
    grid.add_row(
        "Lost",
        f"{verdict.lost_gpu_hours:,.3g} GPU-hours in these steps, {verdict.lost_gpu_hours_per_day:,.3g} a day at this"
        f" rate, {verdict.share:.1%} of the time",
    )
    grid.add_row(
        "Step time",
        f"recorded {seconds(found.recorded_s)}, original (launch delays removed) {seconds(found.original_s)},"
        f" ideal {seconds(found.ideal_s)}",
    )
    if found.straggling:
        grid.add_row("Who", _who(report))
    figures = f"replay error {trust.replay_error:.2%}, launch delays add {trust.discrepancy:.1%}"
    if trust.trustworthy and trust.discrepancy > LARGEST_DISCREPANCY:
        figures += f", all but {trust.unexplained:.1%} of them explained by the causes below"
    clamped = found.clamped_transfers + found.clamped_delays
    if clamped and trust.trustworthy:
        figures += f"; {clamped:,} transfers or delays more than 10 ms below zero taken as 0: ops overlapped"
    if trust.trustworthy:
        grid.add_row("Trust", Text.assemble(("yes", "green"), f"  {figures}"))
    else:
        grid.add_row("Trust", Text.assemble(("NO", "bold red"), f"  {figures}: " + "; ".join(trust.reasons)))
    if clocks := _clocks(report):
        grid.add_row("Clocks", clocks)
    if posting := _posting(report):
        grid.add_row("Receives", posting)
    if method := _method(report):
        grid.add_row("Method", method)
    if coverage := _coverage(report):
        grid.add_row("Coverage", Text(coverage, style="yellow"))
    return grid


def _clocks(report: Report) -> str:
    """Which clocks were off and set right, or that some could not be compared; empty where neither."""
    clocks = report.clocks
    off = [row for row in clocks.offsets if max(abs(row.offset_s), abs(row.jump_s)) >= SMALLEST_OFFSET_S]
    parts = [_clock(row) for row in off[:_TOP]]
    if parts:
        more = f" and {len(off) - _TOP} more" if len(off) > _TOP else ""
        return f"worker{'s' if len(off) > 1 else ''} {', '.join(parts)}{more}: taken out of all figures"
    if clocks.untied:
        return f"{clocks.untied} cannot be compared: no op ends at once on several of them"
    return ""


def _clock(row: ClockOffset) -> str:
    """How one clock was off."""
    if row.jump_step is not None:
        way = "forward" if row.jump_s > 0 else "back"
        return f"{row.worker} set {way} by {seconds(abs(row.jump_s))} at step {row.jump_step}"
    way = "ahead" if row.offset_s > 0 else "behind"
    drift = f", drifting by {row.drift * 1e6:+.0f} us/s" if row.drift else ""
    return f"{row.worker} {way} by {seconds(abs(row.offset_s))} \u00b1 {seconds(row.error_s)}{drift}"


def _posting(report: Report) -> str:
    """What bounds the start of a receive, as inferred; empty where the published rule stands."""
    found = report.posting
    if found.posting is Posting.SAME_DIRECTION:
        return ""
    return f"posted {_POSTED[found.posting]} ({found.obeyed:.1%} of {found.telling:,} ops that tell)"


def _method(report: Report) -> str:
    """Which rules were followed, and where the published ones say something else; empty where they agree."""
    if report.method is Method.PUBLISHED:
        return "published: the rules of the OSDI'25 paper, nothing else"
    published = report.published
    if published is None or not published.differs(report.slowdown):
        return ""
    return f"the published method has S = {published.slowdown:.2f}: {'; '.join(published.reasons)}"


def _who(report: Report) -> str:
    """How much of the loss goes back to few workers, and to the last stage; the larger share first."""
    found = report.attribution
    workers = ", ".join(str(worker) for worker in found.slowest_workers[:3])
    more = len(found.slowest_workers) - 3
    plural = "s" if len(found.slowest_workers) > 1 else ""
    named = f"worker{plural} {workers}" + (f" and {more} more" if more > 0 else "")
    shares = [(found.m_w.removal, f"idealising {named} gives back {percent(found.m_w.removal)} of the loss (M_W)")]
    if found.stages > 1:
        shares.append((found.m_s.removal, f"idealising the last stage gives back {percent(found.m_s.removal)} (M_S)"))
    shares.sort(reverse=True)
    line = ", ".join(text for _, text in shares)
    if shares[0][0] >= _CULPRIT_SHARE:
        return line
    most = max(shares[0][0], 0.0)
    return f"nobody in particular: idealising the slowest workers or the last stage gives back at most {percent(most)}"


def _coverage(report: Report) -> str:
    """What is missing from the trace; empty where nothing is."""
    coverage, parts = report.coverage, []
    if coverage.workers_traced < coverage.workers_expected:
        shown = ", ".join(str(worker) for worker in coverage.missing_workers[:4])
        more = coverage.workers_expected - coverage.workers_traced - 4
        parts.append(
            f"{coverage.workers_traced} of {coverage.workers_expected} workers traced (missing {shown}"
            + (f" and {more} more)" if more > 0 else ")")
        )
    elif not coverage.complete:
        parts.append(
            f"{coverage.worker_steps_traced} of {coverage.worker_steps_expected} worker-steps traced: some workers miss"
            " some steps"
        )
    if report.dropped_lanes:
        ranks = sorted({dp_rank for _, dp_rank in report.dropped_lanes})
        parts.append(
            f"left out {len(report.dropped_lanes)} DP-rank-steps that lack a stage (DP rank"
            f" {', '.join(map(str, ranks[:6]))}{' ...' if len(ranks) > 6 else ''})"
        )
    if steps := report.left_out_steps:
        parts.append(f"left out {len(steps)} steps that some DP ranks lack")
    elif parts:
        parts.append("waiting for untraced workers shows as slow communication")
    if gaps := report.attribution.gaps:
        done = "" if report.attribution.slowdown_as_recorded is None else ", reconstructed from their peers"
        parts.append(f"not recorded{done}: {gaps_text(gaps)}")
    return "; ".join(parts)


def _kinds(report: Report) -> Table:
    table = new_table("Op kind", "S alone", "if ideal", "on path")
    on_path = dict(report.critical_path.select("kind", "recorded_s").iter_rows())
    for row in report.by_kind.head(_TOP).iter_rows(named=True):
        share = percent(on_path[row["kind"]] / report.attribution.recorded_s)
        table.add_row(row["kind"], slowdown_text(row["slowdown"]), saving_text(row["saved_s"]), share)
    return table


def _stages(report: Report) -> Table:
    table = new_table("Stage", "S alone", "if ideal")
    for row in _worst(report.by_pp_rank).iter_rows(named=True):
        table.add_row(str(row["pp_rank"]), slowdown_text(row["slowdown"]), saving_text(row["saved_s"]))
    return table


def _dp_ranks(report: Report) -> Table:
    table = new_table("DP rank", "S alone")
    for row in _worst(report.by_dp_rank).iter_rows(named=True):
        table.add_row(str(row["dp_rank"]), slowdown_text(row["slowdown"]))
    return table


def _workers(report: Report) -> Table:
    has_hosts = report.by_worker["host"].null_count() < report.by_worker.height
    table = new_table("Worker (dp,pp)", "rank", *(("host",) if has_hosts else ()), "S alone", "on path")
    on_path = {tuple(at): seconds for *at, seconds in report.critical_workers.drop("original_s").iter_rows()}
    for row in report.by_worker.head(_TOP).iter_rows(named=True):
        host = (Text(short(row["host"] or "")),) if has_hosts else ()
        worker = row["dp_rank"], row["pp_rank"]
        share = percent(on_path.get(worker, 0.0) / report.attribution.recorded_s)
        table.add_row(str(Worker(*worker)), str(row["rank"]), *host, slowdown_text(row["slowdown"]), share)
    return table


def _worst(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort("slowdown", descending=True, maintain_order=True).head(_TOP)


def _causes(report: Report) -> RenderableType:
    """What is wrong, where, since when, how sure, on what evidence, what to check next."""
    lines: list[RenderableType] = [Text("Causes", style="bold underline")]
    for number, cause in enumerate(report.diagnosis.causes, 1):
        line = Text(f" {number}. ").append(cause.title, style="bold")
        line.append(f"  {cause.where}" if cause.change is not None or str(cause.where) != "whole job" else "")
        if cause.change is not None:
            line.append(f", {cause.when}, {min(cause.confidence, 0.99):.0%} sure: {cost(cause.saved_s, cause.alone_s)}")
            if cause.saved_when_acting_s is not None:
                line.append(f", {seconds(cause.saved_when_acting_s)} in each of those steps")
        lines.append(line)
        for name, text in (("because", cause.effect), ("check", cause.next_check)):
            if text:
                grid = Table.grid(padding=(0, 1))
                grid.add_row(f"    {name:<7}", Text(text), style="dim")
                lines.append(grid)
    return Group(*lines, Text())


def _fixes(report: Report) -> RenderableType:
    """What to do, what the step takes then, what it saves, best first."""
    fixes = report.diagnosis.fixes
    if not fixes:
        return Text("Fixes: none that would save 1 % of the step")
    table = new_table("Fix", "sure", "step then", "saves", "GPU-hours a day")
    table.caption, table.caption_justify = f"{report.rate_assumption}. Steps as recorded, with launch delays.", "left"
    for fix in fixes:
        title = Text(fix.title)
        sure = "-" if fix.confidence is None else f"{min(fix.confidence, 0.99):.0%}"
        remarks = [*(["at most"] if fix.bound else []), *([f"assumes {fix.assumes}"] if fix.assumes else [])]
        if remarks:
            title.append(f" ({'; '.join(remarks)})", style="dim")
        if fix.withheld is not None:
            table.add_row(title.append(f": no promise, {fix.withheld}", style="dim"), sure, "", "", "")
            continue
        table.add_row(
            title,
            sure,
            seconds(fix.new_step_s),
            seconds(fix.saved_s) + (f" \u00b1 {seconds(fix.error_s)}" if fix.error_s > 0 else ""),
            f"{fix.saved_gpu_hours_per_day:,.1f}",
        )
    return table


def _worker_map(report: Report) -> RenderableType:
    """S of every worker, DP ranks down, stages across; large maps keep the maximum of each patch."""
    slowdown = report.attribution.worker_slowdown
    pooled, patch = _pooled(slowdown)
    if slowdown.size == 1:
        return Text()
    scale = _heat_scale(slowdown)
    lines: list[RenderableType] = [Text("S alone: DP rank down, stage across", style="bold underline")]
    if patch != (1, 1):
        lines.append(Text(f"a cell is the worst of {patch[0]} x {patch[1]} workers", style="dim"))
    for row, values in enumerate(pooled):
        first = report.attribution.dp_ranks[row * patch[0]]
        line = Text(f"  {first:>5} ", style="dim")
        for value in values:
            level = int(np.searchsorted(scale, value, side="right"))
            line.append(_GLYPHS[level] * 2, style=_HEAT[level])
        lines.append(line)
    legend = Text("        ")
    for level, glyph in enumerate(_GLYPHS):
        bound = f"<{scale[0]:.2f}" if level == 0 else f"{scale[level - 1]:.2f}"
        legend.append(glyph * 2, style=_HEAT[level]).append(f" {bound} ", style="dim")
    lines.append(legend)
    return Group(*lines)


def _heat_scale(slowdown: npt.NDArray[np.float64]) -> list[float]:
    """Five thresholds from just above 1 to the largest slowdown; a map of healthy workers stays blank."""
    top = max(float(slowdown.max()), 1.1)
    return [1.0 + (top - 1.0) * share for share in (0.1, 0.25, 0.45, 0.65, 0.85)]


def _pooled(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], tuple[int, int]]:
    """The map reduced to at most _LARGEST_MAP cells by maximum, and how many workers a cell covers."""
    patch = tuple(-(-size // limit) for size, limit in zip(values.shape, _LARGEST_MAP, strict=True))
    rows, columns = (-(-size // step) for size, step in zip(values.shape, patch, strict=True))
    padded = np.full((rows * patch[0], columns * patch[1]), -np.inf)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.reshape(rows, patch[0], columns, patch[1]).max(axis=(1, 3)), (patch[0], patch[1])


def _steps(report: Report, width: int) -> RenderableType:
    """Slowdown over the steps as a line of bars, with its extremes in words."""
    found = report.attribution
    slowdown = found.step_slowdown
    if len(slowdown) == 1:
        return Text(f"One step traced: {found.steps[0]}; variation over steps is unknown", style="dim")
    worst = int(slowdown.argmax())
    line = Text("Steps: ", style="bold")
    line.append(
        f"S {slowdown.min():.3f} to {slowdown.max():.3f}, median {float(np.median(slowdown)):.3f}; worst step"
        f" {found.steps[worst]}",
        style="not bold",
    )
    size = -(-len(slowdown) // max(width - 10, 10))
    peaks = [float(slowdown[at : at + size].max()) for at in range(0, len(slowdown), size)]
    low = min(peaks)
    high = max(*peaks, low + 0.05)  # so that noise stays flat
    bars = "".join(_SPARKS[round((peak - low) / (high - low) * (len(_SPARKS) - 1))] for peak in peaks)
    return Group(line, Text(f"        {bars}", style="#fe9929"))
