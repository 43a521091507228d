"""Tasks on a Ray cluster that analyse traces. Ray is imported only here, and only on request.

In: tasks. Out: outcomes. Each task declares the memory that its trace needs, reads its source from storage and writes
its result to the study's folder, so both must be accessible from every node; only short messages go through Ray.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from tracekit.base.errors import SelectionError, extra
from tracekit.base.text import short
from tracekit.fleet.exclusions import Rule
from tracekit.fleet.executor import BASE_BYTES, ONE_THREAD, AnyTask, TaskOutcome

#: Number of tasks to submit to Ray ahead of the running ones, per processor.
_AHEAD = 2
#: Number of attempts to start a local cluster: on a busy machine, Ray gives up early.
_STARTS = 4


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
        work = ray.remote(num_cpus=1, max_retries=0)(_work)
        most = 1 if alone else max(1, int(ray.cluster_resources().get("CPU", 1)) * _AHEAD)
        largest = max((node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        waiting = list(reversed(tasks))
        running: dict[Any, AnyTask] = {}
        while waiting or running:
            while waiting and len(running) < most:
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


def _work(task: bytes) -> bytes:
    """Runs in a Ray process. Bytes in and out: Ray itself imports nothing of ours."""
    os.environ.update(ONE_THREAD)  # before polars is imported, which reads the number of threads then
    from tracekit.fleet.worker import work

    return pickle.dumps(work(pickle.loads(task)))  # noqa: S301 - of our own driver


def _ray() -> Any:
    with extra("ray", "--ray"):
        import ray
        import ray.exceptions
    return ray
