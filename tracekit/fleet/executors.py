"""Executors: processes on this machine, or tasks on a Ray cluster, that analyse traces; and what runs in them.

A process has one task at a time, so that a crash can be attributed to a task; together, the processes stay within their
memory limit. `python -m tracekit.fleet.executors` reads pickled tasks from stdin and writes pickled outcomes to the
original stdout; anything else written there is discarded. It ends with its stdin, so also when the driver is killed.

Ray is imported only on request: each task declares the memory that its trace needs, reads its source from storage and
writes its result to the study's folder, so both must be accessible from every node.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from tracekit.base import memory
from tracekit.base.errors import SelectionError, extra
from tracekit.base.processes import serve
from tracekit.base.text import short
from tracekit.fleet.tasks import BASE_BYTES, ONE_THREAD, AnyTask, Batch, Rule, TaskOutcome

#: A process that has grown beyond this is replaced after its task, because it would keep part of the memory.
_GROWN_BYTES = 640 << 20
#: Number of tasks to submit to Ray ahead of the running ones, per processor.
_AHEAD = 2
#: Number of attempts to start a local cluster: on a busy machine, Ray gives up early.
_STARTS = 4


class _Process:
    """A process that imports tracekit from the same place as this one, and analyses one task at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tracekit.fleet.executors"],
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
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return TaskOutcome(task.name, rule=str(Rule.CRASHED), reason=f"its analysis {ending}", died=True)
        return outcome

    def end(self) -> None:
        """Close its stdin, with which it ends, and wait for that."""
        self.process.communicate()


class LocalExecutor:
    """Up to `processes` workers that together use at most `memory_bytes`; a task that exceeds this runs alone."""

    def __init__(self, processes: int, memory_bytes: int) -> None:
        self.processes, self.memory_bytes = processes, memory_bytes

    def run(self, tasks: Sequence[AnyTask], *, alone: bool = False) -> Iterator[TaskOutcome]:
        limit = 1 if alone else min(self.processes, len(tasks))
        waiting, idle = list(tasks), list[_Process]()
        running: dict[Future[TaskOutcome], tuple[_Process, AnyTask]] = {}
        pool = ThreadPoolExecutor(max(limit, 1))
        try:
            while waiting or running:
                while len(running) < limit and (task := self._pop(waiting, [task for _, task in running.values()])):
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

    def _pop(self, waiting: list[AnyTask], running: Sequence[AnyTask]) -> AnyTask | None:
        """Remove and return the first task that fits into memory next to the others."""
        used_bytes = sum(task.memory_bytes for task in running)
        idle = BASE_BYTES * (min(self.processes, len(running) + len(waiting)) - len(running) - 1)
        for index, task in enumerate(waiting):
            if not running or used_bytes + idle + task.memory_bytes <= self.memory_bytes:
                return waiting.pop(index)
        return None


class RayExecutor:
    """`address`: of a running cluster, None for a local one with `processes` processors.

    A local cluster ends with this process.
    """

    def __init__(self, address: str | None, processes: int) -> None:
        self.address, self.processes = address, processes

    def run(self, tasks: Sequence[AnyTask], *, alone: bool = False) -> Iterator[TaskOutcome]:
        if not tasks:
            return
        ray = _ray()
        if not ray.is_initialized():
            self._connect(ray)
        yield from self._outcomes(ray, tasks, alone=alone)

    def _connect(self, ray: Any) -> None:
        """Connect. Raises SelectionError if no cluster answers; retries the start of a local one."""
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if self.address is None:
            settings |= {"address": "local", "num_cpus": self.processes, "include_dashboard": False}
        else:
            settings["address"] = self.address
        for retries in reversed(range(_STARTS if self.address is None else 1)):
            try:
                ray.init(**settings)
            except Exception as error:  # Ray raises nothing more specific if a node takes more than its 30 s to start
                ray.shutdown()
                if not retries:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    where, check = "a cluster on this machine", "use processes"
                    if self.address is not None:
                        where, check = short(self.address), "check the address"
                    raise SelectionError(f"Ray: {where} does not answer ({reason:.200}); {check}") from None
            else:
                return

    def _outcomes(self, ray: Any, tasks: Sequence[AnyTask], *, alone: bool) -> Iterator[TaskOutcome]:
        """Submit tasks as others return, so that Ray never holds many."""
        work = ray.remote(num_cpus=1, max_retries=0)(_work_in_ray)
        limit = 1 if alone else max(1, int(ray.cluster_resources().get("CPU", 1)) * _AHEAD)
        largest = max((node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        waiting = list(reversed(tasks))
        running: dict[Any, AnyTask] = {}
        while waiting or running:
            while waiting and len(running) < limit:
                task = waiting.pop()
                memory = int(min(task.memory_bytes, max(largest, BASE_BYTES)))
                running[work.options(memory=memory).remote(pickle.dumps(task))] = task
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(done)
            try:
                yield pickle.loads(ray.get(done))  # noqa: S301 - of our own task
            except ray.exceptions.RayError as error:
                reason = f"its analysis died: {type(error).__name__}"
                yield TaskOutcome(task.name, rule=str(Rule.CRASHED), reason=reason, died=True)


def _work_in_ray(task: bytes) -> bytes:
    """Runs in a Ray process. Bytes in and out: Ray itself imports nothing of ours."""
    os.environ.update(ONE_THREAD)  # before polars is imported, which reads the number of threads then
    return pickle.dumps(work(pickle.loads(task)))  # noqa: S301 - of our own driver


def _ray() -> Any:
    with extra("ray", "a Ray cluster"):
        import ray
        import ray.exceptions
    return ray


def main() -> None:
    """Work until stdin ends."""
    memory.return_soon()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    serve(work)


def work(task: AnyTask) -> TaskOutcome:
    """Like `analyse` or `analyse_batch`, but a defect costs only one trace and not the run."""
    try:
        if isinstance(task, Batch):
            from tracekit.fleet.batches import analyse_batch

            return analyse_batch(task)
        from tracekit.fleet.analyse import analyse

        return analyse(task)
    except Exception as error:  # a defect that one trace triggers must not cost the others their figures
        return TaskOutcome(
            task.name, rule=str(Rule.CRASHED), reason=f"the analysis ended with {type(error).__name__}: {error}"[:400]
        )


if __name__ == "__main__":
    main()
