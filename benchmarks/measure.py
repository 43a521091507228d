"""Measure whole processes and single calls, and name the machine and the commit."""

import contextlib
import json
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
class MeasuredRun:
    """Median wall time and CPU time (s) of a command, and its largest peak memory (MB)."""

    wall_s: float
    cpu_s: float
    peak_mb: float

    @property
    def cells(self) -> list[str]:
        """Wall time, CPU time and memory as cells of a table."""
        return [f"{self.wall_s:.2f}", f"{self.cpu_s:.2f}", f"{self.peak_mb:.0f}"]


#: Runs a command from a small process: a child starts with the peak memory of its parent.
_WATCH = """
import json, os, sys, time
began, null = time.perf_counter(), os.open(os.devnull, os.O_WRONLY)
silent = [(os.POSIX_SPAWN_DUP2, null, output) for output in (1, 2)]
_, status, used = os.wait4(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=silent), 0)
wall_s, code = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
print(json.dumps([code, wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def measure(*command: str, runs: int = 5, warm_up: int = 1, code: int = 0) -> MeasuredRun:
    """Run `command` several times in a process of its own. Raises CalledProcessError if it ends with another code."""
    measured = []
    for number in range(warm_up + runs):
        watched = (sys.executable, "-S", "-c", _WATCH, *command)
        ended, *figures = json.loads(subprocess.run(watched, capture_output=True, check=True).stdout)
        if ended != code:
            raise subprocess.CalledProcessError(ended, command)
        if number >= warm_up:
            measured.append(figures)
    walls, cpus, peaks = zip(*measured, strict=True)
    return MeasuredRun(statistics.median(walls), statistics.median(cpus), max(peaks))


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
    processes = [process]
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                processes += descendants(int(child))
    return processes


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
