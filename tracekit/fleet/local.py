"""Processes on this machine that analyse traces.

In: tasks. Out: outcomes. Every process has one task at a time, so that a crash can be attributed to a task; together,
the processes stay within their memory limit.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO

from tracekit.fleet.exclusions import Rule
from tracekit.fleet.executor import BASE_BYTES, ONE_THREAD, Outcome, Task

#: A process that has grown beyond this is replaced after its task, because it would keep part of the memory.
_GROWN_BYTES = 640 << 20


@dataclass(eq=False)
class _Process:
    """One worker process. `task`: its current task, None while it waits."""

    process: subprocess.Popen[bytes]
    task: Task | None = None
    buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls) -> _Process:
        """Start a process that imports tracekit from the same place as this one."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return cls(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tracekit.fleet.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
            )
        )

    @property
    def out(self) -> IO[bytes]:
        """The stream of its answers."""
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, task: Task) -> None:
        """Give it a task; if the process has ended meanwhile, that shows on its stdout."""
        self.task = task
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")

    def answer(self) -> Outcome | None:
        """The next outcome, or None while it is incomplete. Raises EOFError if the process has ended."""
        if not (read := os.read(self.out.fileno(), 1 << 16)):
            raise EOFError
        self.buffer += read
        if not self.buffer.endswith(b"\n"):
            return None
        outcome = Outcome(**json.loads(self.buffer))
        self.buffer.clear()
        return outcome

    def end(self, *, kill: bool = False) -> int:
        """End the process and wait for that; returns its exit code."""
        if kill:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return self.process.wait()


class LocalExecutor:
    """Up to `processes` workers that together use at most `memory_bytes`; a task that exceeds this runs alone."""

    def __init__(self, processes: int, memory_bytes: int) -> None:
        self.processes, self.memory_bytes = processes, memory_bytes

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> Iterator[Outcome]:
        """See `Executor.run`."""
        most = 1 if alone else min(self.processes, len(tasks))
        waiting, crew = list(tasks), _Crew(most)
        try:
            while waiting or crew.busy:
                while len(crew.busy) < most and (task := self._next(waiting, crew.busy)) is not None:
                    crew.give(task, fresh=alone)
                yield from crew.answers()
        finally:
            crew.dismiss()

    def _next(self, waiting: list[Task], busy: set[_Process]) -> Task | None:
        """Remove and return the first task that fits into memory next to the others."""
        taken = sum(process.task.memory_bytes for process in busy if process.task is not None)
        idle = BASE_BYTES * (min(self.processes, len(busy) + len(waiting)) - len(busy) - 1)
        for at, task in enumerate(waiting):
            if not busy or taken + idle + task.memory_bytes <= self.memory_bytes:
                return waiting.pop(at)
        return None


class _Crew:
    """A limited number of processes, working or waiting."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy: set[_Process] = set()
        self.idle: list[_Process] = []
        self.selector = selectors.DefaultSelector()

    def give(self, task: Task, *, fresh: bool) -> None:
        """Give a task to a waiting process, or to a new one; with `fresh` always to a new one."""
        while fresh and self.idle:
            self.idle.pop().end()
        process = self.idle.pop() if self.idle else _Process.started()
        process.give(task)
        self.busy.add(process)
        self.selector.register(process.out, selectors.EVENT_READ, process)

    def answers(self) -> Iterator[Outcome]:
        """Wait for input; every outcome that is complete by then."""
        for key, _ in self.selector.select():
            process: _Process = key.data
            try:
                outcome = process.answer()
            except EOFError:
                yield self._lost(process)
                continue
            if outcome is not None:
                self._leave(process)
                if outcome.peak_bytes > _GROWN_BYTES:
                    process.end()
                else:
                    self.idle.append(process)
                yield outcome

    def dismiss(self) -> None:
        """End all processes."""
        for process in self.idle:
            process.end()
        for process in self.busy:
            process.end(kill=True)
        self.selector.close()

    def _leave(self, process: _Process) -> None:
        self.selector.unregister(process.out)
        self.busy.discard(process)

    def _lost(self, process: _Process) -> Outcome:
        """The outcome of a task whose process has ended."""
        self._leave(process)
        code, task = process.end(), process.task
        assert task is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(task.source.url, rule=str(Rule.CRASHED), reason=f"its analysis {how}", died=True)
