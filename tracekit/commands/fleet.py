"""`tracekit fleet`: a study of many jobs, and its results.

In: traces, or studies. Out: a study, reports in the terminal and as a page, CSV.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tracekit.base import memory
from tracekit.base.arguments import OUT, PATH, STORE_PATH, FiniteRange
from tracekit.base.errors import ExitCode, SelectionError, StudyError
from tracekit.base.paths import Look, command, quoted
from tracekit.base.stderr import advance, progress, say
from tracekit.base.text import bytes_of, counted, printable
from tracekit.commands.options import AS_JSON, FULL, HTML, console, executor_of
from tracekit.sources.load import wrong_source
from tracekit.sources.source import Content

if TYPE_CHECKING:
    import polars as pl

    from tracekit.fleet.study import RunSummary, Standing, Study

#: Value of `--ray` if it is given without one.
_OWN_CLUSTER = "local"
#: Columns of `--timings`.
_TIMINGS = ("url", "reused", "rule", "read_s", "analyse_s", "write_s", "cpu_s", "analyse_cpu_s",
            "peak_bytes")  # fmt: skip
_OF_TIMINGS = "timings that `tracekit fleet run` wrote"


@click.group("fleet")
def fleet_command() -> None:
    """Study many jobs at once: how many straggle, what is lost, to what, and where."""


@fleet_command.command("run")
@click.argument("sources", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=OUT, help="Folder of the study; an existing study is continued.")
@click.option("--processes", type=click.IntRange(1, 4096), help="Processes that analyse [default: one a core].")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory for all processes together, such as 2500M or 16G [default: half of the machine's].",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value=_OWN_CLUSTER,
    metavar="[ADDRESS]",
    help="Run on the Ray cluster at this address; without an address, on a local one.",
)
@click.option("--timings", type=OUT, help="Write a CSV file with the time that each source took.")
def run(
    sources: tuple[str, ...],
    out: Path,
    processes: int | None,
    memory: str | None,
    ray: str | None,
    timings: Path | None,
) -> ExitCode:
    """Analyse every trace of SOURCES and keep the figures in a study. Exits with 2 if none of them can be read.

    SOURCES are trace files, folders, globs, stores and prefixes of s3://, gs:// or az://, in any format that
    `tracekit whatif` reads.
    Run it again to add sources, or to go on after an interruption: only what is new or has changed is analysed.
    """
    import polars as pl

    from tracekit.fleet.sources import find_sources
    from tracekit.fleet.study import Study, run_study
    from tracekit.fleet.tasks import Rule

    if timings is not None:
        from tracekit.base.atomic_write import check_writable
        from tracekit.report.tables import csv_kind

        check_writable(timings, csv_kind(_OF_TIMINGS, _TIMINGS))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if memory is None else bytes_of(memory)
    if memory_bytes is None:
        raise SelectionError(f"--memory {memory!r:.40}; expected a size such as 2500M or 16G")
    executor = executor_of(ray is not None, None if ray == _OWN_CLUSTER else ray, memory_bytes, processes)
    with progress("looking for traces"):
        traces = find_sources(sources)
        try:
            summary = run_study(Study(out), traces, executor, _show)
        except KeyboardInterrupt:
            say(f"tracekit: {printable(str(out))} keeps what is analysed; the same command goes on")
            raise
    if timings is not None:
        _write_timings(timings, summary)
    study = Study(out)
    jobs = study.read("sources").filter(pl.col("source").is_in([source.url for source in traces]))
    excluded = _excluded(study, jobs)
    unread = {*excluded.filter(pl.col("rule").is_in([Rule.NO_TRACE, Rule.INVALID]))["job"]}
    for line in _summary(summary, excluded, unread, out):
        click.echo(printable(line))
    failed = {outcome.url for outcome in summary.outcomes if outcome.rule is not None}
    any_read = any(job not in unread and source not in failed for source, job in jobs.iter_rows())
    return ExitCode.DONE if any_read else ExitCode.BAD_INPUT


def _study(path: Path) -> Study:
    """The study at `path`. Raises FormatError if it is something else, StudyError if nothing is there."""
    from tracekit.fleet.study import Study

    result = Study(path)
    try:
        result.check()
    except StudyError as error:
        raise wrong_source(Look(path), Content.STUDY) or error from None
    return result


def _show(standing: Standing) -> None:
    """Show how many jobs are analysed, and how many failed by which rule."""
    failed = "".join(f" ({count:,} {rule})" for rule, count in sorted(standing.failed.items()))
    advance("analysing", standing.done, standing.total, f"jobs{failed}")


def _summary(summary: RunSummary, excluded: pl.DataFrame, unread: Collection[str], out: Path) -> list[str]:
    new = [outcome.digest for outcome in summary.outcomes if outcome.rule is None and not outcome.reused]
    analysed = sum(digest not in unread for digest in new)
    copies = sum(outcome.reused for outcome in summary.outcomes)
    total = (
        f"{counted(summary.sources, 'source')}: {analysed:,} analysed, {summary.unchanged:,} unchanged,"
        f" {copies:,} known by content"
    )
    lines = [total]
    for rule, count in sorted(summary.failed.items()):
        reasons = Counter(outcome.reason or "" for outcome in summary.outcomes if outcome.rule == rule)
        lines.append(f"  {count:,} {rule}: {_commonest(reasons)}; tried again by the next run")
    return [*lines, *_exclusion_lines(excluded), f"Next: {command('fleet', 'report', out)}"]


def _commonest(reasons: Counter[str]) -> str:
    ((reason, _),) = reasons.most_common(1)
    return f"{reason} and others" if len(reasons) > 1 else reason


def _excluded(study: Study, jobs: pl.DataFrame) -> pl.DataFrame:
    """What the study leaves out of these jobs, `source` and `job`: `rule`, `source`, `reason`, `job`."""
    import polars as pl

    sources = jobs.group_by("job").agg(pl.col("source").min())
    return study.read("exclusions").drop("source").join(sources, on="job").sort("rule", "source")


def _exclusion_lines(excluded: pl.DataFrame) -> Iterator[str]:
    """A line for each rule, with the first job that it leaves out."""
    for (rule,), rows in excluded.unique(["rule", "job"], maintain_order=True).group_by("rule", maintain_order=True):
        others = " (and others: see the table exclusions)" if rows.height > 1 else ""
        yield f"  {rows.height:,} {rule}: {rows['source'][0]}: {rows['reason'][0]}{others}"


def _write_timings(path: Path, summary: RunSummary) -> None:
    import polars as pl

    from tracekit.base.atomic_write import write_text
    from tracekit.report.tables import csv_kind, safe_csv

    columns = {name: [getattr(outcome, name) for outcome in summary.outcomes] for name in _TIMINGS}
    table = pl.DataFrame(columns, schema_overrides={"rule": pl.String})
    write_text(path, safe_csv(table), csv_kind(_OF_TIMINGS, _TIMINGS))


_RATE = click.option(
    "--fdr",
    "rate",
    type=FiniteRange(0, 1),
    default=0.05,
    show_default=True,
    help="False-discovery rate of the machines that are named.",
)


@fleet_command.command("report")
@click.argument("study", type=PATH)
@FULL
@HTML
@AS_JSON
@click.option("--store", type=STORE_PATH, help="Store that knows which fixes were applied (`tracekit compare --fix`).")
@_RATE
def report(study: Path, full: bool, html: Path | None, as_json: bool, store: Path | None, rate: float) -> None:
    """Report how many jobs of STUDY straggle, what is lost, to what and where, and which fixes give back most."""
    memory.return_later()
    from tracekit.fleet.figures import CURVE, counted_jobs, figures_of, quantiles
    from tracekit.fleet.recurring_culprits import recurring_culprits

    if html is not None:
        from tracekit.base.atomic_write import check_writable, write_text
        from tracekit.dashboards.documents.fleet_page import FLEET_PAGE_FILE, fleet_page

        check_writable(html, FLEET_PAGE_FILE)
    opened = _study(study)
    if opened.unfinished:
        say(f"tracekit: {printable(str(study))}: its last run did not finish; run it again to complete the study")
    with progress("reading the study"):
        figures, culprits = figures_of(opened), recurring_culprits(opened, rate)
        if store is not None:
            from tracekit.store import Store

            Store(store).check()
            figures = replace(figures, applied=Store(store).applied())
        if html is not None:
            curves = quantiles(counted_jobs(opened), CURVE)
            write_text(html, fleet_page(figures, curves, culprits, rate, study.absolute().name), FLEET_PAGE_FILE)
    if as_json:
        click.echo(json.dumps(figures.to_dict() | {"culprits": culprits.to_dicts()}, allow_nan=False))
        return
    if html is not None:
        click.echo(f"Wrote {printable(str(html))}")
        return
    from tracekit.dashboards.terminal.fleet_screen import print_fleet

    print_fleet(figures, culprits, rate, console(), study=quoted(study), full=full)


@fleet_command.command("culprits")
@click.argument("study", type=PATH)
@click.option("--csv", type=OUT, help="Write all columns as CSV, for a ticket system.")
@_RATE
def culprits(study: Path, csv: Path | None, rate: float) -> None:
    """List hosts and GPUs that hold up one job of STUDY after another, more often than chance explains."""
    memory.return_later()
    from tracekit.base.atomic_write import check_writable, write_text
    from tracekit.dashboards.terminal.fleet_screen import print_culprits
    from tracekit.fleet.recurring_culprits import CULPRITS, recurring_culprits
    from tracekit.report.tables import csv_kind, safe_csv

    kind = csv_kind("culprits that `tracekit fleet culprits` wrote", CULPRITS)
    if csv is not None:
        check_writable(csv, kind)
    with progress("reading the study"):
        machines = recurring_culprits(_study(study), rate)
    if csv is None:
        print_culprits(
            machines, rate, console(), most=machines.height, all_culprits=command("fleet", "culprits", study)
        )
        return
    write_text(csv, safe_csv(machines), kind)
    click.echo(f"Wrote {printable(str(csv))}: {machines.height:,} machines")


@fleet_command.command("compare")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@AS_JSON
@click.option("--fail-on-worse", is_flag=True, help="Exit with 3 if a figure is worse.")
def compare(before: Path, after: Path, as_json: bool, fail_on_worse: bool) -> int:
    """List what became worse from study BEFORE to study AFTER, in all, by cause and by team."""
    memory.return_later()
    from tracekit.fleet.study_comparison import ChangeDirection, compare_studies

    with progress("reading the studies"):
        comparison = compare_studies(_study(before), _study(after))
    if as_json:
        click.echo(msgspec.json.encode(comparison))
    else:
        from tracekit.dashboards.terminal.fleet_screen import print_fleet_comparison

        print_fleet_comparison(comparison, console())
    worse = any(change.direction is ChangeDirection.WORSE for change in comparison.changes)
    return ExitCode.CONDITION if fail_on_worse and worse else ExitCode.DONE
