"""Find the traces of a study: files, folders, globs, stores, prefixes of object storage.

In: the names that the user gave. Out: a `StudySource` for each job found there. Reads only names, sizes and times, and
the first bytes of files whose names do not identify them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import SelectionError
from tracekit.base.object_storage import ADDRESSES, objects_below, said, shown
from tracekit.base.searches import Search
from tracekit.base.text import encodable, short
from tracekit.sources.registry import OTHER_ENDINGS, PARQUET
from tracekit.sources.search import is_endless, jobs_below, windows_of

#: Layouts of published traces, next to the trace.
_LAYOUTS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class StudySource:
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


def find_sources(named: Iterable[str]) -> list[StudySource]:
    """Return all jobs in the named places, once each, by url. Raises SelectionError for a name without any."""
    sources: dict[str, StudySource] = {}
    for text in named:
        in_place = list(_expand(text, Search(Path(text), bounded=False)))
        for source in in_place:
            sources.setdefault(source.url, source)
        if not in_place:
            raise SelectionError(
                f"{short(text)}: no trace found; expected trace files, a folder, a glob, a store or s3://, gs://, az://"
            )
    return [sources[url] for url in sorted(sources)]


def stamp_of(path: Path) -> str:
    """A stamp that changes with the content of a file, or of all files of a folder. Raises OSError."""
    states = [file.stat() for file in files_of(path)]
    return "|".join(f"{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}:{state.st_ino}" for state in states)


def files_of(path: Path) -> list[Path]:
    """The file, or all files below a folder, by name. Raises OSError if a folder cannot be read."""
    if not path.is_dir():
        return [path]

    def fail(error: OSError) -> None:
        raise error

    files = sorted(Path(root) / name for root, _, names in os.walk(path, onerror=fail) for name in names)
    return [file for file in files if not is_endless(file)]


def _expand(text: str, search: Search) -> Iterator[StudySource]:
    if text.startswith(ADDRESSES):
        yield from _in_object_storage(text)
        return
    path = Path(text)
    if path.is_dir():
        yield from map(_local, jobs_below(path.absolute(), search))
    elif path.exists():
        yield _local(path.absolute())
    elif glob.has_magic(text):
        pattern = path.absolute()
        for match in sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
            if match.is_dir():
                yield from map(_local, jobs_below(match, search))
            elif match.suffix not in _LAYOUTS:
                yield _local(match.absolute())
    else:
        raise SelectionError(
            f"{short(text)}: not found; expected trace files, a folder, a glob, a store or s3://, gs://, az://"
        )


def _local(path: Path) -> StudySource:
    try:
        size = sum(file.stat().st_size for file in files_of(path))
        stamp = stamp_of(path)
    except OSError:  # reading will report what is wrong
        size, stamp = 0, ""
    layout = None if path.is_dir() else _layout_beside(path)
    return StudySource(encodable(str(path)), stamp, size, layout, str(path))


def _layout_beside(path: Path) -> str | None:
    """The YAML file for a Parquet file: the one with its name, or the only one called meta."""
    if path.suffix != PARQUET:
        return None
    names = [path.with_suffix(suffix) for suffix in _LAYOUTS] + [path.with_name(f"meta{suffix}") for suffix in _LAYOUTS]
    return next((str(name) for name in names if name.exists()), None)


# ---- object storage


def _in_object_storage(prefix: str) -> Iterator[StudySource]:
    """Every object below a prefix that can be a trace, one job each; for stores, the windows in their catalogue."""
    try:
        objects = objects_below(prefix)
    except OSError as error:
        raise SelectionError(f"{short(prefix)}: cannot be listed: {said(prefix, error)}") from None
    from tracekit.store.folder import MARK as STORE_MARK

    stores = [url.removesuffix(STORE_MARK) for url in objects if url.rpartition("/")[2] == STORE_MARK]
    windows = {shown(path) for store in stores for path in windows_of(Path(store))}
    for url, info in objects.items():
        if url in windows or (url.endswith((PARQUET, *OTHER_ENDINGS)) and not url.startswith(tuple(stores))):
            stem, folder = url.removesuffix(PARQUET), url.rpartition("/")[0]
            beside = [f"{base}{suffix}" for base in (stem, f"{folder}/meta") for suffix in _LAYOUTS]
            layout = next((name for name in beside if name in objects), None)
            yield StudySource(url, f"{info.size}:{info.mtime_ns}", info.size or 0, layout)
