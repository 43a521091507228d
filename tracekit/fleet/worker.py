"""The process that analyses traces for `local.LocalExecutor`: `python -m tracekit.fleet.worker`.

In: tasks on stdin, a line of JSON each. Out: outcomes on the original stdout; anything else written there is discarded.
It ends with its stdin, so also when the driver is killed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from tracekit.base import memory
from tracekit.fleet.executor import AnyTask, Batch, Task, TaskOutcome
from tracekit.fleet.sources import StudySource


def main() -> None:
    """Work until stdin ends."""
    memory.return_soon()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        answers.write(json.dumps(asdict(work(task_of(json.loads(line))))) + "\n")
        answers.flush()


def task_of(plain: dict[str, Any]) -> AnyTask:
    """The inverse of `asdict`."""
    if "folder" in plain:
        return Batch(**plain)
    return Task(**{**plain, "source": StudySource(**plain["source"])})


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
            task.name, rule="crashed", reason=f"the analysis ended with {type(error).__name__}: {error}"[:400]
        )


if __name__ == "__main__":
    main()
