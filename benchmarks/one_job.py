"""One job that does not fit into memory: `python -m benchmarks.one_job FOLDER --steps 1000 --dp 64`.

Writes a canonical trace of that many steps, a row group each, into FOLDER, analyses it in batches of steps, and prints
wall clock, the largest process and the largest sum over all processes. `--figure` draws both over time. Deletes the
trace unless told to keep it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks.measure import descendants
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import METADATA_KEY, SCHEMA_VERSION
from tracekit.trace.model import Layout

#: Different steps to repeat, each time scaled by a factor of its own.
DISTINCT = 4
#: Seconds between two readings of memory; size of the figure.
READ_EVERY_S, WIDTH, HEIGHT = 0.2, 640, 240


class Reading(NamedTuple):
    """Resident bytes of the largest process and of all together, some seconds after the start."""

    after_s: float
    largest: int
    together: int


def write(path: Path, steps: int, layout: Layout, microbatches: int) -> int:
    """Write a trace; returns the number of ops."""
    import pyarrow.parquet as pq

    spec = SynthSpec(
        layout=layout,
        microbatches=microbatches,
        steps=DISTINCT,
        seed=1,
        causes=(parse_cause("slow-worker"),),
    )
    trace = synthesize(spec)
    parts = [trace.ops.filter(pl.col("step") == step) for step in trace.steps.tolist()]
    header = {"schema_version": SCHEMA_VERSION, "name": "one job", "layout": layout.to_dict()}
    schema = parts[0].to_arrow().schema.with_metadata({METADATA_KEY: json.dumps(header)})
    factors, ops = np.random.default_rng(1).normal(1.0, 0.02, steps), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for step, factor in enumerate(factors.tolist()):
            part = parts[step % DISTINCT].with_columns(
                pl.lit(step, pl.Int32).alias("step"), pl.col("start") * factor, pl.col("duration") * factor
            )
            writer.write_table(part.to_arrow().cast(schema))
            ops += part.height
    return ops


def measured(command: list[str | Path]) -> tuple[dict[str, Any], list[Reading]]:
    """Run a command: its JSON, and what it held over time, last when it ended."""
    began, done = time.monotonic(), threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    held: list[Reading] = []

    def watch() -> None:
        while not done.wait(READ_EVERY_S):
            sizes = [_resident(pid) for pid in (process.pid, *descendants(process.pid))]
            held.append(Reading(time.monotonic() - began, max(sizes), sum(sizes)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    done.set()
    watcher.join()
    return json.loads(out), [*held, Reading(time.monotonic() - began, 0, 0)]


def figure(held: list[Reading]) -> str:
    """An SVG of memory over time: all processes together, and the largest of them."""
    seconds, most = held[-1].after_s, max(reading.together for reading in held)

    def line(colour: str, values: list[int]) -> str:
        points = " ".join(
            f"{WIDTH * reading.after_s / seconds:.1f},{HEIGHT * (1 - value / most):.1f}"
            for reading, value in zip(held, values, strict=True)
        )
        return f'<polyline fill="none" stroke="{colour}" points="{points}"/>'

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -24 {WIDTH + 8} {HEIGHT + 48}" font-family="sans-serif"'
        ' font-size="12"><rect x="-4" y="-24" width="100%" height="100%" fill="white"/>'
        f'<text y="-8">{most / 1e9:.1f} GB; blue: all processes, orange: the largest</text>'
        f'<path fill="none" stroke="silver" d="M0 0V{HEIGHT}H{WIDTH}"/>'
        + line("steelblue", [reading.together for reading in held])
        + line("darkorange", [reading.largest for reading in held])
        + f'<text y="{HEIGHT + 16}">0 s</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{seconds:.0f} s</text></svg>\n'
    )


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--figure", type=Path, help="write memory over time there, as SVG")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    path = asked.folder / "one_job.parquet"
    if not path.exists():
        began = time.monotonic()
        ops = write(path, asked.steps, Layout(dp=asked.dp, pp=asked.pp), asked.microbatches)
        print(
            f"{ops:,} ops, {path.stat().st_size / 1e9:.2f} GB, written in {time.monotonic() - began:.0f} s", flush=True
        )
    report, held = measured([sys.executable, "-m", "tracekit.cli", "whatif", path, "--engine", asked.engine, "--json"])
    largest, together = max(reading.largest for reading in held), max(reading.together for reading in held)
    print(
        f"{asked.engine}: {held[-1].after_s:.0f} s, largest process {largest / 1e9:.2f} GB, all {together / 1e9:.2f} GB"
    )
    if asked.figure:
        asked.figure.write_text(figure(held))
    print(f"S {report['slowdown']!r}, {report['job']['ops']:,} ops, {report['job']['steps']} steps")
    if not asked.keep:
        path.unlink()


if __name__ == "__main__":
    main()
