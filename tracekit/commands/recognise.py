"""Recognise a file that a command cannot read, and name the command that can.

In: a path that a command cannot use. Out: one sentence, None if nothing is known about the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import click

from tracekit.base.command_line import command, quoted
from tracekit.base.errors import FormatError, SelectionError, StoreError, StudyError, TracekitError
from tracekit.base.object_storage import ADDRESSES, object_url, shown
from tracekit.base.text import listed, nearest, printable

#: Most bytes of a file, and most files of a folder, to inspect.
_LOOKED_AT, _MOST_FILES = 65_536, 16
#: Words near the beginning of flight-recorder dumps, pickled or as JSON.
_DUMP_WORDS = (b"pg_config", b"entries")
#: First bytes of a Parquet file.
_PARQUET = b"PAR1"
#: A Parquet file that tracekit did not write: a trace only if its columns say so.
_PERHAPS = "a Parquet file"
#: Commands that take `--store` with `--job` instead of a trace.
_OF_ONE_JOB = ("culprits", "export", "whatif")


class Wanted(StrEnum):
    """The kind of input that a command reads."""

    TRACE = "a trace"
    DUMPS = "a folder of dumps"
    STUDY = "a study"
    STORE = "a store"


@contextmanager
def explained(path: Path, wanted: Wanted = Wanted.TRACE) -> Iterator[None]:
    """If reading `path` fails because it is of another kind, report the kind instead. Raises FormatError."""
    try:
        yield
    except (FormatError, StudyError):
        words = what_it_is(path, wanted)
        if words is None:
            raise
        raise FormatError(f"{shown(path)}: {words}") from None


def what_it_is(path: Path, wanted: Wanted = Wanted.TRACE) -> str | None:
    """What the file or folder is, if that is not what is wanted, and the command to type."""
    from tracekit.collectors.importers.kineto.other_recordings import other_recording
    from tracekit.collectors.importers.registry import is_known
    from tracekit.fleet.sources import is_study

    try:
        if wanted in (Wanted.TRACE, Wanted.DUMPS) and not os.path.lexists(path):
            return _nearest(path)
        if is_store(path):
            return None if wanted is Wanted.STORE else f"a store, not {wanted}; {_with_store(path, wanted)}"
        if is_study(path):
            show = command("fleet", "report", path)
            return None if wanted is Wanted.STUDY else f"a study, not {wanted}; type `{show}`"
        if wanted is not Wanted.TRACE and (kind := _kind_of_trace(path)) is not None:
            return f"{kind}, not {wanted}{_for_trace(kind, path, wanted)}"
        if path.is_dir():
            return _folder(path, wanted)
        if not path.is_file():
            return None
        if path.suffix != ".parquet" and not _beginning(path, 1):
            return f"an empty file, not {wanted}; record or copy it again"
        if wanted is Wanted.TRACE and (is_known(path) or other_recording(path) is not None):
            return None  # the readers have reported more
        return _own(path, wanted) or _foreign(path, wanted)
    except OSError:
        return None


def _with_store(path: Path, wanted: Wanted) -> str:
    """Return how the current command, or `whatif`, reads a store."""
    context = click.get_current_context(silent=True)
    name = None if context is None else context.info_name
    if name == "compare":
        return f"name two of its jobs: `{command('compare', 'JOB', 'JOB', '--store', path)}`"
    if name == "info":
        return f"list its jobs with `{command('info', '--store', path)}`"
    of_command = name if name in _OF_ONE_JOB and wanted is Wanted.TRACE else "whatif"
    return f"type `{command(of_command, '--store', path)}`"


def _for_trace(kind: str, path: Path, wanted: Wanted) -> str:
    """Return the commands for a trace, or a possible one."""
    if kind == _PERHAPS:
        return ""
    many = f", or study many with `{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}`"
    return f"; type `{command('whatif', path)}`{many if wanted is Wanted.STUDY else ''}"


def _nearest(path: Path) -> str:
    """What to type instead of a path that does not exist here: one with a similar name, if there is one."""
    if object_url(path) is not None:
        return f"in object storage: `{command('fleet', 'run')}` reads traces there, --store a store; else copy it here"
    folder = path.parent
    names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    found = nearest(path.name, names)
    meant = f"; did you mean {printable(str(folder / found))}?" if found else ""
    if re.match(r"[a-z][\w+.-]+:/", str(path)):
        meant = f"; addresses of object storage begin with {listed(ADDRESSES)}"
    return f"no such file or folder{meant}"


def jobs_in(path: Path) -> list[Path]:
    """Return the jobs in a folder. Several folders of torch.profiler count as one; their reader separates them.

    Jobs in a store count only if there are no others: they were imported from somewhere, most likely from here. Raises
    FormatError for a folder that is too large to be searched.
    """
    if not path.is_dir() or is_store(path):
        return []
    from tracekit.fleet.sources import find_sources
    from tracekit.job.load import are_gpu_traces
    from tracekit.store.folder import is_store_folder

    try:
        sources = find_sources([str(path)], bounded=True)
    except SelectionError:
        return []
    found = [path / Path(source.path).relative_to(path.absolute()) for source in sources]
    stores = {folder for one in found for folder in one.parents if is_store_folder(folder)}
    found = [one for one in found if stores.isdisjoint(one.parents)] or found
    return [path] if found and all(are_gpu_traces((one,)) for one in found) else found


def only_job(path: Path) -> Path:
    """The path, or the only job in a folder. Raises FormatError for a folder that holds several."""
    jobs = jobs_in(path)
    if len(jobs) > 1:
        raise FormatError(
            f"{path}: a folder of {len(jobs)} jobs, not one trace; name one, such as `{command('whatif', jobs[0])}`, or"
            f" list them: `{command('info', path)}`"
        )
    return jobs[0] if jobs else path


def is_dumps(path: Path) -> bool:
    """True if a path is a folder of flight-recorder dumps, or one dump."""
    try:
        files = [path] if path.is_file() else sorted(path.iterdir())[:_MOST_FILES] if path.is_dir() else []
        return any(_is_dump(file) for file in files if file.is_file())
    except OSError:
        return False


def is_store(path: Path) -> bool:
    """True if a path is a store."""
    from tracekit.store import Store

    try:
        return Store(path).is_store()
    except StoreError:
        return False


def _kind_of_trace(path: Path) -> str | None:
    """Return the kind of trace of a file or folder, None if it is none."""
    from tracekit.collectors.importers.kineto.sniff import is_sqlite
    from tracekit.collectors.importers.registry import is_known
    from tracekit.job.load import are_gpu_traces
    from tracekit.trace.canonical import read_header

    if path.is_file() and _beginning(path, len(_PARQUET)) == _PARQUET:
        try:
            return _PERHAPS if read_header(path) is None else "a trace"
        except TracekitError:
            return None
    if are_gpu_traces((path,)):
        if is_sqlite(path):
            return "an export of Nsight Systems"
        return "traces of torch.profiler" if path.is_dir() else "a trace of torch.profiler"
    return "a recording" if is_known(path) else None


def _folder(path: Path, wanted: Wanted) -> str | None:
    files = [file for _, file in zip(range(_MOST_FILES), sorted(path.iterdir()), strict=False)]
    if not files:
        made = f"; `{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}` makes one"
        return f"an empty folder, not {wanted}{made if wanted is Wanted.STUDY else ''}"
    if all(file.is_file() and not _beginning(file, 1) for file in files):
        return f"a folder with nothing but empty files, not {wanted}; record or copy them again"
    if wanted is not Wanted.DUMPS and is_dumps(path):
        return f"flight-recorder dumps of a hang, not {wanted}; type `{command('hang', path)}`"
    if trace := next((file for file in files if file.suffix == ".parquet" and _kind_of_trace(file)), None):
        study = f"study all: `{command('fleet', 'run', path, '--out', 'STUDY')}`"
        return f"a folder of traces, not {wanted}; name one: `{command('whatif', trace)}`, or {study}"
    return None


def _beginning(path: Path, size: int = _LOOKED_AT) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _end(path: Path, size: int = _LOOKED_AT) -> bytes:
    """The last bytes of a file that is longer: a job that hung says so at the end."""
    with path.open("rb") as file:
        file.seek(max(size, path.stat().st_size - size))
        return file.read(size)


def is_hang_log(path: Path) -> bool:
    """True if a path is a file with what NCCL's watchdogs have printed, or with a report of its RAS."""
    from tracekit.collectors.importers.other_logs import is_hang_text

    try:
        return path.is_file() and (is_hang_text(_beginning(path)) or is_hang_text(_end(path)))
    except OSError:
        return False


def _is_dump(path: Path) -> bool:
    beginning = _beginning(path)
    return beginning[:1] in {b"\x80", b"{"} and all(word in beginning for word in _DUMP_WORDS)


def _own(path: Path, wanted: Wanted) -> str | None:
    """Files that tracekit wrote."""
    from tracekit.job.lanes import TABLE_FILE
    from tracekit.show.documents.markdown import MARKDOWN_FILE
    from tracekit.show.documents.page import PAGE_FILE

    made_of = ", or name the trace that it was made from" if wanted is Wanted.TRACE else ""
    for kind, hint in (
        (PAGE_FILE, f"open it in a browser: `xdg-open {quoted(path)}`"),
        (MARKDOWN_FILE, "it is text to read"),
        (TABLE_FILE, "read it with polars or pandas"),
    ):
        with path.open("rb") as file:
            if kind.recognises(file):
                return f"{kind.name}, not {wanted}; {hint}{made_of}"
    if _beginning(path).lstrip().startswith(b'{"report_version"'):
        instead = "the trace that it was made from" if made_of else wanted
        return f"a report of `tracekit whatif --json`, not {wanted}; name {instead}"
    return None


def _foreign(path: Path, wanted: Wanted) -> str | None:
    """Files that belong to another command, or to none."""
    from tracekit.collectors.importers.other_logs import other_log
    from tracekit.collectors.importers.rl.reader import looks_like_rl

    if _is_dump(path):
        hang = command("hang", path.parent)
        if wanted is Wanted.DUMPS:
            return f"one flight-recorder dump; name the folder with those of all ranks: `{hang}`"
        return f"a flight-recorder dump, not {wanted}; type `{hang}`"
    if looks_like_rl(path):
        if wanted is Wanted.TRACE:
            return None  # a damaged one; the reader has reported more
        return f"a log of RL post-training, not {wanted}; type `{command('rl', path)}`"
    match path.suffix:
        case ".py" | ".sh":
            run = command("collect", "--", "python" if path.suffix == ".py" else "sh", path)
            return f"a script, not {wanted}; record what it does: `{run}`"
        case ".yaml" | ".yml":
            return f"a layout, not {wanted}; give it with its trace: `{command('whatif', 'TRACE', '--layout', path)}`"
        case ".parquet" | ".json" | ".gz" if wanted is Wanted.TRACE:
            return None  # a damaged or unknown trace; the reader has reported more
    beginning = _beginning(path)
    if (log := other_log(beginning, path) or other_log(_end(path), path)) is not None:
        return log
    kind = "a text file" if b"\0" not in beginning else "a file"
    if wanted is not Wanted.TRACE:
        return f"{kind}, not {wanted}" if kind != "a file" or wanted is Wanted.DUMPS else None
    if beginning.startswith(_PARQUET):
        return None
    return f"{kind}, not a trace; `tracekit import --format` lists the formats that tracekit reads"
