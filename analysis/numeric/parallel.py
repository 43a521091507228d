"""Work in parts: on all cores, or on some steps of a job in each process.

Functions that spend their time in numpy or in compiled kernels release the GIL, so `each` runs them side by side.

A process may hold only some steps of a job. The usual costs, the rules that receives follow and the clocks are
properties of the job, everything else is one of a step. Code that needs such a property asks a `Whole` for it, in the
same order whichever steps it has. If all steps are here, the answer follows at once. If others are elsewhere, `Asked`
ends the work; once all of them have asked the same, whoever holds their parts merges them and starts the work anew,
with the answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

Part = TypeVar("Part")
First = TypeVar("First")
Second = TypeVar("Second")
Answer = TypeVar("Answer")
Name = TypeVar("Name", bound=Hashable)

#: Below this many numbers, threads cost more than they save.
WORTH_THREADS = 1_000_000

_of_thread = threading.local()


def each(
    run: Callable[[Part], object], parts: Sequence[Part], *, numbers: int = WORTH_THREADS, threads: int | None = None
) -> None:
    """Call `run` with every part, on as many threads as there are cores; on one if there are few numbers to read."""
    inside = getattr(_of_thread, "inside", False)  # else a thread of the pool would wait for its own pool for ever
    alone = len(parts) == 1 or inside or numbers < WORTH_THREADS
    workers = 1 if alone else threads or os.cpu_count() or 1
    if workers == 1:
        for part in parts:
            run(part)
    else:
        try:
            running = _pool(workers).map(run, parts)
        except RuntimeError:  # the interpreter is ending and starts no threads
            each(run, parts, threads=1)
        else:
            list(running)


def both(first: Callable[[], First], second: Callable[[], Second], *, numbers: int) -> tuple[First, Second]:
    """Call two functions, at the same time if they read many numbers, and return both results."""
    results: dict[int, Any] = {}
    each(lambda index: results.__setitem__(index, (first, second)[index]()), range(2), numbers=numbers)
    return results[0], results[1]


def slices(length: int, numbers: int) -> list[slice]:
    """Split an axis into one slice per core; into one only if the array has few numbers."""
    count = 1 if numbers < WORTH_THREADS else max(1, min(os.cpu_count() or 1, length))
    bounds = [length * part // count for part in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        workers, thread_name_prefix="arrays", initializer=lambda: setattr(_of_thread, "inside", True)
    )


os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads stay with the parent


class Whole:
    """A job of which this process has all steps."""

    #: Whether other steps of the job are elsewhere.
    divided = False

    def combined(self, part: Callable[[], Part], merge: Callable[[Sequence[Part]], Answer]) -> Answer:
        """What `merge` makes of the `part` of each batch of steps, in the order of the steps."""
        return merge([part()])


#: The usual job.
UNDIVIDED = Whole()


class Asked(Exception):  # noqa: N818 - no error: it ends the work until the answer is known
    """A question about the whole job without an answer: the `part` of this process, and how to `merge` all."""

    def __init__(self, part: Any, merge: Callable[[Sequence[Any]], Any]) -> None:
        super().__init__(merge.__qualname__)
        self.part, self.merge = part, merge


class Divided(Whole):
    """Some steps of a job. `answers`: to the first questions about the whole job, in order; `asked`: how many were
    asked.
    """

    divided = True

    def __init__(self, answers: Sequence[Any], asked: int = 0) -> None:
        self.answers, self.asked = answers, asked

    def combined(self, part: Callable[[], Part], merge: Callable[[Sequence[Part]], Answer]) -> Answer:
        """The next of the answers. Raises `Asked` if it is not known yet."""
        if self.asked == len(self.answers):
            raise Asked(part(), merge)
        self.asked += 1
        answer: Answer = self.answers[self.asked - 1]
        return answer


def by_name(parts: Sequence[Mapping[Name, Part]]) -> dict[Name, list[Part]]:
    """The values of each name in the parts that have it, in their order."""
    grouped: dict[Name, list[Part]] = {}
    for part in parts:
        for name, value in part.items():
            grouped.setdefault(name, []).append(value)
    return grouped
