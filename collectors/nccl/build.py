"""The plugin as a shared library: compiled once per machine with its `cc`, kept in the user's cache.

In: the C sources next to this file. Out: the path of a library whose name carries the hash of sources, flags and
machine, so that a library is never stale and never built twice. Concurrent builds each write a separate file and rename
it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tracekit.base.atomic_write import Kind, replacing, starting_with
from tracekit.base.errors import OutputError

SOURCES = ("plugin.c", "abi.h", "ring.h")
#: Only tests turn warnings into errors: a warning of a newer compiler must not stop a recording.
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
#: NCCL closes the library after its last communicator, while threads of the job may still return to it.
LINK_FLAGS = ("-Wl,-z,nodelete", "-Wl,-z,defs", "-pthread")
#: Time limit of the compiler, seconds.
TIMEOUT_S = 60
#: NCCL truncates longer paths.
LONGEST_PATH = 255

#: Two processes may build at once; the second replaces the result of the first.
_LIBRARY = Kind("a shared library", starting_with(b"\x7fELF"))
_HERE = Path(__file__).parent


def build_plugin(cache: Path | None = None) -> Path:
    """Compile the plugin, unless the cache has it; return its path.

    `cache`: default `$XDG_CACHE_HOME/tracekit`, else `~/.cache/tracekit`. Raises OutputError if there is no compiler,
    it fails, or the place cannot be written or has too long a path.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    folder = cache or default_cache()
    library = folder / f"libnccl-profiler-tracekit-{_fingerprint()}.so"
    if len(os.fsencode(library)) >= LONGEST_PATH:
        raise OutputError(
            f"{library}: too long, NCCL cuts paths at {LONGEST_PATH} bytes; set XDG_CACHE_HOME to a shorter folder"
        )
    if library.exists():
        _check_owner(folder, library)
        return library
    if compiler is None:
        raise OutputError("no C compiler (cc, gcc, clang) on the PATH to build the NCCL plugin; install one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        with replacing(library, _LIBRARY) as temporary, tempfile.TemporaryDirectory(prefix="tracekit-") as scratch:
            built = Path(scratch) / "plugin.so"  # a compiler replaces its output, which would lose the lock
            _compile(compiler, built)
            shutil.copyfile(built, temporary)
        library.chmod(0o755)
    except OSError as error:
        raise OutputError(f"{library}: cannot be written ({error.strerror or error}); set XDG_CACHE_HOME") from None
    _check_owner(folder, library)
    return library


def _check_owner(folder: Path, library: Path) -> None:
    """Refuse a library that other users could have put there: the training would run it. Raises OutputError."""
    for path in (folder, library):
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise OutputError(
                f"{path}: other users can write it, so it is not loaded; delete it, or set XDG_CACHE_HOME"
            )


def default_cache() -> Path:
    """The cache of compiled plugins. Raises OutputError if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tracekit"
    except RuntimeError:
        raise OutputError("no home folder to keep the NCCL plugin in; set XDG_CACHE_HOME") from None


def _compile(compiler: str, library: Path) -> None:
    command = [compiler, *FLAGS, "-o", str(library), str(_HERE / "plugin.c"), *LINK_FLAGS]
    try:
        done = subprocess.run(  # noqa: S603  our own sources, the machine's compiler
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OutputError(f"{compiler} took more than {TIMEOUT_S} s to build the NCCL plugin; try it by hand") from None
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise OutputError(f"{compiler} cannot build the NCCL plugin: {complaint}")


def _fingerprint() -> str:
    """A key that depends on all inputs of the library, and on the machine."""
    digest = hashlib.sha256(" ".join((*FLAGS, *LINK_FLAGS, platform.machine(), *platform.libc_ver())).encode())
    for name in SOURCES:
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()[:16]
