"""Find the running jobs of this user, and start and stop their recording from another process."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tracekit.base.atomic_write import Kind, write_text
from tracekit.base.errors import FormatError, OutputError, SelectionError
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.record.small_file import MOST_BYTES, create, open_regular, read_small
from tracekit.collectors.record.wire_format import (
    CONTROL_FILE,
    HEADER,
    RECORD,
    Category,
    RecordingSchedule,
    attempt_directory,
)
from tracekit.collectors.run_directory.launchers import RUN_FILE, RUN_FILE_BYTES, attempts

#: All ranks have seen a new control file after this time, seconds.
LEAD_S = 1.0
#: Most ranks, and bytes at the end of a rank's records, to read for the newest step.
_RANKS, _TAIL = 8, 1 << 20
_STEPS_TIMED = 9
_CONTROL_KIND = Kind("a schedule of tracekit", lambda file: _is_schedule(file.read(MOST_BYTES)))


def _is_schedule(content: bytes) -> bool:
    try:
        RecordingSchedule.parse(content)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Pace:
    """The newest step that has ended on any rank, and how long the last steps took, seconds."""

    step: int
    step_s: float


def pace(directory: Path) -> Pace | None:
    """The progress of a run; None if no step has ended yet."""
    numbers = attempts(directory)
    ends: list[tuple[int, float]] = []
    for path in _newest_segments(attempt_directory(directory, numbers[-1])) if numbers else ():
        with contextlib.suppress(OSError):  # sealed under another name meanwhile: other ranks suffice
            ends += _step_ends(path)
    if not ends:
        return None
    ends = sorted(ends)[-_STEPS_TIMED:]
    return Pace(ends[-1][0], statistics.median(took for _, took in ends))


def _newest_segments(directory: Path) -> list[Path]:
    """The newest segment of some ranks."""
    newest: dict[str, Path] = {}
    for path in sorted(directory.glob("rank-*-*")):
        newest[path.name[: len("rank-000000")]] = path
    return [newest[name] for name in sorted(newest)[:_RANKS]]


def _step_ends(path: Path) -> list[tuple[int, float]]:
    """Step and seconds of the steps that end near the end of a segment."""
    with open(open_regular(path), "rb") as file:
        whole = max(0, file.seek(0, os.SEEK_END) - HEADER.size) // RECORD.size  # one just begun has no header yet
        count = min(whole, _TAIL // RECORD.size)
        file.seek(HEADER.size + (whole - count) * RECORD.size)
        content = file.read(count * RECORD.size)
    records = RECORD.iter_unpack(content[: len(content) // RECORD.size * RECORD.size])
    return [(record[3], (record[8] - record[7]) / 1e9) for record in records if record[0] == Category.STEP]


def first_common_step(directory: Path) -> int:
    """The first step by which all ranks will have seen a control file that is written now."""
    now = pace(directory)
    return 1 if now is None else now.step + 2 + math.ceil(LEAD_S / max(now.step_s, 1e-6))


def current_schedule(directory: Path) -> RecordingSchedule:
    """The schedule of the recording at present. Raises FormatError."""
    try:
        try:
            return RecordingSchedule.parse(read_small(directory / CONTROL_FILE))
        except FileNotFoundError:
            options = json.loads(read_small(directory / RUN_FILE, RUN_FILE_BYTES))["options"]
            return RecordingSchedule.parse(json.dumps({name: options[name] for name in asdict(RecordingSchedule())}))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{directory}: not a folder of a run ({error!s:.200}); name the folder of one") from None


def write_schedule(directory: Path, schedule: RecordingSchedule) -> None:
    """Set the steps that all ranks record from now on. Raises OutputError."""
    write_text(directory / CONTROL_FILE, json.dumps(asdict(schedule)), _CONTROL_KIND)


def name_of_job(directory: Path) -> str:
    """The name of the job of a run directory: from its launcher on this host, else the name of the folder."""
    absolute = directory.absolute()
    return next((job.name for job in running_jobs() if job.directory == absolute), absolute.name)


def find_job(named: str | None) -> Path:
    """The run directory of a job: of the only one, or of the one with this folder, name or launcher's process id.

    Raises SelectionError, which lists the running jobs.
    """
    if named is not None and (Path(named) / RUN_FILE).exists():
        return Path(named)
    jobs = running_jobs()
    fitting = [job for job in jobs if named is None or named in (job.name, str(job.process_id))]
    if len(fitting) == 1:
        return fitting[0].directory
    running = ", ".join(f"{job.name} ({job.process_id})" for job in jobs) or "none"
    what = "no JOB given" if named is None else f"no single job is called {named!r:.80}"
    raise SelectionError(
        f"{what}; running on this host: {running}. Name one, its process id, or the folder given to --segments"
    )


_NOTE = re.compile(r"(\d{1,9})\.json")


@dataclass(frozen=True)
class RunningJob:
    """A command that a launcher of this user runs on this host: its name, run directory, and the launcher's process."""

    name: str
    directory: Path
    process_id: int


@contextlib.contextmanager
def announced(name: str, directory: Path) -> Iterator[None]:
    """Publish a note for `running_jobs` of this host while the context is open, in a folder that only this user can
    enter. If that fails, print a line.
    """
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
