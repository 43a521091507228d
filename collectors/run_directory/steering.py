"""Start and stop the recording of a running job, from another process.

In: a run directory, or the name of a running job. Out: the control file that its ranks follow. Imports the standard
library only: it runs where the training does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from tracekit.base.atomic_write import Kind, write_text
from tracekit.base.errors import FormatError, SelectionError
from tracekit.collectors.record.small_file import MOST_BYTES, open_regular, read_small
from tracekit.collectors.record.wire_format import (
    CONTROL_FILE,
    HEADER,
    RECORD,
    Category,
    RecordingSchedule,
    attempt_directory,
)
from tracekit.collectors.run_directory.job_notes import running_jobs
from tracekit.collectors.run_directory.writing import RUN_FILE, RUN_FILE_BYTES, attempts

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
