"""The command `tracekit hang`: dumps of a hung job, or a store, in; the ranks that hold the job up out.

As a process of its own, it is what `tracekit collect --hang-after` keeps ready to write reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.arguments import OUT, STORE_PATH
from tracekit.base.errors import ExitCode, FormatError
from tracekit.base.paths import Look, command
from tracekit.base.stderr import progress
from tracekit.base.text import printable, short
from tracekit.commands.options import AS_JSON, job_names, made_folder
from tracekit.sources.load import wrong_source
from tracekit.sources.source import Content

if TYPE_CHECKING:
    from tracekit.analysis.hang.hang_report import HangReport
    from tracekit.store import Store
    from tracekit.store.hangs import StoredHang
    from tracekit.trace.dumps import FlightRecord

#: How `tracekit collect --hang-after` names the folders of its dumps.
HANG_FOLDERS = "hang-*"


@click.command("hang")
@click.argument("directory", metavar="DIRECTORY|STORE", type=STORE_PATH)
@click.option("--job", shell_complete=job_names, help="With a store: show the newest hang of this job.")
@AS_JSON
@click.option("--out", type=OUT, help="Also write report.txt and report.json to this folder.")
def hang_command(directory: Path, job: str | None, as_json: bool, out: Path | None) -> int:
    """Which rank never arrives? Names the ranks that hold a hung job up, and why.

    DIRECTORY holds the flight-recorder dumps of the ranks, one file each (pickle or JSON), or is the --segments folder
    of a `tracekit collect --hang-after` that saw a hang, or a file with what the watchdogs of NCCL printed, or with a
    report of `ncclras`. With a STORE, shows the newest hang that it holds. Exits with 3 if a hang was found.
    """
    from tracekit.store import Store

    store = Store(directory)
    if store.is_store():
        stored = _newest_hang(store, job)
        lines, report = list(stored.lines), stored.report
        if not as_json:
            moment = datetime.fromtimestamp(stored.found_at, UTC)
            lines.insert(0, f"{printable(stored.job)}, {moment:%Y-%m-%d %H:%M:%S} UTC")
    elif job is not None:
        raise click.UsageError("--job chooses a hang in a store; DIRECTORY is not a store")
    else:
        lines, report = analyse(directory)
    if out is not None:
        write_report(out, lines, report)
    click.echo(json.dumps(report.to_dict()) if as_json else "\n".join(lines))
    return ExitCode.CONDITION if report.hang else ExitCode.DONE


def _newest_hang(store: Store, job: str | None) -> StoredHang:
    """The newest hang in a store. Raises NotStoredError if there is none."""
    from tracekit.base.errors import NotStoredError
    from tracekit.base.paths import object_url

    hangs = store.hangs(job)
    if not hangs:
        of_job = "" if job is None else f" of a job {short(job)!r}"
        is_copy = object_url(store.path) is not None  # which is read-only
        original = "FOLDER" if is_copy else store.path
        watch = command("collect", "--hang-after", "120", "--store", original, "--", "COMMAND")
        advice = f"`{watch}` adds them" + (", and a copy of FOLDER there has them" if is_copy else "")
        raise NotStoredError(f"{store.name}: keeps no hang{of_job}; {advice}")
    return hangs[0]


def analyse(directory: Path) -> tuple[list[str], HangReport]:
    """The report on a folder of dumps, or on text about a hang, as text and as data."""
    from tracekit.analysis.hang.hang_culprits import find_hang
    from tracekit.collectors.importers.flight_recorder import read_flight_records
    from tracekit.collectors.importers.sniff import has_dumps
    from tracekit.dashboards.terminal.hang_lines import report_lines

    with progress("reading the dumps") as show_stage:
        newest = newest_dumps(directory)
        record = None if has_dumps(Look(newest)) else _nccl_text(newest)
        try:
            record = record or read_flight_records(newest)
        except FormatError as error:
            raise wrong_source(Look(directory), Content.DUMPS) or error from None
        show_stage("finding who waits for whom")
        report = find_hang(record)
    return list(report_lines(report)), report


def _nccl_text(path: Path) -> FlightRecord | None:
    """What NCCL printed about a hang, in a file or the files of a folder; None if there is no such text."""
    from tracekit.collectors.importers.nccl_text import read_nccl_text

    return read_nccl_text(path) if path.is_file() or path.is_dir() else None  # a pipe would block


def write_report(out: Path, lines: Sequence[str], report: HangReport) -> None:
    """Write report.txt, then report.json, into the folder `out`: both or none. Raises OutputError."""
    from tracekit.base.atomic_write import Kind, check_writable, starting_with, write_text

    is_text = Kind("a report on a hang", lambda file: b"HANG  " in file.read(16))
    is_json = Kind("a report on a hang", starting_with(b'{"hang": '))
    made_folder(out, "another --out")
    text, plain = "\n".join(lines), json.dumps(report.to_dict())
    files = ((out / "report.txt", text, is_text), (out / "report.json", plain, is_json))
    for path, _, kind in files:
        check_writable(path, kind)
    for path, content, kind in files:
        write_text(path, f"{content}\n", kind)


def newest_dumps(directory: Path) -> Path:
    """The folder of dumps: the newest one of a run directory, else the directory itself."""
    if directory.is_dir() and (dumps := [path for path in directory.glob(HANG_FOLDERS) if path.is_dir()]):
        return max(dumps, key=lambda path: path.stat().st_mtime)
    return directory


def stand_by() -> None:
    """Write reports until there is no more input; the analysis is imported before it comes.

    In, on stdin: a line of JSON per report, with the `folder` for it and the `attempt` whose answers to gather there
    first (null: the dumps are there already); `ended_ns` is when processes were seen to end.
    """
    from tracekit.analysis.hang.hang_culprits import find_hang
    from tracekit.collectors.importers.flight_recorder import read_flight_records
    from tracekit.collectors.launch.hang_answers import gather
    from tracekit.dashboards.terminal.hang_lines import report_lines

    for line in sys.stdin:
        about = json.loads(line)
        folder = Path(about["folder"])
        if about["attempt"] is not None:
            gather(Path(about["attempt"]), folder, dict(about["ended_ns"]))
        report = find_hang(read_flight_records(folder))
        write_report(folder, list(report_lines(report)), report)


if __name__ == "__main__":
    stand_by()
