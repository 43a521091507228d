"""Jobs of any source: pipeline traces, op traces, recordings of torch.profiler, stores.

In: a path. Out: a `Job`, loaded and ready for questions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.replay.method import Method
from tracekit.base.errors import SelectionError, StoreError
from tracekit.base.text import short
from tracekit.job.job import Job, PathLike
from tracekit.job.pipeline import PipelineJob
from tracekit.trace.model import TraceKind
from tracekit.trace.op import is_op_trace, read_op_trace
from tracekit.trace.rl import POST_TRAINING

if TYPE_CHECKING:
    from tracekit.job.graph import GraphJob
    from tracekit.job.rl import RlJob
    from tracekit.store.window import AnyTrace
    from tracekit.trace.canonical import Trace
    from tracekit.trace.model import Unit


def load(
    *paths: PathLike,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
    kernel_classes: Sequence[str] = (),
) -> Job:
    """Read a job: canonical Parquet, a published trace with its YAML `layout` file, an op trace, files or a folder of
    torch.profiler, logs of post-training, a store (its newest job), or any format that an importer reads.

    `layout` also gives the sizes of collected segments if the ranks do not.

    `importer`: its name (`tracekit import --format` lists them), by default the first that recognises the path. `unit`:
    of the times in a canonical or published trace, one of s, ms, us, ns; by default seconds, which must be plausible.
    `method`: "published" analyses by the published rules only. `kernel_classes`: patterns of kernels in torch.profiler
    traces, each `class=regular expression` or the path of a YAML file with such patterns. Raises FormatError,
    TraceError, LayoutError or StoreError, each naming file, place and next step; SelectionError for options of other
    traces; ValueError for an unknown method.
    """
    if len(paths) == 1 and is_store(Path(os.fsdecode(paths[0]))):
        return load_from_store(store=paths[0], method=method)
    return load_trace(*paths, layout=layout, importer=importer, unit=unit, method=method, kernel_classes=kernel_classes)


def load_trace(
    *paths: PathLike,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
    kernel_classes: Sequence[str] = (),
) -> Job:
    """Read a job as `load` does, but not from a store."""
    files = [Path(os.fsdecode(path)) for path in paths]
    rules = None if Method(method) is Method.TRACEKIT else method
    if not files:
        raise SelectionError("no path given; expected a trace, a folder or a store")
    if importer is None and are_gpu_traces(files):
        _refuse("is a torch.profiler trace (docs/kineto.md)", files[0], layout=layout, unit=unit, method=rules)
        from tracekit.collectors.importers.kineto.reader import read_kineto
        from tracekit.job.graph import RecordingJob

        return RecordingJob(read_kineto(files, classes=kernel_classes))
    if kernel_classes:
        raise SelectionError("--kernel-class is for traces of torch.profiler")
    if importer is None and all(map(_is_rl, files)):
        _refuse("is a run of post-training (docs/rl.md)", files[0], layout=layout, unit=unit, method=rules)
        from tracekit.job.rl import RlJob

        return RlJob.read(files)
    if len(files) > 1:
        raise SelectionError(f"{len(files)} traces: only files of torch.profiler can form one job together")
    (file,) = files
    if importer is None and is_op_trace(file):
        _refuse("is an op trace (docs/op-trace.md)", file, layout=layout, unit=unit, method=rules)
        return job_of(read_op_trace(file))
    from tracekit.trace.model import unit_of_time

    known = None if unit is None else unit_of_time(unit)
    return PipelineJob(read_trace(file, layout, importer, known), Method(method))


def is_store(path: Path) -> bool:
    """True if there is a store at a path, or at an address in object storage."""
    from tracekit.store import Store

    try:
        return not path.is_file() and Store(path).is_store()
    except StoreError:
        return False


def _refuse(what: str, file: Path, **options: object) -> None:
    """Raise SelectionError for an option that is only for pipeline traces."""
    for name, value in options.items():
        if value is not None:
            raise SelectionError(f"--{name} is for pipeline traces; {file} {what}: leave out --{name}")


def read_trace(
    file: Path,
    layout: PathLike | None,
    importer: str | None = None,
    unit: Unit | None = None,
    steps: Sequence[int] | None = None,
) -> Trace:
    """The trace in `file`, by whatever reads it. `steps`: only these, of a Parquet file."""
    if importer is None and layout is None and file.suffix == ".parquet":  # avoids importing every importer
        from tracekit.trace.canonical import read_parquet

        return read_parquet(file, unit=unit, steps=steps)
    if importer is None and layout is not None and not file.is_dir():
        from tracekit.collectors.importers.published import read_published

        return read_published(file, layout, unit=unit, steps=steps)
    from tracekit.collectors.importers.registry import read_any

    return read_any(file, name=importer, layout=None if layout is None else Path(layout), unit=unit)


def _is_rl(path: Path) -> bool:
    if path.suffix == ".parquet":  # avoids importing the reader
        return False
    from tracekit.collectors.importers.rl.reader import looks_like_rl

    return looks_like_rl(path)


def job_of(trace: AnyTrace, method: Method | str = Method.TRACEKIT) -> PipelineJob | GraphJob | RlJob:
    """Return the job of a trace. `method` as in `load`. Raises SelectionError for an op trace with another method."""
    if trace.kind is TraceKind.OPS:
        if Method(method) is not Method.TRACEKIT:
            raise SelectionError(f"--method is for pipeline traces; {short(trace.name)} is an op trace: leave it out")
        if POST_TRAINING in trace.metadata:
            from tracekit.job.rl import RlJob

            return RlJob(trace)
        from tracekit.job.graph import GraphJob

        return GraphJob(trace)
    return PipelineJob(trace, Method(method))


def are_gpu_traces(paths: Sequence[Path]) -> bool:
    """Whether these are torch.profiler traces: no other importer recognises any of them, and one looks like it."""
    from tracekit.collectors.importers.kineto.sniff import looks_like_kineto

    if not any(map(looks_like_kineto, paths)):
        return False
    from tracekit.collectors.importers.registry import is_known

    return not any(map(is_known, paths))


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
