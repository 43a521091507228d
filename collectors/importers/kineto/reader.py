"""Reads traces of torch.profiler, and exports of Nsight Systems: a folder, or files.

In: paths. Out: a `GpuRecording`. Files are read in separate processes, several at a time; nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.base.processes import answers_of
from tracekit.base.stderr import advance
from tracekit.collectors.importers.kineto.assemble import assemble
from tracekit.collectors.importers.kineto.kernel_classes import kernel_classes
from tracekit.collectors.importers.kineto.rank_columns import RankColumns
from tracekit.collectors.importers.kineto.reading import read_file
from tracekit.collectors.importers.kineto.sniff import SUFFIXES, empty_in, traces_in
from tracekit.trace.gpu_recording import GpuRecording

#: Below this many bytes of files, starting processes takes longer than reading.
LARGEST_IN_PROCESS = 8 << 20


def read_kineto(
    paths: Sequence[Path],
    *,
    classes: Sequence[str] = (),
    processes: int | None = None,
) -> GpuRecording:
    """Read the recording of one job.

    `paths`: files, and folders searched with all below them. `classes`: the user's own patterns of kernels
    (`kernel_classes`). `processes`: read that many files at a time [default: one per core].

    Raises FormatError, naming the file, if a file is no such trace, if files contradict each other, or if nothing was
    recorded on a GPU.
    """
    table = kernel_classes(classes)
    files = list(dict.fromkeys(file for path in paths for file in (traces_in(path) if path.is_dir() else [path])))
    if not files:
        raise FormatError(f"{paths[0]}: holds no traces of torch.profiler (files that end in {' or '.join(SUFFIXES)})")
    read: list[RankColumns] = []
    for done, columns_of_file in enumerate(_read_all(files, processes or len(os.sched_getaffinity(0))), 1):
        read += columns_of_file
        advance("reading", done, len(files), "files")
    read.sort(key=lambda columns: (files.index(Path(columns.file)), columns.part))
    recording = assemble(read, table, name=_name(paths[0]))
    empty = [f"{file.name}: empty, and left out" for path in paths if path.is_dir() for file in empty_in(path)]
    return replace(recording, notes=(*recording.notes, *empty))


def _read_all(files: Sequence[Path], processes: int) -> Iterator[list[RankColumns]]:
    """Yield each file's ranks as they become ready."""
    if (
        processes == 1
        or len(files) == 1
        or sum(file.stat().st_size for file in files if file.is_file()) < LARGEST_IN_PROCESS
    ):
        yield from map(read_file, files)
        return
    yield from answers_of(_READ, files, processes)


_READ = "from tracekit.collectors.importers.kineto.reading import send_files; send_files()"


def _name(path: Path) -> str:
    """Return the name of the job: its folder, or the file without suffixes."""
    whole = path.absolute()
    return whole.name if path.is_dir() else whole.name.split(".")[0]
