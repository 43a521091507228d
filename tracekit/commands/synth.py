"""`tracekit synth`: a simulated job with known stragglers.

In: sizes, causes and a seed. Out: a canonical trace, or a folder of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.command_line import command
from tracekit.base.stderr import advance, progress
from tracekit.base.text import printable
from tracekit.commands.options import OUT, made_folder

if TYPE_CHECKING:
    from tracekit.synth import SynthSpec


@click.command("synth")
@click.option("-o", "--out", required=True, type=OUT, help="Canonical Parquet file to write; a folder with --jobs.")
@click.option("--jobs", type=click.IntRange(1, 1_000_000), help="Simulate so many jobs, each with a seed of its own.")
@click.option("--dp", default=4, show_default=True, help="Data-parallel size.")
@click.option("--pp", default=4, show_default=True, help="Pipeline stages.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--vpp", default=1, show_default=True, help="Model chunks per stage.")
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "1f1b", "interleaved"]),
    help="Order of forwards and backwards [default: 1f1b, interleaved with --vpp].",
)
@click.option("--microbatches", default=8, show_default=True, help="Microbatches per step and DP rank.")
@click.option("--steps", default=20, show_default=True, help="Steps to simulate.")
@click.option("--overlap-dp", is_flag=True, help="Overlap gradient reduction with the backwards.")
@click.option("--noise", default=0.02, show_default=True, help="Relative spread of compute durations.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same trace.")
@click.option("--name", default="synthetic", show_default=True, help="Name of the job.")
@click.option("--cause", "causes", multiple=True, metavar="CAUSE", help="Inject this cause. Repeatable.")
def synth_command(
    out: Path,
    jobs: int | None,
    dp: int,
    pp: int,
    tp: int,
    vpp: int,
    schedule: str | None,
    microbatches: int,
    steps: int,
    overlap_dp: bool,
    noise: float,
    seed: int,
    name: str,
    causes: tuple[str, ...],
) -> None:
    """Simulate a job with known stragglers, or a folder of such jobs.

    A CAUSE is a name with optional settings, such as "slow-worker:dp=1,pp=2,factor=1.5", "slow-last-stage",
    "sequence-length-imbalance", "python-gc", "slow-p2p-link", "slow-nic", "late-data-loading", "slow-steps",
    "clock-offset", "missing-ranks", "missing-steps"; its place is drawn from the seed unless given.
    """
    from tracekit.base.atomic_write import check_writable
    from tracekit.synth import Schedule, SynthSpec, parse_cause, synthesize
    from tracekit.trace.canonical import TRACE_FILE
    from tracekit.trace.model import Layout

    chosen = schedule or ("interleaved" if vpp > 1 else "1f1b")
    spec = SynthSpec(
        layout=Layout(dp=dp, pp=pp, tp=tp, vpp=vpp),
        schedule=Schedule(chosen),
        microbatches=microbatches,
        steps=steps,
        overlap_dp=overlap_dp,
        seed=seed,
        noise=noise,
        causes=tuple(parse_cause(cause) for cause in causes),
        name=name,
    )
    if jobs is not None:
        _write_jobs(spec, jobs, out)
        return
    check_writable(out, TRACE_FILE)
    with progress("simulating") as tell:
        trace = synthesize(spec)
        tell("writing")
        trace.write_parquet(out)
    click.echo(f"Wrote {printable(str(out))}: {trace.ops.height:,} ops. Next: {command('whatif', out)}")


def _write_jobs(spec: SynthSpec, jobs: int, out: Path) -> None:
    """Write jobs that differ in their seed, and so in noise and in places that are drawn. Raises OutputError."""
    from tracekit.synth import synthesize

    made_folder(out)
    with progress():
        for number in range(jobs):
            name = f"{spec.name}-{number:06d}"
            synthesize(replace(spec, seed=spec.seed + number, name=name)).write_parquet(out / f"{number:06d}.parquet")
            advance("simulating", number + 1, jobs, "jobs")
    click.echo(f"Wrote {jobs:,} jobs into {printable(str(out))}")
    click.echo(f"Next: {command('fleet', 'run', out, '--out', 'study')}")
