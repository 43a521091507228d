"""The traces of a study: find them by the names that the user gave (files, folders, globs, stores, prefixes of object
storage), and read one as a file with the digest of its content.

Finding reads only names, sizes and times, and the first bytes of files whose names do not identify them. Objects in
storage are copied to a scratch folder before they are read, because every importer reads files.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import SelectionError
from tracekit.base.limits import Search
from tracekit.base.paths import ADDRESSES, fetch, objects_below, said, shown
from tracekit.base.text import encodable, short
from tracekit.sources.load import is_endless, jobs_below, windows_of
from tracekit.sources.registry import OTHER_ENDINGS, PARQUET

#: Layouts of published traces, next to the trace.
_LAYOUTS = (".yaml", ".yml")
_CHUNK = 1 << 20
#: A file that changed less than this before it was read, seconds, can change again without a new modification time.
_SETTLED_S = 2.0


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


def find_sources(arguments: Iterable[str]) -> list[StudySource]:
    """Return all jobs in the named places, once each, by url. Raises SelectionError for a name without any.

    Reads only names, sizes and times, and the first bytes of files whose names do not identify them.
    """
    sources: dict[str, StudySource] = {}
    for text in arguments:
        matches = list(_expand(text, Search(Path(text), bounded=False)))
        for source in matches:
            sources.setdefault(source.url, source)
        if not matches:
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


@dataclass(frozen=True, slots=True)
class Fetched:
    """A trace as a file or folder. `layout`: the YAML file that it needs, None if it needs none.

    `stamp`: of the source before it was read. `settled`: the same stamp implies the same content.
    """

    path: Path
    layout: Path | None
    digest: str
    stamp: str
    settled: bool

    def changed(self, source: StudySource) -> bool:
        """True if the source has changed since. Raises OSError if it is gone."""
        return not source.remote and stamp_of(self.path) != self.stamp


@contextmanager
def fetched(source: StudySource) -> Iterator[Fetched]:
    """The content of a source, as files. Raises OSError.

    Objects in storage are first copied to a scratch folder, because every importer reads files.
    """
    if not source.remote:
        path = Path(source.path)
        if is_endless(path):
            raise OSError(errno.EINVAL, "a pipe, a socket or a device; expected a file")
        stamp = stamp_of(path)
        layout = None if source.layout is None or _has_header(path) else Path(source.layout)
        yield Fetched(path, layout, digest_of(path, layout), stamp, settled=not _is_fresh(path))
        return
    with tempfile.TemporaryDirectory(prefix="tracekit-fleet-") as scratch:
        path = _download(source.url, Path(scratch))
        layout = None
        if source.layout is not None and not _has_header(path):
            layout = _download(source.layout, Path(scratch))
        yield Fetched(path, layout, digest_of(path, layout), source.stamp, settled=True)


def digest_of(path: Path, layout: Path | None = None) -> str:
    """Digest of a trace's content, 32 hexadecimal digits: covers the names in a folder, not the name of a file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in [*files_of(path), *([] if layout is None else [layout])]:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode("utf-8", "surrogateescape") + b"\0")
        with open(file, "rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _is_fresh(path: Path) -> bool:
    return any(time.time() - file.stat().st_ctime < _SETTLED_S for file in files_of(path))


def _has_header(path: Path) -> bool:
    """True if a Parquet file contains its layout; also for other files, which take no layout."""
    from tracekit.base.errors import FormatError
    from tracekit.trace.canonical import read_header

    try:
        return read_header(path) is not None
    except FormatError:  # reading will report what is wrong
        return True


def _download(url: str, folder: Path) -> Path:
    path = folder / url.rpartition("/")[2]
    fetch(url, path)
    return path
