"""Measuring whole processes, and naming the machine they ran on."""

import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """A command's median wall time and CPU time (s), and its largest peak memory (MB)."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def measure(*command: str, runs: int = 5, warm_up: int = 1) -> Run:
    """Run `command` a few times as a process of its own; raises where it fails."""
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


def cpu_s(process: int) -> float:
    """Processor seconds that a running process and those it started have used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)


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


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
