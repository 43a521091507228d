"""S3-compatible storage, as configured by the environment (AWS_* variables, AWS_ENDPOINT_URL).

In: addresses such as s3://bucket/path. Out: objects as files or bytes. This module only reads; all traces of a study
and stores in S3 are read through it.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.base.errors import extra
from tracekit.base.text import encodable

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

S3 = "s3://"
#: Retry a request that was throttled or failed this many times, doubling the delay.
_ATTEMPTS = 8
_CHUNK = 1 << 20


def s3_url(place: str | os.PathLike[str]) -> str | None:
    """The S3 address that a path stands for, without a slash at its end; None for a local path.

    A `Path` has one slash where the address that it was made from has two.
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
    with extra("s3", "S3"):
        from pyarrow import fs

    settings: dict[str, Any] = {"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        settings |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    if region:
        settings["region"] = region
    return fs.S3FileSystem(**settings)


def objects_below(url: str) -> list[FileInfo]:
    """The object at that address, or all objects below it. Raises OSError."""
    system, place = s3_filesystem(), url.removeprefix(S3).strip("/")
    from pyarrow import fs

    found = system.get_file_info(place)
    if found.is_file:
        return [found]
    below = system.get_file_info(fs.FileSelector(place, recursive=True, allow_not_found=True))
    return [info for info in below if info.is_file]


def fetch(url: str, path: Path) -> None:
    """Download an object to a file. Raises OSError; FileNotFoundError if there is no such object."""
    with s3_filesystem().open_input_stream(url.removeprefix(S3)) as reading, open(path, "wb") as writing:
        shutil.copyfileobj(reading, writing, _CHUNK)


def has_bucket(name: str) -> bool:
    """Whether a bucket exists. Raises OSError."""
    return bool(s3_filesystem().get_file_info(name).type.name != "NotFound")


def tag(url: str) -> str:
    """A tag that changes with the content of an object. Raises OSError; FileNotFoundError if there is none."""
    with s3_filesystem().open_input_stream(url.removeprefix(S3)) as reading:
        described: dict[str, bytes] = reading.metadata()
    return (described.get("ETag") or described["Last-Modified"]).decode()


def said(error: OSError) -> str:
    """The message of an S3 error, shortened."""
    return f"{encodable(str(error)):.300}"
