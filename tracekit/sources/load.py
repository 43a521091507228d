"""Identify paths and open them: the source of a path, the jobs in a folder, and errors for anything else.

In: paths, what a command wants of them, and what the user states about them. Out: the entry of the registry or of a
plug-in, the paths of jobs, a `Job` that is loaded and ready for questions, or an error that names what the path is
and what to type.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.analysis.replay import Method
from tracekit.base.errors import FormatError, SelectionError, StoreError, TraceError, TracekitError, UnsafeFileError
from tracekit.base.limits import MOST_ENTRIES, Search
from tracekit.base.paths import Look, command, elsewhere, object_url, shown
from tracekit.base.plug_ins import PlugIn, plug_ins, tell
from tracekit.base.stderr import say, saying_if_slow
from tracekit.base.text import printable, quoted
from tracekit.sources.registry import (
    FIRST,
    FORMATS,
    GPU_FORMATS,
    LAST,
    OTHER_ENDINGS,
    PARQUET,
    PROFILES,
    STUDY_MARK,
    job_of,
)
from tracekit.sources.source import Content, ReadOptions, Source, one_error
from tracekit.trace import facts
from tracekit.trace.model import TimeUnit, unit_of_time

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job, PathLike
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
    traces, an unknown method, and what is no path.
    """
    if len(paths) == 1 and is_a(Content.STORE, path_given(paths[0])):
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

    `window`: its number, if the job has several; by default the newest. Raises StoreError, and SelectionError for an
    unknown method.
    """
    from tracekit.store import Store, default_store

    jobs = Store(Path(store) if store is not None else default_store())
    return job_of(jobs.load(jobs.newest() if name is None else name, window), method)


def load_trace(
    *paths: PathLike,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
    kernel_classes: Sequence[str] = (),
) -> Job:
    """Read a job as `load` does, but not from a store."""
    files = [path_given(path) for path in paths]
    if not files:
        raise SelectionError("no path given; expected a trace, a folder or a store")
    options = ReadOptions(
        None if layout is None else path_given(layout),
        None if unit is None else unit_of_time(unit),
        None if Method.named(method) is Method.TRACEKIT else str(method),
        tuple(kernel_classes),
    )
    if len(files) > 1:
        source = _source_of_files(files, importer)
    elif importer is not None:
        source = _source_named(importer)
    else:
        source, files = _source_at(files[0], options)
    _refuse(source, files[0], options)
    assert source.read is not None
    return source.read(files, options)


def path_given(path: object) -> Path:
    """The path that a caller means. Raises SelectionError for what is none."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise SelectionError(f"{quoted(path, 80)} is no path; expected one as text or as pathlib.Path")
    name = os.fsdecode(path)
    if not name:
        raise SelectionError("the path is empty; expected a trace, a folder or a store")
    return Path(name)


def _source_named(importer: str) -> Source:
    """The source with this name. Raises FormatError."""
    formats = FORMATS if importer in FORMATS else FORMATS | {source.name: source for source in plugged_in()}
    if importer not in formats:
        raise FormatError(f"unknown format {importer!r}; known: {', '.join(formats)}")
    return formats[importer]


def _source_of_files(files: Sequence[Path], importer: str | None) -> Source:
    """The source of several files of one job: of profilers, or of post-training. Raises SelectionError for others."""
    looks = map(Look, files)
    sources = [with_content(Content.TRACE, look) if importer is None else _source_named(importer) for look in looks]
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


def _source_at(path: Path, options: ReadOptions) -> tuple[Source, list[Path]]:
    """The source at a path, or of the only job in a folder, and the path to read. Raises FormatError for others."""
    look = Look(path)
    source = with_content(Content.TRACE, look)
    if source is None and look.is_folder:
        jobs = jobs_in(path)
        if jobs == [path] and os.access(path, os.R_OK):
            return PROFILES, jobs
        look = Look(only_of(path, jobs))
        source = with_content(Content.TRACE, look)
    if source is not None and source.name != "tracekit":
        return source, [look.path]
    if options.layout is not None and not look.is_folder:
        return FORMATS["published"], [look.path]
    if source is None and (error := wrong_source(look, Content.TRACE)) is not None:
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


def source_of(look: Look) -> Source | None:
    """The source of a path that tracekit can show; None for folders of jobs, and for anything else."""
    return next((entry for entry in _entries(look) if entry.content is not Content.OTHER and entry.sniff(look)), None)


def with_content(wanted: Content, look: Look) -> Source | None:
    """The first source with the wanted content that recognises a path."""
    return next((entry for entry in _entries(look, wanted) if entry.content is wanted and entry.sniff(look)), None)


def is_a(content: Content, path: Path) -> bool:
    """Whether a path holds this, such as a store."""
    return with_content(content, Look(path)) is not None


def _entries(look: Look, wanted: Content = Content.TRACE) -> Iterator[Source]:
    """The entries to try; plug-ins, which read traces only, are looked for only if those before them do not recognise
    the path.
    """
    if object_url(look.path) is not None:
        yield from (entry for entry in FIRST if entry.content is Content.STORE)
        return
    yield from FIRST
    if wanted is Content.TRACE and (look.is_file or look.is_folder):
        yield from plugged_in()
    yield from LAST


def jobs_in(path: Path) -> list[Path]:
    """Return the jobs in a folder that is none itself, by path. Several folders of torch.profiler count as one; their
    reader separates them.

    Jobs in a store count only if there are no others: they were imported from somewhere, most likely from here. Raises
    FormatError for a folder that is too large to be searched.
    """
    from tracekit.store.folder import is_store_folder

    folder = path.absolute()
    if not path.is_dir() or is_store_folder(folder):
        return []
    with saying_if_slow(f"tracekit: {shown(path)}: looking for traces, in up to {MOST_ENTRIES:,} files and folders"):
        jobs = [path / job.relative_to(folder) for job in sorted(jobs_below(folder, Search(path)))]
    stores = {parent for job in jobs for parent in job.parents if is_store_folder(parent)}
    jobs = [job for job in jobs if stores.isdisjoint(job.parents)] or jobs
    return [path] if jobs and all(are_one_job([job]) for job in jobs) else jobs


def only_job(path: Path) -> Path:
    """The path, or the only job in a folder. Raises FormatError for a folder that holds several."""
    return path if is_a(Content.TRACE, path) else only_of(path, jobs_in(path))


def only_of(path: Path, jobs: Sequence[Path]) -> Path:
    """The only one of the jobs in a folder, the path if there is none. Raises FormatError if there are several."""
    if len(jobs) > 1:
        raise FormatError(
            f"{path}: a folder of {len(jobs)} jobs, not one trace; name one, such as `{command('whatif', jobs[0])}`, or"
            f" list them: `{command('store', 'list', path)}`"
        )
    return jobs[0] if jobs else path


def jobs_below(folder: Path, search: Search) -> Iterator[Path]:
    """The jobs in a folder and everything below it: stores by window, folders that are one job as one, files.

    Folders that `search` has seen are not searched again, because links can form loops. Yields a folder or a store that
    cannot be searched as a job: reading it reports what is wrong.
    """
    try:
        yield from _jobs_in(folder, search)
    except (OSError, StoreError):
        yield folder


def _jobs_in(folder: Path, search: Search) -> Iterator[Path]:
    from tracekit.store.folder import is_store_folder

    status = folder.stat()
    if (status.st_dev, status.st_ino) in search.folders:
        return
    search.folders.add((status.st_dev, status.st_ino))
    if is_store_folder(folder):
        yield from list(windows_of(folder))
        return
    if (folder / STUDY_MARK).is_file():
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    search.count(len(entries))
    if any(entry.name.endswith(OTHER_ENDINGS) for entry in entries) and is_a(Content.TRACE, folder):
        yield folder
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or is_endless(path):
            continue
        if entry.is_dir():
            yield from jobs_below(path, search)
        elif entry.name.endswith(PARQUET) or (entry.name.endswith(OTHER_ENDINGS) and _is_trace(path)):
            yield path


def _is_trace(path: Path) -> bool:
    """True if a file is a trace by its first bytes, or if it cannot be read, so that reading reports why."""
    return not os.access(path, os.R_OK) or is_a(Content.TRACE, path)


def windows_of(store: Path) -> Iterator[Path]:
    """The traces of all windows of a store that have not been pruned. Raises StoreError."""
    from tracekit.store import Store, WindowPart
    from tracekit.store.folder import Folder, name_of

    jobs, folder = Store(store), Folder(store)
    for job in jobs.jobs():
        for window in jobs.windows(job.name):
            if WindowPart.OPS in window.files:
                name = name_of(window.job_id, window.number, WindowPart.OPS)
                try:
                    folder.contained.status(name)
                except UnsafeFileError as error:
                    say(f"left out: {error}")
                    continue
                yield store / name


def is_endless(path: Path) -> bool:
    """True for a pipe, a socket or a device, which might block forever."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading will report what is wrong
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def wrong_source(look: Look, wanted: Content) -> FormatError | None:
    """The error for a path that is not `wanted`, with what it is and what to type; None if nothing is known of it.

    Raises FormatError for a folder that is too large to be searched.
    """
    if wanted in (Content.TRACE, Content.DUMPS) and not look.exists:
        return FormatError(f"{shown(look.path)}: {elsewhere(look.path)}")
    if with_content(wanted, look) is not None:
        return None
    source = source_of(look) or with_content(Content.OTHER, look)
    words = _folder(look, wanted) if source is None else source.instead(look, wanted)
    return None if words is None else FormatError(f"{shown(look.path)}: {words}")


def _folder(look: Look, wanted: Content) -> str | None:
    """A folder that is no source itself; None for anything else of which nothing is known, and what cannot be read."""
    if not look.is_folder or not os.access(look.path, os.R_OK):
        return None
    if jobs := jobs_in(look.path):
        study = f"study all: `{command('fleet', 'run', look.path, '--out', 'STUDY')}`"
        return f"a folder of traces, not {wanted}; name one: `{command('whatif', jobs[0])}`, or {study}"
    if wanted is not Content.TRACE:
        return None
    return (
        "not a folder that tracekit reads; one of `tracekit collect --segments` has a run.json, one of the NCCL"
        " Inspector *.log files"
    )


class _Importer:
    """An importer of another distribution."""

    def __init__(self, plug_in: PlugIn) -> None:
        self._plug_in, self._failed = plug_in, False

    def sniff(self, look: Look) -> bool:
        """Whether it recognises the path; not called again once it has failed. A pipe would block it."""
        if self._failed or not (look.is_file or look.is_folder):
            return False
        try:
            with self._plug_in.guarded(TraceError, passed=(OSError,)):
                return bool(self._plug_in.value.sniff(look.path))
        except OSError:
            return False
        except TraceError as error:
            self._failed = True
            tell([f"{error} at {quoted(str(look.path))}, and recognises no file from now on"])
            return False

    def read(self, paths: Sequence[Path], options: ReadOptions) -> Job:
        """The job of the trace that it reads. The importer gets `layout` and `unit` only if they are given."""
        from tracekit.trace.canonical import Trace
        from tracekit.trace.op import OpTrace

        (path,) = paths
        stated = {name: value for name, value in options.stated.items() if name in {"layout", "unit"}}
        guarded = self._plug_in.guarded(lambda why: TraceError(f"{path}: {why}"), passed=(OSError, TracekitError))
        with one_error(path), guarded:
            trace = self._plug_in.value.read(path, **stated)
            if not isinstance(trace, Trace | OpTrace):
                raise TypeError(f"it read a {type(trace).__name__}; expected a tracekit.Trace or a tracekit.OpTrace")
        return job_of(trace, options.method or "tracekit")


@cache
def plugged_in() -> tuple[Source, ...]:
    """The sources of plug-ins; those that are left out are named on stderr."""
    importers, problems = plug_ins("importers", frozenset(FORMATS), _is_importer)
    tell(problems)
    return tuple(_entry(name, plug_in) for name, plug_in in importers.items())


def _entry(name: str, plug_in: PlugIn) -> Source:
    importer = _Importer(plug_in)
    return Source(
        name,
        "a recording",
        importer.sniff,
        content=Content.TRACE,
        read=importer.read,
        takes=frozenset({"layout", "unit", "method"}),
        description=printable(plug_in.value.description),
        page="extending.md",
        kinds=(facts.TABLE,),
    )


def _is_importer(value: object) -> bool:
    described = isinstance(getattr(value, "description", None), str)
    return described and all(callable(getattr(value, name, None)) for name in ("sniff", "read"))
