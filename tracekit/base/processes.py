"""Work in processes of their own, several at a time.

In: code that calls `serve`, and tasks. Out: the answer to each, in their order. The processes are not forked, because
the libraries of this process have threads; not spawned by multiprocessing, which would run a caller's script again.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import IO, Any, TypeVar, cast

from tracekit.base.errors import FormatError, TracekitError
from tracekit.base.memory import collect_seldom

Task = TypeVar("Task")

#: Answers that wait for an earlier one, for each process: they are in memory.
_AHEAD = 32


def serve(work: Callable[[Any], Any]) -> None:
    """In such a process: for each pickled task on stdin, what `work` returns or the TracekitError that it raises,
    pickled, on stdout.
    """
    collect_seldom()
    copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one ends it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)  # noqa: S301  of the process that started this one
        except EOFError:
            return
        try:
            answer = work(task)
        except TracekitError as error:
            # What an error carries beside its text, such as the source that was recognised, has code in it.
            answer = FormatError(str(error)) if vars(error) else error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
        del answer


def answers_of(code: str, tasks: Sequence[Task], processes: int, name: Callable[[Task], object] = str) -> Iterator[Any]:
    """Yield what processes that run `code` answer to each task, in their order.

    `name`: what people know a task by. Raises the TracekitError that is an answer; FormatError if a process is killed.
    """
    environment = os.environ | {"POLARS_MAX_THREADS": "1"}
    command = [sys.executable, "-c", code]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)  # noqa: S603  our own code, no shell
        for _ in range(min(processes, len(tasks)))
    ]
    idle = list(workers)

    def answer(task: Task) -> Any:
        if not idle:  # a process was killed, which the future of its task says
            return None
        worker = idle.pop()
        try:
            pickle.dump(task, cast("IO[bytes]", worker.stdin))
            cast("IO[bytes]", worker.stdin).flush()
            answered = pickle.load(cast("IO[bytes]", worker.stdout))  # noqa: S301  of our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            raise FormatError(
                f"{name(task)}: the process that read it was killed ({worker.wait()}); read fewer files at a time"
            ) from None
        idle.append(worker)
        if isinstance(answered, TracekitError):
            raise answered
        return answered

    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            waiting = deque[Future[Any]]()
            try:
                for task in tasks:
                    waiting.append(pool.submit(answer, task))
                    if len(waiting) > _AHEAD * len(workers):
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.kill()
    finally:
        for worker in workers:
            worker.communicate()


def _read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Called by pickle, which cannot find the type itself by a name."""
    return MappingProxyType(mapping)
