"""The process that analyses traces for `local.LocalExecutor`: `python -m tracekit.fleet.worker`.

In: pickled tasks on stdin. Out: pickled outcomes on the original stdout; anything else written there is discarded. It
ends with its stdin, so also when the driver is killed.
"""

from __future__ import annotations

import os

from tracekit.base import memory
from tracekit.base.processes import serve
from tracekit.fleet.executor import AnyTask, Batch, TaskOutcome


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
            task.name, rule="crashed", reason=f"the analysis ended with {type(error).__name__}: {error}"[:400]
        )


if __name__ == "__main__":
    main()
