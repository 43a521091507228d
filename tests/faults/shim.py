"""The library of `shim.c`: how to build it, to preload it, and to arm it in a process that has it."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Names the library in a process that has it preloaded.
LIBRARY = "TRACEKIT_FAULTS_LIBRARY"


class What(enum.IntEnum):
    """What happens to an operation, as in `shim.c`."""

    FAIL = 0
    SHORTEN = 1
    TEAR = 2
    KILL = 3


class Group(enum.IntFlag):
    """Groups of operations, as in `shim.c`."""

    WRITE = 1
    SPACE = 2
    CHANGE = 4
    READ = 8
    LOOK = 16
    LOCK = 32


CHANGES = Group.WRITE | Group.SPACE | Group.CHANGE


@dataclass(frozen=True)
class Fault:
    """What happens to which operations, with which errno, and whether to every later one, too."""

    what: What
    groups: Group
    error: int = 0
    sticky: bool = False


FAULTS = {
    "killed": Fault(What.KILL, CHANGES),
    "killed in a write": Fault(What.TEAR, Group.WRITE),
    "short write": Fault(What.SHORTEN, Group.WRITE),
    "interrupted": Fault(What.FAIL, Group.WRITE, errno.EINTR),
    "failing write": Fault(What.FAIL, CHANGES, errno.EIO),
    "full disk": Fault(What.FAIL, Group.WRITE | Group.SPACE, errno.ENOSPC, sticky=True),
    "read-only from then on": Fault(What.FAIL, CHANGES, errno.EROFS, sticky=True),
    "no permission": Fault(What.FAIL, Group.SPACE | Group.LOOK, errno.EACCES),
    "failing read": Fault(What.FAIL, Group.READ, errno.EIO),
    "short read": Fault(What.SHORTEN, Group.READ),
    "no locks": Fault(What.FAIL, Group.LOCK, errno.ENOLCK),
}


def build(folder: Path) -> Path:
    """Compile the library into a folder."""
    library = folder / "faults.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", library, Path(__file__).with_name("shim.c")], check=True)
    return library


def preloaded(library: Path) -> Mapping[str, str]:
    """The environment of a process that has the library; one thread for each library that would start several."""
    few = {"OPENBLAS_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    return os.environ | few | {"LD_PRELOAD": str(library), LIBRARY: str(library)}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.arm.argtypes = [ctypes.c_long, *[ctypes.c_int] * 5, ctypes.c_char_p]
    library.counted.restype = ctypes.c_long
    return library


def arm(nth: int, fault: Fault, root: Path, log: int = -1) -> None:
    """Let the `nth` operation below `root` from now on meet `fault`; 0: none, but all are counted."""
    _library().arm(nth, fault.what, fault.error, fault.sticky, fault.groups, log, os.fsencode(root))


def disarm() -> int:
    """The number of operations since `arm`; none counts any more."""
    count: int = _library().counted()
    _library().arm(0, 0, 0, 0, 0, -1, b"")
    return count
