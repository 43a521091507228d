"""Jobs of any kind, by what their trace is: a pipeline's (`Job`) or ops of any shape (`OpJob`).

In: a file or a store. Out: the job, loaded and ready for questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.replay.method import Method
from tracekit.errors import SelectionError
from tracekit.job import Job, PathLike, load
from tracekit.op_trace import OpTrace, is_op_trace

if TYPE_CHECKING:
    from tracekit.op_job import OpJob
    from tracekit.store.window import AnyTrace


def job_of(trace: AnyTrace, method: Method | str = Method.TRACEKIT) -> Job | OpJob:
    """The job of a trace. `method` as in `load`; op traces have one method."""
    if not isinstance(trace, OpTrace):
        return Job(trace, Method(method))
    from tracekit.op_job import OpJob

    return OpJob(trace)


def load_any(
    path: Path,
    *,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job | OpJob:
    """Read a trace of any kind. Parameters and errors as for `load`; SelectionError for what an op trace has not."""
    if importer is not None or not is_op_trace(path):
        return load(path, layout=layout, importer=importer, unit=unit, method=method)
    from tracekit.op_job import load_ops

    for option, value in (("--layout", layout), ("--unit", unit)):
        if value is not None:
            raise SelectionError(f"{option} is for pipeline traces; {path} is an op trace (docs/op-trace.md)")
    return load_ops(path)


def load_any_from_store(
    name: str | None = None,
    *,
    store: PathLike | None = None,
    window: int | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job | OpJob:
    """Read a window of a job from a store, by default the newest of the newest job. Raises StoreError."""
    from tracekit.store import Store, default_store

    opened = Store(Path(store) if store is not None else default_store())
    return job_of(opened.load(opened.newest() if name is None else name, window), method)
