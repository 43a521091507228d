"""Processes of this machine that analyse traces.

In: tasks. Out: outcomes. Every process has one task at a time, so that it is known which one ended it; together they
take no more memory than they may.
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

#: A process that has grown beyond this is replaced once its task is done: it would keep part of that.
_GROWN_BYTES = 640 << 20


@dataclass(eq=False)
class _Process:
    """One worker. `task`: what it works on, None while it waits."""

    process: subprocess.Popen[bytes]
    task: Task | None = None
    buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls) -> _Process:
        """A new one, which imports tracekit from where this process has it."""
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
        """What it answers on."""
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, task: Task) -> None:
        """Let it work on a task; one that has ended meanwhile shows on its stdout."""
        self.task = task
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")

    def answer(self) -> Outcome | None:
        """What has come: an outcome, or None while it is not whole. Raises EOFError where the process has ended."""
        if not (read := os.read(self.out.fileno(), 1 << 16)):
            raise EOFError
        self.buffer += read
        if not self.buffer.endswith(b"\n"):
            return None
        outcome = Outcome(**json.loads(self.buffer))
        self.buffer.clear()
        return outcome

    def end(self, *, kill: bool = False) -> int:
        """End it, and wait for that; its exit code."""
        if kill:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return self.process.wait()


class LocalExecutor:
    """`processes` workers that together take at most `memory_bytes`; a task that alone takes more runs alone."""

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
        """Take out the first task that there is memory for beside the others."""
        taken = sum(process.task.memory_bytes for process in busy if process.task is not None)
        idle = BASE_BYTES * (min(self.processes, len(busy) + len(waiting)) - len(busy) - 1)
        for at, task in enumerate(waiting):
            if not busy or taken + idle + task.memory_bytes <= self.memory_bytes:
                return waiting.pop(at)
        return None


class _Crew:
    """At most so many processes, those that work and those that wait."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy: set[_Process] = set()
        self.idle: list[_Process] = []
        self.selector = selectors.DefaultSelector()

    def give(self, task: Task, *, fresh: bool) -> None:
        """Let a waiting process work, or a new one; with `fresh` always a new one."""
        while fresh and self.idle:
            self.idle.pop().end()
        process = self.idle.pop() if self.idle else _Process.started()
        process.give(task)
        self.busy.add(process)
        self.selector.register(process.out, selectors.EVENT_READ, process)

    def answers(self) -> Iterator[Outcome]:
        """Wait until something comes; every outcome that is whole by then."""
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
        """End all."""
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
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Outcome(task.source.url, rule=str(Rule.CRASHED), reason=f"its analysis was ended {how}", died=True)
