"""Open the job at a path, whatever the path is.

In: paths, and what the user states about them. Out: a `Job`, loaded and ready for questions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.job.job import Job, PathLike
from tracekit.analysis.replay import Method
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.paths import Look
from tracekit.sources.recognise import is_a, with_content
from tracekit.sources.registry import FORMATS, GPU_FORMATS, PROFILES, job_of
from tracekit.sources.source import Content, ReadOptions, Source
from tracekit.trace.model import TimeUnit, unit_of_time

if TYPE_CHECKING:
    from tracekit.trace.canonical import Trace


def load(
    *paths: PathLike,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
    kernel_classes: Sequence[str] = (),
) -> Job:
    """Read a job: canonical Parquet, a published trace with its YAML `layout` file, an op trace, files or a folder of
    torch.profiler, logs of post-training, a folder with one of these, a store (its newest job), or any format that an
    importer reads.

    `layout` also gives the sizes of collected segments if the ranks do not.

    `importer`: its name (`tracekit import --format` lists them), by default the first that recognises the path. `unit`:
    of the times in a canonical or published trace, one of s, ms, us, ns; by default seconds, which must be plausible.
    `method`: "published" analyses by the published rules only. `kernel_classes`: patterns of kernels in torch.profiler
    traces, each `class=regular expression` or the path of a YAML file with such patterns. Raises FormatError,
    TraceError, LayoutError or StoreError, each naming file, place and next step; SelectionError for options of other
    traces; ValueError for an unknown method.
    """
    if len(paths) == 1 and is_a(Content.STORE, Path(os.fsdecode(paths[0]))):
        return load_from_store(store=paths[0], method=method)
    return load_trace(*paths, layout=layout, importer=importer, unit=unit, method=method, kernel_classes=kernel_classes)


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
    if not files:
        raise SelectionError("no path given; expected a trace, a folder or a store")
    options = ReadOptions(
        None if layout is None else Path(os.fsdecode(layout)),
        None if unit is None else unit_of_time(unit),
        None if Method(method) is Method.TRACEKIT else str(method),
        tuple(kernel_classes),
    )
    if len(files) > 1:
        source = _together(files, importer)
    elif importer is not None:
        source = _named(importer)
    else:
        source, files = _one(files[0], options)
    _refuse(source, files[0], options)
    assert source.read is not None
    return source.read(files, options)


def _named(importer: str) -> Source:
    """The source with this name. Raises FormatError."""
    from tracekit.sources.recognise import plugged_in

    formats = FORMATS if importer in FORMATS else FORMATS | {source.name: source for source in plugged_in()}
    if importer not in formats:
        raise FormatError(f"unknown format {importer!r}; known: {', '.join(formats)}")
    return formats[importer]


def _together(files: Sequence[Path], importer: str | None) -> Source:
    """The source of several files of one job: of profilers, or of post-training. Raises SelectionError for others."""
    looks = map(Look, files)
    sources = [with_content(Content.TRACE, look) if importer is None else _named(importer) for look in looks]
    formats = {source.name: source for source in sources if source is not None}
    if formats and formats.keys() <= GPU_FORMATS:
        return next(iter(formats.values()))
    if formats.keys() == {"post-training"} and None not in sources:
        return formats["post-training"]
    raise SelectionError(f"{len(files)} traces: only files of torch.profiler can form one job together")


def are_one_job(paths: Sequence[Path]) -> bool:
    """Whether files are those of one job: traces of torch.profiler or Nsight Systems, of one rank each."""
    sources = [with_content(Content.TRACE, Look(path)) for path in paths]
    names = {source.name for source in sources if source is not None}
    return bool(names) and names <= GPU_FORMATS


def _one(path: Path, options: ReadOptions) -> tuple[Source, list[Path]]:
    """The source at a path, or of the only job in a folder, and the path to read. Raises FormatError for others."""
    look = Look(path)
    source = with_content(Content.TRACE, look)
    if source is None and look.is_folder:
        from tracekit.sources.recognise import jobs_in, only_of

        jobs = jobs_in(path)
        if jobs == [path] and os.access(path, os.R_OK):
            return PROFILES, jobs
        look = Look(only_of(path, jobs))
        source = with_content(Content.TRACE, look)
    if source is not None and source.name != "tracekit":
        return source, [look.path]
    if options.layout is not None and not look.is_folder:
        return FORMATS["published"], [look.path]
    if source is None:
        from tracekit.sources.recognise import wrong_source

        if (error := wrong_source(look, Content.TRACE)) is not None:
            raise error
    return FORMATS["tracekit"], [look.path]  # most paths are meant to be a trace: its reader reports what is wrong


def _refuse(source: Source, path: Path, options: ReadOptions) -> None:
    """Raise SelectionError for an option that the source does not take."""
    for name in options.stated.keys() - source.takes:
        if name == "kernel-class":
            raise SelectionError("--kernel-class is for traces of torch.profiler")
        raise SelectionError(
            f"--{name} is for pipeline traces; {path} is {source.title} (docs/{source.page}): leave out --{name}"
        )


def read_trace(
    path: Path, layout: PathLike | None, unit: TimeUnit | None = None, steps: Sequence[int] | None = None
) -> Trace:
    """The pipeline trace in a Parquet file. `steps`: only these."""
    if layout is not None:
        from tracekit.collectors.importers.published import read_published

        return read_published(path, layout, unit=unit, steps=steps)
    from tracekit.trace.canonical import read_parquet

    return read_parquet(path, unit=unit, steps=steps)
