"""Find the traces of a study: files, folders, globs, stores, prefixes of object storage.

In: the names that the user gave. Out: a `Source` for each job found there. Reads only names, sizes and times, and the
first bytes of files whose names do not identify them.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import SelectionError, StoreError, UnsafeFileError
from tracekit.base.object_storage import ADDRESSES, objects_below, said, shown
from tracekit.base.searches import Search
from tracekit.base.stderr import say
from tracekit.base.text import encodable, short

PARQUET = ".parquet"
#: Endings of files other than Parquet that can be traces; their first bytes decide.
_OTHERS = (".json", ".json.gz", ".sqlite", ".log", ".txt", ".jsonl")
#: Layouts of published traces, next to the trace.
_LAYOUTS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Source:
    """One trace. `url`: an absolute path or an address in object storage as text, with escapes if it is not UTF-8.

    `stamp`: changes whenever the content may have changed; "" if that cannot be detected. `bytes`: its size, as far as
    known. `layout`: the YAML file next to it. `path`: its path for the system; "" in object storage.
    """

    url: str
    stamp: str
    bytes: int
    layout: str | None = None
    path: str = ""

    @property
    def remote(self) -> bool:
        """True if it is in object storage."""
        return self.url.startswith(ADDRESSES)


def find_sources(named: Iterable[str], *, bounded: bool = False) -> list[Source]:
    """Return all jobs in the named places, once each, by url. Raises SelectionError for a name without any; if
    `bounded`, FormatError for a folder that is too large to be searched.
    """
    found: dict[str, Source] = {}
    for text in named:
        there = list(_expand(text, Search(Path(text), bounded=bounded)))
        for source in there:
            found.setdefault(source.url, source)
        if not there:
            raise SelectionError(
                f"{short(text)}: no trace found; expected trace files, a folder, a glob, a store or s3://, gs://, az://"
            )
    return [found[url] for url in sorted(found)]


def stamp_of(path: Path) -> str:
    """A stamp that changes with the content of a file, or of all files of a folder. Raises OSError."""
    found = [file.stat() for file in files_of(path)]
    return "|".join(f"{one.st_size}:{one.st_mtime_ns}:{one.st_ctime_ns}:{one.st_ino}" for one in found)


def files_of(path: Path) -> list[Path]:
    """The file, or all files below a folder, by name. Raises OSError if a folder cannot be read."""
    if not path.is_dir():
        return [path]

    def fail(error: OSError) -> None:
        raise error

    found = sorted(Path(root) / name for root, _, names in os.walk(path, onerror=fail) for name in names)
    return [file for file in found if not is_endless(file)]


def is_endless(path: Path) -> bool:
    """True for a pipe, a socket or a device, which might block forever."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading will report what is wrong
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _expand(text: str, search: Search) -> Iterator[Source]:
    if text.startswith(ADDRESSES):
        yield from _in_object_storage(text)
        return
    path = Path(text)
    if path.is_dir():
        yield from _in_folder(path.absolute(), search)
    elif path.exists():
        yield _local(path.absolute())
    elif glob.has_magic(text):
        pattern = path.absolute()
        for match in sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
            if match.is_dir():
                yield from _in_folder(match, search)
            elif match.suffix not in _LAYOUTS:
                yield _local(match.absolute())
    else:
        raise SelectionError(
            f"{short(text)}: not found; expected trace files, a folder, a glob, a store or s3://, gs://, az://"
        )


def _local(path: Path) -> Source:
    try:
        size = sum(file.stat().st_size for file in files_of(path))
        stamp = stamp_of(path)
    except OSError:  # reading will report what is wrong
        size, stamp = 0, ""
    layout = None if path.is_dir() else _layout_beside(path)
    return Source(encodable(str(path)), stamp, size, layout, str(path))


def _layout_beside(path: Path) -> str | None:
    """The YAML file for a Parquet file: the one with its name, or the only one called meta."""
    if path.suffix != PARQUET:
        return None
    names = [path.with_suffix(suffix) for suffix in _LAYOUTS] + [path.with_name(f"meta{one}") for one in _LAYOUTS]
    return next((str(name) for name in names if name.exists()), None)


def _in_folder(folder: Path, search: Search) -> Iterator[Source]:
    """The jobs in a folder and everything below it: stores by window, folders that are one job as one, files.

    Folders that `search` has seen are not searched again, because links can form loops.
    """
    try:
        yield from _jobs_in(folder, search)
    except OSError:
        yield _unreadable(folder)


def _unreadable(folder: Path) -> Source:
    """A folder that cannot be searched: reading it as a job will report what is wrong."""
    return Source(encodable(str(folder)), "", 0, path=str(folder))


def _jobs_in(folder: Path, search: Search) -> Iterator[Source]:
    from tracekit.store.folder import is_store_folder

    found = folder.stat()
    if (found.st_dev, found.st_ino) in search.folders:
        return
    search.folders.add((found.st_dev, found.st_ino))
    if is_store_folder(folder):
        try:
            windows = [_local(path) for path in _ops_of(folder)]
        except StoreError:
            windows = [_unreadable(folder)]
        yield from windows
        return
    if is_study(folder):
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    search.count(len(entries))
    shown = [entry for entry in entries if not entry.name.startswith(".") and not is_endless(Path(entry.path))]
    others = [entry for entry in shown if entry.name.endswith(_OTHERS)]
    if others and _is_one_job(folder, [Path(entry.path) for entry in others]):
        yield _local(folder)
        return
    for entry in shown:
        path = Path(entry.path)
        if entry.is_dir():
            yield from _in_folder(path, search)
        elif entry.name.endswith(PARQUET) or (entry.name.endswith(_OTHERS) and _is_trace(path)):
            yield _local(path)


def _ops_of(store: Path) -> Iterator[Path]:
    """The traces of all windows of a store that have not been pruned."""
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


def is_study(folder: Path) -> bool:
    """True if a folder is a study, whose tables are not traces."""
    return (folder / MARK).is_file()


#: The files that mark a study and a store.
MARK, STORE_MARK = "tracekit-study", "tracekit-store"


def _is_one_job(folder: Path, files: list[Path]) -> bool:
    """True if an importer reads the folder as one job: a recording, the files of a profiler, or records of tracekit.rl
    and nothing else that can be a trace.
    """
    from tracekit.collectors.importers.kineto.sniff import looks_like_kineto
    from tracekit.collectors.importers.registry import is_known
    from tracekit.collectors.importers.rl.reader import is_record_of_rl

    if is_known(folder) or any(looks_like_kineto(file) for file in files):
        return True
    return all(map(is_record_of_rl, files)) and not any(folder.glob(f"*{PARQUET}"))


def _is_trace(path: Path) -> bool:
    """True if an importer recognises its first bytes, or if it cannot be read, so that reading reports why."""
    from tracekit.collectors.importers.registry import is_known
    from tracekit.collectors.importers.rl.reader import looks_like_rl

    return not os.access(path, os.R_OK) or is_known(path) or looks_like_rl(path)


# ---- object storage


def _in_object_storage(prefix: str) -> Iterator[Source]:
    """Every object below a prefix that can be a trace, one job each; for stores, the windows in their catalogue."""
    try:
        found = objects_below(prefix)
    except OSError as error:
        raise SelectionError(f"{short(prefix)}: cannot be listed: {said(prefix, error)}") from None
    stores = [url.removesuffix(STORE_MARK) for url in found if url.rpartition("/")[2] == STORE_MARK]
    windows = {shown(path) for store in stores for path in _ops_of(Path(store))}
    for url, info in found.items():
        if url in windows or (url.endswith((PARQUET, *_OTHERS)) and not url.startswith(tuple(stores))):
            stem, folder = url.removesuffix(PARQUET), url.rpartition("/")[0]
            beside = [f"{base}{suffix}" for base in (stem, f"{folder}/meta") for suffix in _LAYOUTS]
            layout = next((name for name in beside if name in found), None)
            yield Source(url, f"{info.size}:{info.mtime_ns}", info.size or 0, layout)
