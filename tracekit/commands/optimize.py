"""Commands that look for another plan: `tracekit optimize`, `experts` and `passport`.

In: a trace, a model file, step times of whole runs, tokens per expert, a GPU that nothing else uses. Out: plans with
the bound that proves them, placements of experts, measurements of a GPU for `whatif --gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tracekit.base.arguments import OUT, PATH, FiniteRange
from tracekit.base.errors import SelectionError, extra
from tracekit.base.paths import command
from tracekit.base.stderr import progress
from tracekit.base.text import counted, printable
from tracekit.commands.options import AS_JSON, JobArguments, console, parse_layers, trace_source
from tracekit.report.questions import PlacedLayer

if TYPE_CHECKING:
    from tracekit.analysis.experts.loads import Loads
    from tracekit.report.questions import Optimum


@click.command("optimize")
@trace_source
@click.option("--model", type=PATH, metavar="FILE", help="A model file (docs/plans.md).")
@click.option("--runs", type=PATH, metavar="FILE", help="CSV of microbatches,step_time_s, a row a run.")
@click.option("--microbatches", "counts", metavar="N,N", help="With --runs: the numbers of microbatches to price.")
@click.option("--memory-gb", type=FiniteRange(0, min_open=True), metavar="GB", help="Memory of a worker.")
@click.option("--keep", type=click.Choice(["schedule", "microbatches", "recompute", "split", "buckets"]), multiple=True,
              help="What must stay as it is. Repeat it.")  # fmt: skip
@click.option("--layers", metavar="N,N", help="Layers of each stage of TRACE [default: those of its metadata].")
@click.option("--time-limit", type=FiniteRange(0, min_open=True), default=60.0, show_default=True,
              metavar="SECONDS", help="End the search then, with the best plan so far and what is proven.")  # fmt: skip
@AS_JSON
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
) -> None:
    """Which plan is fastest, and fits? Searches split, schedule, microbatches, recomputation and buckets together.

    The best plan is proven: no plan of the space takes less than `bound_s` (docs/plans.md).
    """
    if sum((source != JobArguments(), model is not None, runs is not None)) > 1:
        raise SelectionError("give a TRACE, --model or --runs, one of them")
    if (runs is None) != (counts is None):
        raise SelectionError("--runs needs --microbatches, such as --microbatches 24,56, and the other way round")
    if layers is not None and (model is not None or runs is not None):
        raise SelectionError("--layers describes a TRACE; a model file states its layers itself")
    if runs is not None and (memory_gb is not None or keep):
        raise SelectionError("--runs prices numbers of microbatches alone; leave out --memory-gb and --keep")
    if runs is not None:
        _print_runs(runs, counts or "", as_json=as_json)
        return
    if model is None:
        optimum = _optimum_of_job(source, memory_gb, keep, parse_layers(layers), time_limit)
    else:
        optimum = _optimum_of_model(model, memory_gb, keep, time_limit)
    if as_json:
        click.echo(msgspec.json.encode(optimum))
    else:
        from tracekit.dashboards.terminal.details import print_optimum

        print_optimum(optimum, console())


def _print_runs(runs: Path, counts: str, *, as_json: bool) -> None:
    from tracekit.analysis.plans.model import line_of_runs
    from tracekit.base.text import seconds

    gpu_counts = [int(text) if text.strip().isdecimal() else 0 for text in counts.split(",")]
    if not all(0 < count <= 1 << 20 for count in gpu_counts):
        raise SelectionError(f"--microbatches {counts!r:.100}; expected whole numbers from 1, such as 24,56")
    result = line_of_runs(runs, gpu_counts)
    if as_json:
        click.echo(msgspec.json.encode(result))
        return
    line = result.line
    click.echo(f"A microbatch takes {seconds(line.per_microbatch_s)}, the rest of a step {seconds(line.fixed_s)}")
    for run in result.microbatches:
        step = run.step_time_s
        interval = f"{seconds(step.low)} to {seconds(step.high)}"
        click.echo(f"  {run.microbatches} microbatches: {seconds(step.value)} a step ({interval})")


def _optimum_of_model(model: Path, memory_gb: float | None, keep: tuple[str, ...], time_limit_s: float) -> Optimum:
    from msgspec.structs import replace

    from tracekit.analysis.plans.model import PlanModel
    from tracekit.analysis.plans.optimize import optimize

    read = PlanModel.read(model)
    fixed = replace(read.space, **dict.fromkeys(keep, "fixed"))
    return optimize(replace(read, space=fixed, memory_gb=memory_gb or read.memory_gb), time_limit_s=time_limit_s)


def _optimum_of_job(
    source: JobArguments,
    memory_gb: float | None,
    keep: tuple[str, ...],
    layers: tuple[int, ...] | None,
    time_limit_s: float,
) -> Optimum:
    from tracekit.analysis.job.best_plans import optimize_job

    with progress() as show_stage:
        show_stage("reading the job")
        job = source.load()
        show_stage("searching")
        report = job.whatif(layers=layers)
        return optimize_job(job, report, memory_gb=memory_gb, keep=keep, layers=layers, time_limit_s=time_limit_s)


_COUNT = click.IntRange(1, 1 << 20)
#: Placing them takes time and memory with the square of their number.
_REPLICAS = click.IntRange(1, 9_999)


class ExpertsOutput(msgspec.Struct, frozen=True):
    """What `tracekit experts --json` prints."""

    layers: list[PlacedLayer]


@click.command("experts")
@click.argument("loads", metavar="LOADS.jsonl", type=PATH)
@click.option("--ranks", type=_COUNT, required=True, help="Ranks to place experts on.")
@click.option("--replicas", type=_REPLICAS, required=True, help="Replicas of all experts, equally many on each rank.")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="Nodes that the ranks are on, in order.")
@click.option("--groups", type=_COUNT, default=1, show_default=True, help="Groups of experts that stay on one node.")
@AS_JSON
def experts_command(loads: Path, ranks: int, replicas: int, nodes: int, groups: int, as_json: bool) -> None:
    """Where should experts and their replicas be? Places them so that the heaviest rank has few tokens.

    Each line of LOADS.jsonl is {"step": 0, "layer": 0, "tokens_per_expert": [12, 7, ...]}, the tokens of all source
    ranks (docs/plans.md). The mean over the steps counts.
    """
    from tracekit.analysis.experts.loads import Loads, placed_layers

    if nodes > 1 and groups == 1:
        raise SelectionError(f"--nodes {nodes} needs --groups, how many groups of experts stay on one node each")
    tokens = Loads.read(loads)
    layers = placed_layers(tokens, ranks, replicas, nodes, groups)
    if as_json:
        click.echo(msgspec.json.encode(ExpertsOutput(layers)))
        return
    click.echo(_headline(layers, tokens, ranks))
    for layer in layers:
        homes = [" ".join(str(expert) for expert, home in layer.placement if home == rank) for rank in range(ranks)]
        click.echo(f"layer {layer.layer}: the heaviest rank gets {layer.max_over_mean:.3f} times the mean")
        click.echo("\n".join(f"  rank {rank}: experts {experts}" for rank, experts in enumerate(homes)))
    next_command = command("whatif", "TRACE", "--expert-loads", loads, "--rebalance", f"replicas={replicas}")
    click.echo(f"Next: {next_command} says what this saves")


def _headline(layers: Sequence[PlacedLayer], tokens: Loads, ranks: int) -> str:
    """The heaviest rank of any layer as placed here and, if experts divide among the ranks, with experts in order."""
    from tracekit.analysis.experts.loads import default_placement, loads_of_ranks

    mean = tokens.tokens.mean(axis=0)
    words = (
        f"The heaviest rank of a layer gets {max(layer.max_over_mean for layer in layers):.3f} times the mean tokens"
    )
    if mean.shape[1] % ranks:
        return f"{words}."
    in_order = loads_of_ranks(mean, default_placement(mean.shape[1], ranks), ranks)
    before = (in_order.max(axis=1) / in_order.mean(axis=1).clip(1e-9)).max()
    return f"{words}; with experts in order, {before:.3f} times."


@click.command("passport")
@click.option("--out", "-o", type=OUT, required=True, metavar="FILE", help="Parquet file to write.")
@click.option("--device", default="cuda", show_default=True, help="Device of torch, such as cuda:1; cpu for a trial.")
def passport_command(out: Path, device: str) -> None:
    """Measure how long kernels take on this GPU: the passport that `whatif --gpu FILE` reads.

    Takes seconds on a data-centre GPU, three minutes at most; nothing else may use the GPU meanwhile. Under torchrun,
    all-reduces between the ranks are measured, too.
    """
    from tracekit.analysis.hardware.passport import PASSPORT_FILE
    from tracekit.base.atomic_write import check_writable

    check_writable(out, PASSPORT_FILE)
    with extra("torch", "measuring a GPU"):
        import torch

        from tracekit.collectors.measure_passport import measure
    kind = device.partition(":")[0]
    if kind not in {"cuda", "cpu"}:
        raise SelectionError(f"--device {device!r:.40}: expected cuda, cuda:1, ... or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SelectionError("torch sees no GPU: run this on the machine that has it, or try --device cpu")
    with progress() as show_stage:
        show_stage("measuring kernels")
        try:
            measured = measure(device)
        except (RuntimeError, ValueError) as error:
            raise SelectionError(f"--device {device!r:.40}: {str(error).splitlines()[0]:.200}") from None
    if measured is None:
        return
    passport, more = measured
    passport.write(out, more)
    count = counted(passport.kernels.height, "kernel")
    click.echo(f"Wrote {printable(str(out))}: {count} of {printable(passport.head.gpu)}")
