"""Kills `tracekit import` at random moments; looks at what is left of the store."""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.measure import table
from tracekit.model import Layout
from tracekit.store import Store
from tracekit.synth import SynthSpec, synthesize

KILLS = 200
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


def section() -> str:
    seed = random.SystemRandom().randrange(2**32)
    chosen = random.Random(seed)  # noqa: S311 - moments, no secrets
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "jobs.store")
        synthesize(SynthSpec(layout=Layout(dp=16, pp=8), steps=10)).write_parquet(Path(folder) / "job.parquet")
        began = time.monotonic()
        _import(store.path, "old").wait()
        longest_s = time.monotonic() - began
        ops = _ops(store)
        found = Counter(_kill(store, ops, chosen, longest_s) for _ in range(KILLS))
        assert _import(store.path, "last").wait() == 0
        left = _left(store.path)
    assert not left, left
    return (
        "## Killed imports\n\n"
        f"{KILLS} times `tracekit import` of {ops:,} ops into a store that has jobs, ended by SIGTERM, SIGINT or"
        f" SIGKILL at a random moment of the {longest_s:.1f} s it takes (seed {seed}). After each the store was read in"
        " full: it was the old or the new one each time, and once another import had run, nothing of the killed one"
        " was left.\n\n"
        + table(["the import left", "times"], [[outcome, str(found[outcome])] for outcome in sorted(found)])
    )


def _import(path: Path, name: str) -> "subprocess.Popen[bytes]":
    """Without the analysis: most of its time goes into the store."""
    command = [sys.executable, "-m", "tracekit", "import", "--no-analysis", "--replace", "--name", name]
    return subprocess.Popen(
        [*command, "--store", path, path.with_name("job.parquet")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _ops(store: Store) -> int:
    return store.load("old").ops.height


def _kill(store: Store, ops: int, chosen: random.Random, longest_s: float) -> str:
    """Kill one import, check what it left; returns that in words."""
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
    return f"the {'new' if replaced else 'old'} store{' and files to clear' if _left(store.path) else ''}"


def _left(store: Path) -> list[str]:
    """What a killed writer left: a copy of the catalogue, its note of unfinished files."""
    return sorted(path.name for path in store.iterdir() if path.name.startswith((".tracekit", "unfinished")))
