"""Jobs of traces, and of stores.

In: a trace, or the name of a job in a store. Out: a `Job`. `tracekit/sources/load.py` opens paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.job.job import Job, PathLike
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay import Method
from tracekit.base.errors import SelectionError
from tracekit.base.text import short
from tracekit.trace.model import TraceKind

if TYPE_CHECKING:
    from tracekit.analysis.job.graph import GraphJob
    from tracekit.analysis.job.rl_job import RlJob
    from tracekit.store.catalogue_rows import AnyTrace


def job_of(trace: AnyTrace, method: Method | str = Method.TRACEKIT) -> PipelineJob | GraphJob | RlJob:
    """Return the job of a trace. `method` as in `load`. Raises SelectionError for an op trace with another method."""
    if trace.kind is TraceKind.OPS:
        if Method(method) is not Method.TRACEKIT:
            raise SelectionError(f"--method is for pipeline traces; {short(trace.name)} is an op trace: leave it out")
        from tracekit.trace.post_training import POST_TRAINING

        if POST_TRAINING in trace.metadata:
            from tracekit.analysis.job.rl_job import RlJob

            return RlJob(trace)
        from tracekit.analysis.job.graph import GraphJob

        return GraphJob(trace)
    return PipelineJob(trace, Method(method))


def load_from_store(
    name: str | None = None,
    *,
    store: PathLike | None = None,
    window: int | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job:
    """Read a job from a store, by default the newest one in the default store. `method` as in `load`.

    `window`: its number, if the job has several; by default the newest. Raises StoreError, ValueError for an unknown
    method.
    """
    from tracekit.store import Store, default_store

    opened = Store(Path(store) if store is not None else default_store())
    return job_of(opened.load(opened.newest() if name is None else name, window), method)
