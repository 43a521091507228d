"""The events of a file as columns.

In: batches of events. Out: `FileColumns`: what the analysis needs, and nothing of the rest. Every event of every file
passes through here, so each costs one look-up and, where it is kept, one tuple.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
COLLECTIVE_COLUMNS = HOST_COLUMNS | {"collective": pl.Int64}
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
    collective_calls: pl.DataFrame
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
        self._roles: dict[str | None, int] = {}
        self._base_us: int | None = None
        self._negative = self._absurd = self._others = 0

    def add(self, events: Iterable[Event]) -> None:
        """Keep what matters of a batch."""
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _SCHEMAS}
        handlers, others = self._handlers(rows), 0
        for event in events:
            handler = handlers.get(event.cat)
            if handler is None:
                handler = self._handler_of(event.cat, handlers)
            if handler is _skip or event.ph != "X":
                others += event.cat is not None and handler is _skip
                continue
            ts, dur = event.ts, event.dur or 0.0
            if ts is None or not math.isfinite(ts) or not dur <= LONGEST_US:
                self._absurd += 1
                continue
            if dur < 0:
                self._negative += 1
                dur = 0.0
            if self._base_us is None:
                self._base_us = math.floor(ts)
            pid = event.pid
            part = pid // FUSED_PID if type(pid) is int and pid >= FUSED_PID else 0
            handler(event, (part, ts - self._base_us, dur))
        self._others += others
        for name, found in rows.items():
            if found:
                self._frames[name].append(_frame(found, _SCHEMAS[name]))

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

    def _handlers(self, rows: dict[str, list[tuple[Any, ...]]]) -> dict[str | None, Callable[..., None]]:
        """What to do with an event of each category."""
        strings, threads = self._strings, self._threads

        def code(text: str | None) -> int:
            return strings.setdefault(text or "", len(strings))

        def thread(event: Event) -> int:
            return threads.setdefault(event.tid, len(threads))

        def gpu(activity: Activity) -> Callable[..., None]:
            number = list(Activity).index(activity)

            def keep(event: Event, times: tuple[float, ...]) -> None:
                args = event.args or _NO_ARGS
                rows["gpu"].append(
                    (
                        *times, code(event.name), number, _integer(args.device, event.pid),
                        _integer(args.stream, event.tid), _integer(args.correlation),
                        code(_shape(args)), self._collective(args),
                    )
                )  # fmt: skip

            return keep

        def call(event: Event, times: tuple[float, ...]) -> None:
            role = self._roles.get(event.name)
            if role is None:
                role = self._roles[event.name] = _role(event.name or "")
            correlation = NO_ID if event.args is None else _integer(event.args.correlation)
            if role >= 0 or correlation != NO_ID:
                rows["calls"].append((*times, thread(event), code(event.name), correlation, role))

        def operator(event: Event, times: tuple[float, ...]) -> None:
            if event.name == COLLECTIVE_OPERATOR:
                collective = self._collective(event.args or _NO_ARGS)
                rows["collective_calls"].append((*times, thread(event), code(event.name), collective))
            rows["operators"].append((*times, thread(event), code(event.name)))

        def annotation(event: Event, times: tuple[float, ...]) -> None:
            rows["annotations"].append((*times, thread(event), code(event.name)))

        def sync(event: Event, times: tuple[float, ...]) -> None:
            args = event.args or _NO_ARGS
            rows["syncs"].append(
                (
                    *times, code(event.name), _integer(args.stream), _integer(args.correlation),
                    _integer(args.wait_on_stream), _integer(args.wait_on_record),
                )
            )  # fmt: skip

        handlers: dict[str | None, Callable[..., None]] = {name: gpu(kind) for name, kind in _GPU_CATEGORIES.items()}
        handlers.update(dict.fromkeys(_CALL_CATEGORIES, call))
        handlers.update(dict.fromkeys(_OPERATOR_CATEGORIES, operator))
        handlers.update(dict.fromkeys(_ANNOTATION_CATEGORIES, annotation))
        handlers["cuda_sync"] = sync
        return handlers

    @staticmethod
    def _handler_of(category: str | None, handlers: dict[str | None, Callable[..., None]]) -> Callable[..., None]:
        """Files of 2021 capitalise categories."""
        handler = handlers.get((category or "").lower(), _skip)
        handlers[category] = handler
        return handler

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
    "operators": HOST_COLUMNS,
    "annotations": HOST_COLUMNS,
    "collective_calls": COLLECTIVE_COLUMNS,
    "syncs": SYNC_COLUMNS,
}
_NO_ARGS = Args()


def _skip(event: Event, times: tuple[float, ...]) -> None:
    """What to do with events that are not needed: nothing."""


def _frame(rows: list[tuple[Any, ...]], schema: dict[str, Any]) -> pl.DataFrame:
    columns = zip(*rows, strict=True)
    return pl.DataFrame(
        {name: pl.Series(values, dtype=schema[name]) for name, values in zip(schema, columns, strict=True)}
    )


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
