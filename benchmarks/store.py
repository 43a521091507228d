"""Time of an append to an empty and a full store, reads while windows are appended, time of an import per GB."""

import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from benchmarks.measure import measure, table, tracekit
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.store.catalogue_rows import WrittenWindow
from tracekit.store.folder import Folder
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.model import Layout

#: Bytes of the files of the full store, and appends to either.
FULL_BYTES, APPENDS = 10_000_000_000, 9
#: Processes that read, windows appended meanwhile, and reads of all processes together.
READERS, LANDING, READS = 2, 1000, 50_000
#: Older windows that are read in full with the newest.
OLDER = 3
QUICK = {"FULL_BYTES": 20_000_000, "APPENDS": 1, "LANDING": 5, "READS": 20}


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = synthesize(SynthSpec(layout=Layout(dp=128, pp=8), steps=10, name="live"))
        small = synthesize(SynthSpec(layout=Layout(dp=2, pp=2), steps=2, name="live"))
        parts = [
            _appending(folder, Incoming(large, "live", "benchmark", PipelineJob(large).stored())),
            _reading(folder, Incoming(small, "live", "benchmark", PipelineJob(small).stored())),
            _importing(folder),
        ]
    return "## The store\n\n" + "\n\n".join(parts)


def _appending(folder: Path, item: Incoming) -> str:
    """Alternate between an empty store and a full one, so that other work on the machine slows both alike."""
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
            window = WrittenWindow(first.job_id, number, item, first.files, first.added_at)
            writer.catalogue.add_windows([window])
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
        f" with its report), {APPENDS} times each in turn. The full store has"
        f" {windows * window_bytes / 1e9:.1f} GB and a catalogue of {catalogue / 1e6:.1f} MB, the one part of it that"
        " an append copies.\n\n" + table(["append to", "median", "CPU time", "fastest", "CPU time"], rows)
    )


def _reading(folder: Path, item: Incoming) -> str:
    """Append windows one by one, with the reads spread over all of them."""
    processes = multiprocessing.get_context("forkserver")  # DuckDB, which this process uses, does not survive a fork
    processes.set_forkserver_preload(["benchmarks.store"])
    store = Store(folder / "read.store")
    store.append(item)
    counts = [processes.Value("q", 0) for _ in range(READERS)]
    done = processes.Event()
    readers = [
        processes.Process(target=_read_on, args=(store.path, item.trace.ops.height, count, done)) for count in counts
    ]
    for reader in readers:
        reader.start()
    began = time.perf_counter()
    for number in range(1, LANDING + 1):
        store.append(item)
        while sum(count.value for count in counts) < READS * number / LANDING and all(map(_is_alive, readers)):
            time.sleep(0.002)
    took = time.perf_counter() - began
    done.set()
    for reader in readers:
        reader.join()
    failed = sum(reader.exitcode != 0 for reader in readers)
    assert not failed, f"{failed} readers hit an error or half a window"
    reads = sum(count.value for count in counts)
    return (
        f"{READERS} processes read the list of windows, and all parts of the newest window and of {OLDER} older ones,"
        f" while {LANDING:,} windows were appended in {took:.0f} s: {reads:,} reads of a list or a part, 0 errors, 0"
        " half windows."
    )


def _is_alive(process: BaseProcess) -> bool:
    return process.is_alive()


def _read_on(path: Path, ops: int, count: "Synchronized[int]", done: Event) -> None:
    """Read until `done`; raises AssertionError for half a window.

    Reads the list of windows, and every part of the newest window and of some older ones.
    """
    folder, chosen = Folder(path), np.random.default_rng(count.value)
    while not done.is_set():
        with folder.reading() as catalogue:
            seen = catalogue.windows("live")
        assert [one.number for one in seen] == list(range(len(seen)))
        count.value += 1
        for window in (seen[-1], *(seen[at] for at in chosen.integers(len(seen), size=OLDER))):
            assert folder.trace(window).ops.height == ops
            assert json.loads(folder.report(window) or "")["job"]["ops"] == ops
            workers = folder.workers(window)
            assert workers is not None
            assert workers["slowdown"].explode().is_finite().all()
            count.value += 3


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
