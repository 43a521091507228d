"""Maintenance of a store: check its files, drop damaged ones, prune ops.

In: a store. Out: what was found or done, one line each. Findings stay when ops go. A link, a pipe or the like where a
file belongs is named and stays as it is; a window behind it is neither dropped nor pruned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from tracekit.base.errors import FormatError, StoreError, TracekitError, UnreadableFileError, UnsafeFileError
from tracekit.base.text import short
from tracekit.report.findings import Findings, Unanalysed
from tracekit.report.report import decoded
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import excluding_writers
from tracekit.store.catalogue_rows import Incoming, StoredFile, StoredWindow, WindowPart, WrittenWindow
from tracekit.store.folder import JOBS, LEFT_OUT, Folder, name_of
from tracekit.store.hangs import hang_files, read_hang
from tracekit.store.incidents import HANGS
from tracekit.store.store import Store, Writer
from tracekit.trace.canonical import is_op_trace, read_parquet
from tracekit.trace.op import read_op_trace

if TYPE_CHECKING:
    from tracekit.store.catalogue_rows import AnyTrace

#: Called with the name of each stage of the work.
ShowStage = Callable[[str], None]
#: What a store keeps of the analysis of a trace, which the analysis above the store makes.
Analyse = Callable[["AnyTrace"], Findings | Unanalysed]

_Read = TypeVar("_Read")

#: The name of a trace of a window.
_TRACE = re.compile(rf"{JOBS}/([0-9]{{1,18}})/([0-9]{{1,18}})\.parquet")
#: The `problem` of a window whose report was dropped; a repair analyses its ops again.
DROPPED = "its report was damaged, and dropped"
_NAMES = {WindowPart.OPS: "ops", WindowPart.REPORT: "report", WindowPart.WORKERS: "slowdowns of workers"}


def damages(store: Store, show_stage: ShowStage = lambda _: None) -> Iterator[str]:
    """Problems with the files of a store, one line each; reads every byte. Changes nothing."""
    folder = store.folder()
    with store.reading() as catalogue:
        windows = catalogue.windows()
    yield from catalogue.left_out
    unsafe = dict.fromkeys(folder.unsafe())
    yield from _not_in_progress(store, folder, list(_damaged_windows(folder, windows, show_stage, unsafe)))
    yield from unsafe
    for damage_of in (folder.damaged_mark, folder.damaged_note):
        if line := _unless_unsafe(damage_of, None):
            yield line
    yield from map(str, _damaged_hangs(store).values())


def _damaged_windows(
    folder: Folder, windows: Sequence[StoredWindow], show_stage: ShowStage, unsafe: dict[str, None]
) -> Iterator[tuple[StoredWindow, dict[WindowPart, str]]]:
    """The windows with damaged files, and what is wrong with each; reads all files. What is refused goes to `unsafe`, a
    line for each.
    """
    for number, window in enumerate(windows, 1):
        show_stage(f"checking window {number:,} of {len(windows):,}")
        bad: dict[WindowPart, str] = {}
        for part in window.files:
            try:
                problem = folder.damage(window, part)
            except (UnsafeFileError, UnreadableFileError) as error:
                unsafe[str(error)] = None
            else:
                bad |= {part: problem} if problem else {}
        if bad:
            yield window, bad


def _not_in_progress(
    store: Store, folder: Folder, damaged: Iterable[tuple[StoredWindow, dict[WindowPart, str]]]
) -> Iterator[str]:
    """Those problems, and files that no window names, that are not the work of a writer.

    Writers may have come and gone since the catalogue was read, so it is read again. A writer notes windows before it
    touches their files, and the catalogue names them before the note goes: what is neither noted nor named, in this
    order, is nobody's work. Nor is anything while no writer is there.
    """
    before = set(_files_of_jobs(folder))
    with excluding_writers(folder.catalogue) as no_writer:
        at_work = set() if no_writer else folder.noted_files()
        with store.reading() as catalogue:
            referenced = folder.named_files(catalogue)
        nameless = (before - referenced.keys() - at_work).intersection(_files_of_jobs(folder))
    for window, bad in damaged:
        for part, problem in bad.items():
            if referenced.get(name_of(window.job_id, window.number, part)) == window.files[part]:
                yield f"{_title(window)}: {_NAMES[part]}: {problem}"
    for name in sorted(nameless):
        yield f"{folder.path / name}: no window names it; a killed writer or a lost catalogue left it behind"


def repair(store: Store, analyse: Analyse, show_stage: ShowStage = lambda _: None) -> list[str]:
    """Drop what is damaged, one line each: a window without ops keeps its report. A report that is damaged, or of
    another version, is made anew from the ops beside it, each in a write of its own: no other writer waits for an
    analysis, and the next repair goes on after one that was killed. What cannot be read now stays, with a line, too.

    If the catalogue is gone, it is rebuilt from the traces, each of which names its job. Files that no window names
    move to `LEFT_OUT`.
    """
    folder = store.folder()
    store.check()
    rebuilding = not folder.has_catalogue()
    if not rebuilding and not _unless_unsafe(lambda: folder.contained.folder_status(JOBS) is not None, otherwise=True):
        with store.reading() as catalogue:
            if folder.named_files(catalogue):  # a disk that is not mounted looks like this
                raise StoreError(
                    f"{folder.path / JOBS}: is missing with the files of all jobs; bring it back, or remove the store"
                )
    mark, note = (_unless_unsafe(damage_of, None) for damage_of in (folder.damaged_mark, folder.damaged_note))
    unsafe = dict.fromkeys(folder.unsafe())
    with store.writing(rebuilding=rebuilding, repairing=True) as writer:
        dropped = list(writer.catalogue.remove_impossible())
        lines = [f"{line}: dropped" for _, line in dropped]
        lines += [f"{verb}; {line}" for verb, line in (("renewed", mark), ("dropped", note)) if line]
        if rebuilding or any(table == "windows" for table, _ in dropped):
            lines += _recover_windows(writer.catalogue, folder, show_stage)
        unnamed = _unnamed(writer.catalogue, folder)
        for window, bad in list(_damaged_windows(folder, writer.catalogue.windows(), show_stage, unsafe)):
            lines += _drop_parts(writer, window, bad)
    lines += _renew_reports(store, analyse, show_stage)
    try:
        if unnamed:
            lines += _move_unnamed(store, folder)
    except UnsafeFileError as error:  # in the place of the folder to move them to
        unsafe[str(error)] = None
    for name, problem in _damaged_hangs(store).items():
        if isinstance(problem, UnreadableFileError):
            unsafe[str(problem)] = None
            continue
        folder.contained.remove(name)
        lines.append(f"removed; {problem}")
    return [*lines, *unsafe]


def _unless_unsafe(read: Callable[[], _Read], otherwise: _Read) -> _Read:
    """The result of `read`; `otherwise` if something unsafe is in the place of a file, which is reported elsewhere."""
    try:
        return read()
    except UnsafeFileError:
        return otherwise


def _files_of_jobs(folder: Folder) -> list[str]:
    return _unless_unsafe(folder.files_of_jobs, [])


def _unnamed(catalogue: Catalogue, folder: Folder) -> list[str]:
    return sorted(set(_files_of_jobs(folder)) - folder.named_files(catalogue).keys())


def _damaged_hangs(store: Store) -> dict[str, StoreError]:
    problems = dict[str, StoreError]()
    with suppress(UnsafeFileError):
        for name in hang_files(store.path):
            try:
                read_hang(store.path, name)
            except FileNotFoundError:  # removed since
                continue
            except StoreError as error:
                problems[name] = error
    return problems


def _move_unnamed(store: Store, folder: Folder) -> Iterator[str]:
    """Move the files that no window names out of the way of new windows."""
    out = f"{LEFT_OUT}/{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    with store.writing() as writer:  # now that the catalogue no longer names them, and while no writer adds files
        for name in _unnamed(writer.catalogue, folder):
            moved = f"{out}{name.removeprefix(JOBS)}"
            folder.contained.make_folder(target := moved.rpartition("/")[0], durable=True)
            folder.contained.rename(name, moved)
            folder.contained.sync_folder(target)
            yield f"{folder.path / name}: moved to {folder.path / moved}; no window names it"


def _recover_windows(catalogue: Catalogue, folder: Folder, show_stage: ShowStage) -> Iterator[str]:
    """Add windows from their traces, each of which names its job; of several jobs with one name, the newest."""
    matches = filter(None, map(_TRACE.fullmatch, _unnamed(catalogue, folder)))
    traces = [(int(match[1]), int(match[2]), match.string) for match in matches]
    for job_id, number, name in sorted(traces, key=lambda trace: (-trace[0], trace[1])):
        path, status = folder.path / name, folder.contained.status(name)
        if status is None or name != name_of(job_id, number, WindowPart.OPS):
            continue
        show_stage(f"reading {path.name} of job {job_id}")
        # Whatever cannot be read now ends the repair here: it is no reason to leave a window out.
        files = {part: stored for part in WindowPart if (stored := _stored(folder, name_of(job_id, number, part)))}
        findings = _findings(folder, name_of(job_id, number, WindowPart.REPORT))
        try:
            trace = read_op_trace(path) if is_op_trace(path) else read_parquet(path)
        except TracekitError as error:
            yield f"{path}: left out; {error}"
            continue
        if catalogue.job_id(trace.name) not in (None, job_id):
            yield f"{path}: left out; job {short(trace.name)!r} was replaced by a newer one"
            continue
        if findings is None:
            files = {WindowPart.OPS: files[WindowPart.OPS]}
        item = Incoming(trace, trace.name, "unknown: found by repair", findings)
        catalogue.ensure_job(job_id, item.name, item.source)
        added_at = datetime.fromtimestamp(status.st_mtime, UTC)
        catalogue.add_windows([WrittenWindow(job_id, number, item, files, added_at)])
        yield f"{short(item.name)}, window {number}: recovered"


def _stored(folder: Folder, name: str) -> StoredFile | None:
    """The size and checksum of a file; None if there is none, or something else."""
    try:
        return folder.checksum(name)
    except (FileNotFoundError, UnsafeFileError):
        return None


def _findings(folder: Folder, name: str) -> Findings | None:
    """The findings in a report; None if there is none, or it is damaged."""
    try:
        return Findings(decoded(folder.read(name), name))
    except (FileNotFoundError, UnsafeFileError, FormatError, RecursionError):
        return None


def renewable(store: Store) -> int:
    """How many windows have a report of another version that a repair makes anew from the ops beside it."""
    return sum({WindowPart.OPS, WindowPart.REPORT} <= set(window.files) for window in _to_renew(store))


def _to_renew(store: Store) -> list[StoredWindow]:
    """The windows that another version has analysed, and those whose report a repair has dropped."""
    folder = store.folder()
    with store.reading() as catalogue:
        windows = catalogue.windows()
        without_costs = {(window.job_id, window.number) for window in catalogue.outdated()}

    def has_other_version(window: StoredWindow) -> bool:
        with suppress(StoreError):  # what cannot be read has its line
            return WindowPart.REPORT in window.files and folder.report(window) is None
        return False

    return [
        window
        for window in windows
        if window.problem == DROPPED or (window.job_id, window.number) in without_costs or has_other_version(window)
    ]


def _renew_reports(store: Store, analyse: Analyse, show_stage: ShowStage) -> Iterator[str]:
    """Make the reports of another version, and those that a repair has dropped, from the ops beside them."""
    folder = store.folder()
    for window in _to_renew(store):
        if WindowPart.OPS not in window.files:
            if WindowPart.REPORT in window.files:
                yield f"{_title(window)}: its report is of another version, and its ops are gone: it stays as it is"
            continue
        show_stage(f"analysing {_title(window)}")
        try:
            trace = folder.trace(window)
        except StoreError:  # what cannot be read has its line
            continue
        item, place = Incoming(trace, window.job, "", analyse(trace)), [(window.job, window.number)]
        with store.writing(repairing=True) as writer:
            if window in writer.catalogue.windows_of(place):  # unchanged meanwhile
                _drop(writer, window, set(window.files) - {WindowPart.OPS})  # a file never changes under a reader
        with store.writing(repairing=True) as writer:
            for bare in writer.catalogue.windows_of(place):
                if bare.problem == DROPPED:
                    writer.add_findings(bare, item)
                    yield f"{_title(window)}: its report was made anew from its ops"


def _drop_parts(writer: Writer, window: StoredWindow, bad: dict[WindowPart, str]) -> Iterator[str]:
    """Drop the damaged parts of a window, or the window itself if nothing is left of it."""
    if set(window.files) == set(bad):
        writer.remove_window(window)
        yield f"{_title(window)}: dropped; {'; '.join(bad.values())}"
        return
    _drop(writer, window, bad)
    for part, problem in bad.items():
        yield f"{_title(window)}: dropped its {_NAMES[part]}; {problem}"


def _drop(writer: Writer, window: StoredWindow, parts: Collection[WindowPart]) -> None:
    for part in parts:
        writer.remove_part(window, part)
    if WindowPart.REPORT in parts:
        writer.catalogue.mark_unanalysed(window, DROPPED)


def prune(
    store: Store,
    *,
    older_than: timedelta | None = None,
    most_bytes: int | None = None,
    show_stage: ShowStage = lambda _: None,
) -> list[str]:
    """Remove ops, one line each, oldest windows first: those added earlier than `older_than` ago, and as many as
    needed.

    Reports and slowdowns of workers stay. Reports on hangs are removed by age only; their incidents stay. `most_bytes`:
    target size of all files of windows.
    """
    folder = store.folder()
    store.check()
    with store.writing() as writer:
        lines = [] if older_than is None else list(_prune_hangs(folder, older_than))
        windows = writer.catalogue.windows()
        size = sum(file.bytes for window in windows for file in window.files.values())
        for window in (window for window in windows if WindowPart.OPS in window.files):
            old = older_than is not None and datetime.now(UTC) - window.added_at > older_than
            if not old and (most_bytes is None or size <= most_bytes):
                continue
            try:
                folder.contained.status(name_of(window.job_id, window.number, WindowPart.OPS))
            except UnsafeFileError as error:
                lines.append(str(error))
                continue
            show_stage(f"removing ops of {short(window.job)}")
            freed = window.files[WindowPart.OPS].bytes
            writer.remove_part(window, WindowPart.OPS)
            size -= freed
            added = f"{window.added_at:%Y-%m-%d %H:%M}"
            lines.append(f"{_title(window)}: removed {window.ops:,} ops of {added} ({freed:,} bytes)")
    return lines


def _prune_hangs(folder: Folder, older_than: timedelta) -> Iterator[str]:
    """Remove reports on hangs that are older than that, and what killed writers of reports have left."""
    try:
        names = [f"{HANGS}/{name}" for name in folder.contained.files(HANGS)]
    except UnsafeFileError as error:
        yield str(error)
        return
    for name in names:
        if (status := folder.contained.status(name)) is None:  # removed since
            continue
        written_at = datetime.fromtimestamp(status.st_mtime, UTC)
        if datetime.now(UTC) - written_at > older_than:
            folder.contained.remove(name)
            yield f"{folder.path / name}: removed the report on a hang of {written_at:%Y-%m-%d %H:%M}"


def _title(window: StoredWindow) -> str:
    return f"{short(window.job)}, window {window.number}"
