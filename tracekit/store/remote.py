"""Stores in object storage: store folders that somebody copied there, read only.

In: an address such as s3://bucket/store. Out: the same catalogue, traces and findings as of the folder. The catalogue
is kept as a file of this process as long as it is current; files of windows exist only while they are read.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base import object_storage
from tracekit.base.errors import StoreError
from tracekit.store.folder import CATALOGUE, MARK, FileGoneError, Folder, open_catalogue
from tracekit.store.hangs import HANGS, StoredHang, read_hangs
from tracekit.store.window import StoredWindow, WindowPart

if TYPE_CHECKING:
    from tracekit.store.catalogue import Catalogue

#: Assume that the catalogue is unchanged for this long, seconds: a page reads it several times.
LOOKED_AT_EVERY_S = 1.0
#: How long to retry fetching a catalogue that is replaced meanwhile, seconds.
_FETCHING_S = 60.0


@dataclass(frozen=True, slots=True)
class Remote:
    """The store at the address `url`."""

    url: str

    def exists(self) -> bool:
        """Whether there is a store. Raises StoreError if that cannot be determined."""
        try:
            with _errors(self.url):
                object_storage.tag(f"{self.url}/{MARK}")
        except FileNotFoundError:
            return False
        return True

    def missing(self) -> StoreError:
        """The error for a missing store; names the bucket if that is what is missing."""
        bucket, _, key = self.url.partition("://")[2].partition("/")
        with suppress(OSError):  # keys without permission to ask
            if not object_storage.has_bucket(self.url):
                check = f"check the address and {object_storage.variables(self.url)}"
                return StoreError(f"{self.url}: no such bucket, {bucket!r}; {check}")
        return StoreError(f"{self.url}: no tracekit store at {key!r} in bucket {bucket!r}; choose another --store")

    def state(self) -> str:
        """A tag that changes with the state of the store."""
        return _copy(self.url).renewed()

    @contextmanager
    def reading(self) -> Iterator[Catalogue]:
        """The catalogue as it is now."""
        copy = _copy(self.url)
        copy.renewed()
        with open_catalogue(copy.path, self.url) as catalogue:
            yield catalogue

    def hangs(self, job: str | None) -> tuple[StoredHang, ...]:
        """The reports on hangs, newest first."""
        with tempfile.TemporaryDirectory(prefix="tracekit-store-") as name, _errors(self.url):
            Path(name, HANGS).mkdir()
            for number, url in enumerate(sorted(object_storage.objects_below(f"{self.url}/{HANGS}"))):
                object_storage.fetch(url, Path(name, HANGS, f"{number:09}.json"))  # a key can end in any name
            return read_hangs(Path(name), job)

    @contextmanager
    def holding(self, window: StoredWindow, part: WindowPart) -> Iterator[Folder]:
        """A folder that has this part of a window meanwhile."""
        with tempfile.TemporaryDirectory(prefix="tracekit-store-") as name:
            folder = Folder(Path(name))
            path = folder.file(window.job_id, window.number, part)
            url = f"{self.url}/{path.relative_to(name)}"
            path.parent.mkdir(parents=True)
            try:
                with _errors(url):
                    object_storage.fetch(url, path)
            except FileNotFoundError:
                raise FileGoneError(f"{url}: is missing; copy windows before the catalogue that names them") from None
            try:
                yield folder
            except StoreError as error:
                raise StoreError(f"{url}: damaged, or copied only in part; copy it again") from error


class _Copy:
    """A copy of the catalogue of the store at `url` in the file `path`."""

    def __init__(self, url: str) -> None:
        self._url, self._tag, self._looked_at = url, "", float("-inf")
        self._folder = tempfile.TemporaryDirectory(prefix="tracekit-store-")
        self._renewing = threading.Lock()
        self.path = Path(self._folder.name) / CATALOGUE

    def renewed(self) -> str:
        """Fetch the catalogue if it has changed; returns its tag."""
        with self._renewing:
            if time.monotonic() - self._looked_at >= LOOKED_AT_EVERY_S:
                try:
                    with _errors(self._url):
                        self._tag = self._fetch()
                except FileNotFoundError:
                    raise StoreError(f"{self._url}: not a tracekit store; choose another --store") from None
                self._looked_at = time.monotonic()
            return self._tag

    def _fetch(self) -> str:
        """Raises OSError."""
        url, new = f"{self._url}/{CATALOGUE}", self.path.with_suffix(".new")
        deadline = time.monotonic() + _FETCHING_S
        tag = object_storage.tag(url)
        while tag != self._tag:
            object_storage.fetch(url, new)  # takes several requests
            if (after := object_storage.tag(url)) == tag:
                new.replace(self.path)
                return tag
            if time.monotonic() > deadline:
                raise OSError(f"for {_FETCHING_S:.0f} s, the catalogue was replaced during every attempt to read it")
            tag = after
        return tag


#: One copy per store and process.
_copy = lru_cache(maxsize=8)(_Copy)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Convert errors of the storage to StoreError; FileNotFoundError stays."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: cannot be read: {object_storage.said(url, error)}") from None
