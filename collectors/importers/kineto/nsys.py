"""Reads an export of Nsight Systems as the events of torch.profiler, each of the rank that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.errors import FormatError
from tracekit.collectors.importers.kineto.event_columns import (
    COLLECTIVE_OPERATOR,
    LONGEST_US,
    NO_ID,
    SCHEMAS,
    STEP,
    FileColumns,
    Ints,
    Table,
    looked_up,
    role_of,
    rows_of,
)
from tracekit.collectors.importers.kineto.json_events import CollectiveArgs
from tracekit.collectors.importers.kineto.nsys_file import Export, collectives, columns, nccl_calls, opened
from tracekit.trace.gpu_activity import Activity

_CUPTI = "CUPTI_ACTIVITY_KIND_"
#: Our columns of GPU ops, and theirs.
_OF_GPU = {
    "start": "start", "end": "end", "process": "globalPid", "device": "deviceId", "stream": "streamId",
    "correlation": "correlationId", "size": "bytes",
}  # fmt: skip
#: Every activity has them.
_TIMES = ("start", "end")
_GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_COPIES = (
    "Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD",
)  # fmt: skip
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
#: The version of CUDA that a call has its form from.
_VERSION = re.compile(r"_v\d{4,}$")
#: Types of ranges: push/pop, and those from any start to any end, each also of programs that write them as text.
_NESTED, _FREE = (59, 70), (60, 71)
#: Makes a number of a thread from that of another: free ranges do not nest in what their thread does.
_APART = 1 << 23
#: What torch.autograd.profiler.emit_nvtx adds to the name of an operator.
_ADDED = re.compile(r", (?:seq|op_id|sizes) = ")
_SEQUENCE, _SIZES = ", seq = ", re.compile(r", sizes = (\[.*?\])(?:, input_op_ids|$)")
#: Operators; without a sequence number, a range without a namespace is the user's own.
_OPERATOR, _FUNCTION = re.compile(rf"(\w+::)+\w+(: \w+)?|{COLLECTIVE_OPERATOR}"), re.compile(r"\w+")
_NUMBERED_STEP = re.compile(r"(.*?(?:step|(?<![a-z])iter(?:ation)?))[ _:#=-]*(\d{1,9})", re.I)
_UNNAMED = "(unnamed)"
#: The type of a synchronisation in which a stream waits for an event.
_STREAM_WAIT = 2
_DAY_NS = round(LONGEST_US * 1e3)


class _Names(dict[str, int]):
    """The strings of a file, each with its code."""

    def code(self, text: str) -> int:
        return self.setdefault(text, len(self))

    def codes(self, texts: Iterable[str]) -> Ints:
        return np.array([self.code(text) for text in texts], np.int64)


def read_nsys(path: Path) -> tuple[FileColumns, dict[str, Any], tuple[str, ...]]:
    """Return the events of an export, the head of a file of torch.profiler that would say the same, and notes.

    Raises FormatError if it is damaged, or holds no GPU ops.
    """
    names = _Names()
    with opened(path) as export:
        read = {"gpu": _gpu_ops(export, names), "calls": _calls(export, names), "ranges": _ranges(export, names)}
        nccl, nccl_notes = nccl_calls(export)
        syncs, head = _syncs(export), _head(export)
        # The GPU behind each number that a process has for one: it may see only some.
        seen = export.rows("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId"))
        gpus = {(pid, device): gpu for pid, device, gpu in seen}
        graphs = any(export.rows(f"{_CUPTI}GRAPH_TRACE", ("start",)))
    if not len(read["gpu"]["start"]):
        raise FormatError(
            f"{path}: an export of Nsight Systems without GPU activity: no kernel, copy or memset; record with"
            " `nsys profile --trace=cuda,nvtx`"
        )
    usual = int(np.median(read["gpu"]["start"]))
    plausible = {name: _plausible(table, usual) for name, table in read.items()}
    gpu, calls, ranges = (table for table, _, _ in plausible.values())
    _to_process_ids(gpu, calls, ranges, syncs, nccl)
    ranks = ranks_of_events(gpu, calls, ranges, nccl, gpus)
    gpu["part"] = ranks.of_op
    gpu["collective"], args = _collectives(gpu, calls, nccl, ranks, names, nccl_notes)
    _name_steps(ranges, names)
    calls["part"] = np.full(len(calls["start"]), NO_ID)  # of those that launched a GPU op
    calls["part"][ranks.launch[ranks.launch >= 0]] = ranks.of_op[ranks.launch >= 0]
    call = matched(syncs["process"], syncs["correlation"], calls["process"], calls["correlation"])
    syncs["thread"] = np.append(calls["thread"], NO_ID)[call]
    tables = {
        "gpu": gpu,
        "calls": _of_ranks(calls, ranks),
        "operators": _of_ranks(rows_of(ranges, np.flatnonzero(ranges["operator"] == 1)), ranks),
        "annotations": _of_ranks(rows_of(ranges, np.flatnonzero(ranges["operator"] == 0)), ranks),
        "python": _of_ranks(rows_of(ranges, np.zeros(0, np.int64)), ranks),
        "syncs": _of_ranks(syncs, ranks),
    }
    numbers = np.unique(ranks.of_op).tolist()
    if ranks.world_size is not None:
        rank = {"rank": numbers[0]} if len(numbers) == 1 else {}
        head["distributedInfo"] = {"world_size": ranks.world_size, **rank}
    base_us = int(min(table["start"].min() for table in (gpu, calls, ranges) if len(table["start"]))) // 1000
    events = FileColumns(
        base_us=base_us,
        memory={name: np.zeros(0, kind) for name, kind in SCHEMAS["memory"].items()},
        **{kind: _like_torch(kind, table, base_us, alone=len(numbers) == 1) for kind, table in tables.items()},
        host_events=len(ranges["start"]),
        strings=tuple(names),
        collectives=args,
        negative=sum(negative for _, _, negative in plausible.values()),
        absurd=sum(absurd for _, absurd, _ in plausible.values()),
        nameless=0,
        damaged=max(sum(odd) / max(len(read[name]["start"]), 1) for name, (_, *odd) in plausible.items()),
    )
    note = f"{path.name}: CUDA graphs were recorded without their kernels; record with --cuda-graph-trace=node"
    return events, head, (note,) if graphs else ()


def _gpu_ops(export: Export, names: _Names) -> Table:
    """Return kernels, graphs recorded as a whole, copies and memsets."""
    column, texts = next(
        (
            (name, texts)
            for name in ("demangledName", "shortName")
            if (texts := export.strings(f"{_CUPTI}KERNEL", name))
        ),
        ("", {}),
    )
    tables = []
    kinds: Sequence[tuple[str, Activity, tuple[str, ...], Callable[..., tuple[str, str]]]] = (
        ("KERNEL", Activity.KERNEL, (column, *_GRID), lambda name, *grid: (texts.get(name, _UNNAMED), _shape(grid))),
        ("GRAPH_TRACE", Activity.KERNEL, ("graphId",), lambda graph: (f"CUDA graph {graph}", "")),
        ("MEMCPY", Activity.MEMCPY, ("copyKind", "srcKind", "dstKind"), lambda *kind: (_copy(*kind), "")),
        ("MEMSET", Activity.MEMSET, ("memKind",), lambda kind: (f"Memset ({_memory(kind, 'Device')})", "")),
    )
    for table, activity, more, describe in kinds:
        alike: dict[tuple[int, ...], int] = {}
        ours = len(_OF_GPU)
        rows = export.rows(f"{_CUPTI}{table}", (*_OF_GPU.values(), *more), needs=_TIMES)
        ops = columns(((*row[:ours], alike.setdefault(row[ours:], len(alike))) for row in rows), (*_OF_GPU, "kind"))
        kind = ops.pop("kind")
        described = [describe(*row) for row in alike]
        ops["name"], ops["shape"] = (names.codes(text[place] for text in described)[kind] for place in (0, 1))
        tables.append({**ops, "activity": np.full(len(kind), list(Activity).index(activity))})
    return {name: np.concatenate([ops[name] for ops in tables]) for name in tables[0]}


def _shape(grid: Sequence[int]) -> str:
    return "" if NO_ID in grid else "/".join("x".join(map(str, sizes)) for sizes in (grid[:3], grid[3:]))


def _copy(kind: int, source: int, destination: int) -> str:
    direction = _COPIES[kind] if 0 <= kind < len(_COPIES) else _COPIES[0]
    return f"Memcpy {direction} ({_memory(source)} -> {_memory(destination)})"


def _memory(kind: int, otherwise: str = _MEMORIES[-1]) -> str:
    return _MEMORIES[kind] if 0 <= kind < len(_MEMORIES) else otherwise


def _calls(export: Export, names: _Names) -> Table:
    table = f"{_CUPTI}RUNTIME"
    texts = export.strings(table, "nameId")
    calls = columns(
        export.rows(table, ("start", "end", "globalTid", "correlationId", "nameId"), needs=_TIMES),
        ("start", "end", "thread", "correlation", "name"),
    )
    numbers, index = np.unique(calls["name"], return_inverse=True)
    call_names = [_VERSION.sub("", texts.get(number, _UNNAMED)) for number in numbers.tolist()]
    roles = np.array([role_of(text) for text in call_names], np.int64)
    return {**calls, "name": names.codes(call_names)[index], "role": roles[index]}


def _ranges(export: Export, names: _Names) -> Table:
    """Return the ranges of NVTX: start, end, thread, name, operator (whether it is one), shape (of its inputs)."""
    kinds: dict[tuple[str, bool, bool], tuple[int, bool]] = {}
    wanted = [f"eventType IN {_NESTED + _FREE}"] if export.has("NVTX_EVENTS", "eventType") else []
    wanted += ['"end" IS NOT NULL'] if export.has("NVTX_EVENTS", "end") else ["0"]
    rows = export.rows(
        "NVTX_EVENTS",
        ("start", "end", "globalTid", "eventType"),
        [("text", "textId")],
        " AND ".join(wanted),
        ("start",),
    )

    def described() -> Iterator[tuple[int, ...]]:
        no_inputs = names.code("")
        for start, end, thread_of, kind, text in rows:
            if text:
                thread = thread_of | _APART if kind in _FREE else thread_of
                added = _ADDED.search(text)
                name = text[: added.start()] if added else text
                key = (name, added is not None, text.startswith(_SEQUENCE, len(name)))
                if key not in kinds:
                    operator = key[1] and (_OPERATOR.fullmatch(name) or (key[2] and _FUNCTION.fullmatch(name)))
                    kinds[key] = (names.code(name), bool(operator))
                sizes = _SIZES.search(text) if added else None
                yield start, end, thread, *kinds[key], names.code(f"[{sizes[1]},[]]") if sizes else no_inputs

    ranges = columns(described(), ("start", "end", "thread", "name", "operator", "shape"))
    return {**ranges, "collective": np.full(len(ranges["start"]), NO_ID)}


def _syncs(export: Export) -> Table:
    """Return the waits of a stream for an event, with the stream and the call that recorded the event."""
    ours = ("start", "end", "process", "stream", "correlation")
    waits = columns(
        export.rows(
            f"{_CUPTI}SYNCHRONIZATION",
            ("start", "end", "globalPid", "streamId", "correlationId", "eventSyncId", "syncType"),
        ),
        (*ours, "event", "type"),
    )
    events = columns(
        export.rows(f"{_CUPTI}CUDA_EVENT", ("globalPid", "eventSyncId", "streamId", "correlationId")),
        ("process", "event", "stream", "correlation"),
    )
    event_row = matched(waits["process"], waits["event"], events["process"], events["event"])
    stream_waits = np.flatnonzero((waits["type"] == _STREAM_WAIT) & (event_row >= 0))
    recorded = rows_of(events, event_row[stream_waits])
    syncs = rows_of({name: waits[name] for name in ours}, stream_waits)
    return {**syncs, "waits_for_stream": recorded["stream"], "waits_for_record": recorded["correlation"]}


def _head(export: Export) -> dict[str, Any]:
    """Return when the recording began, and its GPUs."""
    began = next(export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)), (NO_ID,))[0]
    listed = export.rows("TARGET_INFO_GPU", ("id",), [("name", "")])
    return {"baseTimeNanoseconds": began, "deviceProperties": [{"id": gpu, "name": name} for gpu, name in listed]}


def _plausible(table: Table, usual: int) -> tuple[Table, int, int]:
    """Return the events at possible times, how many were left out, and of how many a negative duration became 0."""
    start, end = table["start"], table["end"]
    possible = (np.abs(start - usual) <= _DAY_NS) & (end - start <= _DAY_NS) & ((start != 0) | (end != 0))
    events = table if possible.all() else rows_of(table, np.flatnonzero(possible))
    negative = int((events["end"] < events["start"]).sum())
    np.maximum(events["end"], events["start"], out=events["end"])
    return events, len(start) - len(events["start"]), negative


def _to_process_ids(gpu: Table, calls: Table, ranges: Table, syncs: Table, nccl: Table) -> None:
    """Replace ids by the process in them. Where some are not recorded, all are of one process."""
    all_recorded = (gpu["process"] >= 0).all() and (calls["thread"] >= 0).all()
    for table in (gpu, syncs):
        table["process"] = table["process"] >> 24 if all_recorded else np.full_like(table["process"], NO_ID)
    for table in (calls, ranges, nccl):
        table["process"] = table["thread"] >> 24 if all_recorded else np.full_like(table["thread"], NO_ID)


def _collectives(
    gpu: Table, calls: Table, nccl: Table, ranks: Ranks, names: _Names, nccl_notes: Sequence[str]
) -> tuple[Ints, tuple[CollectiveArgs, ...]]:
    """Return which collective each GPU op is, -1 for none, and their arguments."""
    kernels = [code for name, code in names.items() if "nccl" in name.lower()]
    graphs = [code for name, code in names.items() if "Graph" in name]  # NCCL was called when the graph was captured
    ops = np.flatnonzero(np.isin(gpu["name"], kernels) & (ranks.launch >= 0))
    ops = ops[~np.isin(calls["name"][ranks.launch[ops]], graphs)]
    launched = {**rows_of(calls, ranks.launch[ops]), "rank": ranks.of_op[ops]}
    collective = np.full(len(gpu["start"]), NO_ID)
    collective[ops], args = collectives(launched, nccl, nccl_notes, ranks.of_nccl)
    return collective, args


def _name_steps(ranges: Table, names: _Names) -> None:
    """Name the steps of each process as torch.profiler does: the longest ranges of a thread that count up by one."""
    matches = [None if STEP.match(name) else _NUMBERED_STEP.fullmatch(name) for name in names]
    family = {name: number for number, name in enumerate(sorted({match[1] for match in matches if match}))}
    of_name = np.array([family[match[1]] if match else NO_ID for match in matches])
    number = np.array([int(match[2]) if match else NO_ID for match in matches])[ranges["name"]]
    marked = np.flatnonzero(np.isin(ranges["name"], [code for name, code in names.items() if STEP.match(name)]))
    best: dict[int, tuple[int, Ints]] = dict.fromkeys(ranges["process"][marked].tolist(), (_DAY_NS, marked[:0]))
    rows = np.flatnonzero((of_name[ranges["name"]] >= 0) & (ranges["operator"] == 0))
    keys = np.stack([ranges["thread"], of_name[ranges["name"]]])[:, rows]
    _, index = np.unique(keys, axis=1, return_inverse=True)
    for series in range(int(index.max(initial=-1)) + 1):
        of_series = rows[index == series]
        of_series = of_series[np.argsort(ranges["start"][of_series], kind="stable")]
        start, end = ranges["start"][of_series], ranges["end"][of_series]
        if len(of_series) < 2 or (np.diff(number[of_series]) != 1).any() or (start[1:] < end[:-1]).any():
            continue
        process, length = int(ranges["process"][of_series[0]]), int((end - start).sum())
        if length > best.get(process, (0, of_series))[0]:
            best[process] = (length, of_series)
    for _, of_series in best.values():
        ranges["name"][of_series] = names.codes(f"ProfilerStep#{step}" for step in number[of_series].tolist())


def _of_ranks(table: Table, ranks: Ranks) -> Table:
    """Return the events of the threads of each rank, which numbers them; a launch of a GPU op only for its rank."""
    launched = table.get("part", np.full(len(table["start"]), NO_ID))
    tables = []
    for number in np.unique(ranks.of_op).tolist():
        threads = np.array(sorted(key for key, users in ranks.of_thread.items() if number in users), np.int64)
        of_rank = np.isin(table["thread"], threads) & ((launched == number) | (launched == NO_ID))
        events = rows_of(table, np.flatnonzero(of_rank))
        thread = np.searchsorted(threads, events["thread"])
        tables.append({**events, "thread": thread, "part": np.full(len(thread), number)})
    return {name: np.concatenate([events[name] for events in tables]) for name in tables[0]}


def _like_torch(kind: str, table: Table, base_us: int, *, alone: bool) -> Table:
    """Return a table of `FileColumns`. A rank that is alone in its file is no part of it."""
    columns = {
        **table,
        "ts": (table["start"] - base_us * 1000) / 1e3,
        "dur": (table["end"] - table["start"]) / 1e3,
        "part": table["part"] * (not alone),
    }
    return {name: np.asarray(columns[name], dtype) for name, dtype in SCHEMAS[kind].items()}


#: A process with a smaller share of its GPU ops on the GPU of another process has no rank there.
_STRAY = 0.01
#: More than the number of any GPU, and than any number of a launch.
_GPUS, _LAUNCHES = 1 << 20, 1 << 40
#: A process, and its number of a GPU.
User = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Numbers of ranks, -1 for none. `of_op`: [GPU ops]; `of_nccl`: [calls of NCCL]. `of_thread`: the ranks whose GPU
    ops a thread launched; if it launched none, all of its process. `launch`: the row of the call of each GPU op, -1 if
    it was not recorded. `world_size`: of the job; None if NCCL does not say it, and then the numbers are guesses.
    """

    of_op: Ints
    of_nccl: Ints
    of_thread: Mapping[int, Sequence[int]]
    launch: Ints
    world_size: int | None


def ranks_of_events(gpu: Table, calls: Table, ranges: Table, nccl: Table, gpus: Mapping[User, int]) -> Ranks:
    """Find the ranks: each GPU that a process uses is one, by what NCCL says, else by the number of the GPU, else in
    the order of GPUs and processes. `process` of the tables: -1 if there is only one.

    `gpus`: the number of the GPU that a process, by its id, knows by a number of its own.
    """
    users, user = _users(gpu["process"], gpu["device"])
    stated, size = _stated(users, nccl)
    number = _by_gpu(users, gpus) if stated is None else stated
    rank = np.array([number[of_user] for of_user in users])[user]
    launch = matched(gpu["process"], gpu["correlation"], calls["process"], calls["correlation"])
    launched = launch >= 0
    of_thread = _by_first(calls["thread"][launch[launched]], rank[launched])
    of_process: dict[int, list[int]] = {}
    for (process, _), rank_number in number.items():
        of_process.setdefault(process, []).append(rank_number)
    for table in (calls, ranges, nccl):
        for thread in np.unique(table["thread"]).tolist():
            of_thread.setdefault(thread, of_process.get(NO_ID, of_process.get(thread >> 24, [])))
    of_nccl = []
    for thread, process, device in np.stack([nccl["thread"], nccl["process"], nccl["device"]]).T.tolist():
        only = of_thread[thread][0] if len(of_thread[thread]) == 1 else NO_ID
        of_nccl.append(number.get((process, device), only))
    return Ranks(rank, np.array(of_nccl, np.int64), of_thread, launch, None if stated is None else size)


def matched(process: Ints, number: Ints, other: Ints, number_of_other: Ints) -> Ints:
    """Return the first row of the others with the same process and number, -1 for none, [numbers]."""
    processes = np.unique(np.concatenate([process, other]))
    wanted = np.searchsorted(processes, process) * _LAUNCHES + number
    keys = np.searchsorted(processes, other) * _LAUNCHES + number_of_other
    return np.where(number == NO_ID, NO_ID, looked_up(wanted, keys))


def _users(process: Ints, device: Ints) -> tuple[list[User], Ints]:
    """Return each process with each of its GPUs, and which of these each GPU op is of.

    What a process does on the GPU of another one, such as before it chose its own, counts for its own.
    """
    keys, user = np.unique(process * _GPUS + device + 1, return_inverse=True)
    users = [(key // _GPUS, key % _GPUS - 1) for key in keys.tolist()]
    count = np.bincount(user).tolist()
    home = {users[index][0]: index for index in sorted(range(len(users)), key=count.__getitem__)}
    home_gpus = {users[index][1] for index in home.values()}
    for index, (owner, gpu) in enumerate(users):
        if home[owner] != index and gpu in home_gpus and count[index] < _STRAY * count[home[owner]]:
            user[user == index] = home[owner]
    remaining, user = np.unique(user, return_inverse=True)
    return [users[index] for index in remaining.tolist()], user


def _stated(users: Sequence[User], nccl: Table) -> tuple[dict[User, int] | None, int]:
    """Return the rank of each user in the largest communicator that was made, None if some lack one; and its size."""
    size = int(nccl["size"].max(initial=0))
    creations = np.flatnonzero((nccl["size"] == size) & (nccl["rank"] >= 0))
    ranks = {
        (process, device): rank
        for process, device, rank in np.stack(
            [nccl[name][creations] for name in ("process", "device", "rank")]
        ).T.tolist()
    }
    stated = {of_user: ranks[of_user] for of_user in users if of_user in ranks}
    return stated if len(set(stated.values())) == len(users) else None, size


def _by_gpu(users: Sequence[User], gpus: Mapping[User, int]) -> dict[User, int]:
    """Number the users by GPU; one alone is 0, as in a file of torch.profiler that does not state its rank."""
    seen = [device for _, device in users]
    real = [gpus.get((process & 0xFFFFFF, device), device) for process, device in users]
    for numbers in (seen, real):
        if len(set(numbers)) == len(users) > 1 and min(numbers) >= 0:
            return dict(zip(users, numbers, strict=True))
    order = sorted(range(len(users)), key=lambda index: (real[index], users[index]))
    return {users[index]: place for place, index in enumerate(order)}


def _by_first(first: Ints, second: Ints) -> dict[int, Sequence[int]]:
    """Return what is paired with each first number."""
    distinct, index = np.unique(first, return_inverse=True)
    count = int(second.max(initial=0)) + 1
    paired: dict[int, list[int]] = {}
    for pair in np.unique(index * count + second).tolist():
        paired.setdefault(int(distinct[pair // count]), []).append(pair % count)
    return dict(paired)
