"""Maintenance of a store: check its files, drop damaged ones, prune ops.

In: a store. Out: what was found or done, one line each. Findings stay when ops go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tracekit.base.errors import StoreError, TracekitError
from tracekit.base.text import short
from tracekit.report.findings import Findings
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import if_nobody_writes
from tracekit.store.folder import JOBS, LEFT_OUT, Folder, checksum
from tracekit.store.hangs import hang_files, read_hang
from tracekit.store.store import Store
from tracekit.store.window import Incoming, Part, StoredWindow
from tracekit.store.writer import Writer
from tracekit.trace.canonical import read_parquet
from tracekit.trace.op import is_op_trace, read_op_trace

#: Called with the name of each stage of the work.
Tell = Callable[[str], None]

#: Where a trace of a window is, below `JOBS`.
_TRACE = re.compile(r"[0-9]+/[0-9]+\.parquet")
_NAMES = {Part.OPS: "ops", Part.REPORT: "report", Part.WORKERS: "slowdowns of workers"}


def damages(store: Store, tell: Tell = lambda _: None) -> Iterator[str]:
    """Problems with the files of a store, one line each; reads every byte. Changes nothing."""
    folder = store.folder()
    with store.reading() as catalogue:
        windows = catalogue.windows()
    yield from catalogue.left_out
    yield from _lasting(store, folder, list(_damaged(folder, windows, tell)))
    yield from _damaged_hangs(store).values()


def _damaged(
    folder: Folder, windows: Sequence[StoredWindow], tell: Tell
) -> Iterator[tuple[StoredWindow, dict[Part, str]]]:
    """The windows with damaged files, and what is wrong with each; reads all files."""
    for number, window in enumerate(windows, 1):
        tell(f"checking window {number:,} of {len(windows):,}")
        if bad := {part: problem for part in window.files if (problem := folder.damage(window, part))}:
            yield window, bad


def _lasting(store: Store, folder: Folder, damaged: Iterable[tuple[StoredWindow, dict[Part, str]]]) -> Iterator[str]:
    """Those problems, and files that no window names, that are not the work of a writer.

    Writers may have come and gone since the catalogue was read, so it is read again. A writer notes windows before it
    touches their files, and the catalogue names them before the note goes: what is neither noted nor named, in this
    order, is nobody's work. Nor is anything while no writer is there.
    """
    files = sorted((store.path / JOBS).glob("*/*"))
    with if_nobody_writes(folder.catalogue) as nobody:
        at_work = set() if nobody else folder.noted_files()
        with store.reading() as catalogue:
            named = folder.named_files(catalogue)
        left = [path for path in files if path not in named and path not in at_work and path.exists()]
    for window, bad in damaged:
        for part, problem in bad.items():
            if named.get(folder.file(window.job_id, window.number, part)) == window.files[part]:
                yield f"{_title(window)}: {_NAMES[part]}: {problem}"
    for path in left:
        yield f"{path}: no window names it; a killed writer or a lost catalogue left it behind"


def repair(store: Store, tell: Tell = lambda _: None) -> list[str]:
    """Drop what is damaged, one line each: a window without ops keeps its report, and the other way round.

    If the catalogue is gone, it is rebuilt from the traces, each of which names its job. Files that no window names
    move to `LEFT_OUT`.
    """
    folder = store.folder()
    store.check()
    rebuilding = not folder.catalogue.exists()
    if not (rebuilding or (folder.path / JOBS).exists()):
        with store.reading() as catalogue:
            if folder.named_files(catalogue):  # a disk that is not mounted looks like this
                raise StoreError(
                    f"{folder.path / JOBS}: is missing with the files of all jobs; bring it back, or remove the store"
                )
    with store.writing(rebuilding=rebuilding) as writer:
        dropped = list(writer.catalogue.remove_impossible())
        lines = [f"{line}: dropped" for _, line in dropped]
        if rebuilding or any(table == "windows" for table, _ in dropped):
            lines += _recovered(writer.catalogue, folder, tell)
        left = _unnamed(writer.catalogue, folder)
        for window, bad in _damaged(folder, writer.catalogue.windows(), tell):
            lines += _without(writer, window, bad)
    if left:
        lines += _moved_out(store, folder)
    for path, problem in _damaged_hangs(store).items():
        path.unlink(missing_ok=True)
        lines.append(f"removed; {problem}")
    return lines


def _unnamed(catalogue: Catalogue, folder: Folder) -> list[Path]:
    """The files of jobs that no window names."""
    return sorted(set((folder.path / JOBS).glob("*/*")) - folder.named_files(catalogue).keys())


def _damaged_hangs(store: Store) -> dict[Path, str]:
    """Problems with reports on hangs, by file."""
    found = {}
    for path in hang_files(store.path):
        try:
            read_hang(path)
        except FileNotFoundError:  # removed since
            continue
        except StoreError as error:
            found[path] = str(error)
    return found


def _moved_out(store: Store, folder: Folder) -> Iterator[str]:
    """Move the files that no window names out of the way of new windows."""
    out = folder.path / LEFT_OUT / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    with store.writing() as writer:  # now that the catalogue no longer names them, and while nobody adds files
        for path in _unnamed(writer.catalogue, folder):
            moved = out / path.relative_to(folder.path / JOBS)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)
            yield f"{path}: moved to {moved}; no window names it"


def _recovered(catalogue: Catalogue, folder: Folder, tell: Tell) -> Iterator[str]:
    """Add windows from their traces, each of which names its job; of several jobs with one name, the newest."""
    traces = [path for path in _unnamed(catalogue, folder) if _TRACE.fullmatch(f"{path.parent.name}/{path.name}")]
    for path in sorted(traces, key=lambda path: (-int(path.parent.name), int(path.stem))):
        job_id, number = int(path.parent.name), int(path.stem)
        tell(f"reading {path.name} of job {job_id}")
        try:
            trace = read_op_trace(path) if is_op_trace(path) else read_parquet(path)
        except TracekitError as error:
            yield f"{path}: left out; {error}"
            continue
        if catalogue.job_id(trace.name) not in (None, job_id):
            yield f"{path}: left out; job {short(trace.name)!r} was replaced by a newer one"
            continue
        files = {part: checksum(file) for part in Part if (file := folder.file(job_id, number, part)).exists()}
        found = _findings(folder.file(job_id, number, Part.REPORT))
        if found is None:
            files = {Part.OPS: files[Part.OPS]}
        item = Incoming(trace, trace.name, "unknown: found by repair", found)
        catalogue.ensure_job(job_id, item.name, item.source)
        catalogue.add_window(job_id, number, item, files, datetime.fromtimestamp(path.stat().st_mtime, UTC))
        yield f"{short(item.name)}, window {number}: recovered"


def _findings(path: Path) -> Findings | None:
    """The findings in a report; None if there is none, or it is damaged."""
    try:
        found = Findings(path.read_text(encoding="utf-8"))
        found.figures(), found.verdict(), found.hosts()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return found


def _without(writer: Writer, window: StoredWindow, bad: dict[Part, str]) -> Iterator[str]:
    """Drop the damaged parts of a window, or the window itself if nothing is left of it."""
    if set(window.files) == set(bad):
        writer.remove_window(window)
        yield f"{_title(window)}: dropped; {'; '.join(bad.values())}"
        return
    for part, problem in bad.items():
        writer.remove_part(window, part)
        yield f"{_title(window)}: dropped its {_NAMES[part]}; {problem}"
    if Part.REPORT in bad:
        writer.catalogue.mark_unanalysed(window, "its report was damaged, and dropped")


def prune(
    store: Store, *, older_than: timedelta | None = None, most_bytes: int | None = None, tell: Tell = lambda _: None
) -> list[str]:
    """Remove ops, one line each, oldest windows first: those added earlier than `older_than` ago, and as many as
    needed.

    Reports and slowdowns of workers stay. Reports on hangs are removed by age only; their incidents stay. `most_bytes`:
    target size of all files of windows.
    """
    store.folder()
    store.check()
    lines = [] if older_than is None else list(_prune_hangs(store, older_than))
    with store.writing() as writer:
        windows = writer.catalogue.windows()
        size = sum(file.bytes for window in windows for file in window.files.values())
        for window in (one for one in windows if Part.OPS in one.files):
            old = older_than is not None and datetime.now(UTC) - window.added_at > older_than
            if not old and (most_bytes is None or size <= most_bytes):
                continue
            tell(f"removing ops of {short(window.job)}")
            freed = window.files[Part.OPS].bytes
            writer.remove_part(window, Part.OPS)
            size -= freed
            added = f"{window.added_at:%Y-%m-%d %H:%M}"
            lines.append(f"{_title(window)}: removed {window.ops:,} ops of {added} ({freed:,} bytes)")
    return lines


def _prune_hangs(store: Store, older_than: timedelta) -> Iterator[str]:
    """Remove reports on hangs that are older than that."""
    for path in hang_files(store.path):
        made_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        if datetime.now(UTC) - made_at > older_than:
            path.unlink(missing_ok=True)
            yield f"{path}: removed the report on a hang of {made_at:%Y-%m-%d %H:%M}"


def _title(window: StoredWindow) -> str:
    return f"{short(window.job)}, window {window.number}"
