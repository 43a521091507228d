"""What each host thread of a rank did at any time: its innermost operator, call or Python function.

In: the host events of a rank. Out: `HostWork`: pieces of time, each with what the thread did, and the operator, module
and line around each call. Arrays only, as everything that runs in the process that reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from tracekit.collectors.importers.kineto._events import nest_spans
from tracekit.collectors.importers.kineto.event_tables import Table, rows_of
from tracekit.collectors.importers.kineto.measured_cost import (
    EventKind,
    Nested,
    pace_of_host,
    profiler_cost,
    recorded_before,
)
from tracekit.trace.gpu_activity import PROFILER_LINE, IdleReason
from tracekit.trace.profiler_cost import ProfilerCost

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_LOADER = re.compile(
    r"enumerate\(DataLoader\)|dataloader\.py\(\d+\): __next__|data_loader\.py\(\d+\): __(next|iter)__"
    r"|^#*\s*data[ _-]?load(?!.*\.py\()",  # an annotation such as "## data_load ##"
    re.IGNORECASE,
)
_COLLECTS = re.compile(r"^(Python )?GC\b|^gc\.collect|garbage collect", re.IGNORECASE)
#: Functions and annotations in which a checkpoint is written: of torch, safetensors, pickle and numpy, and whatever is
#: called so. `async_save` returns once the copy is made, and another thread writes.
_SAVES = re.compile(
    r"(^|/)torch/serialization\.py\(\d+\): (_legacy)?_?save$"
    r"|(^|/)torch/distributed/checkpoint/\w+\.py\(\d+\): _?save(_state_dict)?$"
    r"|(^|/)safetensors/\w+\.py\(\d+\): save(_file|_model)?$"
    r"|(^|/)pickle\.py\(\d+\): _?dump$|^<built-in function dump>$"
    r"|(^|/)numpy/lib/\w+\.py\(\d+\): savez?(_compressed)?$"
    r"|\.py\(\d+\): _?save_(checkpoint|ckpt|pretrained|state|state_dict|model)$"
    r"|^(?!.*\.py\()(.*[^a-z])?(sav(e|ing)|writ(e|ing))[^a-z]*(model[^a-z]*)?(checkpoint|ckpt)"
    r"|^(?!.*\.py\()(.*[^a-z])?(checkpoint|ckpt)[^a-z]*(sav(e|ing)|writ(e|ing))|^\W*(checkpoint|ckpt)(ing)?\W*$",
    re.IGNORECASE,
)
_ALLOCATES = re.compile(
    r"^(cuda|hip|cu)(Mem)?(Malloc|Alloc|Free|HostAlloc|HostRegister|MemCreate|MemMap|MemUnmap|MemRelease|MemSetAccess"
    r"|MemAddressReserve)"
)
#: A line of the user's own: a Python function outside of torch and of what is installed beside it or with Python. What
#: the profiler does is not the user's doing, so its own lines count, too.
_PYTHON_LINE = re.compile(r"\.pyx?\(\d+\): ")
_NOT_OWN = re.compile(
    r"(^|/)(torch|site-packages|dist-packages|lib/python3[^/]*)/|^<|^(threading|contextlib|functools)\.py"
)
_MODULE = "nn.Module: "


class _Flag(IntFlag):
    """What a span is, as `nest_spans` knows it."""

    CALL = 1
    OPERATOR = 2
    PYTHON = 4
    NOTE = 8
    COLLECTS = 16
    LOADER = 32
    MODULE = 64
    OWN = 128
    SAVES = 256


@dataclass(frozen=True, slots=True)
class HostWork:
    """`pieces`: thread, start, duration (microseconds), what (position in `whats`), by thread and start.

    `whats`: reason, name, own line ("" if unknown), whether it is inside an operator or a call, and inside an operator
    that launches kernels. `around`: for each call, positions of texts, -1 for none: `inner`, its innermost operator;
    `inputs` of that; `module`; `own`, its line.
    `recorded_s`: what recording had cost the thread of each call before it, seconds, [calls], by `cost`, None if that
    is not known.
    `first`, `last`: the first start and the last end of all events; nan if there are none.
    """

    pieces: Mapping[str, np.ndarray]
    whats: tuple[tuple[str, str, str, bool, bool], ...]
    around: Mapping[str, np.ndarray]
    first: float
    last: float
    recorded_s: npt.NDArray[np.float64]
    cost: ProfilerCost | None = None


def host_work(
    calls: Table,
    waits: Bools,
    launches: Bools,
    operators: Table,
    python: Table,
    annotations: Table,
    names: Sequence[str],
) -> HostWork:
    """Find out what the threads did. `waits`, `launches`: which calls wait for the GPU, and launch kernels, [calls]."""
    # Of spans with the same times, those first in this order are the outer ones.
    tables = (annotations, python, operators, calls)
    count = [len(table["ts"]) for table in tables]
    if not sum(count):
        none = dict.fromkeys(("thread", "start", "duration"), np.zeros(0)) | {"what": np.zeros(0, np.int32)}
        return HostWork(none, (), dict.fromkeys(_AROUND, np.zeros(0, np.int32)), np.nan, np.nan, np.zeros(0))
    begin, length = (np.concatenate([table[column] for table in tables]) for column in ("ts", "dur"))
    thread, name = (np.concatenate([table[column] for table in tables]) for column in ("thread", "name"))
    of_name = _flags_of(names)
    flags = np.repeat(np.array([_Flag.NOTE, _Flag.PYTHON, _Flag.OPERATOR, _Flag.CALL], np.int32), count)
    flags |= of_name[name] & np.repeat(np.array([_OF_CODE, _OF_CODE, _Flag.COLLECTS, _Flag.COLLECTS], np.int32), count)
    order = np.lexsort((-length, begin, thread)).astype(np.int32)
    before_calls = len(name) - count[3]
    thread, begin, name, flags = thread[order], begin[order], name[order], flags[order]
    end = begin + length[order]
    first, last = float(begin.min()), float(end.max())
    inputs, reason = np.full(len(name), -1, np.int32), np.zeros(len(name), np.uint8)
    inputs[before_calls - count[2] : before_calls] = operators["shape"]
    reason[before_calls - count[2] : before_calls] = _launching(operators, rows_of(calls, np.flatnonzero(launches)))
    reason[before_calls:] = _reasons_of_calls(calls, waits, names)
    around, parent = np.empty((len(_AROUND), count[3]), np.int32), np.empty(len(name), np.int32)
    (begun, ended), (what, where) = np.empty((2, 2 * len(name))), np.empty((2, 2 * len(name)), np.int32)
    pieces, whats = nest_spans(
        thread,
        begin,
        end,
        name,
        inputs[order],
        flags,
        reason[order],
        begun,
        ended,
        what,
        where,
        around,
        parent,
    )
    kinds = (EventKind.NOTE, EventKind.FUNCTION, EventKind.OPERATOR, EventKind.CALL)
    kind = np.repeat(np.array(kinds, np.uint8), count)
    kind[before_calls:][launches] = EventKind.LAUNCH
    events = Nested(thread, begin, end, name, kind[order], parent)
    pace = pace_of_host(events)
    cost = profiler_cost(events, pace)
    call = order[order >= before_calls] - before_calls
    in_order = np.empty_like(around)
    in_order[:, call] = around
    recorded_s = np.empty(count[3])
    recorded_s[call] = recorded_before(events, cost, pace)[order >= before_calls]
    return HostWork(
        pieces={
            "thread": where[:pieces].copy(), "start": begun[:pieces].copy(),
            "duration": ended[:pieces] - begun[:pieces], "what": what[:pieces].copy(),
        },
        whats=tuple(_whats(np.frombuffer(whats, np.int32).reshape(-1, 5), names)),
        around=dict(zip(_AROUND, in_order, strict=True)),
        first=first,
        last=last,
        recorded_s=recorded_s,
        cost=cost,
    )  # fmt: skip


_AROUND = ("inner", "inputs", "module", "own")
#: Flags that only names of Python functions and annotations have.
_OF_CODE = _Flag.COLLECTS | _Flag.LOADER | _Flag.MODULE | _Flag.OWN | _Flag.SAVES


def _flags_of(names: Sequence[str]) -> npt.NDArray[np.int32]:
    """What the name of a span says about it, [names]."""
    flags = np.zeros(len(names) + 1, np.int32)
    for code, name in enumerate(names):
        if _LOADER.search(name):
            flags[code] |= _Flag.LOADER
        if _SAVES.search(name):
            flags[code] |= _Flag.SAVES
        if _COLLECTS.search(name):
            flags[code] |= _Flag.COLLECTS
        if name.startswith(_MODULE):
            flags[code] |= _Flag.MODULE
        if _PYTHON_LINE.search(name) and (not _NOT_OWN.search(name) or PROFILER_LINE.match(name)):
            flags[code] |= _Flag.OWN
    return flags


def _reasons_of_calls(calls: Table, waits: Bools, names: Sequence[str]) -> npt.NDArray[np.uint8]:
    """The number of the reason of a GPU that is idle during each call, [calls]."""
    used = np.unique(calls["name"])
    allocates = np.zeros(len(names) + 1, np.bool_)
    allocates[[code for code in used.tolist() if _ALLOCATES.match(names[code])]] = True
    other = np.where(allocates[calls["name"]], _NUMBER[IdleReason.ALLOCATION], _NUMBER[IdleReason.RUNTIME_CALL])
    return np.where(waits, _NUMBER[IdleReason.SYNCHRONISE], other).astype(np.uint8)


def _launching(operators: Table, launches: Table) -> Bools:
    """Which operators have one of these calls inside, [operators]."""
    launching = np.zeros(len(operators["ts"]), np.bool_)
    for thread in np.unique(launches["thread"]):
        of_thread, called = operators["thread"] == thread, np.sort(launches["ts"][launches["thread"] == thread])
        begin, length = operators["ts"][of_thread], operators["dur"][of_thread]
        launching[of_thread] = np.searchsorted(called, begin) < np.searchsorted(called, begin + length, side="right")
    return launching


def _whats(whats: npt.NDArray[np.int32], names: Sequence[str]) -> Iterator[tuple[str, str, str, bool, bool]]:
    """Yield what threads did, in words. `whats`: reason, name, call, own line, and whether it is busy (1) and launches
    (2), [whats, 5].
    """
    for number, text, called, own, busy in whats.tolist():
        reason = _REASONS[number]
        name = "garbage collection" if reason is IdleReason.GC else _text(names, text)
        if called >= 0:
            name = f"{names[called]} in {name}" if name else names[called]
        yield str(reason), name, _text(names, own), bool(busy), busy > 1


def _text(names: Sequence[str], code: int) -> str:
    return names[code] if code >= 0 else ""


_REASONS = tuple(IdleReason)
_NUMBER = {reason: number for number, reason in enumerate(_REASONS)}
