"""`tracekit synth-fleet`: a simulated fleet with known shares.

In: a population. Out: a canonical trace for each job, and the ground truth about them.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.base.command_line import command
from tracekit.base.errors import FormatError, OutputError
from tracekit.base.stderr import progress
from tracekit.base.text import printable
from tracekit.commands.options import OUT, PATH

if TYPE_CHECKING:
    from tracekit.synth.population import JobTruth, Population

_TRUTH = "truth.csv"


@click.command("synth-fleet")
@click.option("-o", "--out", required=True, type=OUT, help="Folder for the traces and truth.csv.")
@click.option("--jobs", type=click.IntRange(1), help="How many jobs [default: 100].")
@click.option("--seed", type=click.IntRange(0), help="Same seed, same fleet [default: 0].")
@click.option("--population", type=PATH, help="YAML file with the shares (docs/fleet.md).")
@click.option("--processes", type=click.IntRange(1, 4096), default=1, show_default=True, help="Processes.")
def synth_fleet_command(out: Path, jobs: int | None, seed: int | None, population: Path | None, processes: int) -> None:
    """Simulate a fleet whose shares of sizes, causes and teams are set.

    truth.csv holds the ground truth about each job, from the simulator alone, to compare a study of the traces with.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from tracekit.synth.population import Population

    settings = _settings(population) | {
        name: value for name, value in (("jobs", jobs), ("seed", seed)) if value is not None
    }
    fleet = Population.from_dict(settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be created: {error.strerror}; choose another folder") from None
    truths = []
    with progress() as tell, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        work = [(fleet, number, out) for number in range(fleet.jobs)]
        for truth in pool.map(_write_job, work) if processes > 1 else map(_write_job, work):
            truths.append(truth)
            tell(f"{len(truths):,} of {fleet.jobs:,} jobs")
    _write_truth(out / _TRUTH, truths)
    slow = sum(truth.straggling for truth in truths)
    click.echo(f"Wrote {fleet.jobs:,} jobs into {printable(str(out))}, {slow:,} of them straggling")
    click.echo(f"Next: {command('fleet', 'run', out, '--out', 'study')}")


def _settings(path: Path | None) -> dict[str, Any]:
    """The content of a YAML file. Raises FormatError."""
    import yaml

    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{path}: cannot be read as YAML ({reason:.200}); check the file") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected settings such as `straggling: 0.4`, one a line")
    return content


def _write_job(work: tuple[Population, int, Path]) -> JobTruth:
    from tracekit.synth.population import job_of_population

    fleet, number, out = work
    trace, truth = job_of_population(fleet, number)
    trace.write_parquet(out / f"{truth.name}.parquet")
    return truth


def _write_truth(path: Path, truths: list[JobTruth]) -> None:
    import polars as pl

    from tracekit.base.atomic_write import Kind, starting_with, write_text
    from tracekit.synth.population import JobTruth

    columns = [one.name for one in fields(JobTruth)]
    kind = Kind("what `tracekit synth-fleet` wrote", starting_with(f"{','.join(columns)}\n".encode()))
    table = pl.DataFrame({name: [getattr(truth, name) for truth in truths] for name in columns})
    write_text(path, table.write_csv(), kind)
