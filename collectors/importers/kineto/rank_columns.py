"""Reads one file, in a separate process if there are several: its events as the GPU ops and calls of its ranks.

Launches are found by correlation, what is around a call by time. It uses arrays only: importing a library of data
frames would add a fifth of the time, and a third of the memory, of reading a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.base.memory import no_garbage_collection, reuse_large_arrays
from tracekit.base.paths import Look
from tracekit.base.text import counted
from tracekit.collectors.importers.kineto.event_columns import (
    CATEGORIES,
    COLLECTIVE_OPERATOR,
    NO_ID,
    RECORD_EVENT,
    ColumnBuilder,
    FileColumns,
    Ints,
    Table,
    looked_up,
    rows_of,
)
from tracekit.collectors.importers.kineto.host_work import (
    Bools,
    CallThreads,
    HostWork,
    host_work,
    marked_steps,
    pass_at,
    step_at,
)
from tracekit.collectors.importers.kineto.json_events import CollectiveArgs, EventStream
from tracekit.collectors.importers.sniff import SQLITE
from tracekit.trace.gpu_activity import Activity, LostOps

#: At most so many points in time, and one, show how much memory is allocated.
MOST_MEMORY = 199
#: Clocks of host and GPU do not move apart by this much within a recording, microseconds.
_EARLY_US = 1000.0
#: Calls that make the GPU do something.
_LAUNCHES = re.compile(r"Launch|Memcpy|Memset")
#: Those that run something on a GPU, at once or as soon as its stream is free.
_RUNS_ON_GPU = re.compile(r"^(cuda|hip|cu)((Graph)?Launch(?!HostFunc)|Mem(cpy|set))")
#: The calls around what is captured into a graph instead of run.
_BEGINS_CAPTURE, _ENDS_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
#: Annotations of torch, which its versions before 1.11 call operators.
_ANNOTATION = re.compile(r"^(ProfilerStep|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad))#")
#: Calls that wait for the GPU whatever they were given.
_SYNCHRONISES = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize")
#: Copies of which one side is the host: neither within a GPU nor between two.
_HOST_COPY = re.compile(r"^(?!.*(DtoD|PtoP))")


@dataclass(frozen=True, slots=True)
class RankColumns:
    """One rank of one file; its number is `part` if several are `fused`. Times: microseconds from `base_us`.

    Names are positions in `strings`, -1 for none. `gpu`: start, duration, name, activity (position in Activity),
    device, stream, shape, size, launch (row of `calls`, -1 for none), step (-1 for none), collective (position in
    `collectives`, -1 for none), stated. `calls`: start, duration, thread, name, role, busy_since, operator, phase
    (position in PHASES), collective_call, step, recomputed; where the profiler recorded any, also waits_stream,
    waits_for_stream (-1 for none) and recorded_at (nan for none). `step_spans`: start, duration, step. `work`: what
    the threads did; `memory`: start, bytes allocated and reserved, of the GPU that has most. `calls` has what is around
    each: inner, inputs, module, own, and whether it waits; `recorded_s`: what recording had cost its thread before.
    `lost`: launches whose GPU ops the file lacks.
    `host_events`: of the whole file. `unlinked`: the share of GPU ops and launches whose other half is missing.
    `cut`: the end of the file is missing; `damaged`: the share of its events that were left out or repaired.
    """

    file: str
    part: int
    fused: bool
    base_us: int
    header: Mapping[str, Any]
    strings: tuple[str, ...]
    gpu: Mapping[str, np.ndarray]
    calls: Mapping[str, np.ndarray]
    step_spans: Mapping[str, np.ndarray]
    work: HostWork
    memory: Mapping[str, np.ndarray]
    collectives: tuple[CollectiveArgs, ...]
    ranks_in_groups: tuple[CollectiveArgs, ...]
    host_events: int
    notes: tuple[str, ...]
    unlinked: float
    lost: LostOps
    cut: bool = False
    damaged: float = 0.0


def ranks_of(
    columns: FileColumns, file: str, header: Mapping[str, Any], notes: tuple[str, ...]
) -> Iterator[RankColumns]:
    """Yield each rank of the file; one without events if it has none."""
    columns = _with_annotations(columns)
    tables = (
        columns.gpu, columns.calls, columns.operators, columns.annotations, columns.python, columns.syncs
    )  # fmt: skip
    parts = sorted({part for table in tables for part in np.unique(table["part"]).tolist()}) or [0]
    for part in parts:
        yield _columns_of_rank(columns, part, file, header, notes, fused=parts != [0])


def _with_annotations(columns: FileColumns) -> FileColumns:
    """Return the columns with annotations in their table: torch 1.x wrote them as operators."""
    annotates = _matches(columns.strings, _ANNOTATION)[columns.operators["name"]]
    if not annotates.any():
        return columns
    moved, table = rows_of(columns.operators, np.flatnonzero(annotates)), columns.annotations
    return replace(
        columns,
        operators=rows_of(columns.operators, np.flatnonzero(~annotates)),
        annotations={name: np.concatenate([values, moved[name]]) for name, values in table.items()},
    )


def _columns_of_rank(
    columns: FileColumns, part: int, file: str, header: Mapping[str, Any], notes: tuple[str, ...], *, fused: bool
) -> RankColumns:
    def of(table: Table) -> Table:
        of_part = rows_of(table, np.flatnonzero(table["part"] == part)) if fused else table
        sorted_already = (of_part["ts"][1:] >= of_part["ts"][:-1]).all()
        if not sorted_already:
            of_part = rows_of(of_part, np.argsort(of_part["ts"], kind="stable"))
        return _without_copies(of_part)

    names = columns.strings
    gpu, operators, annotations = of(columns.gpu), of(columns.operators), of(columns.annotations)
    all_calls = of(columns.calls)
    if (all_calls["correlation"] == 0).sum() > 1:  # of no launch: the profiler left it unset
        gpu, all_calls = _without_zeros(gpu), _without_zeros(all_calls)
    kept_calls, role = _kept_calls(all_calls, gpu)
    calls = {**rows_of(all_calls, kept_calls), "role": role}
    waits = _waits(all_calls, gpu, names)
    kernels = gpu["correlation"][gpu["activity"] == list(Activity).index(Activity.KERNEL)]
    launches = np.isin(all_calls["correlation"], kernels) & (all_calls["correlation"] != NO_ID)
    python = of(columns.python)
    work = host_work(all_calls, waits, launches, operators, python, annotations, names)
    steps = marked_steps(annotations, names)
    threads = CallThreads(calls, operators, annotations, names)
    code = names.index(COLLECTIVE_OPERATOR) if COLLECTIVE_OPERATOR in names else -1
    collective_calls = rows_of(operators, np.flatnonzero(operators["name"] == code))
    inside = threads.containing(collective_calls)
    step = step_at(steps, calls["ts"])
    launch = _launches(gpu, calls)
    in_time = _not_too_early(gpu, launch, calls)
    if early := len(launch) - len(in_time):
        gpu, launch = rows_of(gpu, in_time), launch[in_time]
        words = f"left out {counted(early, 'GPU op')} that would begin before their launch"
        notes = (*notes, f"{PurePath(file).name}: {words}")
    stated = np.append(collective_calls["collective"], NO_ID)[np.append(inside, -1)[launch]]
    on_kernel = gpu["collective"]
    collective, all_args = _named(
        np.where(on_kernel >= 0, on_kernel, stated), threads.collective_names(), launch, columns.collectives
    )
    used = set(collective_calls["collective"].tolist()) | set(on_kernel.tolist())
    return RankColumns(
        file=file,
        part=part,
        fused=fused,
        base_us=columns.base_us,
        header=header,
        strings=names,
        gpu={
            **{name: gpu[name] for name in ("name", "activity", "device", "stream", "shape", "size")},
            "start": gpu["ts"], "duration": gpu["dur"], "launch": launch.astype(np.int32),
            "step": np.append(step, -1)[launch], "collective": collective.astype(np.int32), "stated": on_kernel >= 0,
        },
        calls={
            **{name: calls[name] for name in ("thread", "name", "role")},
            "start": calls["ts"], "duration": calls["dur"], "busy_since": threads.busy_since(),
            "operator": threads.operators(), "phase": threads.phases(), "action": threads.actions(),
            "collective_call": inside >= 0, "step": step, "annotated": pass_at(annotations, names, calls["ts"]),
            "recomputed": threads.recomputed(python),
            "waits": waits[kept_calls], "recorded_s": work.recorded_s[kept_calls],
            **{name: values[kept_calls] for name, values in work.around.items()},
            **_recorded_waits(of(columns.syncs), calls, all_calls),
        },
        step_spans=steps,
        work=replace(work, around={}, recorded_s=work.recorded_s[:0]),
        memory=_memory(of(columns.memory)),
        collectives=all_args,
        ranks_in_groups=tuple(columns.collectives[code] for code in sorted(used) if code >= 0),
        host_events=columns.host_events,
        notes=notes,
        unlinked=_unlinked(gpu, launch, calls, all_calls, names),
        lost=_lost(gpu, all_calls, names),
    )  # fmt: skip


def _memory(table: Table) -> Table:
    """The memory of the GPU that has most allocated, thinned out to the largest value of each of many intervals."""
    table = rows_of(table, np.flatnonzero((table["allocated"] >= 0) & (table["reserved"] >= 0)))
    if not len(table["ts"]):
        return {"start": table["ts"], "allocated": table["allocated"], "reserved": table["reserved"]}
    of_device = rows_of(table, np.flatnonzero(table["device"] == table["device"][table["allocated"].argmax()]))
    begin, span = of_device["ts"][0], of_device["ts"][-1] - of_device["ts"][0]
    interval = np.floor((of_device["ts"] - begin) / (span or 1.0) * MOST_MEMORY).astype(np.int64)
    order = np.lexsort((-of_device["allocated"], interval))
    largest = order[np.unique(interval[order], return_index=True)[1]]
    return {
        "start": of_device["ts"][largest],
        "allocated": of_device["allocated"][largest],
        "reserved": of_device["reserved"][largest],
    }


def _without_copies(table: Table) -> Table:
    """Return events in order of start, without duplicates."""
    same = np.flatnonzero((table["ts"][1:] == table["ts"][:-1]) & (table["dur"][1:] > 0))
    if not len(same):
        return table
    alike = np.union1d(same, same + 1)
    columns = np.stack([values[alike].astype(np.float64) for values in table.values()])
    _, first = np.unique(columns, axis=1, return_index=True)
    distinct = np.ones(len(table["ts"]), np.bool_)
    distinct[np.setdiff1d(alike, alike[first])] = table["dur"][np.setdiff1d(alike, alike[first])] == 0
    return rows_of(table, np.flatnonzero(distinct))


def _without_zeros(table: Table) -> Table:
    """Return events without the correlation 0."""
    return {**table, "correlation": np.where(table["correlation"] == 0, NO_ID, table["correlation"])}


def _not_too_early(gpu: Table, launch: Ints, calls: Table) -> Ints:
    """Drop GPU ops that begin long before their launch, judged by the clock offset of nearly all others."""
    delay = gpu["ts"] - np.append(calls["ts"], np.nan)[launch]
    finite = delay[np.isfinite(delay)]
    place = min(max(1, len(finite) // 100), len(finite) - 1)
    usual = float(np.partition(finite, place)[place]) if len(finite) else 0.0
    return np.flatnonzero(~(delay < min(usual, 0.0) - _EARLY_US))


def _unlinked(gpu: Table, launch: Ints, calls: Table, all_calls: Table, names: Sequence[str]) -> float:
    """Return the share of GPU ops and of launching calls whose counterpart is missing.

    Ops launched before the recording come first in their stream, and ops that had not run at its end were launched
    last; these do not count, unless no op has a launch.
    """
    launches = _matches(names, _LAUNCHES)[all_calls["name"]]
    if not (launch >= 0).any():
        return float(launches.any())
    device, stream = (np.unique(gpu[name], return_inverse=True)[1] for name in ("device", "stream"))
    stream = device * (int(stream.max(initial=0)) + 1) + stream
    first = np.full(int(stream.max(initial=-1)) + 1, np.inf)
    np.minimum.at(first, stream[launch >= 0], gpu["ts"][launch >= 0])
    missing = int(((launch < 0) & (gpu["ts"] > first[stream])).sum())
    launches &= all_calls["ts"] <= calls["ts"][launch[launch >= 0]].max(initial=-np.inf)
    in_vain = int((launches & ~np.isin(all_calls["correlation"], gpu["correlation"])).sum())
    return (missing + in_vain) / max(len(launch) + int(launches.sum()), 1)


def _lost(gpu: Table, calls: Table, names: Sequence[str]) -> LostOps:
    """Return how many launches have no GPU op, and the share of the GPU's time that they stand for.

    A call that has none takes as long on the GPU as those of its name that have some: one call launches a whole graph.
    While a stream is captured into a graph, nothing runs.
    """
    launches = np.flatnonzero(_matches(names, _RUNS_ON_GPU)[calls["name"]] & ~_captured(calls, names))
    name, order = calls["name"][launches], np.argsort(gpu["correlation"], kind="stable")
    total = np.append(0.0, np.cumsum(gpu["dur"][order]))
    ids = gpu["correlation"][order]
    first, last = (np.searchsorted(ids, calls["correlation"][launches], side=side) for side in ("left", "right"))
    ran, took = last > first, total[last] - total[first]
    usual = np.bincount(name[ran], took[ran], len(names)) / np.maximum(np.bincount(name[ran], minlength=len(names)), 1)
    lost = np.where(usual > 0, usual, took[ran].mean() if ran.any() else 0.0)[name[~ran]].sum()
    return LostOps(len(launches), int((~ran).sum()), float(lost / (lost + gpu["dur"].sum())) if lost else 0.0)


def _captured(calls: Table, names: Sequence[str]) -> Bools:
    """Return which calls a thread makes while it captures a stream into a graph."""
    begins, ends = (_matches(names, pattern)[calls["name"]] for pattern in (_BEGINS_CAPTURE, _ENDS_CAPTURE))
    if not begins.any():
        return np.zeros(len(begins), np.bool_)
    order = np.argsort(calls["thread"], kind="stable")
    open_captures = np.cumsum((begins.astype(np.int64) - ends)[order])
    captured = np.empty(len(order), np.bool_)
    captured[order] = open_captures > 0
    return captured


def _matches(names: Sequence[str], pattern: re.Pattern[str]) -> Bools:
    """Return which names match, and False for no name."""
    return np.array([pattern.search(name) is not None for name in [*names, ""]])


def _kept_calls(calls: Table, gpu: Table) -> tuple[Ints, npt.NDArray[np.int8]]:
    """Return the rows of calls that launched a recorded op, synchronise or order streams, and which they do."""
    launches = np.isin(calls["correlation"], gpu["correlation"]) & (calls["correlation"] != NO_ID)
    rows = np.flatnonzero(launches | ((calls["role"] >= 0) & (calls["role"] < RECORD_EVENT)))
    return rows, np.where(launches, 0, calls["role"])[rows].astype(np.int8)


def _waits(calls: Table, gpu: Table, names: Sequence[str]) -> Bools:
    """Return which calls wait for the GPU: by name, or by returning after the end of the copy that they launched.

    Copies within a GPU or between GPUs do not count; a short one may end before its call returns.
    """
    waits = _matches(names, _SYNCHRONISES)[calls["name"]]
    host_copy = _matches(names, _HOST_COPY)[gpu["name"]]
    host_copy &= (gpu["activity"] == list(Activity).index(Activity.MEMCPY)) & (gpu["correlation"] != NO_ID)
    copies = np.flatnonzero(host_copy)
    call = looked_up(gpu["correlation"][copies], calls["correlation"])
    returned = np.append(calls["ts"] + calls["dur"], -np.inf)[call]
    waits[call[returned >= gpu["ts"][copies] + gpu["dur"][copies]]] = True
    return np.asarray(waits)


def _launches(gpu: Table, calls: Table) -> Ints:
    """Return the row of the call that launched each GPU op, -1 if it was not recorded. A graph launches many ops."""
    launching = np.flatnonzero(calls["role"] == 0)
    row = looked_up(gpu["correlation"], calls["correlation"][launching])
    return np.where(gpu["correlation"] == NO_ID, -1, np.append(launching, -1)[row])


def _named(
    collective: Ints, called: Sequence[tuple[str, Bools]], launch: Ints, args: tuple[CollectiveArgs, ...]
) -> tuple[Ints, tuple[CollectiveArgs, ...]]:
    """Give collectives that only an annotation names arguments with that name."""
    table, named = list(args), collective.astype(np.int64)
    for name, calls in called:
        unnamed = (collective < 0) & np.append(calls, np.False_)[launch]
        if unnamed.any():
            named[unnamed] = len(table)
            table.append(CollectiveArgs(name))
    return named, tuple(table)


def _recorded_waits(syncs: Table, calls: Table, all_calls: Table) -> Table:
    """Return, per call, the recorded synchronisation: the waiting stream, the awaited stream, and as of when."""
    if not len(syncs["ts"]):
        return {}
    sync = looked_up(calls["correlation"], syncs["correlation"])
    record = looked_up(syncs["waits_for_record"], all_calls["correlation"])
    recorded_at = np.append(all_calls["ts"], np.nan)[record]
    return {
        "waits_stream": np.append(syncs["stream"], -1)[sync],
        "waits_for_stream": np.append(syncs["waits_for_stream"], -1)[sync],
        "recorded_at": np.append(recorded_at, np.nan)[sync],
    }


def read_file(path: Path) -> list[RankColumns]:
    """Read the ranks of one file; empty if it has no events of torch.profiler. Raises FormatError."""
    with no_garbage_collection():
        if Look(path).beginning(len(SQLITE)) == SQLITE:
            from tracekit.collectors.importers.kineto.nsys import read_nsys  # most files are JSON

            columns, header, notes = read_nsys(path)
            ranks = _ranks(path, columns, header, notes)
            # What is known of the cost of recording is torch.profiler's.
            return [replace(rank, work=replace(rank.work, cost=None)) for rank in ranks]
        stream, builder = EventStream(path, CATEGORIES), ColumnBuilder()
        for batch in stream:
            builder.add(batch)
        note = (
            f"{path.name}: {stream.cut}; the part before was read, and only what all ranks have is compared: copy or"
            " record it again for the rest"
        )
        cut = stream.cut is not None
        return _ranks(path, builder.columns(), stream.header(), (note,) if cut else (), cut=cut, lost=stream.lost)


def _ranks(
    path: Path,
    columns: FileColumns,
    header: Mapping[str, Any],
    notes: tuple[str, ...],
    *,
    cut: bool = False,
    lost: int = 0,
) -> list[RankColumns]:
    """The ranks of a file of which `lost` events could not be read; they may be GPU ops."""
    for count, words in (
        (nameless := lost + columns.nameless, f"left out {counted(nameless, 'damaged event')}"),
        (columns.absurd, f"left out {counted(columns.absurd, 'event')} with impossible times"),
        (columns.negative, f"set {counted(columns.negative, 'negative duration')} to 0"),
    ):
        if count:
            notes = (*notes, f"{path.name}: {words}")
    ranks = ranks_of(columns, str(path), header, notes)
    lost = max(lost - cut, 0)  # the event in which a file is cut off is not damaged
    damaged = min(columns.damaged + lost / max(len(columns.gpu["ts"]) + lost, 1), 1.0)
    return [replace(rank, cut=cut, damaged=damaged) for rank in ranks]


def send_files() -> None:
    """In a process of its own: for each path that it is asked for, its ranks."""
    from tracekit.base.processes import serve

    reuse_large_arrays()
    serve(read_file)
