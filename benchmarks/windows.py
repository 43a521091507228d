"""Windows of a running job: time from the end of a window to the store, memory over many windows, false alarms."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import generate_latest

from benchmarks.measure import table
from benchmarks.writtenrun import WrittenRun
from judges.eventsim.cases import draw_job
from judges.eventsim.run import simulate
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.live import watch, windows
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.live.receivers import Notifier
from tracekit.live.run import LiveOptions, LiveRun
from tracekit.live.windows import WindowSize
from tracekit.report.findings import Findings
from tracekit.store import Incoming, Store
from tracekit.synth.injected_causes import parse_cause
from tracekit.synth.simulate import SynthSpec, synthesize
from tracekit.trace.model import Layout

PAGE = os.sysconf("SC_PAGE_SIZE")
RANKS, MICROBATCHES, STEPS, WINDOWS = 1024, 4, 10, 5
#: A long watch of a small job: ranks, steps per window, readings of its memory, windows between two readings.
SMALL_RANKS, SMALL_STEPS, READINGS, EVERY = 4, 5, 10, 1000
#: Windows per segment, per slow spell of one rank, and between two scrapes of metrics.
SEALED_AFTER, SPELL, SCRAPED = 100, 20, 10
#: Windows with a fault, a rank that computes so much slower, and healthy ones before and after them.
FAULTY, FAULT, AROUND = 100, "slow-worker:dp=1,pp=2,factor=1.3", 5
#: Healthy windows: jobs of these cases of the event-driven simulator with at least this many steps.
HEALTHY, FIRST_SEED, CASES, FEWEST_STEPS = 1000, 8_600_000, ("healthy", "healthy-lockstep"), 5
QUICK = {"RANKS": 8, "WINDOWS": 2, "EVERY": 4, "HEALTHY": 2, "FAULTY": 2}


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as name:
        parts = [_latency(Path(name) / "large"), _memory(Path(name) / "small"), _alarms(), _fault(Path(name) / "fault")]
    return "## Windows of a running job\n\n" + "\n\n".join(parts)


def _latency(folder: Path) -> str:
    """Stages from the end of a window to its findings in the store; earlier steps were read while it ran."""
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
        follower.update(time.monotonic())
        written.run([last], slow={3: 1.5})
        timed("read", lambda: follower.update(time.monotonic()))
        recording = timed("take", lambda last=last: follower.take(last))
        trace = timed("merge", lambda window=recording: merge_attempt(window, name="job", running=True)).trace
        findings = timed("analyse", lambda merged=trace: PipelineJob(merged).stored())
        item = Incoming(trace, "job", "x", findings)
        timed("append", lambda item=item: store.append(item))
        ops = trace.ops.height
    rows = [_row(stage, values[1:]) for stage, values in took.items()]
    totals = [tuple(map(sum, zip(*window, strict=True))) for window in zip(*took.values(), strict=True)]
    header = ["from the end of a window", "s", "CPU s"]
    return (
        f"{RANKS:,} workers x {STEPS} steps, {ops:,} ops, medians of {WINDOWS - 1} windows.\n\n"
        f"{table(header, [*rows, _row('all', totals[1:])])}"
    )


def _row(stage: str, values: list[Any]) -> list[str]:
    return [stage, *(f"{statistics.median(column):.2f}" for column in zip(*values, strict=True))]


def _memory(folder: Path) -> str:
    """Runs in a process of its own, since memory of the other parts would count."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        sizes = pool.submit(_watched, folder, EVERY).result()
    rows = [[f"{EVERY * (at + 1):,}", f"{size:.0f}", f"{took:.3f}"] for at, (size, took) in enumerate(sizes)]
    return (
        f"A watch of {SMALL_RANKS} ranks over {READINGS * EVERY:,} windows of {SMALL_STEPS} steps, without its"
        f" pauses: one rank is slow in every other {SPELL} windows, segments are sealed and consumed, incidents are"
        f" posted to a webhook, and metrics are scraped every {SCRAPED} windows.\n\n"
        + table(["windows", "resident memory, MiB", "CPU s a window"], rows)
    )


def _watched(folder: Path, every: int) -> list[tuple[float, float]]:
    """Resident MiB after every `every` windows, and CPU seconds per window."""
    fed = _Fed(folder, every)
    thread = threading.Thread(target=fed.webhook.serve_forever, daemon=True)
    thread.start()
    with mock.patch.object(watch, "POLL_S", 0.0), mock.patch.object(windows, "SETTLE_S", 0.0):
        fed.watch.until_ended(threading.Event())
    fed.webhook.shutdown()
    assert fed.received == len(Store(folder / "store").incidents()) * 2
    return fed.sizes


class _Fed:
    """A watch that gets the next window once it has reported the one before."""

    def __init__(self, folder: Path, every: int) -> None:
        self._every = every
        self.written = WrittenRun(folder / "run", SMALL_RANKS)
        self.sizes: list[tuple[float, float]] = []
        self.received, self._reported, self._cpu_s = 0, 0, time.process_time()
        self.webhook = HTTPServer(("127.0.0.1", 0), self._answers())
        store = Store(folder / "store")
        options = LiveOptions(folder / "run", store.path, "job", WindowSize(steps=SMALL_STEPS), consume=True)
        notifier = Notifier(f"http://127.0.0.1:{self.webhook.server_port}/")
        self.watch = watch.Watch(store, LiveRun(options, self.tell), "job", self.tell, notifier)
        self._metrics = StoreMetrics(remembered(store))
        self._write()

    def _answers(self) -> type[BaseHTTPRequestHandler]:
        fed = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fed.received += len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["incidents"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Receiver

    def tell(self, line: str) -> None:
        """Receive a line of the watch: a stored window or an incident."""
        if not line.startswith("job, window "):
            assert "INCIDENT" in line or "incident" in line or line.startswith("    "), line
            return
        self._reported += 1
        if self._reported % SCRAPED == 0:
            generate_latest(self._metrics)
        if self._reported % SEALED_AFTER == 0:
            self.written.seal()
        if self._reported % self._every == 0:
            cpu_s, self._cpu_s = self._cpu_s, time.process_time()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.sizes.append((pages * PAGE / 2**20, (self._cpu_s - cpu_s) / self._every))
        if self._reported < READINGS * self._every:
            self._write()
        else:
            self.written.end()

    def _write(self) -> None:
        slow = {3: 1.5} if self._reported // SPELL % 2 else {}
        first = 1 + SMALL_STEPS * self._reported
        self.written.run(range(first, first + SMALL_STEPS), slow=slow)


def _alarms() -> str:
    """Incidents that healthy jobs would open."""
    seen = doubtful = 0
    alarms = []
    for seed, case in ((seed, case) for seed in itertools.count(FIRST_SEED) for case in CASES):
        job = draw_job(seed, case)
        if job.shape.steps < FEWEST_STEPS:
            continue
        findings = PipelineJob(simulate(job).trace).stored()
        verdict = findings.verdict() if isinstance(findings, Findings) else None
        if verdict is None or not verdict.judged:
            doubtful += 1
        elif verdict.alarming:
            alarms.append(f"{case} {seed}: {verdict.alarming[0].what}")
        seen += 1
        if seen == HEALTHY:
            break
    listed = "".join(f"\n- {alarm}" for alarm in alarms)
    return (
        f"Healthy windows of the event-driven simulator: {seen:,}; incidents: {len(alarms)}, untrusted: {doubtful}."
        f"{listed}"
    )


def _fault(folder: Path) -> str:
    """The incidents of a job with one fault. No two of its windows have the same noise."""
    store = Store(folder)
    for number in range(AROUND + FAULTY + AROUND):
        causes = (parse_cause(FAULT),) if AROUND <= number < AROUND + FAULTY else ()
        job = synthesize(SynthSpec(Layout(dp=4, pp=4), steps=FEWEST_STEPS, seed=number, causes=causes))
        store.append(Incoming(job, "job", "synth", PipelineJob(job).stored()))
    incidents = "; ".join(
        f"opened in window {one.opened_window}, last seen in {one.seen_window}, closed in {one.closed_window}"
        for one in store.incidents()
    )
    through = f"windows {AROUND} to {AROUND + FAULTY - 1}"
    return f"One fault ({FAULT}) through {through} of a store; incidents: {len(store.incidents())} ({incidents})."
