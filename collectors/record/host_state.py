"""Samples the state of the host of a rank into a file, at a low rate: how long processes waited, what throttled them.

In: what the kernel counts (PSI, `cpu.stat`) of the cgroup of this process or, if it counts pressure only for the host,
of the host. Out: a fact `host-state` that names the cgroups, and samples of totals, us; None for what the kernel does
not count.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .small_file import create, write_all

#: Maximum number of samples: one every 2 s for a day.
SAMPLE_LIMIT = 43_200
#: How long to wait for the thread when the process ends, seconds.
CLOSE_TIMEOUT_S = 0.5


class Sampler(ABC):
    """Samples every `period_s` seconds into the file `path`, which the first sample creates."""

    def __init__(self, path: Path, period_s: float) -> None:
        self._path, self._period_s = path, period_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def reader(self) -> Callable[[], Sequence[int | None]] | None:
        """Prepare, on the thread of the sampler: what reads a sample; None if there is nothing to read."""

    def begin(self) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._run, name=f"tracekit{self._path.suffix}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whatever a kernel, a library or a disk does: no more samples
            read = self.reader()
            if read is None:
                return
            with create(self._path) as file:
                for _ in range(SAMPLE_LIMIT):
                    write_all(file, f"{json.dumps([time.monotonic_ns(), *read()])}\n".encode())
                    if self._over.wait(self._period_s):
                        return


#: What processes wait for, in the order of a sample, which ends with the throttled time.
RESOURCES = ("cpu", "io", "memory")
_HOST_PRESSURE = Path("/proc/pressure")


class HostState(Sampler):
    """Samples this process's cgroup, or its host. `tell` takes the fact."""

    def __init__(self, path: Path, period_s: float, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(path, period_s)
        self._tell = tell

    def reader(self) -> Callable[[], Sequence[int | None]] | None:
        """See `Sampler`."""
        folders = list(cgroup_folders())
        limited = _first_with("cpu.stat", throttled_us, folders)
        pressed = _first_with("cpu.pressure", waited_us, folders)
        files = [_HOST_PRESSURE / resource for resource in RESOURCES]
        if pressed is not None:
            files = [pressed / f"{resource}.pressure" for resource in RESOURCES]
        counters = [_counter(file, waited_us) for file in files]
        counters.append(None if limited is None else _counter(limited / "cpu.stat", throttled_us))
        if not any(counters):
            return None
        self._tell({"pressure": _identity(pressed), "limit": _identity(limited)})
        return lambda: [None if counter is None else counter() for counter in counters]


def cgroup_folders() -> Iterator[Path]:
    """Where files of this process's cgroups can be: of version 2, then of the CPU controller of version 1.

    A container may see its own cgroup as the root of the mount.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in Path("/proc/self/mountinfo").read_text().splitlines():
            where, _, what = mount.partition(" - ")
            _, _, _, root, point, *_ = where.split(" ")
            kind, _, options = what.split(" ", 2)
            if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or "cpu" in options.split(",")):
                inside = group[len(root) :] if group.startswith(root) else group
                yield Path(point, inside.lstrip("/"))
                yield Path(point)


def waited_us(pressure: str) -> int:
    """Time in which at least one process waited, us. Raises ValueError or LookupError."""
    return int(pressure.split("total=", 1)[1].split(maxsplit=1)[0])


def throttled_us(cpu_stat: str) -> int:
    """Time for which a CPU limit throttled processes, us. Raises ValueError or LookupError if there is no limit."""
    values = dict(line.split() for line in cpu_stat.splitlines())
    return int(values["throttled_usec"]) if "throttled_usec" in values else int(values["throttled_time"]) // 1000


def _first_with(name: str, total: Callable[[str], int], folders: Sequence[Path]) -> Path | None:
    """The first folder with a file that has such a total."""
    return next((folder for folder in folders if _counter(folder / name, total) is not None), None)


def _counter(path: Path, total: Callable[[str], int]) -> Callable[[], int | None] | None:
    """What reads a total from a file of the kernel, again and again; None if that has none."""

    def count() -> int | None:
        try:
            return total(path.read_text())
        except (OSError, ValueError, LookupError):  # the cgroup is gone, or the kernel does not count
            return None

    return None if count() is None else count


def _identity(folder: Path | None) -> str | None:
    """What tells a cgroup from the others of its host; None for the whole host."""
    if folder is None:
        return None
    status = folder.stat()
    return f"{status.st_dev}:{status.st_ino}"
