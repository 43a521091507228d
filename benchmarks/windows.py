"""Windows of a running job: how long after its end one is in the store, memory over many, alarms on healthy jobs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.eventsim.cases import draw_job
from benchmarks.eventsim.run import simulate
from benchmarks.measure import table
from benchmarks.writtenrun import WrittenRun
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.findings import Findings
from tracekit.job import Job
from tracekit.live.run import LiveOptions, LiveRun
from tracekit.live.windows import WindowSize
from tracekit.store import Incoming, Store

RANKS, MICROBATCHES, STEPS, WINDOWS = 1024, 4, 10, 5
#: Windows of a small job whose memory is looked at, and how often.
MANY, EVERY = 400, 100
#: Healthy jobs of the independent simulator, each one window: seeds and cases.
SEEDS, CASES, FEWEST_STEPS = range(8_600_000, 8_600_400), ("healthy", "healthy-lockstep"), 5


def section() -> str:
    with tempfile.TemporaryDirectory() as name:
        parts = [_latency(Path(name) / "large"), _memory(Path(name) / "small"), _alarms()]
    return "## Windows of a running job\n\n" + "\n\n".join(parts)


def _latency(folder: Path) -> str:
    """What is done between the end of a window and its findings in the store; the steps before were read meanwhile."""
    written = WrittenRun(folder / "run", RANKS, microbatches=MICROBATCHES)
    follower = AttemptFollower(0, written.attempt_directory, 1)
    store = Store(folder / "store")
    took: dict[str, list[tuple[float, float]]] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = work()
        took.setdefault(stage, []).append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        return result

    ops = 0
    for number in range(WINDOWS):
        first, last = 1 + STEPS * number, STEPS * (number + 1)
        written.run(range(first, last), slow={3: 1.5})
        follower.update()
        written.run([last], slow={3: 1.5})
        timed("read", follower.update)
        recording = timed("take", lambda last=last: follower.take(last))
        trace = timed("merge", lambda taken=recording: merge_attempt(taken, name="job", running=True)).trace
        findings = timed("analyse", lambda merged=trace: Job(merged).findings())
        item = Incoming(trace, "job", "x", findings)
        timed("append", lambda item=item: store.append(item))
        ops = trace.ops.height
    rows = [_row(stage, values[1:]) for stage, values in took.items()]
    totals = [tuple(map(sum, zip(*window, strict=True))) for window in zip(*took.values(), strict=True)]
    header = ["from the end of a window", "seconds", "processor seconds"]
    return (
        f"{RANKS:,} workers x {STEPS} steps, {ops:,} ops, medians of {WINDOWS - 1} windows.\n\n"
        f"{table(header, [*rows, _row('all', totals[1:])])}"
    )


def _row(stage: str, values: list[Any]) -> list[str]:
    return [stage, *(f"{statistics.median(column):.2f}" for column in zip(*values, strict=True))]


def _memory(folder: Path) -> str:
    written = WrittenRun(folder / "run", 8)
    run = LiveRun(LiveOptions(folder / "run", folder / "store", "job", WindowSize(steps=STEPS)), lambda _: None)
    sizes = list(_sizes(written, run))
    shown = ", ".join(f"{size} MiB after {EVERY * (at + 1)}" for at, size in enumerate(sizes))
    return f"Resident memory of a watch of 8 ranks over windows: {shown}."


def _sizes(written: WrittenRun, run: LiveRun) -> Iterator[int]:
    for number in range(MANY):
        slow = {3: 1.5} if number // 20 % 2 else {}
        written.run(range(1 + STEPS * number, 1 + STEPS * (number + 1)), slow=slow)
        for _ in range(2):  # due, then ready
            run.poll()
            time.sleep(0.31)
        if number % EVERY == EVERY - 1:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            yield pages * 4096 // 2**20


def _alarms() -> str:
    windows = doubtful = 0
    alarms = []
    for seed in SEEDS:
        for case in CASES:
            job = draw_job(seed, case)
            if job.shape.steps < FEWEST_STEPS:
                continue
            windows += 1
            findings = Job(simulate(job).trace).findings()
            verdict = findings.verdict() if isinstance(findings, Findings) else None
            if verdict is None or not verdict.judged:
                doubtful += 1
            elif verdict.alarming:
                alarms.append(f"{case} {seed}: {verdict.alarming[0].what}")
    listed = "".join(f"\n- {alarm}" for alarm in alarms)
    return (
        f"Healthy windows of the independent simulator: {windows}; incidents: {len(alarms)}, not trusted: {doubtful}."
        f"{listed}"
    )
