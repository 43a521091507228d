"""What `tracekit collect` costs a training: step and processor time with it and without, in alternation.

Both trainings run in forks of a process that has imported torch (`overhead_train.py`), one under `collect`. They take
turns of a second or two, and each pair of turns gives one comparison, so that what else the machine does meanwhile hits
both alike.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from benchmarks.measure import table, tracekit
from tracekit.collectors.launch.launcher import INJECTED

TRAIN = Path(__file__).with_name("overhead_train.py")
OPTIONS = ("--no-store", "--segments", "segments")
Training: TypeAlias = "subprocess.Popen[str]"


@dataclass(frozen=True)
class OverheadJob:
    """Width, layers and batch of the model, and how many steps a turn has, warm-up first."""

    width: int
    layers: int
    batch: int
    warm_up: int
    steps: int

    def line(self) -> str:
        """What the training reads."""
        return f"{self.width} {self.layers} {self.batch} {self.warm_up} {self.steps}\n"


#: Milliseconds that a step takes, about, on two cores -> the job.
JOBS = {2: OverheadJob(64, 4, 16, 50, 600), 20: OverheadJob(512, 4, 128, 10, 75), 200: OverheadJob(1024, 8, 192, 3, 10)}
#: Pairs of turns per job, and starts of Python with and without.
PAIRS, STARTS = 12, 12
QUICK = {"PAIRS": 2, "STARTS": 2, "JOBS": {2: JOBS[2]}}
#: Standard error of a median, in median absolute deviations of n values times sqrt(n).
_ERROR_PER_MAD = 1.2533 * 1.4826


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        alone, under = (_start(stack, folder, words) for words in ((), tracekit("collect", *OPTIONS, "--")))
        rows = [_row(f"{length} ms", _pairs(alone, under, job)) for length, job in JOBS.items()]
        if len(list(Path(folder).glob("segments/*/rank-*.ops"))) < 2 * (PAIRS + 1) * len(JOBS):
            raise RuntimeError("not every training under `collect` was recorded")
    starts = [
        [f"`python -c '{code}'`", *(f"{statistics.median(cpu_s) * 1e3:.0f} ms" for cpu_s in _starts(code))]
        for code in ("pass", "import torch")
    ]
    return (
        "## What collecting costs a training\n\n"
        "DistributedDataParallel on two ranks over gloo, AdamW, DataLoader; all ops of all steps are recorded."
        f" {PAIRS} pairs of turns with and without `collect`, in alternation: the median, and the median of the"
        " differences within pairs with its standard error. CPU time is that of all threads of both ranks.\n\n"
        + table(["steps of", "without", "`collect` adds", "share", "CPU time without", "`collect` adds", "share"], rows)
        + "\n\nCPU time of starting Python:\n\n"
        + table(["", "without", "under `collect`"], starts)
    )


def _start(stack: ExitStack, folder: str, under: Sequence[str]) -> Training:
    """A training that waits for its turns."""
    process = subprocess.Popen(
        [*under, sys.executable, str(TRAIN)],
        cwd=tempfile.mkdtemp(dir=folder) if not under else folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return stack.enter_context(process)  # closes its stdin, which ends it, and waits


def _turn(process: Training, job: OverheadJob) -> tuple[float, float]:
    """Wall and CPU time of a step, seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job.line())
    process.stdin.flush()
    wall_s, cpu_s = json.loads(process.stdout.readline())
    return wall_s, cpu_s


def _pairs(alone: Training, under: Training, job: OverheadJob) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Times of a step without and with, for each pair of turns. Who is first changes from pair to pair."""
    pairs = []
    for number in range(PAIRS + 1):
        order = (alone, under) if number % 2 else (under, alone)
        turns = {id(process): _turn(process, job) for process in order}
        if number:  # the first one is a warm-up
            pairs.append((turns[id(alone)], turns[id(under)]))
    return pairs


def _row(length: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> list[str]:
    row = [length]
    for quantity in (0, 1):
        alone_s = statistics.median(alone[quantity] for alone, _ in pairs)
        added_us, error_us = _median([(under[quantity] - alone[quantity]) * 1e6 for alone, under in pairs])
        share, share_error = _median([under[quantity] / alone[quantity] - 1 for alone, under in pairs])
        row += [
            f"{alone_s * 1e3:.2f} ms",
            f"{added_us:.0f} +- {error_us:.0f} us",
            f"{share:.1%} +- {share_error:.1%}",
        ]
    return row


def _median(values: list[float]) -> tuple[float, float]:
    """Median and its standard error."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle, _ERROR_PER_MAD * deviation / len(values) ** 0.5


def _starts(code: str) -> tuple[list[float], list[float]]:
    """CPU seconds of starts of Python without and under `collect`, in alternation."""
    with tempfile.TemporaryDirectory() as run:
        path = os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")]))
        kinds = (dict(os.environ), {**os.environ, "PYTHONPATH": path, "TRACEKIT_COLLECT_DIR": run})
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(STARTS):
            for environment, cpu_s in zip(kinds, times, strict=True):
                process = os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment)
                used = os.wait4(process, 0)[2]
                cpu_s.append(used.ru_utime + used.ru_stime)
    return times
