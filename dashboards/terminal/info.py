"""The content of a trace or a store for a terminal.

In: a `Trace`, or the jobs of a store. Out: text on a rich console.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracekit.analysis.gpu.recorded import KEPT, Kept
from tracekit.base.paths import adding, command
from tracekit.base.text import printable, seconds, short, three_digits
from tracekit.dashboards.terminal.tables import new_table
from tracekit.store import StoredJob
from tracekit.store.folder import is_store_folder
from tracekit.trace.canonical import share_of_samples
from tracekit.trace.post_training import POST_TRAINING

if TYPE_CHECKING:
    from tracekit.store.catalogue_rows import AnyTrace

#: The number of throttled GPUs to name.
_MOST_THROTTLED = 8
#: Most jobs of a folder that are listed.
_MOST_LISTED = 20
#: The number of characters to show of a metadata value.
_LONGEST = 300


def print_trace(trace: AnyTrace, console: Console) -> None:
    """Print the content of a trace: its identity, sizes and metadata, and its ops per kind."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold", max_width=24)
    grid.add_column(overflow="fold")
    grid.add_row("Job", Text(short(trace.name)))
    recorded = Kept.read(trace.metadata)
    overview = trace.overview() if recorded is None else _recording(recorded, trace.overview()["Ranks"])
    if POST_TRAINING in trace.metadata:
        overview = {"Kind": "run of post-training (docs/rl.md)", "Steps": overview["Steps"]}
    for name, text in {**overview, "Ops": f"{trace.ops.height:,}"}.items():
        grid.add_row(name, Text(printable(text)))
    for name, value in trace.metadata.items():
        if name == POST_TRAINING or (name == KEPT and recorded is not None):
            continue
        text = _gpus(value) if name == "gpus" else json.dumps(value)
        grid.add_row(Text(short(name)), Text(text if len(text) < _LONGEST else text[:_LONGEST] + " ..."))
    console.print(grid)
    if "kind" not in trace.ops.columns:
        return
    console.print()
    table = new_table("Op kind", "ops", "mean", "longest")
    by_kind = trace.ops.group_by("kind").agg(
        pl.len().alias("ops"), pl.col("duration").mean().alias("mean"), pl.col("duration").max().alias("longest")
    )
    for kind, ops, mean, longest in by_kind.sort("kind").iter_rows():
        table.add_row(Text(short(str(kind))), f"{ops:,}", seconds(mean), seconds(longest))
    console.print(table)


def _recording(recorded: Kept, ranks: str) -> dict[str, str]:
    """The contents of a recording of GPUs."""
    of_all = "" if recorded.world_size is None else f" of {recorded.world_size:,}"
    return {
        "Kind": "recording of GPUs (docs/kineto.md)",
        "GPU": short(recorded.gpu) if recorded.gpu else "unknown",
        "Ranks": f"{ranks}{of_all}",
        "Steps": f"{recorded.steps:,} marked",
        "GPU ops": f"{recorded.gpu_ops:,}",
        **({"Notes": "; ".join(recorded.notes)} if recorded.notes else {}),
    }


def print_folder(folder: Path, jobs: Sequence[Path], console: Console) -> None:
    """List the jobs in a folder, and what to do with them."""
    lines = [f"{printable(str(folder))} holds {len(jobs)} jobs:", ""]
    lines += [f"    {printable(str(path.relative_to(folder)))}" for path in jobs[:_MOST_LISTED]]
    if len(jobs) > _MOST_LISTED:
        lines.append(f"    ... and {len(jobs) - _MOST_LISTED} more")
    stores = [entry for entry in sorted(folder.iterdir()) if is_store_folder(entry)]
    lines += [
        "",
        *(f"A store:      {command('open', store)}" for store in stores),
        f"One job:      {command(jobs[0])}",
        f"All of them:  {command('fleet', 'run', folder, '--out', 'STUDY')}",
        f"In a browser: {command('open', folder)}",
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _gpus(gpus: Any) -> str:
    """The GPUs of the ranks in a line, with those that were throttled; as JSON if the metadata has another form."""
    if not isinstance(gpus, dict) or not gpus or not all(isinstance(gpu, dict) for gpu in gpus.values()):
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
        more = " ..." if len(throttled) > _MOST_THROTTLED else ""
        text += f"; throttled: {', '.join(throttled[:_MOST_THROTTLED])}{more}"
    return printable(text)


def _names(counts: object) -> list[str]:
    """The names in free metadata that counts things by name, or lists them."""
    return [str(name) for name in counts] if isinstance(counts, dict | list) else []


def _trusted_savings(job: StoredJob) -> tuple[bool, float]:
    """The key that puts the job first that saves most and can be trusted."""
    return job.trusted, -1.0 if job.gives_back is None else job.gives_back


def print_jobs(store: str, jobs: Sequence[StoredJob], console: Console) -> None:
    """Print the jobs of a store by what fixing saves a day; last those whose reports are not to be trusted."""
    if not jobs:
        console.print(Text(f"{printable(store)}: no job yet; add one with `{adding(store)}`"))
        return
    several = any(job.windows > 1 for job in jobs)
    heads = ["Job", "saves a day", "GPUs", "steps", *(["windows"] if several else []), "imported (UTC)"]
    table = new_table(*heads)
    console.print("Jobs by the GPU-hours a day that fixing them saves, most first")
    for job in sorted(jobs, key=_trusted_savings, reverse=True):
        saves = "-" if job.gives_back is None else three_digits(max(job.gives_back, 0.0))
        saves = saves if job.trusted else "?"
        gpus = "-" if job.gpus is None else f"{job.gpus:,}"
        sizes = (job.steps, *([job.windows] if several else []))
        imported = f"{job.imported_at:%Y-%m-%d %H:%M}"
        table.add_row(Text(short(job.name)), saves, gpus, *(f"{size:,}" for size in sizes), imported)
    console.print(table)
