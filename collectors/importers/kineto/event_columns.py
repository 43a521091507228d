"""The events of a file as columns.

In: batches of events. Out: `FileColumns`: what the analysis needs, and nothing of the rest. Every event of every file
passes through here, so each costs one look-up and, where it is kept, one tuple.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.importers.kineto.json_events import Args, Event
from tracekit.gpu_recording import Activity, CallRole

#: A fused file holds several ranks: its process ids are rank * FUSED_PID + pid.
FUSED_PID = 100_000_000
#: No op lasts a day (microseconds): such durations are wrong subtractions.
LONGEST_US = 86.4e9
#: What is no correlation.
NO_ID = -1
_INT64 = (1 << 63) - 1

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
COLLECTIVE_OPERATOR = "record_param_comms"
#: Allocating and freeing memory waits for the GPU too, freeing always.
_SYNCHRONISES = re.compile(
    r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip|cu)(Mem)?(Malloc|Alloc|Free)(Host)?(_v\d)?$"
)
_STREAM_WAITS = re.compile(r"StreamWaitEvent")
_RECORDS = re.compile(r"EventRecord")
#: Numbers of what a call is for; -1 for one that only counts where it launched something.
ROLES = (CallRole.LAUNCH, CallRole.SYNCHRONISE, CallRole.STREAM_WAIT)
RECORD_EVENT = len(ROLES)

_TIMES = {"part": pl.Int64, "ts": pl.Float64, "dur": pl.Float64}
GPU_COLUMNS = _TIMES | dict.fromkeys(
    ("name", "activity", "device", "stream", "correlation", "shape", "collective"), pl.Int64
)
HOST_COLUMNS = _TIMES | {"thread": pl.Int64, "name": pl.Int64}
CALL_COLUMNS = HOST_COLUMNS | {"correlation": pl.Int64, "role": pl.Int64}
OPERATOR_COLUMNS = HOST_COLUMNS | {"collective": pl.Int64}
SYNC_COLUMNS = _TIMES | dict.fromkeys(
    ("name", "stream", "correlation", "waits_for_stream", "waits_for_record"), pl.Int64
)


@dataclass(frozen=True, slots=True)
class CollectiveArgs:
    """What a collective's arguments say; None where they do not."""

    collective: str | None
    elements_in: int | None
    elements_out: int | None
    dtype: str | None
    group_size: int | None
    group_name: str | None
    group_description: str | None
    group_ranks: str | None
    rank_in_group: int | None
    sequence: int | None
    comms_id: str | None
    source: int | None
    destination: int | None


@dataclass(slots=True)
class FileColumns:
    """A file's events. Times: microseconds from `base_us`. `name`, `shape`: codes into `strings`.

    `collective`: positions in `collectives`, -1 for none. `part`: the rank in a fused file, else 0. `threads`: what
    codes of threads stand for. `negative`, `absurd`: durations below 0 (taken as 0), and ops of more than a day or
    without times (left out).
    """

    base_us: int
    gpu: pl.DataFrame
    calls: pl.DataFrame
    operators: pl.DataFrame
    annotations: pl.DataFrame
    syncs: pl.DataFrame
    strings: tuple[str, ...]
    collectives: tuple[CollectiveArgs, ...]
    other_events: int
    negative: int
    absurd: int


class ColumnBuilder:
    """Collects events batch by batch."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._threads: dict[int | str | None, int] = {}
        self._collectives: dict[CollectiveArgs, int] = {}
        self._frames: dict[str, list[pl.DataFrame]] = {name: [] for name in _SCHEMAS}
        self._base_us: int | None = None
        self._negative = self._absurd = self._others = 0
        self._described_by: dict[str, Callable[[list[Event]], dict[str, Any]]] = {
            "gpu": self._gpu, "calls": self._calls, "operators": self._operators, "annotations": self._host,
            "syncs": self._syncs,
        }  # fmt: skip

    def add(self, events: Iterable[Event]) -> None:
        """Keep what matters of a batch."""
        by_category: defaultdict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        for category, found in by_category.items():
            # Files of 2021 capitalise categories.
            table = _TABLES.get(category or "", _TABLES.get((category or "").lower()))
            if table is None:
                self._others += len(found)
                continue
            kept, times = self._timed([event for event in found if event.ph == "X"])
            if not kept:
                continue
            columns = times | self._described_by[table](kept)
            if table == "gpu":
                columns["activity"] = [_ACTIVITIES[(category or "").lower()]] * len(kept)
            frame = pl.DataFrame(columns, schema=_SCHEMAS[table])
            if table == "calls":
                frame = frame.filter((pl.col("role") >= 0) | (pl.col("correlation") != NO_ID))
            self._frames[table].append(frame)

    def columns(self) -> FileColumns:
        """All that was kept."""
        frames = {
            name: pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=_SCHEMAS[name])
            for name, frames in self._frames.items()
        }
        return FileColumns(
            base_us=self._base_us or 0,
            strings=tuple(self._strings),
            collectives=tuple(self._collectives),
            other_events=self._others,
            negative=self._negative,
            absurd=self._absurd,
            **frames,
        )

    def _timed(self, events: list[Event]) -> tuple[list[Event], dict[str, Any]]:
        """The events that can have been, and when."""
        start = np.array([event.ts for event in events], np.float64)
        duration = np.array([event.dur or 0.0 for event in events], np.float64)
        possible = np.isfinite(start) & (np.abs(duration) <= LONGEST_US)
        if not possible.all():
            self._absurd += int((~possible).sum())
            events = [event for event, kept in zip(events, possible.tolist(), strict=True) if kept]
            start, duration = start[possible], duration[possible]
        if not events:
            return [], {}
        self._negative += int((duration < 0).sum())
        if self._base_us is None:
            self._base_us = math.floor(start[0])
        pids = [event.pid for event in events]
        part = [pid // FUSED_PID if type(pid) is int and pid >= FUSED_PID else 0 for pid in pids]
        return events, {"part": part, "ts": start - self._base_us, "dur": np.maximum(duration, 0.0)}

    def _gpu(self, events: list[Event]) -> dict[str, Any]:
        args = [event.args or _NO_ARGS for event in events]
        return {
            "name": self._codes([event.name or "" for event in events]),
            "device": _integers([one.device for one in args], [event.pid for event in events]),
            "stream": _integers([one.stream for one in args], [event.tid for event in events]),
            "correlation": _integers([one.correlation for one in args]),
            "shape": self._codes([_shape(one) for one in args]),
            "collective": [self._collective(one) for one in args],
        }

    def _calls(self, events: list[Event]) -> dict[str, Any]:
        names = [event.name or "" for event in events]
        roles = {name: _role(name) for name in set(names)}
        return self._host(events) | {
            "correlation": _integers([(event.args or _NO_ARGS).correlation for event in events]),
            "role": [roles[name] for name in names],
        }

    def _operators(self, events: list[Event]) -> dict[str, Any]:
        return self._host(events) | {
            "collective": [
                self._collective(event.args or _NO_ARGS) if event.name == COLLECTIVE_OPERATOR else NO_ID
                for event in events
            ]
        }

    def _syncs(self, events: list[Event]) -> dict[str, Any]:
        args = [event.args or _NO_ARGS for event in events]
        return {
            "name": self._codes([event.name or "" for event in events]),
            "stream": _integers([one.stream for one in args]),
            "correlation": _integers([one.correlation for one in args]),
            "waits_for_stream": _integers([one.wait_on_stream for one in args]),
            "waits_for_record": _integers([one.wait_on_record for one in args]),
        }

    def _host(self, events: list[Event]) -> dict[str, Any]:
        """The thread and the name of events of the host."""
        threads = self._threads
        tids = [event.tid for event in events]
        for tid in set(tids) - threads.keys():
            threads[tid] = len(threads)
        return {"thread": [threads[tid] for tid in tids], "name": self._codes([event.name or "" for event in events])}

    def _codes(self, texts: list[str]) -> list[int]:
        """A number for each text."""
        strings = self._strings
        for text in set(texts) - strings.keys():
            strings[text] = len(strings)
        return [strings[text] for text in texts]

    def _collective(self, args: Args) -> int:
        """The position of a collective's arguments."""
        if args.collective is None and args.group_name is None:
            return NO_ID
        key = CollectiveArgs(
            args.collective, args.elements_in, args.elements_out, args.dtype, args.group_size, args.group_name,
            args.group_description, None if args.group_ranks is None else str(args.group_ranks), args.rank_in_group,
            args.sequence, None if args.comms_id is None else str(args.comms_id), args.source, args.destination,
        )  # fmt: skip
        return self._collectives.setdefault(key, len(self._collectives))


_SCHEMAS: dict[str, dict[str, Any]] = {
    "gpu": GPU_COLUMNS,
    "calls": CALL_COLUMNS,
    "operators": OPERATOR_COLUMNS,
    "annotations": HOST_COLUMNS,
    "syncs": SYNC_COLUMNS,
}
_ACTIVITIES = {category: list(Activity).index(activity) for category, activity in _GPU_CATEGORIES.items()}
_TABLES = {
    **dict.fromkeys(_GPU_CATEGORIES, "gpu"),
    **dict.fromkeys(_CALL_CATEGORIES, "calls"),
    **dict.fromkeys(_OPERATOR_CATEGORIES, "operators"),
    **dict.fromkeys(_ANNOTATION_CATEGORIES, "annotations"),
    "cuda_sync": "syncs",
}
_NO_ARGS = Args()


def _integers(values: Sequence[int | str | None], otherwise: Sequence[int | str | None] = ()) -> npt.NDArray[np.int64]:
    """Ids as numbers of 64 bits, NO_ID where there is none; `otherwise`: what to take there."""
    try:
        return np.array(values, np.int64)
    except (OverflowError, TypeError, ValueError):
        pairs = zip_longest(values, otherwise) if otherwise else ((value, None) for value in values)
        return np.array([_integer(*pair) for pair in pairs], np.int64)


def _integer(value: int | str | None, otherwise: int | str | None = None) -> int:
    """An id as a number of 64 bits; NO_ID where there is none."""
    for candidate in (value, otherwise):
        if type(candidate) is int:
            return candidate if -_INT64 <= candidate <= _INT64 else candidate & _INT64
        if isinstance(candidate, str):
            try:
                return int(candidate, 0) & _INT64
            except ValueError:
                continue
    return NO_ID


def _shape(args: Args) -> str:
    if args.grid is None and args.block is None:
        return ""
    return "x".join(map(str, args.grid or ())) + "/" + "x".join(map(str, args.block or ()))


def _role(name: str) -> int:
    if _SYNCHRONISES.search(name):
        return ROLES.index(CallRole.SYNCHRONISE)
    if _STREAM_WAITS.search(name):
        return ROLES.index(CallRole.STREAM_WAIT)
    return RECORD_EVENT if _RECORDS.search(name) else -1
