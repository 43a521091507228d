"""Notes about the running jobs of this user, by which `tracekit attach` finds them by name.

In: a run directory and its name. Out: a note per launcher, while it runs, in a folder that only this user can enter. No
folder is trusted unless it is. Imports the standard library only: it runs where the training does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import OutputError
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.record.small_file import create, read_small

_NOTE = re.compile(r"(\d{1,9})\.json")


@dataclass(frozen=True)
class RunningJob:
    """A command that a launcher of this user runs on this host: its name, run directory, and the launcher's process."""

    name: str
    directory: Path
    process_id: int


@contextlib.contextmanager
def announced(name: str, directory: Path) -> Iterator[None]:
    """Publish a note for `running_jobs` of this host while the context is open. If that fails, print a line."""
    note, folder = f"{os.getpid()}.json", -1
    try:
        folder = _open_first(_places())
        with contextlib.suppress(FileNotFoundError):  # of a killed launcher with the same number
            os.unlink(note, dir_fd=folder)
        about = {"directory": str(directory.absolute()), "name": name, "started": _started(os.getpid())}
        with create(note, folder=folder) as file:
            file.write(json.dumps(about).encode())
    except Exception as error:  # the command runs already
        say(f"tracekit: `tracekit attach` finds this job by its folder only: {printable(str(error))}")
    try:
        yield
    finally:
        if folder >= 0:
            with contextlib.suppress(OSError):
                os.unlink(note, dir_fd=folder)
            os.close(folder)


def running_jobs() -> list[RunningJob]:
    """The jobs that launchers of this user run on this host, by process id."""
    jobs: dict[int, RunningJob] = {}
    for place in (*_places(), *_private(f"/run/user/{os.geteuid()}")):  # `attach` can lack XDG_RUNTIME_DIR
        with contextlib.suppress(OSError):
            folder = _open(place)
            try:
                jobs |= {job.process_id: job for job in _jobs_in(folder)}
            finally:
                os.close(folder)
    return [jobs[process_id] for process_id in sorted(jobs)]


def _jobs_in(folder: int) -> Iterator[RunningJob]:
    for note in filter(_NOTE.fullmatch, os.listdir(folder)):
        # The job is over, or the note is being written or damaged.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            process_id = int(note[: -len(".json")])
            os.kill(process_id, 0)
            about = json.loads(read_small(note, folder=folder))
            if about.get("started") in (None, _started(process_id)):
                yield RunningJob(str(about["name"]), Path(about["directory"]), process_id)


def _places() -> list[Path]:
    """Folders for notes, the best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return [*_private(runtime), Path(tempfile.gettempdir()) / f"tracekit-jobs-{os.geteuid()}"]


def _private(folder: str) -> list[Path]:
    """The place for notes in `folder`, if that is this user's alone."""
    try:
        private = Path(folder).is_absolute() and _is_private(Path(folder).stat())
    except OSError:
        private = False
    return [Path(folder) / "tracekit-jobs"] if private else []


def _is_private(folder: os.stat_result) -> bool:
    return stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and not folder.st_mode & 0o077


def _open_first(places: list[Path]) -> int:
    """A descriptor of the first usable of these folders; makes it if necessary. Raises OutputError."""
    for place in places[:-1]:
        with contextlib.suppress(OSError):
            return _open(place, make=True)
    try:
        return _open(places[-1], make=True)
    except OSError as error:
        raise OutputError(f"{places[-1]}: {error.strerror or error}") from None


def _open(place: Path, *, make: bool = False) -> int:
    """A descriptor of a folder that is this user's alone. Raises OSError."""
    if make:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_private(os.fstat(folder)):
        os.close(folder)
        raise PermissionError(errno.EPERM, "belongs to another user, or other users can enter it")
    return folder


def _started(process_id: int) -> str | None:
    """The start time of a process in kernel ticks; None if unknown.

    It detects notes of killed launchers, whose process number another process can get.
    """
    try:
        # Split after the command's name, which can contain any byte.
        about = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    return about.split()[19]
