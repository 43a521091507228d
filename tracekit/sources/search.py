"""Find the jobs in a folder: windows of stores, folders that are one job, files.

In: a folder. Out: the paths of its jobs. Reads only names, and the first bytes of files whose names do not identify
them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracekit.base.command_line import command
from tracekit.base.errors import FormatError, StoreError, UnsafeFileError
from tracekit.base.look import Look
from tracekit.base.searches import Search
from tracekit.base.stderr import say
from tracekit.sources.recognise import with_content
from tracekit.sources.registry import GPU_FORMATS, OTHER_ENDINGS, PARQUET, STUDY_MARK
from tracekit.sources.source import Content


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
    jobs = [path / job.relative_to(folder) for job in sorted(jobs_below(folder, Search(path)))]
    stores = {parent for job in jobs for parent in job.parents if is_store_folder(parent)}
    jobs = [job for job in jobs if stores.isdisjoint(job.parents)] or jobs
    return [path] if jobs and all(map(_is_profile, jobs)) else jobs


def _is_profile(path: Path) -> bool:
    source = with_content(Content.TRACE, Look(path))
    return source is not None and source.name in GPU_FORMATS


def only_job(path: Path) -> Path:
    """The path, or the only job in a folder. Raises FormatError for a folder that holds several."""
    return path if with_content(Content.TRACE, Look(path)) is not None else only_of(path, jobs_in(path))


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
    look = Look(folder)
    if any(entry.name.endswith(OTHER_ENDINGS) for entry in entries) and _is_one_job(look):
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


def _is_one_job(look: Look) -> bool:
    return with_content(Content.TRACE, look) is not None


def _is_trace(path: Path) -> bool:
    """True if a file is a trace by its first bytes, or if it cannot be read, so that reading reports why."""
    return not os.access(path, os.R_OK) or _is_one_job(Look(path))


def windows_of(store: Path) -> Iterator[Path]:
    """The traces of all windows of a store that have not been pruned. Raises StoreError."""
    from tracekit.store import Store, WindowPart
    from tracekit.store.folder import Folder, name_of

    opened, folder = Store(store), Folder(store)
    for job in opened.jobs():
        for window in opened.windows(job.name):
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
