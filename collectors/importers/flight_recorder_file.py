"""One file of a flight recorder: bytes of unknown origin in, plain containers out.

A dump is a pickle (PyTorch's own) or JSON, possibly gzipped. Neither may run code or exhaust memory: only plain
containers, numbers and strings are unpickled, and what a file can make the process allocate is bounded.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracekit.collectors.record.plain_pickle import DAMAGE, RefusedPickleError, load_plain

#: No dump is larger, bytes: 20,000 entries with stacks take about 40 MB.
LARGEST_FILE = 256 << 20
#: Maximum memory that reading may allocate, bytes.
LARGEST_GROWTH = 2 << 30
_PICKLE, _JSON, _GZIP = b"\x80", b"{", b"\x1f\x8b"
_VERSION = re.compile(r"2\.(\d+)$")
_READ_VERSIONS = range(1, 11)


class UnreadableError(Exception):
    """The file is not a usable dump; the message is a clause that follows the file's name."""


def read_dump(path: Path) -> dict[str, Any]:
    """Read one dump: a dictionary with a list of `entries`, versions 2.1 to 2.10 and later ones of 2.

    Raises UnreadableError if the file is torn, empty, too large, of another format, or would run code.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UnreadableError(f"is {size / 1e9:.1f} GB; the limit for a dump is {LARGEST_FILE / 1e9:.1f} GB")
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    if not content:
        raise UnreadableError("is empty")
    return _checked(_decoded(_unpacked(content) if content.startswith(_GZIP) else content))


def _unpacked(content: bytes) -> bytes:
    """The content of a gzip file, up to the limit for a dump."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(f"is torn or damaged ({type(error).__name__}: {str(error)[:80]})") from None
    if len(unpacked) > LARGEST_FILE:
        raise UnreadableError(f"unpacks to more than {LARGEST_FILE / 1e9:.1f} GB, the limit for a dump")
    return unpacked


def _decoded(content: bytes) -> Any:
    try:
        if content.startswith(_PICKLE):
            return load_plain(content)
        if content.lstrip().startswith(_JSON):
            return json.loads(content)
    except RefusedPickleError as error:
        raise UnreadableError(str(error)) from None
    except MemoryError:
        raise UnreadableError("refused: it asks for more memory than a dump needs") from None
    except DAMAGE as error:
        raise UnreadableError(f"is torn or damaged ({type(error).__name__}: {str(error)[:80]})") from None
    raise UnreadableError("is neither a pickle nor a JSON object")


def _checked(dump: Any) -> dict[str, Any]:
    if not isinstance(dump, dict) or not isinstance(dump.get("version"), str):
        raise UnreadableError("is not a flight-recorder dump: it has no version")
    if _VERSION.match(dump["version"]) is None:
        raise UnreadableError(f"has version {dump['version'][:20]!r}; tracekit reads 2.1 to 2.10")
    if not isinstance(dump.setdefault("entries", []), list):
        raise UnreadableError("is not a flight-recorder dump: its entries are not a list")
    return dump


def is_newer(version: str) -> bool:
    """True if this version is newer than the newest known one."""
    match = _VERSION.match(version)
    return match is not None and int(match.group(1)) not in _READ_VERSIONS


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process grow by `LARGEST_GROWTH` at most: a pickle of twenty bytes can request any amount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not Linux, where the limit has no effect either
        yield
        return
    limit = held + LARGEST_GROWTH
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
