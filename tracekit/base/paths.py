"""Paths that users name: one look at each, addresses in object storage, and commands that name them.

In: a path, or an address such as s3://bucket/path. Out: its type, first bytes and entries, each read at most once;
copies of stored files; lines that a shell takes as printed.
"""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tracekit.base.errors import FormatError, extra
from tracekit.base.text import encodable, listed, nearest, printable

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

#: How much of a file is read to recognise it, bytes.
HEAD_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
#: The environment variables of each cloud, as an error names them.
_VARIABLES = {"s3": "AWS_*", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_*"}
#: How addresses in object storage begin.
ADDRESSES = tuple(f"{scheme}://" for scheme in _VARIABLES)
#: Try a request to S3 that is throttled or fails this many times, doubling the delay; to Google, this long.
_ATTEMPTS, _RETRYING = 8, timedelta(seconds=30)
#: Wait for an answer at most this long, retries included, seconds: alone, Azure's client waits for four minutes.
_ANSWERS_S = 90.0
#: The same until it is clear that storage is there. Python's end waits for requests to S3, hence few attempts.
_FIRST_ATTEMPTS, _FIRST_RETRYING, _FIRST_ANSWER_S = 3, timedelta(seconds=3), 10.0
#: What the clients for S3, Google and Azure say if nothing is there to answer.
_UNREACHED = ("NETWORK_CONNECTION", "CURL error", "Fail to get a new connection")
_CHUNK = 1 << 20

_Answer = TypeVar("_Answer")


def unpacked(beginning: bytes) -> bytes:
    """As many first bytes of a file, unpacked if it is gzipped; none if its stream is damaged there."""
    if not beginning.startswith(_GZIP):
        return beginning
    try:
        return zlib.decompressobj(wbits=31).decompress(beginning, len(beginning))
    except zlib.error:
        return b""


def read_whole(path: Path, most: int, fewer: str) -> bytes:
    """The content of a file, unpacked if it is gzipped.

    Raises FormatError if it cannot be read, is damaged, or has more than `most` bytes, with the advice `fewer`.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == _GZIP
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # before OSError, which BadGzipFile is too
        raise FormatError(f"{path}: its gzip stream is damaged ({error}); copy it again") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > most:
        raise FormatError(f"{path}: unpacks to more than {most >> 20} MiB; {fewer}")
    return content


class Look:
    """What can be seen of a path without reading all of it.

    Nothing here raises an OSError: what cannot be read is empty, and the reader of the file reports why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @cached_property
    def _mode(self) -> int:
        """Type and permissions, 0 if nothing can be seen at the path."""
        try:
            return self.path.stat().st_mode
        except (OSError, ValueError):
            return 0

    @cached_property
    def exists(self) -> bool:
        """Whether anything is at the path, be it a link that leads nowhere."""
        return os.path.lexists(self.path)

    @property
    def is_folder(self) -> bool:
        """Whether the path leads to a folder."""
        return stat.S_ISDIR(self._mode)

    @property
    def is_file(self) -> bool:
        """Whether the path leads to a regular file: a pipe or a device might block for ever."""
        return stat.S_ISREG(self._mode)

    @cached_property
    def is_readable(self) -> bool:
        """Whether the path is a file that can be read."""
        if not self.is_file:
            return False
        try:
            self._bytes(0, 1)
        except OSError:
            return False
        return True

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file, as they are stored."""
        return self.beginning(HEAD_BYTES)

    @cached_property
    def text(self) -> bytes:
        """The first bytes of the file, unpacked; none if its gzip stream is damaged there."""
        return unpacked(self.head)

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of a file that has more than `head`: a job that hung says so at the end."""
        if len(self.head) < HEAD_BYTES:
            return b""
        try:
            return self._bytes(max(HEAD_BYTES, self.path.stat().st_size - HEAD_BYTES), HEAD_BYTES)
        except OSError:
            return b""

    def beginning(self, most: int) -> bytes:
        """At most the first `most` bytes of the file, as stored."""
        try:
            return self._bytes(0, most) if self.is_file else b""
        except OSError:
            return b""

    @cached_property
    def entries(self) -> tuple[Look, ...]:
        """The entries of the folder, by name."""
        try:
            return tuple(map(Look, sorted(self.path.iterdir()))) if self.is_folder else ()
        except OSError:
            return ()

    def files(self, endings: tuple[str, ...] = ("",)) -> Iterator[Look]:
        """The regular files of the folder with this suffix, by name."""
        return (entry for entry in self.entries if entry.name.endswith(endings) and entry.is_file)

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name."""
        return self.is_folder and os.path.lexists(self.path / name)

    def _bytes(self, offset: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def object_url(place: str | os.PathLike[str]) -> str | None:
    """The address in object storage that a path stands for, without a slash at its end; None for a local path.

    A `Path` has one slash where the address that it was made from has two.
    """
    match = re.match(rf"({'|'.join(_VARIABLES)}):/+(.*)", os.fspath(place))
    return None if match is None else f"{match[1]}://{match[2].rstrip('/')}"


def is_address(path: Path) -> bool:
    """Whether a path was made from an address, in object storage or such as https://host/file."""
    looks_like_one = re.match(r"[a-z][\w+.-]+:/", str(path)) is not None
    return object_url(path) is not None or (looks_like_one and not os.path.lexists(path))


def shown(place: Path) -> str:
    """A path or address, as people write it."""
    slashes = ":///" if str(place).startswith("file:/") else "://"
    return object_url(place) or (str(place).replace(":/", slashes, 1) if is_address(place) else str(place))


def elsewhere(path: Path) -> str:
    """Advice for a path that does not exist: a similar name in the same folder, if any."""
    if object_url(path) is not None:
        return f"in object storage: `{command('fleet', 'run')}` reads traces there, --store a store; else copy it here"
    folder = path.parent
    names = [entry.name for entry in os.scandir(folder)] if os.access(folder, os.R_OK) and folder.is_dir() else []
    similar = nearest(path.name, names)
    suggestion = f"; did you mean {printable(str(folder / similar))}?" if similar else ""
    if is_address(path):
        suggestion = f"; addresses of object storage begin with {listed(ADDRESSES)}"
    return f"no such file or folder{suggestion}"


def unreadable(path: str | os.PathLike[str], error: OSError) -> FormatError:
    """The error for a file that could not be opened or read; of one that does not exist, what to type instead."""
    if isinstance(error, FileNotFoundError):
        return FormatError(f"{shown(Path(path))}: {elsewhere(Path(path))}")
    return FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions")


def absolute(place: Path) -> Path:
    """The same place from any working directory."""
    return place if object_url(place) is not None else place.absolute()


def located(url: str) -> tuple[FileSystem, str]:
    """The storage that an address is in, and `bucket/path` there. Raises OSError, MissingExtraError."""
    scheme, _, place = url.partition("://")
    return _filesystem(scheme), place


@cache
def _filesystem(scheme: str, attempts: int = _ATTEMPTS, retrying: timedelta = _RETRYING) -> FileSystem:
    with extra("storage", f"{scheme}://"):
        from pyarrow import fs

    variable = os.environ.get
    if scheme == "s3":
        return fs.S3FileSystem(
            endpoint_override=variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL"),
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        )
    if scheme == "gs":
        host, protocol = _endpoint("STORAGE_EMULATOR_HOST")
        return fs.GcsFileSystem(
            anonymous=host is not None, endpoint_override=host, scheme=protocol, retry_time_limit=retrying
        )
    account, key = variable("AZURE_STORAGE_ACCOUNT"), variable("AZURE_STORAGE_KEY")
    if not account:
        raise OSError("AZURE_STORAGE_ACCOUNT is not set")
    sas, (host, protocol) = variable("AZURE_STORAGE_SAS_TOKEN"), _endpoint("AZURE_STORAGE_SERVICE_ENDPOINT")
    # Azure's client ends the process over these two.
    if key and not re.fullmatch(r"(?:[A-Za-z\d+/]{4})*(?:[A-Za-z\d+/]{2}==|[A-Za-z\d+/]{3}=)?", key):
        raise OSError("AZURE_STORAGE_KEY is not in base 64")
    if protocol == "http" and not key and not sas:
        raise OSError("AZURE_STORAGE_KEY is not set")
    # pyarrow puts the account before a host that begins with a dot, else into the path, as Azurite has it.
    host = host and host.removeprefix(account)
    return fs.AzureFileSystem(
        account_name=account,
        account_key=key,
        sas_token=None if key else sas,
        blob_storage_authority=host,
        dfs_storage_authority=host and host.replace(".blob.", ".dfs."),
        blob_storage_scheme=protocol,
        dfs_storage_scheme=protocol,
    )


def _endpoint(variable: str) -> tuple[str | None, str | None]:
    """Host and protocol of the URL in an environment variable; None if it is not set. An emulator's has no protocol."""
    protocol, _, rest = os.environ.get(variable, "").rpartition("://")
    return (rest.partition("/")[0], protocol or "http") if rest else (None, None)


def _asked(url: str, request: Callable[[FileSystem, str], _Answer]) -> _Answer:
    """What a request for few bytes returns, of the storage and place of an address.

    Raises OSError; in about 10 s if nothing is there to answer. Storage that is busy is asked again, patiently.
    """
    scheme, _, place = url.partition("://")
    system = _filesystem(scheme, _FIRST_ATTEMPTS, _FIRST_RETRYING)
    try:
        return _answer(lambda: request(system, place), _FIRST_ANSWER_S)
    except (FileNotFoundError, TimeoutError):
        raise
    except OSError as error:
        if any(words in str(error) for words in _UNREACHED):
            raise
    return _answer(lambda: request(_filesystem(scheme), place), _ANSWERS_S)


def _answer(request: Callable[[], _Answer], most_s: float) -> _Answer:
    """The answer to a request. Raises OSError, also on a timeout; Ctrl-C ends the wait."""
    answer = Future[_Answer]()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:  # pyarrow's own, too, of keys that cannot be read
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, daemon=True).start()
    with suppress(TimeoutError):
        return answer.result(most_s)
    raise TimeoutError(f"no answer for {most_s:.0f} s")


def objects_below(url: str) -> dict[str, FileInfo]:
    """The object at that address, or all objects below it, by address. Raises OSError."""
    infos = [_asked(url, lambda system, place: system.get_file_info(place.rstrip("/")))]
    if not infos[0].is_file:
        from pyarrow import fs

        system, place = located(url)
        infos = system.get_file_info(fs.FileSelector(place.rstrip("/"), recursive=True, allow_not_found=True))
    scheme = url.partition("://")[0]
    return {f"{scheme}://{info.path}": info for info in infos if info.is_file}


def fetch(url: str, path: Path) -> None:
    """Download an object to a file. Raises OSError; FileNotFoundError if there is no such object."""
    system, place = located(url)
    with _answer(lambda: system.open_input_stream(place), _ANSWERS_S) as reading, open(path, "wb") as writing:
        shutil.copyfileobj(reading, writing, _CHUNK)


def has_bucket(url: str) -> bool:
    """Whether the bucket of an address exists. Raises OSError."""
    info = _asked(url, lambda system, place: system.get_file_info(place.partition("/")[0]))
    return bool(info.type.name != "NotFound")


def tag(url: str) -> str:
    """A tag that changes with the content of an object. Raises OSError; FileNotFoundError if there is none."""
    with _asked(url, lambda system, place: system.open_input_stream(place)) as reading:
        described: dict[str, bytes] = {name.lower(): value for name, value in reading.metadata().items()}
    return (described.get("etag") or described["last-modified"]).decode()


def said(url: str, error: OSError) -> str:
    """The error of the storage at an address on one line, with what to check."""
    words = " ".join(encodable(str(error)).partition(" error_info=")[0].split())
    return f"{words:.600}; check the address and {variables(url)}"


def variables(url: str) -> str:
    """The environment variables that say how to reach an address."""
    return _VARIABLES[url.partition("://")[0]]


def command(*words: str | Path) -> str:
    """`tracekit` with these words. Words in capitals stand for what only the user knows."""
    return f"tracekit {quoted(*words)}"


def adding(store: str | Path) -> str:
    """The command that adds a job to a store."""
    return command("import", "TRACE", "--store", store)


def quoted(*words: str | Path) -> str:
    """Words of a command line. A path never looks like an option."""
    texts = [shown(word) if isinstance(word, Path) else word for word in words]
    return " ".join(
        shlex.quote(printable(f"./{text}" if isinstance(word, Path) and text.startswith("-") else text))
        for word, text in zip(words, texts, strict=True)
    )
