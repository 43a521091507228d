"""Processes on this machine that analyse traces.

In: tasks. Out: outcomes. Every process has one task at a time, so that a crash can be attributed to a task; together,
the processes stay within their memory limit.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tracekit.fleet.exclusions import Rule
from tracekit.fleet.executor import BASE_BYTES, ONE_THREAD, AnyTask, TaskOutcome

#: A process that has grown beyond this is replaced after its task, because it would keep part of the memory.
_GROWN_BYTES = 640 << 20


class _Process:
    """A process that imports tracekit from the same place as this one, and analyses one task at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tracekit.fleet.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        )

    def work(self, task: AnyTask) -> TaskOutcome:
        """The outcome of a task, also if the process ends over it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()
            outcome: TaskOutcome = pickle.load(self.process.stdout)  # noqa: S301 - of our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return TaskOutcome(task.name, rule=str(Rule.CRASHED), reason=f"its analysis {how}", died=True)
        return outcome

    def end(self) -> None:
        """Close its stdin, with which it ends, and wait for that."""
        self.process.communicate()


class LocalExecutor:
    """Up to `processes` workers that together use at most `memory_bytes`; a task that exceeds this runs alone."""

    def __init__(self, processes: int, memory_bytes: int) -> None:
        self.processes, self.memory_bytes = processes, memory_bytes

    def run(self, tasks: Sequence[AnyTask], *, alone: bool = False) -> Iterator[TaskOutcome]:
        most = 1 if alone else min(self.processes, len(tasks))
        waiting, idle = list(tasks), list[_Process]()
        running: dict[Future[TaskOutcome], tuple[_Process, AnyTask]] = {}
        pool = ThreadPoolExecutor(max(most, 1))
        try:
            while waiting or running:
                while len(running) < most and (task := self._next(waiting, [task for _, task in running.values()])):
                    process = idle.pop() if idle else _Process()
                    running[pool.submit(process.work, task)] = process, task
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    outcome, (process, _) = done.result(), running.pop(done)
                    if alone or outcome.died or outcome.peak_bytes > _GROWN_BYTES:
                        process.end()
                    else:
                        idle.append(process)
                    yield outcome
        finally:
            for process, _ in running.values():
                process.process.kill()
            pool.shutdown()
            for process in (*idle, *(process for process, _ in running.values())):
                process.end()

    def _next(self, waiting: list[AnyTask], running: Sequence[AnyTask]) -> AnyTask | None:
        """Remove and return the first task that fits into memory next to the others."""
        used_bytes = sum(task.memory_bytes for task in running)
        idle = BASE_BYTES * (min(self.processes, len(running) + len(waiting)) - len(running) - 1)
        for index, task in enumerate(waiting):
            if not running or used_bytes + idle + task.memory_bytes <= self.memory_bytes:
                return waiting.pop(index)
        return None
