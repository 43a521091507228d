"""How the registry opens a source: each reader is imported once a path of its kind is opened.

In: paths, and what the user states about them. Out: a `Job`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base.errors import FormatError
from tracekit.sources.misfits import a_table, is_table
from tracekit.sources.source import ReadOptions
from tracekit.trace.model import TimeUnit

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job
    from tracekit.trace.canonical import Trace


def pipeline(module: str, reader: str) -> Callable[[Sequence[Path], ReadOptions], Job]:
    """Read one path as a pipeline job. `reader`: a function of `module` that returns a `Trace`."""

    def read(paths: Sequence[Path], options: ReadOptions) -> Job:
        from tracekit.analysis.job.pipeline import PipelineJob
        from tracekit.analysis.replay.method import Method
        from tracekit.collectors.importers.formats import one_error

        (path,) = paths
        with one_error(path):
            trace = getattr(import_module(module), reader)(path, layout=options.layout, unit=options.unit)
        return PipelineJob(trace, Method(options.method or Method.TRACEKIT))

    return read


def read_canonical(path: Path, *, layout: Path | None, unit: TimeUnit | None) -> Trace:
    """Read a trace that tracekit wrote. Raises FormatError for a layout, which is in the file."""
    from tracekit.trace.canonical import read_parquet

    if layout is not None:
        raise FormatError(f"{path}: a canonical trace contains its layout; leave out --layout")
    try:
        return read_parquet(path, unit=unit)
    except FormatError:
        if not is_table(path):
            raise
        raise FormatError(f"{path}: {a_table(path)}") from None


def read_published(path: Path, *, layout: Path | None, unit: TimeUnit | None) -> Trace:
    """Read a published trace. Raises FormatError without its layout."""
    from tracekit.collectors.importers.published import read_published as read

    if layout is None:
        raise FormatError(f"{path}: a published trace needs its layout; add --layout meta.yaml")
    return read(path, layout, unit=unit)


def read_ops(paths: Sequence[Path], options: ReadOptions) -> Job:
    """Read an op trace, which takes no options."""
    from tracekit.analysis.job.load import job_of
    from tracekit.trace.op import read_op_trace

    del options
    (path,) = paths
    return job_of(read_op_trace(path))


def read_gpus(paths: Sequence[Path], options: ReadOptions) -> Job:
    """Read files or folders of torch.profiler or Nsight Systems as one job."""
    from tracekit.analysis.job.graph import RecordingJob
    from tracekit.collectors.importers.kineto.reader import read_kineto

    return RecordingJob(read_kineto(list(paths), classes=options.kernel_classes))


def read_post_training(paths: Sequence[Path], options: ReadOptions) -> Job:
    """Read the logs of one run of post-training, which take no options."""
    from tracekit.analysis.job.rl_job import RlJob

    del options
    return RlJob.read(list(paths))
