"""Records the phases and trajectories of RL post-training: `from tracekit import rl`.

In: calls of the user's code, in any process of the job. Out: one JSONL file per process, which `tracekit rl` reads.
Calls append to a bounded queue, which a daemon thread writes to disk twice a second; they never block and never raise.
Records beyond the queue are dropped and counted; a disk error stops recording with one warning. Imports the standard
library only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from multiprocessing import util
from pathlib import Path
from typing import Any

from .inject._tracekit_recorder import warn
from .small_file import create, write_all

#: Processes record into this folder from their start, without calling `record`.
ENV_FOLDER = "TRACEKIT_RL"
#: Records that may wait for the disk.
QUEUE_LIMIT = 100_000
FLUSH_INTERVAL_S = 0.5
#: How long the end of a process waits for the disk, seconds.
CLOSE_TIMEOUT_S = 5.0
#: Who carries out a phase if the caller does not say; the trainer all others.
_ROLES = {"generate": "rollout", "reward": "reward", "sync": "all"}
#: The wall clock, so that hosts agree; read once, so that a step of that clock never changes a duration.
_EPOCH_S = time.time() - time.monotonic()


class _Recorder:
    """The records of this process. The thread and the file begin with the first of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._queue: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._off = self._refused = False
        self._close_now = threading.Event()
        self._started = threading.Lock()  # held from the first record on
        self._writer = threading.Thread(target=self._run, name="tracekit-rl", daemon=True)

    def add(self, record: dict[str, Any]) -> None:
        if self._off:
            return
        if len(self._queue) >= QUEUE_LIMIT:
            self._lost += 1
            return
        self._queue.append(record)
        if self._started.acquire(blocking=False):
            self._start()

    def close(self) -> None:
        """Write what is queued, for at most `CLOSE_TIMEOUT_S`, and report what is lost."""
        if not self._started.locked():
            return
        self._close_now.set()
        # Also where it has stopped: Python aborts a process that ends while a thread writes a warning.
        self._writer.join(CLOSE_TIMEOUT_S)
        if self._off:
            return
        self._off = True
        if lost := self._lost + len(self._queue):
            warn(f"rl: {lost:,} records of process {os.getpid()} are lost")

    def _start(self) -> None:
        try:
            self._writer.start()
            # Unlike atexit, this also runs in the processes that multiprocessing starts.
            util.Finalize(None, self.close, exitpriority=0)
        except Exception as error:  # the interpreter is shutting down
            self._stop(error)

    def _run(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}.jsonl"
            with create(self.folder / name) as file:
                while not self._close_now.wait(FLUSH_INTERVAL_S):
                    self._drain(file)
                self._drain(file)
        except Exception as error:
            self._stop(error)

    def _drain(self, file: Any) -> None:
        lines = []
        while self._queue:
            try:
                lines.append(json.dumps(self._queue.popleft(), allow_nan=False, default=lambda value: value.item()))
            except Exception as error:
                self._lost += 1
                if not self._refused:
                    warn(f"rl: a record is not written ({type(error).__name__}: {error!s:.200})")
                self._refused = True
        if lines:
            write_all(file, ("\n".join(lines) + "\n").encode())

    def _stop(self, error: Exception) -> None:
        self._off = True
        self._queue.clear()
        warn(f"rl: recording has stopped, training continues ({type(error).__name__}: {error!s:.200})")


_recorder = _Recorder(Path(os.environ[ENV_FOLDER])) if os.environ.get(ENV_FOLDER) else None


def _in_child() -> None:
    """Give a forked process a file of its own: thread, file and queued records are the parent's."""
    global _recorder  # noqa: PLW0603  one process has one recorder
    if _recorder is not None:
        _recorder = _Recorder(_recorder.folder)


os.register_at_fork(after_in_child=_in_child)


def record(folder: str | Path) -> None:
    """Record this process, and those that it forks, into a new file in `folder`.

    Without this call, and without `TRACEKIT_RL=folder` in the environment, nothing is recorded. Give each run a folder
    of its own; processes of all hosts may share it.
    """
    global _recorder  # noqa: PLW0603
    if _recorder is not None:
        _recorder.close()
    _recorder = _Recorder(Path(folder))


def now() -> float:
    """Seconds since 1970, of a clock that never steps back: the clock of all records."""
    return _EPOCH_S + time.monotonic()


class phase:  # noqa: N801  reads as a verb does: `with rl.phase("train", step=7):`
    """Times a block as a phase of step number `step`, also if it raises.

    `name`: `generate`, `reward`, `old-log-prob`, `ref-log-prob`, `advantage`, `train`, `sync` (the engines get the new
    weights), or another word. `role`: who carries it out; by default `rollout`, `reward` and `all` for generate, reward
    and sync, `trainer` for the others.
    """

    __slots__ = ("_name", "_role", "_start", "_step")

    def __init__(self, name: str, *, step: int, role: str | None = None) -> None:
        self._name, self._step, self._role = name, step, role
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(self, *exception: object) -> None:
        if _recorder is not None:
            role = self._role or _ROLES.get(self._name, "trainer")
            _recorder.add({"phase": self._name, "role": role, "step": self._step, "start": self._start, "end": now()})


def trajectory(
    trajectory: str,
    *,
    step: int,
    engine: str,
    submit: float,
    tokens: int,
    start: float | None = None,
    end: float | None = None,
    tool_s: float = 0.0,
    version: int | None = None,
    status: str = "completed",
) -> None:
    """Record a trajectory of step number `step`, or a part of one: call it for each part, with the same name.

    `submit`: when it was asked for, by `now()`. `start`: when its engine began to decode it; without it, waiting for a
    slot cannot be told from decoding. `end`: now, if omitted. `tokens`: decoded in this part. `tool_s`: seconds of it
    spent in tools. `version`: the step whose weights decoded it. `status`: `completed`, `truncated`, or `aborted` for a
    part that is resumed later.
    """
    if _recorder is not None:
        _recorder.add(
            {
                "trajectory": trajectory,
                "step": step,
                "engine": engine,
                "submit": submit,
                "start": submit if start is None else start,
                "end": now() if end is None else end,
                "tokens": tokens,
                "tool_s": tool_s,
                "version": version,
                "status": status,
            }
        )
