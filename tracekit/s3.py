"""S3-compatible storage, as the environment describes it (AWS_* variables, AWS_ENDPOINT_URL).

In: addresses such as s3://bucket/path. Out: objects as files or bytes. Nothing is written there. Traces of a study and
stores are read by this alone.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.text import encodable

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

S3 = "s3://"
#: So often a request is repeated that was throttled or failed, each time after twice as long.
_ATTEMPTS = 8
_CHUNK = 1 << 20


def s3_url(place: str | os.PathLike[str]) -> str | None:
    """The address in S3 that a path is, without a slash at its end; None for a place of this machine.

    A `Path` has one slash where the address that it was made of has two.
    """
    match = re.match(r"s3:/+(.*)", os.fspath(place))
    return None if match is None else S3 + match[1].rstrip("/")


def shown(place: Path) -> str:
    """A path or address, as people write it."""
    return s3_url(place) or str(place)


def absolute(place: Path) -> Path:
    """The same place from any working directory."""
    return place if s3_url(place) is not None else place.absolute()


def s3_filesystem() -> FileSystem:
    """S3 as the environment describes it; requests that fail are repeated."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return _filesystem(endpoint, os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"))


@lru_cache(maxsize=1)
def _filesystem(endpoint: str | None, region: str | None) -> FileSystem:
    from pyarrow import fs

    settings: dict[str, Any] = {"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        settings |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    if region:
        settings["region"] = region
    return fs.S3FileSystem(**settings)


def objects_below(url: str) -> list[FileInfo]:
    """The object of that address, or all that lie below it. Raises OSError."""
    from pyarrow import fs

    system, place = s3_filesystem(), url.removeprefix(S3).strip("/")
    found = system.get_file_info(place)
    if found.type is fs.FileType.File:
        return [found]
    below = system.get_file_info(fs.FileSelector(place, recursive=True, allow_not_found=True))
    return [info for info in below if info.type is fs.FileType.File]


def fetch(url: str, path: Path) -> None:
    """Write an object into a file. Raises OSError; FileNotFoundError where there is no such object."""
    with s3_filesystem().open_input_stream(url.removeprefix(S3)) as reading, open(path, "wb") as writing:
        shutil.copyfileobj(reading, writing, _CHUNK)


def has_bucket(name: str) -> bool:
    """Whether there is such a bucket. Raises OSError."""
    from pyarrow import fs

    found = s3_filesystem().get_file_info(name)
    return bool(found.type is not fs.FileType.NotFound)


def tag(url: str) -> str:
    """What tells one content of an object from the next. Raises OSError; FileNotFoundError where there is none."""
    with s3_filesystem().open_input_stream(url.removeprefix(S3)) as reading:
        described: dict[str, bytes] = reading.metadata()
    return (described.get("ETag") or described["Last-Modified"]).decode()


def said(error: OSError) -> str:
    """What an error of S3 says, short."""
    return f"{encodable(str(error)):.300}"
