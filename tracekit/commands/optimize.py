"""`tracekit optimize`: the best plan of a job, with the bound that proves it.

In: a trace, a model file, or step times of whole runs. Out: plans, or a line, in the terminal or as JSON.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.commands.arguments import parse_layers
from tracekit.commands.options import PATH, JobArguments, console, trace_source

if TYPE_CHECKING:
    from tracekit.report.plans import Optimum


@click.command("optimize")
@trace_source
@click.option("--model", type=PATH, metavar="FILE", help="A model file (docs/plans.md).")
@click.option("--runs", type=PATH, metavar="FILE", help="CSV of microbatches,step_time_s, a row a run.")
@click.option("--microbatches", "counts", metavar="N,N", help="With --runs: the numbers of microbatches to price.")
@click.option("--memory-gb", type=click.FloatRange(0, min_open=True), metavar="GB", help="Memory of a worker.")
@click.option("--keep", type=click.Choice(["schedule", "microbatches", "recompute", "split", "buckets"]), multiple=True,
              help="What must stay as it is. Repeat it.")  # fmt: skip
@click.option("--layers", metavar="N,N", help="Layers of each stage of TRACE [default: those of its metadata].")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              metavar="SECONDS", help="End the search then, with the best plan so far and what is proven.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def optimize_command(
    source: JobArguments,
    model: Path | None,
    runs: Path | None,
    counts: str | None,
    memory_gb: float | None,
    keep: tuple[str, ...],
    layers: str | None,
    time_limit: float,
    as_json: bool,
) -> int:
    """Which plan is fastest, and fits? Searches split, schedule, microbatches, recomputation and buckets together.

    The best plan is proven: no plan of the space takes less than `bound_s` (docs/plans.md).
    """
    if memory_gb is not None and not math.isfinite(memory_gb):
        raise SelectionError(f"--memory-gb {memory_gb}; expected a number of GB, or leave it out for no limit")
    if not math.isfinite(time_limit):
        raise SelectionError(f"--time-limit {time_limit}; expected a number of seconds, such as 600")
    if sum((source != JobArguments(), model is not None, runs is not None)) > 1:
        raise SelectionError("give a TRACE, --model or --runs, one of them")
    if (runs is None) != (counts is None):
        raise SelectionError("--runs needs --microbatches, such as --microbatches 24,56, and the other way round")
    if layers is not None and (model is not None or runs is not None):
        raise SelectionError("--layers describes a TRACE; a model file states its layers itself")
    if runs is not None and (memory_gb is not None or keep):
        raise SelectionError("--runs prices numbers of microbatches alone; leave out --memory-gb and --keep")
    if runs is not None:
        return _runs(runs, counts or "", as_json=as_json)
    if model is None:
        optimum = _of_job(source, memory_gb, keep, parse_layers(layers), time_limit)
    else:
        optimum = _of_model(model, memory_gb, keep, time_limit)
    if as_json:
        click.echo(msgspec.json.encode(optimum))
    else:
        from tracekit.dashboards.terminal.plans import print_optimum

        print_optimum(optimum, console())
    return ExitCode.DONE


def _runs(runs: Path, counts: str, *, as_json: bool) -> int:
    from tracekit.analysis.plans.runs import WholeRuns
    from tracekit.base.text import seconds

    asked = [int(text) if text.strip().isdecimal() else 0 for text in counts.split(",")]
    if not all(0 < count <= 1 << 20 for count in asked):
        raise SelectionError(f"--microbatches {counts!r:.100}; expected whole numbers from 1, such as 24,56")
    result = WholeRuns.read(runs).line(asked)
    if as_json:
        click.echo(msgspec.json.encode(result))
        return ExitCode.DONE
    line = result.line
    click.echo(f"A microbatch takes {seconds(line.per_microbatch_s)}, the rest of a step {seconds(line.fixed_s)}")
    for each in result.microbatches:
        step = each.step_time_s
        interval = f"{seconds(step.low)} to {seconds(step.high)}"
        click.echo(f"  {each.microbatches} microbatches: {seconds(step.value)} a step ({interval})")
    return ExitCode.DONE


def _of_model(model: Path, memory_gb: float | None, keep: tuple[str, ...], time_limit_s: float) -> Optimum:
    from msgspec.structs import replace

    from tracekit.analysis.plans.model import PlanModel
    from tracekit.analysis.plans.optimize import optimize

    read = PlanModel.read(model)
    fixed = replace(read.space, **dict.fromkeys(keep, "fixed"))
    return optimize(replace(read, space=fixed, memory_gb=memory_gb or read.memory_gb), time_limit_s=time_limit_s)


def _of_job(
    source: JobArguments,
    memory_gb: float | None,
    keep: tuple[str, ...],
    layers: tuple[int, ...] | None,
    time_limit_s: float,
) -> Optimum:
    from tracekit.analysis.job.best_plans import optimize_job

    with progress() as tell:
        tell("reading the job")
        job = source.load()
        tell("searching")
        report = job.whatif(layers=layers)
        return optimize_job(job, report, memory_gb=memory_gb, keep=keep, layers=layers, time_limit_s=time_limit_s)
