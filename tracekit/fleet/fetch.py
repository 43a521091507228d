"""A trace of a study as a file, with the digest of its content.

In: a `StudySource`. Out: paths to read, and the digest. Objects in storage are first copied to a scratch folder,
because every importer reads files.
"""

from __future__ import annotations

import errno
import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.object_storage import fetch
from tracekit.fleet.sources import StudySource, files_of, stamp_of
from tracekit.sources.registry import PARQUET
from tracekit.sources.search import is_endless

_CHUNK = 1 << 20
#: A file that changed less than this before it was read, seconds, can change again without a new modification time.
_SETTLED_S = 2.0


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
    """The content of a source, as files. Raises OSError."""
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
    from tracekit.trace.parquet_file import read_header

    try:
        return path.suffix != PARQUET or read_header(path) is not None
    except FormatError:  # reading will report what is wrong
        return True


def _download(url: str, folder: Path) -> Path:
    path = folder / url.rpartition("/")[2]
    fetch(url, path)
    return path
