"""Jobs of any kind, by the type of their trace: pipelines (`Job`), GPU recordings (`GpuJob`), or any shape (`OpJob`).

In: a file or a store. Out: the job, loaded and ready for questions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.replay.method import Method
from tracekit.base.errors import SelectionError
from tracekit.job.pipeline import Job, PathLike, load
from tracekit.trace.op import OpTrace, is_op_trace

if TYPE_CHECKING:
    from tracekit.job.gpu import GpuJob
    from tracekit.job.op import OpJob
    from tracekit.store.window import AnyTrace


def job_of(trace: AnyTrace, method: Method | str = Method.TRACEKIT) -> Job | OpJob:
    """The job of a trace. `method` as in `load`; op traces have only one method."""
    if not isinstance(trace, OpTrace):
        return Job(trace, Method(method))
    from tracekit.job.op import OpJob

    return OpJob(trace)


def load_any(
    path: Path,
    *,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job | OpJob | GpuJob:
    """Read a trace of any kind. Parameters and errors as for `load`; SelectionError for options of other traces."""
    of_gpus = importer is None and are_gpu_traces((path,))
    if importer is not None or not (of_gpus or is_op_trace(path)):
        return load(path, layout=layout, importer=importer, unit=unit, method=method)
    what = "is a torch.profiler trace (docs/kineto.md)" if of_gpus else "is an op trace (docs/op-trace.md)"
    for option, value in (("--layout", layout), ("--unit", unit)):
        if value is not None:
            raise SelectionError(f"{option} is for pipeline traces; {path} {what}: leave out {option}")
    if of_gpus:
        from tracekit.job.gpu import load_gpu

        return load_gpu(path)
    from tracekit.job.op import load_ops

    return load_ops(path)


def are_gpu_traces(paths: Sequence[Path]) -> bool:
    """Whether these are torch.profiler traces: no other importer recognises any of them, and one looks like it."""
    from tracekit.collectors.importers.kineto.sniff import looks_like_kineto

    if not any(map(looks_like_kineto, paths)):
        return False
    from tracekit.collectors.importers.registry import is_known

    return not any(map(is_known, paths))


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
    wanted = opened.newest() if name is None else name
    job = job_of(opened.load(wanted, window), method)
    if isinstance(job, Job):
        return job
    stored = json.loads(opened.report(wanted, window) or "{}").get("verdict")
    return replace(job, verdict=stored["sentence"] if isinstance(stored, dict) else None)
