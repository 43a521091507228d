"""The events of a file as columns.

In: batches of events. Out: `FileColumns`, with only the data that the analysis needs. Events that came as rows of
numbers stay columns all the way.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracekit.collectors.importers.kineto.json_events import (
    Args,
    CollectiveArgs,
    Column,
    EventBatch,
    TraceEvent,
    decoded,
)
from tracekit.trace.gpu_activity import Activity, CallRole
from tracekit.trace.model import LARGEST_SIZE

#: A fused file holds several ranks: its process ids are rank * FUSED_PID + pid.
FUSED_PID = 100_000_000
#: No recording lasts a day (microseconds): such durations are wrong subtractions, such times are damaged.
LONGEST_US = 86.4e9
#: An event is damaged, unless most are, if it lasts this many times as long as all starts of its file are apart, or
#: begins this many times as far away as all but two percent of them are apart.
_LONGEST_SPANS, _FURTHEST_SPANS = 2, 1000
_INT64 = (1 << 63) - 1

#: Rows of `EventBatch`, [Column, events].
Rows = npt.NDArray[np.int64]

#: Allocating and freeing memory waits for the GPU too, freeing always.
_SYNCHRONISES_OR_ALLOCATES = re.compile(
    r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip|cu)(Mem)?(Malloc|Alloc|Free)(Host)?(_v\d)?$"
)
_STREAM_WAITS = re.compile(r"StreamWaitEvent")
_RECORDS = re.compile(r"EventRecord")
#: Numbers of the roles of calls; -1 for a call that only counts if it launched something.
ROLES = (CallRole.LAUNCH, CallRole.SYNCHRONISE, CallRole.STREAM_WAIT)
RECORD_EVENT = len(ROLES)
_NO_ARGS = Args()
#: Arguments of collectives that are text, whatever a file has.
_AS_TEXT = ("group_ranks", "comms_id", "sent", "received")
#: The name of events that say how much memory is allocated.
_MEMORY = "[memory]"
#: Where an object is in memory, in the name of a function; another one in every recording.
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{4,}")


def outermost(begin: npt.NDArray[np.float64], duration: npt.NDArray[np.float64]) -> Ints:
    """Return the positions of spans that lie in no other span, in order of begin."""
    order = np.lexsort((-duration, begin))
    end = (begin + duration)[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return np.asarray(order[begin[order] >= before])


class ColumnBuilder:
    """Collects events batch by batch."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._code_of_hash: dict[int, int] = {}
        self._threads: dict[tuple[int | str, ...], int] = {}
        self._collectives: dict[CollectiveArgs, int] = {}
        self._parts: dict[str, dict[str, list[npt.NDArray[Any]]]] = {
            table: {name: [] for name in schema} for table, schema in SCHEMAS.items()
        }
        self._base_us: int | None = None
        self._negative = self._absurd = self._nameless = self._host_events = 0
        self._events, self._damaged = np.zeros(2, np.int64), np.zeros(2, np.int64)  # of GPUs and of hosts

    def add(self, batch: EventBatch) -> None:
        """Keep the relevant data of a batch."""
        of_table = np.where(batch.rows[Column.ODD] == 0, TABLE_OF[batch.rows[Column.CATEGORY]], -1)
        for number, table in enumerate(SCHEMAS):
            chosen = np.flatnonzero(of_table == number)
            if len(chosen):
                self._add_rows(table, batch.text, batch.rows[:, chosen], batch.times[:, chosen])
        by_category: defaultdict[str, list[TraceEvent]] = defaultdict(list)
        for event in batch.events:
            if event.ph == "X":
                by_category[(event.cat or "").lower()].append(event)
            elif event.name == _MEMORY and (event.args or _NO_ARGS).device_type:  # 0 is that of the host
                by_category[_MEMORY].append(event)
        for name, events in by_category.items():
            if name in TABLES:
                self._add_events(name, events)

    def _add_rows(self, table: str, text: bytes, rows: Rows, times: npt.NDArray[np.float64]) -> None:
        """Add the rows of one table."""
        if table == "syncs":  # they are few, and have arguments of their own
            pieces = rows[[Column.BEGIN, Column.END]].T.tolist()
            self._add_events("cuda_sync", [event for begin, end in pieces if (event := decoded(text[begin:end]))])
            return
        whole = self._whole(table, times, rows[Column.NAME] != NO_ID)
        if not whole.all():
            rows, times = rows[:, whole], times[:, whole]
        if times.size:
            self._keep(table, times, rows[Column.PID], self._of_rows(table, text, rows))

    def _add_events(self, category: str, events: list[TraceEvent]) -> None:
        """Add the events of one category."""
        table = TABLES[category]
        ends = [0.0 if category == _MEMORY else event.dur for event in events]
        times = np.array([[event.ts for event in events], ends], np.float64)
        whole = self._whole(table, times, np.array([event.name is not None for event in events]))
        whole_events = [event for event, is_whole in zip(events, whole.tolist(), strict=True) if is_whole]
        if not whole_events:
            return
        columns = self._of_events(table, whole_events)
        columns["activity"] = np.full(len(whole_events), ACTIVITY_OF[CATEGORIES.index(category)])
        pid = np.array(
            [event.pid if type(event.pid) is int and 0 <= event.pid <= _INT64 else 0 for event in whole_events]
        )
        self._keep(table, times[:, whole], pid, columns)

    def _whole(self, table: str, times: npt.NDArray[np.float64], named: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask of the events with a name and possible times; count the others."""
        possible = np.isfinite(times[0]) & (np.abs(times[1]) <= LONGEST_US)
        if self._base_us is None and possible.any():
            starts = times[0, possible]
            usual = float(np.partition(starts, len(starts) // 2)[len(starts) // 2])
            self._base_us = math.floor(starts[0] if abs(starts[0] - usual) <= LONGEST_US else usual)
        possible[possible] = np.abs(times[0, possible] - (self._base_us or 0)) <= LONGEST_US
        whole = np.asarray(possible & named)
        self._absurd += int((~possible).sum())
        self._nameless += int((possible & ~named).sum())
        self._negative += (negative := int((times[1, whole] < 0).sum()))
        self._events[_of_host(table)] += len(whole)
        self._damaged[_of_host(table)] += len(whole) - int(whole.sum()) + negative
        return whole

    def _keep(self, table: str, times: npt.NDArray[np.float64], pid: Ints, columns: dict[str, Any]) -> None:
        start, duration = times
        if table == "calls":
            columns["role"] = self._roles(np.asarray(columns["name"]))
        columns |= {"part": _parts(pid), "ts": start - (self._base_us or 0), "dur": np.maximum(duration, 0.0)}
        arrays = {name: np.asarray(columns[name], kind) for name, kind in SCHEMAS[table].items()}
        if table in {"operators", "annotations"}:
            self._host_events += len(start)
        for name, values in arrays.items():
            self._parts[table][name].append(values)

    def columns(self) -> FileColumns:
        """Return all collected columns."""
        tables: dict[str, Table] = {}
        for table, schema in SCHEMAS.items():
            # Two copies of everything at once would be the peak memory of reading a file.
            parts = self._parts.pop(table)
            tables[table] = {
                name: np.concatenate(parts.pop(name)) if parts[name] else np.empty(0, kind)
                for name, kind in schema.items()
            }
        self._drop_impossible(tables)
        return FileColumns(
            base_us=self._base_us or 0,
            host_events=self._host_events,
            strings=tuple(self._strings),
            collectives=tuple(self._collectives),
            negative=self._negative,
            absurd=self._absurd,
            nameless=self._nameless,
            damaged=float((self._damaged / np.maximum(self._events, 1)).max()),
            **tables,
        )

    def _drop_impossible(self, tables: dict[str, Table]) -> None:
        """Drop the few events that begin far away from all others, or last longer than a recording can."""
        starts = np.concatenate([tables[table]["ts"] for table in ("gpu", "calls", "operators", "python")])
        if not len(starts):
            return
        few = len(starts) // 100
        begin, end = np.partition(starts, (few, -1 - few))[[few, -1 - few]]
        away = _FURTHEST_SPANS * (end - begin)
        span = np.ptp(starts[(starts >= begin - away) & (starts <= end + away)])
        for name, table in tables.items():
            plausible = (table["ts"] >= begin - away) & (table["ts"] <= end + away)
            possible = np.flatnonzero(plausible & (table["dur"] <= _LONGEST_SPANS * span))
            lost = len(plausible) - len(possible)
            if 0 < lost < len(possible):
                tables[name] = rows_of(table, possible)
                self._absurd += lost
                self._damaged[_of_host(name)] += lost

    def _of_rows(self, table: str, text: bytes, rows: Rows) -> dict[str, Any]:
        """The columns of rows of numbers, without their times."""
        device, stream = rows[Column.DEVICE], rows[Column.STREAM]
        columns = {
            "name": self._text_codes(text, rows, Column.NAME, _name_of),
            "activity": ACTIVITY_OF[rows[Column.CATEGORY]],
            "device": np.where(device == NO_ID, rows[Column.PID], device),
            "stream": np.where(stream == NO_ID, rows[Column.TID], stream),
            "correlation": rows[Column.CORRELATION],
            "size": rows[Column.SIZE],
            "collective": np.full(rows.shape[1], NO_ID, np.int64),
        }
        if "thread" in SCHEMAS[table]:
            # Threads of several processes may have the same number.
            pids, pid = np.unique(rows[Column.PID], return_inverse=True)
            tids, tid = np.unique(rows[Column.TID], return_inverse=True)
            pairs, inverse = np.unique(pid * len(tids) + tid, return_inverse=True)
            named = [(int(pids[pair // len(tids)]), int(tids[pair % len(tids)])) for pair in pairs.tolist()]
            columns["thread"] = np.array(self._numbered(named), np.int64)[inverse]
        if table in _SHAPES:
            shape = _SHAPES[table]
            columns["shape"] = self._text_codes(text, rows, Column.SHAPE, lambda *row: shape(*_two_lists(*row)))
        return columns

    def _text_codes(self, text: bytes, rows: Rows, column: Column, read: Callable[[bytes, list[int]], str]) -> Ints:
        """Return a code for the text of each row, read once for all rows with the same hash in `column`."""
        hashes, first, inverse = np.unique(rows[column], return_index=True, return_inverse=True)
        code_of = self._code_of_hash
        for number, row in zip(hashes.tolist(), first.tolist(), strict=True):
            if number not in code_of:
                code_of[number] = self._codes([read(text, rows[:, row].tolist())])[0]
        return np.array([code_of[number] for number in hashes.tolist()], np.int64)[inverse]

    def _of_events(self, table: str, events: list[TraceEvent]) -> dict[str, Any]:
        """The columns of events, without their times."""
        args = [event.args or _NO_ARGS for event in events]
        columns: dict[str, Any] = {
            name: _integers([getattr(arg, field) for arg in args]) for name, field in _IDS.get(table, {}).items()
        }
        if "name" in SCHEMAS[table]:
            columns["name"] = self._codes([event.name or "" for event in events])
        if "thread" in SCHEMAS[table]:
            pairs = [tuple(NO_ID if id_ is None else id_ for id_ in (event.pid, event.tid)) for event in events]
            columns["thread"] = self._numbered(pairs)
        if table == "gpu":
            sizes = ((arg.size, arg.occupancy) for arg in args)
            columns["device"] = _integers([arg.device for arg in args], [event.pid for event in events])
            columns["stream"] = _integers([arg.stream for arg in args], [event.tid for event in events])
            columns["size"] = _integers([next((size for size in pair if type(size) is int), None) for pair in sizes])
            columns["shape"] = self._codes([_shape(arg.grid, arg.block) for arg in args])
            columns["collective"] = [self._collective(arg) for arg in args]
        if table == "operators":
            columns["shape"] = self._codes([_inputs(arg.dims, arg.types) for arg in args])
            columns["collective"] = [
                self._collective(arg) if event.name == COLLECTIVE_OPERATOR else NO_ID
                for event, arg in zip(events, args, strict=True)
            ]
        return columns

    def _numbered(self, threads: Sequence[tuple[int | str, ...]]) -> list[int]:
        """Return a number for each thread."""
        return [self._threads.setdefault(thread, len(self._threads)) for thread in threads]

    def _roles(self, names: Ints) -> Ints:
        """Return the role of the calls with names of these codes."""
        codes, inverse = np.unique(names, return_inverse=True)
        strings = list(self._strings)
        return np.array([role_of(strings[code]) for code in codes.tolist()], np.int64)[inverse]

    def _codes(self, texts: list[str]) -> list[int]:
        """Return a code for each text."""
        strings = self._strings
        texts = [_ADDRESS.sub("0x...", text) for text in texts]
        for text in set(texts) - strings.keys():
            strings[text] = len(strings)
        return [strings[text] for text in texts]

    def _collective(self, args: Args) -> int:
        """Return the position of a collective's arguments."""
        if args.collective is None and args.group_name is None:
            return NO_ID
        stated = {name: getattr(args, name) for name in CollectiveArgs.__struct_fields__}
        texts = {name: str(stated[name]) for name in _AS_TEXT if stated[name] is not None}
        return self._collectives.setdefault(CollectiveArgs(**stated | texts), len(self._collectives))


def _parts(pid: Ints) -> Ints:
    """Return the rank of each process in a fused file; 0 for numbers that no rank can have."""
    part = np.maximum(pid, 0) // FUSED_PID
    return np.where(part < LARGEST_SIZE, part, 0)


def _of_host(table: str) -> int:
    """Return 1 for a table of host events, 0 for one of the GPU."""
    return int(table not in {"gpu", "syncs", "memory"})


def _integers(values: Sequence[int | str | None], otherwise: Sequence[int | str | None] = ()) -> npt.NDArray[np.int64]:
    """Return ids as 64-bit integers; a missing one is replaced by its value in `otherwise`, else NO_ID."""
    try:
        return np.array(values, np.int64)
    except (OverflowError, TypeError, ValueError):
        pairs = zip_longest(values, otherwise) if otherwise else ((value, None) for value in values)
        return np.array([_integer(*pair) for pair in pairs], np.int64)


def _integer(value: int | str | None, otherwise: int | str | None = None) -> int:
    """Return an id as a 64-bit integer; NO_ID if there is none."""
    for candidate in (value, otherwise):
        if type(candidate) is int:
            return candidate if -_INT64 <= candidate <= _INT64 else candidate & _INT64
        if isinstance(candidate, str):
            try:
                return int(candidate, 0) & _INT64
            except ValueError:
                continue
    return NO_ID


def _name_of(text: bytes, row: list[int]) -> str:
    return (
        text[row[Column.NAME_BEGIN] : row[Column.NAME_END]].decode("utf-8", "replace") if row[Column.NAME] != -1 else ""
    )


def _two_lists(text: bytes, row: list[int]) -> tuple[Any, Any]:
    """Return the two arguments of an event whose text matters, None for those it lacks."""
    return (
        _list_at(text, row[Column.FIRST_BEGIN], row[Column.FIRST_END]),
        _list_at(text, row[Column.SECOND_BEGIN], row[Column.SECOND_END]),
    )


def _list_at(text: bytes, begin: int, end: int) -> Any:
    """Return the value of an argument; None if it is missing."""
    if begin < 0:
        return None
    try:
        return msgspec.json.decode(text[begin:end])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text[begin:end].decode("utf-8", "replace")


def _shape(grid: Any, block: Any) -> str:
    if grid is None and block is None:
        return ""
    return "/".join("x".join(map(str, sizes if isinstance(sizes, list) else (sizes or "",))) for sizes in (grid, block))


def _inputs(dims: Any, types: Any) -> str:
    """The sizes and types of an operator's inputs as JSON; empty if they were not recorded."""
    if not isinstance(dims, list):
        return ""
    return msgspec.json.encode([dims, types if isinstance(types, list) else []]).decode()


def role_of(name: str) -> int:
    """Return the number of what a call of the runtime does: its position in ROLES, RECORD_EVENT, or -1."""
    if _SYNCHRONISES_OR_ALLOCATES.search(name):
        return ROLES.index(CallRole.SYNCHRONISE)
    if _STREAM_WAITS.search(name):
        return ROLES.index(CallRole.STREAM_WAIT)
    return RECORD_EVENT if _RECORDS.search(name) else -1


#: How the two arguments of an event whose text matters become a shape.
_SHAPES = {"gpu": _shape, "operators": _inputs}
#: Columns that are numbers in the arguments of an event, with their names there.
_IDS = {
    "gpu": {"correlation": "correlation"},
    "calls": {"correlation": "correlation"},
    "syncs": {
        "stream": "stream", "correlation": "correlation", "waits_for_stream": "wait_on_stream",
        "waits_for_record": "wait_on_record",
    },
    "memory": {"device": "device_id", "allocated": "allocated", "reserved": "reserved"},
}  # fmt: skip

#: Marks a missing id.
NO_ID = -1

Ints = npt.NDArray[np.int64]

_GPU_CATEGORIES = {
    "kernel": Activity.KERNEL, "concurrent_kernel": Activity.KERNEL, "gpu_memcpy": Activity.MEMCPY,
    "gpu_memset": Activity.MEMSET, "memcpy": Activity.MEMCPY, "memset": Activity.MEMSET,
}  # fmt: skip
_CALL_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "driver",
    "xpu_runtime",
    "mtia_runtime",
    "privateuse1_runtime",
)
_OPERATOR_CATEGORIES = ("cpu_op", "operator", "cpu_instant_event")
_ANNOTATION_CATEGORIES = ("user_annotation", "python_gc")
_PYTHON_CATEGORIES = ("python_function",)

#: A table of events: arrays by name, all of one length.
Table = dict[str, npt.NDArray[Any]]

_TIMES = {"part": np.int32, "ts": np.float64, "dur": np.float64}
_GPU_TYPES = _TIMES | {
    "name": np.int32, "activity": np.int8, "device": np.int64, "stream": np.int64, "correlation": np.int64,
    "shape": np.int32, "size": np.int64, "collective": np.int32,
}  # fmt: skip
_HOST_TYPES = _TIMES | {"thread": np.int32, "name": np.int32}
_CALL_TYPES = _HOST_TYPES | {"correlation": np.int64, "role": np.int8}
_OPERATOR_TYPES = _HOST_TYPES | {"shape": np.int32, "collective": np.int32}
_SYNC_TYPES = _TIMES | dict.fromkeys(("stream", "correlation", "waits_for_stream", "waits_for_record"), np.int64)


@dataclass(slots=True)
class FileColumns:
    """A file's events. Times: microseconds from `base_us`. `name`, `shape`: codes into `strings`.

    `collective`: positions in `collectives`, -1 for none. `size`: bytes of a copy, or the estimated occupancy of a
    kernel in percent, -1 if unknown. `memory`: bytes allocated and reserved on a GPU. `part`: the rank in a fused file,
    else 0. `python`: functions, where stacks were recorded. `host_events`: operators and annotations.
    `negative`: durations below 0 (taken as 0). Left out: `absurd`, events of more than a day or without times, or a day
    away from the others; `nameless`, without a name. `damaged`: the share of all of these among the events of GPUs or
    hosts, whichever is larger.
    """

    base_us: int
    gpu: Table
    calls: Table
    operators: Table
    annotations: Table
    python: Table
    syncs: Table
    memory: Table
    host_events: int
    strings: tuple[str, ...]
    collectives: tuple[CollectiveArgs, ...]
    negative: int
    absurd: int
    nameless: int
    damaged: float


def rows_of(table: Table, rows: Ints) -> Table:
    """Return some rows of a table."""
    return {name: values[rows] for name, values in table.items()}


def looked_up(wanted: Ints, keys: Ints) -> Ints:
    """Return the first position of each wanted number in `keys`, -1 for none."""
    distinct, first = np.unique(keys, return_index=True)
    if not len(distinct):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    return np.where(distinct[place] == wanted, first[place], -1)


_MEMORY_TYPES = _TIMES | dict.fromkeys(("device", "allocated", "reserved"), np.int64)

SCHEMAS: dict[str, dict[str, Any]] = {
    "gpu": _GPU_TYPES,
    "calls": _CALL_TYPES,
    "operators": _OPERATOR_TYPES,
    "annotations": _HOST_TYPES,
    "python": _HOST_TYPES,
    "syncs": _SYNC_TYPES,
    "memory": _MEMORY_TYPES,
}
#: Category of events -> table that they go into.
TABLES = {
    **dict.fromkeys(_GPU_CATEGORIES, "gpu"),
    **dict.fromkeys(_CALL_CATEGORIES, "calls"),
    **dict.fromkeys(_OPERATOR_CATEGORIES, "operators"),
    **dict.fromkeys(_ANNOTATION_CATEGORIES, "annotations"),
    **dict.fromkeys(_PYTHON_CATEGORIES, "python"),
    "cuda_sync": "syncs",
    "[memory]": "memory",  # events of the category cpu_instant_event
}
CATEGORIES = tuple(TABLES)
TABLE_OF = np.array([list(SCHEMAS).index(TABLES[name]) for name in CATEGORIES], np.int64)
ACTIVITY_OF = np.array(
    [list(Activity).index(_GPU_CATEGORIES[name]) if name in _GPU_CATEGORIES else -1 for name in CATEGORIES], np.int64
)


COLLECTIVE_OPERATOR = "record_param_comms"
STEP = re.compile(r"ProfilerStep#(\d{1,9})(?!\d)")
