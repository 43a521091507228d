"""Appending to stores of different sizes, reading while windows land, and what an import costs per GB."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import measure, table, tracekit
from tracekit.job import Job
from tracekit.model import Layout
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, synthesize

#: Bytes of the files of the full store, and appends to either.
FULL_BYTES, APPENDS = 10_000_000_000, 9
READERS, LANDING = 2, 1000
WRITER = """
import sys
from pathlib import Path
from tracekit.store import Incoming, Store
from tracekit.trace import read_parquet
store, trace = Store(Path(sys.argv[1])), read_parquet(sys.argv[2])
for _ in range(int(sys.argv[3])): store.append(Incoming(trace, "live", "benchmark"))
"""
READER = """
import sys
from pathlib import Path
from tracekit.store import Store
store, ops, reads = Store(Path(sys.argv[1])), int(sys.argv[2]), 0
while not Path(sys.argv[3]).exists():
    seen = store.windows("live")
    assert [one.number for one in seen] == list(range(len(seen)))
    assert store.load("live", seen[-1].number).ops.height == ops
    reads += 2
print(reads)
"""


def section() -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = synthesize(SynthSpec(layout=Layout(dp=128, pp=8), steps=10, name="live"))
        small = synthesize(SynthSpec(layout=Layout(dp=2, pp=2), steps=2, name="live"))
        small.write_parquet(folder / "small.parquet")
        parts = [_appending(folder, Incoming(large, "live", "benchmark", Job(large).findings())), _reading(folder)]
        parts.append(_importing(folder))
    return "## The store\n\n" + "\n\n".join(parts)


def _appending(folder: Path, item: Incoming) -> str:
    """Alternating between an empty store and a full one, so that both meet the same machine."""
    full = Store(folder / "full.store")
    full.append(item)
    first = full.windows("live")[0]
    window_bytes = sum(file.bytes for file in first.files.values())
    windows = -(-FULL_BYTES // window_bytes)
    with full.writing() as writer:
        for number in range(1, windows):
            for part in first.files:
                shutil.copyfile(
                    writer.folder.file(first.job_id, 0, part), writer.folder.file(first.job_id, number, part)
                )
            writer.catalogue.add_window(first.job_id, number, item, first.files, first.added_at)
    times: dict[str, list[tuple[float, float]]] = {"empty": [], "full": []}
    for _ in range(APPENDS):
        empty = Store(folder / "empty.store")
        empty.add([])
        for name, store in (("empty", empty), ("full", full)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            store.append(item)
            times[name].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        shutil.rmtree(empty.path)
    catalogue = (full.path / "catalog.duckdb").stat().st_size
    rows = [
        [
            f"a store of {count}",
            *(f"{of(column):.3f} s" for of in (statistics.median, min) for column in zip(*times[name], strict=True)),
        ]
        for name, count in (("empty", "no window"), ("full", f"{windows:,} windows"))
    ]
    return (
        f"Appending a window of 1,024 workers and 10 steps ({item.trace.ops.height:,} ops, {window_bytes / 1e6:.1f} MB"
        f" with its report), {APPENDS} times each in alternation. The full store has"
        f" {windows * window_bytes / 1e9:.1f} GB and a catalogue of {catalogue / 1e6:.1f} MB, the one part of it that"
        " an append copies.\n\n" + table(["append to", "median", "CPU time", "fastest", "CPU time"], rows)
    )


def _reading(folder: Path) -> str:
    store, done = Store(folder / "read.store"), folder / "done"
    subprocess.run([sys.executable, "-c", WRITER, store.path, folder / "small.parquet", "1"], check=True)
    ops = store.windows("live")[0].ops
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, store.path, str(ops), done], stdout=subprocess.PIPE, text=True)
        for _ in range(READERS)
    ]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", WRITER, store.path, folder / "small.parquet", str(LANDING)], check=True)
    took = time.perf_counter() - began
    done.touch()
    reads = sum(int(reader.communicate()[0]) for reader in readers)
    assert all(reader.returncode == 0 for reader in readers)
    return (
        f"{READERS} processes read the list of windows and the newest window in full while {LANDING} windows landed in"
        f" {took:.0f} s: {reads:,} reads, 0 errors, 0 half windows."
    )


def _importing(folder: Path) -> str:
    trace = synthesize(SynthSpec(layout=Layout(dp=256, pp=8), steps=20, name="large"))
    path = folder / "large.parquet"
    trace.write_parquet(path)
    size = trace.ops.estimated_size()
    ops = trace.ops.height
    del trace
    ran = measure(
        *tracekit("import", "--no-analysis", "--replace", "--store", str(folder / "import.store"), str(path)),
        runs=3,
        warm_up=1,
    )
    on_disk = path.stat().st_size / 1e9
    return (
        f"`tracekit import --no-analysis` of {ops:,} ops ({size / 1e9:.2f} GB in memory, {on_disk:.2f} GB as Parquet)"
        f" takes {ran.wall_s:.2f} s and {ran.peak_mb:,.0f} MB: {ran.wall_s / (size / 1e9):.1f} s per GB."
    )
