"""Give NCCL the plugin before the command (`tracekit collect --nccl`), save its rings while it runs, report the
result afterwards.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.errors import FormatError, OutputError
from tracekit.base.text import ranks_text
from tracekit.collectors.nccl.rings import open_ring, ring_files
from tracekit.collectors.record.small_file import create
from tracekit.collectors.record.wire_format import (
    DEFAULT_MASK,
    ENV_MASK,
    ENV_NCCL_PLUGIN,
    ENV_PLUGIN,
    LOG_SUFFIX,
    RING_SUFFIX,
    NcclEvent,
)
from tracekit.collectors.run_directory.segments import AttemptRecording

#: NCCL truncates longer paths.
LONGEST_PATH = 255
#: The first version that takes one of the plugin's tables.
FIRST_VERSION = (2, 27)
#: Versions with known problems.
HAZARDS: Mapping[tuple[int, ...], str] = {
    (2, 30, 3): "can crash with any profiler plugin in an all-to-all over several nodes",
    (2, 31, 2): "spends 4 to 13% on timing channels; `--nccl coll,p2p` leaves them out",
}
#: A /dev/shm below this size is small for NCCL with timed channels, bytes.
SMALL_SHARED_MEMORY = 1 << 30
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  NCCL's, only looked at


def prepare_nccl(
    environment: Mapping[str, str], mask: int = int(DEFAULT_MASK)
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Put the plugin into the environment of a command, unless the user has set one or NCCL could not load ours.

    Returns the environment, which names the plugin in `ENV_PLUGIN` if NCCL loads it, and warnings for the user.
    """
    stated = environment.get(ENV_NCCL_PLUGIN)
    if stated is not None:
        warning = f"{ENV_NCCL_PLUGIN}={stated} is already set and NCCL loads one plugin only, so --nccl records nothing"
        return dict(environment), (warning,)
    try:
        plugin = find_plugin()
    except OutputError as error:
        warning = f"--nccl records nothing, the rest is recorded: {error}"
        return dict(environment), (warning,)
    ours = {ENV_NCCL_PLUGIN: str(plugin), ENV_PLUGIN: str(plugin), ENV_MASK: hex(mask)}
    return {**environment, **ours}, (*hazards(installed_version(), mask), *_shared_memory(mask))


def find_plugin() -> Path:
    """The plugin's shared library. Raises OutputError if there is none, or NCCL would cut off its path."""
    spec = find_spec("tracekit.collectors.nccl._plugin")
    if spec is None or spec.origin is None:
        raise OutputError("the NCCL plugin is not compiled; install tracekit again")
    if len(os.fsencode(spec.origin)) >= LONGEST_PATH:
        raise OutputError(
            f"{spec.origin}: too long, NCCL cuts paths at {LONGEST_PATH} bytes; install tracekit into a shorter folder"
        )
    return Path(spec.origin)


def installed_version() -> tuple[int, ...] | None:
    """The version of NCCL that pip installed with torch; None if it was not installed by pip."""
    for generation in ("cu13", "cu12", "cu11"):
        try:
            return tuple(int(part) for part in metadata.version(f"nvidia-nccl-{generation}").split(".")[:3])
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return None


def hazards(version: tuple[int, ...] | None, mask: int) -> tuple[str, ...]:
    """Known problems of a version of NCCL."""
    if version is None:
        return ()
    text = ".".join(map(str, version))
    if version[:2] < FIRST_VERSION:
        return (f"NCCL {text} cannot load such a plugin; --nccl needs {'.'.join(map(str, FIRST_VERSION))} or newer",)
    trouble = HAZARDS.get(version)
    if trouble is None or (version == (2, 31, 2) and not mask & NcclEvent.KERNEL_CH):
        return ()
    return (f"NCCL {text} {trouble}",)


def _shared_memory(mask: int) -> tuple[str, ...]:
    """A warning for a container's default of 64 MB, which crashes NCCL when it times channels."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ()
    size = status.f_frsize * status.f_blocks
    if size >= SMALL_SHARED_MEMORY or not mask & NcclEvent.KERNEL_CH:
        return ()
    warning = (
        f"{SHARED_MEMORY} has {size / 1e6:.0f} MB, where NCCL can crash when it times channels: give the"
        " container more (docker run --shm-size), or do not time channels (`--nccl coll,p2p`)"
    )
    return (warning,)


def nccl_lines(recording: AttemptRecording, report: Mapping[str, Any] | None, mask: int) -> list[str]:
    """Lines about an attempt: ranks without a ring and why, hazards of its NCCL, joined operations.

    `report`: what `join_nccl` says, from the trace's metadata, None without rings to join or without a trace.
    """
    version_before = installed_version()
    versions = [version for version in _versions(recording, recording.ranks) if version != version_before]
    lines = [f"WARNING: {line}" for version in versions for line in hazards(version, mask)]
    if report is None:
        rings = len(ring_files(Path(recording.directory)))
        if rings:
            return [*lines, f"{rings} NCCL rings are kept with the segments"]
        why = _why(recording, recording.ranks)
        return [*lines, f"no NCCL ring appeared on any of {len(recording.ranks)} ranks: {why}"]
    if missing := report["ranks_without_ring"]:
        lines.append(f"no NCCL ring appeared on {ranks_text(missing, 16)}: {_why(recording, missing)}")
    return [*lines, *report["unreadable"], *_joined(report)]


def _joined(report: Mapping[str, Any]) -> list[str]:
    """The number of ops that NCCL timed, and what is missing."""
    unmatched = sum(report["unmatched_records"].values())
    extra = sum(report["unmatched_operations"].values())
    timed = (
        f"NCCL timed {report['timed']} communication ops; {report['untimed']} that it did not time and {unmatched} that"
        f" it did not report keep their host times; {extra} NCCL operations match no op"
    )
    lines = [timed]
    if report["size_differs"]:
        lines.append(f"{report['size_differs']} ops keep their host times because NCCL reported another size")
    if report["overwritten"] or report["dropped"]:
        lines.append(
            f"NCCL's rings lost {report['overwritten']} events to newer ones and {report['dropped']} for lack of lanes;"
            " record fewer steps (--every), or set TRACEKIT_NCCL_SLOTS=65536"
        )
    return lines


def _why(recording: AttemptRecording, ranks: Iterable[int]) -> str:
    """The likely reason why NCCL wrote nothing."""
    backends = {str(fact["backends"]) for fact in _facts(recording, ranks)}
    if backends and not any("nccl" in backend for backend in backends):
        return f"the job communicates with {', '.join(sorted(backends - {''})) or 'nothing'}, not with NCCL"
    old = [version for version in _versions(recording, ranks) if version[:2] < FIRST_VERSION]
    if old:
        return f"NCCL {'.'.join(map(str, old[0]))} cannot load such a plugin"
    return (
        "NCCL did not load the plugin, made no communicator, or the ring did not fit on the disk of the"
        " segments; set NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV to see which"
    )


def _versions(recording: AttemptRecording, ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """The versions of NCCL that these ranks reported."""
    return sorted({tuple(fact["version"]) for fact in _facts(recording, ranks) if fact["version"]})


def _facts(recording: AttemptRecording, ranks: Iterable[int]) -> list[dict[str, Any]]:
    return [fact for rank in ranks for fact in recording.ranks[rank].facts.get("nccl", [])]


@dataclass(slots=True)
class Drain:
    """Follows the rings below a run directory that `host` writes, and saves slots before their reuse."""

    directory: Path
    host: str = field(default_factory=socket.gethostname)
    _saved: dict[tuple[Path, int], int] = field(default_factory=dict)

    def update(self) -> int:
        """Save the slots that are new since the last call; return their number. A ring that is not ready waits."""
        saved = 0
        for path in self.directory.glob(f"attempt-*/nccl-{self.host}-*{RING_SUFFIX}"):
            try:
                if path.lstat().st_uid == os.geteuid():  # other users could truncate the mapped file
                    saved += self._update(path)
            except (FormatError, OSError):  # not laid out yet, or gone: the reader reports it
                continue
        return saved

    def _update(self, path: Path) -> int:
        ring = open_ring(path)
        fresh = []
        for number in map(int, np.flatnonzero(ring.header["lane"]["written"])):
            slots = ring.lane(number, self._saved.get((path, number), 0))
            if len(slots):
                fresh.append((number, slots))
        if fresh:
            _append(path.with_suffix(LOG_SUFFIX), b"".join(slots.tobytes() for _, slots in fresh))
        for number, slots in fresh:
            self._saved[path, number] = int(slots["sequence"][-1])
        return sum(len(slots) for _, slots in fresh)


def _append(path: Path, content: bytes) -> None:
    """Write all of it or nothing: half a slot would shift those after it. Raises OSError."""
    whole = False
    with create(path, append=True) as log:
        size = log.tell()
        try:
            whole = log.write(content) == len(content)
        finally:
            if not whole:
                log.truncate(size)
    if not whole:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
