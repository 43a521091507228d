"""Kill `tracekit import`, and a process that appends windows, at random moments; check the store each time."""

import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import table
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.model import Layout

KILLS = 200
QUICK = {"KILLS": 2}
#: The process that appends windows is killed within this time.
LONGEST_WRITE_S = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


def section() -> str:
    """The Markdown of this section."""
    seed = random.SystemRandom().randrange(2**32)
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "jobs.store")
        synthesize(SynthSpec(layout=Layout(dp=16, pp=8), steps=10)).write_parquet(Path(folder) / "job.parquet")
        began = time.monotonic()
        _import(store.path, "old").wait()
        longest_s = time.monotonic() - began
        ops = _ops(store)
        outcomes = Counter(_kill(store, ops, chosen, longest_s) for _ in range(KILLS))
        assert _import(store.path, "last").wait() == 0
        left_over = _files_to_clear(store.path)
    assert not left_over, left_over
    return (
        "## Killed imports\n\n"
        f"{KILLS} times `tracekit import` of {ops:,} ops into a store that has jobs, ended by SIGTERM, SIGINT or"
        f" SIGKILL at a random moment of the {longest_s:.1f} s it takes (seed {seed}). After each the store was read in"
        " full: it was the old or the new one each time, and once another import had run, nothing of the killed one"
        " was left.\n\n"
        + table(["the import left", "times"], [[outcome, str(outcomes[outcome])] for outcome in sorted(outcomes)])
        + f"\n\n{_killed_windows()}"
    )


def _killed_windows() -> str:
    """Kill -9 a process that appends windows and reports each one once it is stored."""
    seed = random.SystemRandom().randrange(2**32)
    chosen = random.Random(seed)
    processes = multiprocessing.get_context("forkserver")  # DuckDB, which this process uses, does not survive a fork
    processes.set_forkserver_preload(["benchmarks.killed"])
    reported = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "live.store"
        trace = synthesize(SynthSpec(layout=Layout(dp=4, pp=2), steps=5, name="live"))
        trace.write_parquet(path.with_name("window.parquet"))
        for _ in range(KILLS):
            stored, report = processes.Pipe(duplex=False)
            writer = processes.Process(target=_append, args=(path, report))
            writer.start()
            report.close()
            stored.recv()  # the first window is due
            time.sleep(chosen.uniform(0, LONGEST_WRITE_S))
            writer.kill()
            writer.join()
            reported = max([reported, *_received(stored)])
            if path.exists():
                _check_windows(Store(path), reported, trace.ops.height)
        with Store(path).writing():
            pass
        assert not _files_to_clear(path)
        stored_in_all = len(Store(path).windows("live"))
    return (
        f"{KILLS} times kill -9 of a process that appends window after window with their reports, at random moments"
        f" (seed {seed}): {reported:,} windows were reported as stored, {stored_in_all:,} are there; 0 lost, 0 half."
    )


def _append(path: Path, report: Connection) -> None:
    from tracekit.trace.canonical import read_parquet

    trace = read_parquet(path.with_name("window.parquet"))
    findings = PipelineJob(trace).stored()
    report.send(0)
    while True:
        report.send(1 + Store(path).append(Incoming(trace, "live", "benchmark", findings)))


def _received(stored: Connection) -> list[int]:
    """Reports of a killed process; the last one may be cut off."""
    counts = []
    try:
        while stored.poll():
            counts.append(stored.recv())
    except (EOFError, OSError):
        pass
    return counts


def _check_windows(store: Store, reported: int, ops: int) -> None:
    """Every reported window is there, and the newest ones can be read in full."""
    windows = store.windows("live") if reported or store.jobs() else ()
    assert [one.number for one in windows] == list(range(len(windows)))
    assert len(windows) >= reported, (len(windows), reported)
    for window in windows[-3:]:
        assert store.load("live", window.number).ops.height == ops
        assert store.report("live", window.number) is not None


def _import(path: Path, name: str) -> "subprocess.Popen[bytes]":
    """Import without analysis, so that most of the time goes into the store."""
    command = [sys.executable, "-m", "tracekit", "import", "--no-analysis", "--replace", "--name", name]
    return subprocess.Popen(
        [*command, "--store", path, path.with_name("job.parquet")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _ops(store: Store) -> int:
    return store.load("old").ops.height


def _kill(store: Store, ops: int, chosen: random.Random, longest_s: float) -> str:
    """Kill one import, check the store, and describe its state."""
    name = f"job {chosen.randrange(3)}"
    before = {job.name: job.imported_at for job in store.jobs()}
    process = _import(store.path, name)
    time.sleep(chosen.uniform(0, longest_s))
    process.send_signal(chosen.choice(SIGNALS))
    process.wait()
    after = {job.name: job.imported_at for job in store.jobs()}
    replaced = after != before
    assert after == before or after == before | {name: after[name]}, (before, after)
    for job in after:
        assert store.load(job).ops.height == ops, job
    return f"the {'new' if replaced else 'old'} store{' and files to clear' if _files_to_clear(store.path) else ''}"


def _files_to_clear(store: Path) -> list[str]:
    """Files that a killed writer left: a copy of the catalogue, its note of unfinished files."""
    return sorted(path.name for path in store.iterdir() if path.name.startswith((".tracekit", "unfinished")))
