"""Measure whole processes and single calls, and name the machine and the commit."""

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Median wall time and CPU time (s) of a command, and its largest peak memory (MB)."""

    wall_s: float
    cpu_s: float
    peak_mb: float

    @property
    def cells(self) -> list[str]:
        """Wall time, CPU time and memory as cells of a table."""
        return [f"{self.wall_s:.2f}", f"{self.cpu_s:.2f}", f"{self.peak_mb:.0f}"]


def measure(*command: str, runs: int = 5, warm_up: int = 1) -> Run:
    """Run `command` several times in a process of its own. Raises CalledProcessError if it fails."""
    walls, cpus, peaks = [], [], []
    for number in range(warm_up + runs):
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        if number >= warm_up:
            walls.append(wall)
            cpus.append(usage.ru_utime + usage.ru_stime)
            peaks.append(usage.ru_maxrss / 1024)
    return Run(statistics.median(walls), statistics.median(cpus), max(peaks))


def tracekit(*arguments: str) -> tuple[str, ...]:
    """The command that runs the tracekit of this environment."""
    return (str(Path(sys.executable).with_name("tracekit")), *arguments)


def median_s(work: Callable[[], object], rounds: int) -> float:
    """Median wall time of a call, seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def per_call_us(function: Callable[[], object], *, calls: int = 500, rounds: int = 50) -> float:
    """Microseconds of this thread's CPU time per call: the best of many short rounds, which no other process hit."""
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, time.thread_time() - began)
    return best / calls * 1e6


def descendants(process: int) -> list[int]:
    """A process and all processes below it."""
    found = [process]
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += descendants(int(child))
    return found


def cpu_s(process: int) -> float:
    """CPU seconds that a process has used so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def tree_cpu_s(process: int) -> float:
    """CPU seconds that a process and all running processes below it have used so far."""
    return sum(map(cpu_s, descendants(process)))


def machine() -> str:
    """Processor, cores, memory, Python."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is checked out, marked `-dirty` if files differ from it."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
