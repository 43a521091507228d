"""Rows of a fleet's report, as terminal and page show them.

In: `FleetFigures`. Out: headings and cells as text. The names of causes and fixes come from the reports of the jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import polars as pl

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.base.text import counted, seconds, short, three_digits, with_error
from tracekit.fleet.figures import CITATION, CONFIDENCE, SHARE, FixOfFleet, FleetFigures, Interval
from tracekit.fleet.study_tables import EVERYWHERE
from tracekit.report.comparison import total_of
from tracekit.report.finding import kind_words
from tracekit.report.tables import Table

#: The number of table rows to show; the JSON has all.
MOST_ROWS = 10
#: What a job loses that straggles, as a share.
_LEAST_LOST = 1 - 1 / VERDICT.straggling
BY_CAUSE, BY_TEAM, APPLIED = "GPU-hours lost by cause", "Who pays: by team", "Fixes that were applied"
_TITLES = {
    "size": "By size, GPUs",
    "week": "By week of the first traced step",
    "gpu_model": "By GPU model",
    "team": BY_TEAM,
    "host": "By host, causes of the machine",
}


def headline(figures: FleetFigures) -> str:
    """The first line."""
    if not figures.jobs:
        return "No job counts: every one was left out."
    return (
        f"{_percent(figures.straggling_jobs.value)} of {figures.jobs:,} jobs straggle;"
        f" {_percent(figures.lost.value)} of {hours(figures.gpu_hours)} GPU-hours are lost to it"
    )


def answer_rows(figures: FleetFigures) -> Iterator[tuple[str, str]]:
    """The rows below the first line of the first screen."""
    left_out = sum(rule.first for rule in figures.left_out if rule.scope == EVERYWHERE)
    sources = f"{counted(figures.sources, 'source')}, {figures.copies:,} of them copies"
    yield "Jobs", f"{sources}; {figures.jobs:,} jobs count, {left_out:,} left out"
    if not figures.jobs:
        return
    straggling = f"{between(figures.straggling_jobs)} of jobs, {between(figures.straggling_hours)} of GPU-hours"
    yield "Straggling", f"{straggling} lose {_LEAST_LOST:.0%}+"
    yield "Lost", f"{hours(figures.lost_gpu_hours)} GPU-hours, {between(figures.lost)}"
    if figures.causes.height:
        first = figures.causes.row(0, named=True)
        yield "Mostly to", f"{first['title']}: {hours(first['lost_gpu_hours'])} GPU-hours in {first['jobs']:,} jobs"
    if figures.fixes and (best := figures.fixes[0]).for_causes:
        given_back = f"{_saved_hours(best)} of all {hours(figures.gpu_hours)} GPU-hours, {between(best.share)}"
        yield "Best fix", f"{_fix(best)}: gives back {given_back}, in {best.jobs:,} jobs"
    if figures.applied:
        yield "Applied", total_of(figures.applied)
    yield "Intervals", f"{CONFIDENCE:.0%}, bootstrap over jobs, {figures.samples:,} samples"
    if len(figures.analyses) > 1:
        yield "Mixed", f"jobs of {len(figures.analyses)} versions of the analysis: run the sources again"


def tables(figures: FleetFigures) -> Iterator[Table]:
    """Every table, in order; leaves out those without rows."""
    everything = (_causes(figures), _fixes(figures), _applied(figures), _examples(figures), _distribution(figures),
                  *_groups(figures), _patterns(figures), _paper(figures), _left_out(figures))  # fmt: skip
    yield from (table for table in everything if table.rows)


def _causes(figures: FleetFigures) -> Table:
    rows = [
        (row["title"], f"{row['jobs']:,}", hours(row["lost_gpu_hours"]), _percent(row["lost"]))
        for row in figures.causes.head(MOST_ROWS).iter_rows(named=True)
    ]
    note = (
        "Jobs that lose at least 1% of their step to it. Causes overlap: they do not add up. The GPU-hours lost in all"
        " are what differences between workers cost; causes that slow all alike, such as checkpoints, come on top."
    )
    return Table(BY_CAUSE, ("Cause", "jobs", "GPU-hours", "of all"), tuple(rows), note)


def _fixes(figures: FleetFigures) -> Table:
    rows = [
        (_fix(fix), "a cause" if fix.for_causes else "-", f"{fix.jobs:,}", _saved_hours(fix), between(fix.share))
        for fix in figures.fixes
    ]
    heads = ("Fix", "for", "jobs", "gives back", "of all GPU-hours")
    note = "First fixes for causes, then what any job could try. Of each job the best fix of its kind. Fixes overlap."
    return Table("Fixes that give back most", heads, tuple(rows), note)


def _applied(figures: FleetFigures) -> Table:
    rows = [
        (
            fix.title,
            f"{short(fix.before)}, then {short(fix.after)}",
            with_error(fix.expected_s, fix.error_s),
            seconds(fix.got_s),
            three_digits(fix.got_gpu_hours_per_day),
        )
        for fix in figures.applied
    ]
    heads = ("Fix", "jobs", "expected", "got", "GPU-hours a day")
    note = "What each was expected to save a step, and what the run with it saves, as tracekit compare --fix noted it."
    return Table(APPLIED, heads, tuple(rows), note)


def _fix(fix: FixOfFleet) -> str:
    return kind_words(fix.kind).capitalize()


def _saved_hours(fix: FixOfFleet) -> str:
    return ("at most " if fix.bound else "") + hours(fix.gpu_hours)


def _examples(figures: FleetFigures) -> Table:
    rows = [(_fix(fix), f"{short(fix.example_job)}: {fix.example}") for fix in figures.fixes]
    return Table("Where each of these fixes gives back most", ("Fix", "job"), tuple(rows))


def _distribution(figures: FleetFigures) -> Table:
    rows = [
        (
            f"{row['quantile']:.0%}",
            _percent(row["waste_jobs"]),
            _percent(row["waste_hours"]),
        )
        for row in figures.quantiles.iter_rows(named=True)
        if figures.jobs
    ]
    return Table("What jobs lose", ("At most, in", "of jobs", "of GPU-hours"), tuple(rows))


def _groups(figures: FleetFigures) -> Iterator[Table]:
    for name, rows in figures.groups.items():
        listed_rows = rows if name in ("size", "week") else rows.head(MOST_ROWS)
        cells = [_group_row(row) for row in listed_rows.iter_rows(named=True)]
        heads = ("", "jobs", "GPU-hours lost", "straggling", "lost")[: len(cells[0]) if cells else 5]
        more = f"{rows.height - listed_rows.height:,} more in the JSON." if rows.height > listed_rows.height else ""
        yield Table(_TITLES[name], heads, tuple(cells), more)


def _group_row(row: dict[str, object]) -> tuple[str, ...]:
    cells = short(str(row["group"])), f"{row['jobs']:,}", hours(_number(row["lost_gpu_hours"]))
    if "lost" not in row:
        return cells
    return *cells, _percent(_number(row["straggling"])), _percent(_number(row["lost"]))


def _patterns(figures: FleetFigures) -> Table:
    rows = [
        (
            f"{row['group']}: {row['pattern']}",
            _percent(row["jobs"]),
            _percent(row["hours"]),
            hours(row["lost_gpu_hours"]),
        )
        for row in figures.patterns.iter_rows(named=True)
    ]
    return Table("Patterns", ("Slowdown", "of jobs", "of GPU-hours", "GPU-hours lost"), tuple(rows))


def _paper(figures: FleetFigures) -> Table:
    def cell(value: float | None, unit: str) -> str:
        if value is None:
            return "-"
        return _percent(value) if unit == SHARE else f"{value:.2f}"

    rows = [
        (row.name, f"{cell(row.paper, row.unit)} ({row.status})", cell(row.ours, row.unit), f"{row.jobs:,}")
        for row in figures.paper
    ]
    heads = ("", "the paper", "ours", "our jobs")
    return Table("Our fleet beside the paper's", heads, tuple(rows), f"Jobs of 128 GPUs and more. Paper: {CITATION}.")


def _left_out(figures: FleetFigures) -> Table:
    rows = [(str(rule.rule), rule.scope, f"{rule.jobs:,}", f"{rule.first:,}") for rule in figures.left_out]
    return Table("Jobs left out", ("Rule", "of", "jobs", "by this rule first"), tuple(rows))


def culprits_table(culprits: pl.DataFrame, rate: float) -> Table:
    """Machines that recur, at that false-discovery rate; without rows, and a note that says so, if there are none."""
    rows = [
        (
            f"{row['kind']} {short(row['machine'])}",
            f"{row['hit']:,} of {row['jobs']:,}",
            f"{row['expected']:.2f}",
            f"{row['q_value']:.2g}",
            hours(row["lost_gpu_hours"]),
            row["parts"],
            "" if row["last_job"] is None else short(row["last_job"]),
        )
        for row in culprits.iter_rows(named=True)
    ]
    heads = ("Machine", "held up", "by chance", "q", "GPU-hours lost", "slow in", "last")
    note = f"At most {rate:.0%} of them are expected to be named by chance (Benjamini-Hochberg)."
    note = note if rows else "None beyond chance."
    return Table("Machines that hold up one job after another", heads, tuple(rows), note)


def between(interval: Interval) -> str:
    """A share with its interval."""
    return f"{_percent(interval.value)} ({_percent(interval.low)} to {_percent(interval.high)})"


def hours(value: float) -> str:
    """GPU-hours with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
