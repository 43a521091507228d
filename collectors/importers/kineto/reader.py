"""Reads traces of torch.profiler, and exports of Nsight Systems: a folder, or files.

In: paths. Out: a `GpuRecording` with the ops of all ranks, classified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import or_null
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.limits import check_pattern, search
from tracekit.base.stderr import advance
from tracekit.collectors.importers.kineto.event_columns import LONGEST_US, ROLES
from tracekit.collectors.importers.kineto.host_work import PHASES
from tracekit.collectors.importers.kineto.json_events import ACCELERATOR_IS, CollectiveArgs, other_accelerator
from tracekit.collectors.importers.kineto.rank_columns import RankColumns, read_file
from tracekit.collectors.importers.kineto.rank_placement import check_one_job, groups_of, mesh_of, place, rank_of
from tracekit.collectors.importers.sniff import SUFFIXES, empty_in, traces_in
from tracekit.trace.gpu_activity import Activity, KernelClass, class_of
from tracekit.trace.op import (
    CALL_SCHEMA,
    GPU_OP_SCHEMA,
    HOST_SCHEMA,
    MEMORY_SCHEMA,
    STEP_SCHEMA,
    WHAT_SCHEMA,
    GpuRecording,
    joined,
)

#: Below this many bytes of files, starting processes takes longer than reading.
LARGEST_IN_PROCESS = 8 << 20


def read_kineto(paths: Sequence[Path], *, classes: Sequence[str] = ()) -> GpuRecording:
    """Read the recording of one job, as many files at a time as there are cores.

    `paths`: files, and folders searched with all below them. `classes`: the user's own patterns of kernels
    (`kernel_classes`).

    Raises FormatError, naming the file, if a file is no such trace, if files contradict each other, or if nothing was
    recorded on a GPU.
    """
    table = kernel_classes(classes)
    files = list(dict.fromkeys(file for path in paths for file in (traces_in(path) if path.is_dir() else [path])))
    if not files:
        raise FormatError(f"{paths[0]}: holds no traces of torch.profiler (files that end in {' or '.join(SUFFIXES)})")
    read: list[RankColumns] = []
    for done, columns_of_file in enumerate(_read_all(files, len(os.sched_getaffinity(0))), 1):
        read += columns_of_file
        advance("reading", done, len(files), "files")
    read.sort(key=lambda columns: (files.index(Path(columns.file)), columns.part))
    whole = paths[0].absolute().name
    recording = assemble(read, table, name=whole if paths[0].is_dir() else whole.split(".")[0])
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
    from tracekit.base.processes import answers_of  # most recordings need no processes of their own

    yield from answers_of(_READ, files, processes)


_READ = "from tracekit.collectors.importers.kineto.rank_columns import send_files; send_files()"


T = TypeVar("T")
#: Times since 1970 are later; smaller ones are of a clock that began with the machine.
_EARLIEST_NS = 10**18
#: How torch.profiler's tensorboard_trace_handler names files: host_pid.time.pt.trace.json.
_HOST_IN_NAME = re.compile(r"^(.+)_\d+\.\d+\.pt\.trace\.json")


def assemble(files: Sequence[RankColumns], classes: KernelClasses, *, name: str) -> GpuRecording:
    """Combine the files. Raises FormatError if no file has GPU ops, or files contradict each other."""
    left_out = _left_out(files)
    files = [file for file in files if len(file.gpu["start"])]
    _check_steps(files)
    ranks, world_size, notes = place(files)
    groups, group_of = groups_of(files, ranks, world_size)
    origins = _origins_ns(files)
    first = min(origin + round(_first_us(file) * 1e3) for origin, file in zip(origins, files, strict=True))
    gpu, calls, spans, calls_before = [], [], [], 0
    work, whats, whats_before, whole, memory = [], [], 0, {}, []
    order = sorted(range(len(files)), key=ranks.__getitem__)
    for number in order:
        file, rank = files[number], ranks[number]
        late_us = (origins[number] - first) / 1e3
        gpu.append(_gpu_ops(file, rank, late_us, calls_before, group_of[number], classes))
        calls.append(_calls(file, rank, late_us))
        spans.append(_on_axis(pl.DataFrame(dict(file.step_spans)), rank, late_us, STEP_SCHEMA))
        calls_before += len(file.calls["start"])
        pieces = {**file.work.pieces, "what": file.work.pieces["what"] + whats_before}
        work.append(_on_axis(pl.DataFrame(pieces), rank, late_us, HOST_SCHEMA))
        whats.append(pl.DataFrame(file.work.whats, WHAT_SCHEMA, orient="row"))
        whats_before += len(file.work.whats)
        whole[rank] = _whole(file, late_us)
        memory.append(_on_axis(pl.DataFrame({**file.memory, "duration": 0.0}), rank, late_us, MEMORY_SCHEMA))
    coordinates, axes = mesh_of(files, ranks)
    by_rank = {ranks[number]: files[number] for number in order}
    return GpuRecording(
        name=name,
        gpu_ops=joined(gpu),
        calls=joined(calls),
        step_spans=pl.concat(spans),
        host=joined(work),
        whats=pl.concat(whats),
        memory=pl.concat(memory),
        spans=whole,
        hosts={rank: host for rank, file in by_rank.items() if (host := _host(file)) is not None},
        files={rank: file.file for rank, file in by_rank.items()},
        groups=groups,
        world_size=world_size,
        notes=tuple(dict.fromkeys([*notes, *(note for file in files for note in file.notes)])),
        device_name=_of_device(files, "name", str),
        multiprocessors=_of_device(files, "numSms", int),
        cut=tuple(rank for rank, file in by_rank.items() if file.cut),
        damaged={rank: file.damaged for rank, file in by_rank.items()},
        unlinked={rank: file.unlinked for rank, file in by_rank.items()},
        lost={rank: file.lost for rank, file in by_rank.items()},
        left_out=left_out,
        coordinates=coordinates,
        axes=axes,
        costs={rank: file.work.cost for rank, file in by_rank.items() if file.work.cost is not None},
        began_s=first / 1e9 if first > _EARLIEST_NS else None,
    )


def _left_out(files: Sequence[RankColumns]) -> dict[int, str]:
    """Map ranks without GPU ops to the reason. Raises FormatError if none has any, or if such a file lacks its rank."""
    reasons = {}
    empty = [file for file in files if not len(file.gpu["start"])]
    for file in empty:
        if len(empty) == len(files) or (rank := rank_of(file)) is None:
            raise FormatError(_why_empty(file))
        reasons[rank] = (
            _why_empty(file).removeprefix(file.file).removeprefix(PurePath(file.file).name).removeprefix(": ")
        )
    return reasons


def _why_empty(file: RankColumns) -> str:
    """Return the reason why a file has no GPU ops."""
    if file.cut:
        return f"{file.notes[0].partition(';')[0]} before its first GPU op; copy or record it again"
    if file.notes:
        return f"{file.notes[0]}, and no GPU op is left; copy or record it again"
    if (accelerator := other_accelerator(Path(file.file), of_torch=file.host_events > 0)) is not None:
        return f"{file.file}: holds no GPU ops, but events of {accelerator}, {ACCELERATOR_IS}"
    if file.host_events or len(file.calls["start"]):
        return (
            f"{file.file}: holds no GPU ops ({file.host_events:,} host events): it was recorded on the CPU only;"
            " record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return (
        f"{file.file}: a Chrome trace, but not of torch.profiler: no event is a GPU op or an operator; export one with"
        " torch.profiler's export_chrome_trace"
    )


def _check_steps(files: Sequence[RankColumns]) -> None:
    """Raise FormatError if two files both mark steps but share none: they are recordings of different times."""
    marked = [(file, steps) for file in files if (steps := set(file.step_spans["step"].tolist()))]
    for file, steps in marked[1:]:
        first, others = marked[0]
        if not steps & others:
            check_one_job(files)
            raise FormatError(
                f"{file.file} holds steps {min(steps)} to {max(steps)}, {first.file} steps {min(others)} to"
                f" {max(others)}: no step in common; give the files of one recording, such as the folder of one"
                " iteration"
            )


def _origins_ns(files: Sequence[RankColumns]) -> list[int]:
    """Return the origin of each file's times, nanoseconds; newer files state times relative to a base.

    A base that puts a file a day away from most others is damaged: the file then begins when most others do.
    """
    origins = []
    for file in files:
        base, own = file.header.get("baseTimeNanoseconds"), file.base_us * 1000
        origins.append(base + own if type(base) is int and base > 0 and own < base // 2 else own)
    usual = sorted(origins)[len(origins) // 2]
    return [origin if abs(origin - usual) <= LONGEST_US * 1000 else usual for origin in origins]


def _first_us(file: RankColumns) -> float:
    return float(min(table["start"].min() for table in (file.gpu, file.calls) if len(table["start"])))


def _whole(file: RankColumns, late_us: float) -> tuple[float, float]:
    """The first start and the last end of all events of a rank, seconds."""
    starts, ends = file.gpu["start"], file.gpu["start"] + file.gpu["duration"]
    first, last = np.nanmin([starts.min(), file.work.first]), np.nanmax([ends.max(), file.work.last])
    return (float(first) + late_us) * 1e-6, (float(last) + late_us) * 1e-6


def _on_axis(frame: pl.DataFrame, rank: int, late_us: float, schema: pl.Schema) -> pl.DataFrame:
    """Return the columns of `schema`, null where the frame lacks them, with times in seconds of the recording."""
    times = [name for name in ("start", "busy_since", "recorded_at") if name in frame.columns]
    on_axis = frame.with_columns(
        *((pl.col(name) + late_us) * 1e-6 for name in times),
        *(pl.lit(None).alias(name) for name in schema if name not in {*frame.columns, "rank"}),
        duration=pl.col("duration") * 1e-6,
        rank=pl.lit(rank),
    )
    return on_axis.select(schema.names()).cast(schema)


def _texts(values: Sequence[str], codes: np.ndarray) -> pl.Series:
    """Decode codes as text; -1 becomes null."""
    return pl.Series([*values, None], dtype=pl.Categorical)[np.where(codes < 0, len(values), codes)]


def _gpu_ops(
    file: RankColumns,
    rank: int,
    late_us: float,
    calls_before: int,
    groups: Sequence[str | None],
    classes: KernelClasses,
) -> pl.DataFrame:
    args = file.collectives
    stated = [name for name in GPU_OP_SCHEMA if name in CollectiveArgs.__struct_fields__]
    columns = {name: [getattr(arg, name) for arg in args] for name in stated} | {"group": groups}
    table = pl.DataFrame(columns, schema={name: GPU_OP_SCHEMA[name] for name in columns}, strict=False)
    used = np.unique(file.gpu["name"]).tolist()
    class_of = dict(zip(used, map(str, classes.of([file.strings[code] for code in used])), strict=True))
    kernel_class = [class_of.get(code) for code in range(len(file.strings))]
    described = pl.concat([table, table.clear(1)])[
        np.where(file.gpu["collective"] >= 0, file.gpu["collective"], len(args))
    ]
    launch, computes = file.gpu["launch"], file.gpu["activity"] == list(Activity).index(Activity.KERNEL)
    frame = pl.DataFrame(
        {
            **{name: file.gpu[name] for name in ("start", "duration", "device", "stream", "stated")},
            "name": _texts(file.strings, file.gpu["name"]),
            "activity": _texts([str(kind) for kind in Activity], file.gpu["activity"]),
            "kernel_class": pl.Series(kernel_class, dtype=pl.Categorical)[file.gpu["name"]],
            "shape": _texts(file.strings, file.gpu["shape"]),
            "bytes": or_null(np.where(computes, -1, file.gpu["size"])),
            "occupancy": or_null(np.where(computes & (file.gpu["size"] > 0), file.gpu["size"], -1)),
            "launch": or_null(np.where(launch >= 0, launch.astype(np.int64) + calls_before, -1)),
            "step": or_null(file.gpu["step"]),
        }
    )
    return _on_axis(frame.hstack(described), rank, late_us, GPU_OP_SCHEMA)


def _calls(file: RankColumns, rank: int, late_us: float) -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            **{name: file.calls[name] for name in ("thread", "start", "duration", "busy_since", "collective_call")},
            "name": _texts(file.strings, file.calls["name"]),
            "role": _texts([str(role) for role in ROLES], file.calls["role"]),
            "operator": _texts(file.strings, file.calls["operator"]),
            **{name: _texts(file.strings, file.calls[name]) for name in _AROUND},
            "waits": file.calls["waits"],
            "recorded_s": file.calls["recorded_s"],
            "recomputed": pl.Series(file.calls["recomputed"]).set(pl.Series(~file.calls["recomputed"]), None),
            "phase": _texts(PHASES, file.calls["phase"]),
            "action": _texts(file.strings, file.calls["action"]),
            "step": or_null(file.calls["step"]),
            **{name: or_null(file.calls[name]) for name in _STREAMS if name in file.calls},
        }
    )
    if "recorded_at" in file.calls:
        frame = frame.with_columns(recorded_at=pl.Series(file.calls["recorded_at"]).fill_nan(None))
    return _on_axis(frame, rank, late_us, CALL_SCHEMA)


_AROUND = ("inner", "inputs", "module", "own", "annotated")
_STREAMS = ("waits_stream", "waits_for_stream")


def _host(file: RankColumns) -> str | None:
    for name in (PurePath(file.file).name, PurePath(str(file.header.get("traceName", ""))).name):
        if match := _HOST_IN_NAME.match(name):
            return match[1]
    return None


def _of_device(files: Sequence[RankColumns], name: str, kind: type[T]) -> T | None:
    """Return a property of the first GPU that a file states, None if none does."""
    for file in files:
        listed = file.header.get("deviceProperties")
        value = listed[0].get(name) if isinstance(listed, list) and listed and isinstance(listed[0], dict) else None
        if value and isinstance(value, kind):
            return value
    return None


_CLASSES = ", ".join(sorted({str(kernel_class) for kernel_class in KernelClass} - {str(KernelClass.OTHER)}))


@dataclass(frozen=True)
class KernelClasses:
    """Patterns of names. `own`: those of the user, which come before the table."""

    own: tuple[tuple[KernelClass, str], ...] = ()

    def of(self, names: Sequence[str]) -> list[KernelClass]:
        """Return the class of each kernel."""
        classes = [class_of(name) for name in names]
        for kernel_class, pattern in reversed(self.own):
            classes = [
                kernel_class if matches else own_class
                for matches, own_class in zip(search(pattern, names, any_case=True), classes, strict=True)
            ]
        return classes


def kernel_classes(stated: Sequence[str] = ()) -> KernelClasses:
    """Parse a user's patterns, each `class=regular expression` or the path of a YAML file of them.

    The file maps classes to a pattern or a list of patterns. Raises SelectionError or FormatError for anything else.
    """
    own: list[tuple[KernelClass, str]] = []
    for text in stated:
        name, equals, pattern = text.partition("=")
        if equals:
            own.append(_pattern(name, pattern, "--kernel-class"))
        else:
            own += [_pattern(name, pattern, text) for name, many in _read(Path(text)).items() for pattern in many]
    return KernelClasses(tuple(own))


def _pattern(name: str, pattern: str, where: str) -> tuple[KernelClass, str]:
    if name.strip() not in {str(kernel_class) for kernel_class in KernelClass}:
        raise SelectionError(f"{where}: {name!r:.40} is not a kernel class; expected one of {_CLASSES}")
    try:
        check_pattern(pattern, any_case=True)
    except ValueError as error:
        raise SelectionError(f"{where}: {error}") from None
    return KernelClass(name.strip()), pattern


def _read(path: Path) -> Mapping[str, Sequence[str]]:
    from tracekit.collectors.importers.published import read_mapping  # few state classes of their own

    content = read_mapping(path, "communication: [my_all_reduce]")
    return {
        str(name): [str(pattern) for pattern in (many if isinstance(many, list) else [many])]
        for name, many in content.items()
    }
