"""What each host thread of a rank did at any time, what is around each of its calls, and what recording them cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.collectors.importers.kineto._events import nest_spans
from tracekit.collectors.importers.kineto.event_columns import STEP, Ints, Table, outermost, rows_of
from tracekit.trace.gpu_activity import PROFILER_LINE, IdleReason, ProfilerCost

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]

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
#: Names that mark the phase of a step; the first match counts.
_PHASE_PATTERNS = {
    "optimizer": re.compile(r"^Optimizer\.(step|zero_grad)#|^optimizer", re.IGNORECASE),
    "backward": re.compile(r"^autograd::engine::evaluate_function|^#*\s*backward|^PP:\d+[BIW]\d", re.IGNORECASE),
}
#: Phases by number; the first is the default.
PHASES = ("forward", *_PHASE_PATTERNS)
#: Actions of torch.distributed.pipelining: PP:2F0 is the forward of microbatch 0 on stage 2.
_PIPELINE_ACTION = re.compile(r"^PP:\d{1,6}(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)\d{1,9}$")
#: An annotation of a module's forward, backward or weight gradients, such as "attn(F)".
_PASS_OF_MODULE = re.compile(r"\w+\([FBW]\)")
#: Functions that compute activations again, of torch, Megatron and DeepSpeed; and the backward inside of some of them.
_RECOMPUTES = (
    re.compile(
        r"(^|/)torch/utils/checkpoint\.py\(\d+\): (recompute_fn|backward)$"
        r"|(^|/)(tensor_parallel/random|activation_checkpointing/checkpointing)\.py\(\d+\): backward$"
    ),
    re.compile(r"(^|/)torch/autograd/__init__\.py\(\d+\): backward$"),
)
_NCCL_ANNOTATION = re.compile(r"^(?:nccl|rccl):(\w+)")


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
        empty = dict.fromkeys(("thread", "start", "duration"), np.zeros(0)) | {"what": np.zeros(0, np.int32)}
        return HostWork(empty, (), dict.fromkeys(_AROUND, np.zeros(0, np.int32)), np.nan, np.nan, np.zeros(0))
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
    (begins, ends), (what, where) = np.empty((2, 2 * len(name))), np.empty((2, 2 * len(name)), np.int32)
    pieces, whats = nest_spans(
        thread, begin, end, name, inputs[order], flags, reason[order], begins, ends, what, where, around, parent
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
            "thread": where[:pieces].copy(), "start": begins[:pieces].copy(),
            "duration": ends[:pieces] - begins[:pieces], "what": what[:pieces].copy(),
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


def _flags_of(names: Sequence[str]) -> Int32s:
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


def _whats(whats: Int32s, names: Sequence[str]) -> Iterator[tuple[str, str, str, bool, bool]]:
    """Yield what threads did, in words. `whats`: reason, name, call, own line, and whether it is busy (1) and launches
    (2), [whats, 5].
    """
    for number, text, called, own, busy in whats.tolist():
        reason = _REASONS[number]
        name = "garbage collection" if reason is IdleReason.GC else _text(names, text)
        name = "" if STEP.match(name) else name  # the profiler's marker, no function of the job
        if called >= 0:
            name = f"{names[called]} in {name}" if name else names[called]
        yield str(reason), name, _text(names, own), bool(busy), busy > 1


def _text(names: Sequence[str], code: int) -> str:
    return names[code] if code >= 0 else ""


_REASONS = tuple(IdleReason)
_NUMBER = {reason: number for number, reason in enumerate(_REASONS)}


def marked_steps(annotations: Table, names: Sequence[str]) -> Table:
    """Return the marked steps, by start."""
    matches = map(STEP.match, [*names, ""])
    numbers = np.array([int(match[1]) if match else -1 for match in matches], np.int64)
    step = numbers[annotations["name"]]
    marked = np.flatnonzero((step >= 0) & (annotations["dur"] > 0))
    return {"start": annotations["ts"][marked], "duration": annotations["dur"][marked], "step": step[marked]}


def step_at(steps: Table, times: Floats) -> Ints:
    """Return the step that contains each time, -1 for none."""
    begin = steps["start"]
    row = np.searchsorted(begin, times, side="right") - 1
    ends = np.append(begin + steps["duration"], -np.inf)
    step = np.where((row >= 0) & (times <= ends[row]), np.append(steps["step"], -1)[row], -1)
    return step.astype(np.int32)


def pass_at(annotations: Table, names: Sequence[str], times: Floats) -> Ints:
    """Return the name of the shortest annotation such as "attn(F)" around each time, on any thread; -1 for none."""
    annotation = np.full(len(times), -1)
    codes = [code for code, name in enumerate(names) if _PASS_OF_MODULE.fullmatch(name)]
    rows = np.flatnonzero(np.isin(annotations["name"], codes))
    begin, end = annotations["ts"][rows], annotations["ts"][rows] + annotations["dur"][rows]
    first, last = np.searchsorted(times, begin), np.searchsorted(times, end, side="right")
    for shorter in np.argsort(-annotations["dur"][rows], kind="stable").tolist():
        annotation[first[shorter] : last[shorter]] = annotations["name"][rows[shorter]]
    return annotation


class CallThreads:
    """The activity of a rank's host threads around each call."""

    def __init__(self, calls: Table, operators: Table, annotations: Table, names: Sequence[str]) -> None:
        self._calls, self._names = calls, names
        self._operators, self._annotations = operators, annotations
        self._operator_around = self.containing(operators)

    def containing(self, spans: Table, inner: Table | None = None) -> Ints:
        """Return the row of the outermost of `spans` around the start of each call, or of each `inner` span, on its
        thread; -1 for none.
        """
        thread, started = ((self._calls if inner is None else inner)[name] for name in ("thread", "ts"))
        container = np.full(len(thread), -1, np.int64)
        begin, end = spans["ts"], spans["ts"] + spans["dur"]
        for thread_number in np.unique(thread):
            started_here, spans_here = (
                np.flatnonzero(thread == thread_number),
                np.flatnonzero(spans["thread"] == thread_number),
            )
            if not len(spans_here):
                continue
            rows = spans_here[outermost(begin[spans_here], spans["dur"][spans_here])]
            place = np.searchsorted(begin[rows], started[started_here], side="right") - 1
            holds = (place >= 0) & (started[started_here] <= end[rows[place]])
            container[started_here] = np.where(holds, rows[place], -1)
        return container

    def recomputed(self, python: Table) -> Bools:
        """Return which calls are inside the recomputation of an activation checkpoint.

        The reentrant kind then runs a backward of its own, which is not repeated.
        """
        codes = ([code for code, name in enumerate(self._names) if pattern.search(name)] for pattern in _RECOMPUTES)
        again, gradients = (rows_of(python, np.flatnonzero(np.isin(python["name"], names))) for names in codes)
        gradients = rows_of(gradients, np.flatnonzero(self.containing(again, gradients) >= 0))
        return np.asarray((self.containing(again) >= 0) & (self.containing(gradients) < 0))

    def busy_since(self) -> Floats:
        """Return the start of the operator around each call; outside any operator, the call's own start."""
        begin = np.append(self._operators["ts"], np.inf)[self._operator_around]
        return np.asarray(np.minimum(begin, self._calls["ts"]))

    def operators(self) -> Int32s:
        """Return the name of the outermost operator around each call."""
        return np.append(self._operators["name"], np.int32(-1))[self._operator_around].astype(np.int32)

    def phases(self) -> npt.NDArray[np.int8]:
        """Return the phase of a step that each call belongs to."""
        phase_of_call = np.zeros(len(self._calls["ts"]), np.int8)
        for phase, pattern in reversed(list(enumerate(_PHASE_PATTERNS.values(), start=1))):
            codes = [code for code, name in enumerate(self._names) if pattern.search(name)]
            for spans in (self._operators, self._annotations):
                of_phase = rows_of(spans, np.flatnonzero(np.isin(spans["name"], codes)))
                phase_of_call[self.containing(of_phase) >= 0] = phase
        return phase_of_call

    def actions(self) -> Int32s:
        """Return the name of the schedule's action during which each call begins, on any thread; -1 for none.

        One thread runs the schedule; autograd launches the kernels of backwards from others meanwhile.
        """
        codes = [code for code, name in enumerate(self._names) if _PIPELINE_ACTION.match(name)]
        spans = rows_of(self._annotations, np.flatnonzero(np.isin(self._annotations["name"], codes)))
        row = np.searchsorted(spans["ts"], self._calls["ts"], side="right") - 1
        ends = np.append(spans["ts"] + spans["dur"], -np.inf)
        inside = (row >= 0) & (self._calls["ts"] <= ends[row])
        return np.where(inside, np.append(spans["name"], np.int32(-1))[row], -1).astype(np.int32)

    def collective_names(self) -> list[tuple[str, Bools]]:
        """Return the collectives named by annotations such as nccl:all_reduce, each with a mask of the calls inside."""
        named = {code: match[1] for code, name in enumerate(self._names) if (match := _NCCL_ANNOTATION.match(name))}
        spans = rows_of(self._annotations, np.flatnonzero(np.isin(self._annotations["name"], list(named))))
        around = np.append(spans["name"], -1)[self.containing(spans)]
        return [(name, around == code) for code, name in named.items() if (around == code).any()]


#: What recording an event costs, by the gap that shows: operators and launches; functions of Python, between which the
#: interpreter works too.
OF_GAP, OF_FUNCTION_GAP = 2.3, 0.6
#: CUPTI makes a launch take twice as long, and times the calls before it (which device, which stream) as those behind
#: it (which error, which device); it does not write them down.
_SHARE_OF_LAUNCH, _SIDES = 0.5, 2
#: The cheapest pairs are those with this share of all pairs; those seen less often than `_FEWEST` do not count, and
#: with fewer than `_FEWEST_PAIRS` nothing is known.
_CHEAPEST, _FEWEST, _FEWEST_PAIRS = 0.1, 5, 20
#: So many pairs, spread over the recording, are enough.
_MOST_PAIRS = 200_000
#: The pace of a host is that of so many pairs; it is known from so many stretches on, and no faster than this.
_IN_STRETCH, _FEWEST_STRETCHES, _FASTEST = 100, 2, 0.2


class EventKind(IntEnum):
    """The kinds of recorded host events."""

    NOTE = 0
    FUNCTION = 1
    OPERATOR = 2
    CALL = 3
    LAUNCH = 4


class Nested(NamedTuple):
    """The host events of a rank, by thread and begin: `begin`, `end`, microseconds; `name`: its number; `kind`;
    `parent`: the innermost event around each, -1 for none; [events].
    """

    thread: Int32s
    begin: Floats
    end: Floats
    name: Int32s
    kind: npt.NDArray[np.uint8]
    parent: Int32s

    @property
    def siblings(self) -> Ints:
        """The events that have no other inside and are followed by another of their kind and parent, by position."""
        parent, kind = self.parent, self.kind
        return np.flatnonzero((parent[1:] == parent[:-1]) & (parent[:-1] >= 0) & (kind[1:] == kind[:-1]))

    def gap(self, before: Ints) -> Floats:
        """How long after each of these events the next one begins, microseconds."""
        return np.maximum(self.begin[before + 1] - self.end[before], 0.0)


def profiler_cost(events: Nested, pace: Floats) -> ProfilerCost | None:
    """Measure the cost of recording at the usual pace; None if there are too few operators. `pace`: `pace_of_host`.

    A profiler takes its timestamps inside its own work: where a program does next to nothing between two events, the
    gap is the profiler's. The cheapest pairs of events show it. How much more it costs in all (other arguments, cold
    caches) was measured on jobs without a GPU (benchmarks/RESULTS.md), and scatters; that launches cost more by the
    same factor is an assumption.
    """
    kind, name, parent, length = events.kind, events.name, events.parent, events.end - events.begin
    siblings = events.siblings

    def gap_between(what: EventKind) -> float:
        before = siblings[kind[siblings] == what]
        context = name[parent[before]] if what is EventKind.FUNCTION else name[before]
        return _cheapest(events.gap(before) / pace[before], context, name[before + 1])

    operator = gap_between(EventKind.OPERATOR)
    if np.isnan(operator):
        return None
    launches = np.flatnonzero(kind == EventKind.LAUNCH)
    last = launches[launches < len(kind) - 1]
    last = last[(parent[last] >= 0) & (events.begin[last + 1] >= events.end[parent[last]])]
    last = last[kind[parent[last]] == EventKind.OPERATOR]
    behind = _or_0(_cheapest((events.end[parent[last]] - events.end[last]) / pace[last], name[parent[last]]))
    leaves = np.flatnonzero((kind[:-1] == EventKind.FUNCTION) & (parent[1:] != np.arange(len(parent) - 1)))
    function = _or_0(gap_between(EventKind.FUNCTION) + _cheapest(length[leaves] / pace[leaves], name[leaves]))
    within = _SHARE_OF_LAUNCH * float(np.median(length[launches] / pace[launches])) if len(launches) else 0.0
    launch = OF_GAP * (_SIDES * behind + within)
    return ProfilerCost(
        operator=1e-6 * OF_GAP * operator,
        function=1e-6 * OF_FUNCTION_GAP * function,
        call=1e-6 * OF_GAP * _or_0(gap_between(EventKind.CALL)),
        launch=1e-6 * launch,
        before_launch=1e-6 * (launch - behind - within),
        in_launch=1e-6 * within,
        stacks=bool((kind == EventKind.FUNCTION).any()),
    )


def recorded_before(events: Nested, cost: ProfilerCost | None, pace: Floats) -> Floats:
    """Return what recording had cost the thread of each event before that, seconds, [events]; 0 if not known."""
    kind, thread = events.kind, events.thread
    if cost is None or not len(kind):
        return np.zeros(len(kind))
    cost_us = np.array([0.0, cost.function, cost.operator, cost.call, cost.launch])[kind] * pace
    total = np.cumsum(cost_us) - cost_us
    begins = np.flatnonzero(np.diff(thread, prepend=thread[0] - 1))
    total -= np.repeat(total[begins], np.diff(np.append(begins, len(kind))))
    return np.asarray(total + np.where(kind == EventKind.LAUNCH, cost.before_launch * pace, 0.0))


def pace_of_host(events: Nested) -> Floats:
    """How much longer gaps between events are now than usual, [events]: at times, others use the cores or caches.

    Times in whole microseconds do not show it.
    """
    before, name = events.siblings, events.name
    before = before[(events.kind[before] == EventKind.OPERATOR) | (events.kind[before] == EventKind.FUNCTION)]
    stretches = len(before) // _IN_STRETCH
    if stretches < _FEWEST_STRETCHES or not (events.begin % 1).any():
        return np.ones(len(name))
    gaps, key = events.gap(before), name[before].astype(np.int64) * (int(name.max()) + 1) + name[before + 1]
    order = np.lexsort((gaps, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    count = np.diff(np.append(first, len(order)))
    usual = np.empty(len(before))
    usual[order] = np.repeat(gaps[order][first + count // 2], count)
    slower = np.divide(gaps, usual, out=np.ones(len(before)), where=usual > 0)
    pace = np.median(slower[: stretches * _IN_STRETCH].reshape(stretches, _IN_STRETCH), axis=1)
    stretch = np.minimum(np.searchsorted(before, np.arange(len(name))) // _IN_STRETCH, stretches - 1)
    return np.asarray(np.maximum(pace, _FASTEST)[stretch])


def _or_0(value: float) -> float:
    return 0.0 if np.isnan(value) else float(value)


def _cheapest(gaps: Floats, *contexts: Int32s) -> float:
    """Return the usual length of the shortest gaps, by context; nan if there are too few."""
    if len(gaps) < _FEWEST_PAIRS:
        return np.nan
    spread = np.linspace(0, len(gaps) - 1, min(len(gaps), _MOST_PAIRS)).astype(np.int64)
    gaps = gaps[spread]
    key = contexts[0][spread].astype(np.int64)
    for other in contexts[1:]:
        key = key * (int(other.max()) + 1) + other[spread]
    order = np.lexsort((gaps, key))
    gaps, key = gaps[order], key[order]
    first = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    count = np.diff(np.append(first, len(key)))
    rounded = not (gaps % 1).any()  # times in whole microseconds: only the mean of many tells
    often = count >= min(_FEWEST_PAIRS if rounded else _FEWEST, int(count.max()))
    first, count = first[often], count[often]
    typical = (gaps[first + (count - 1) // 2] + gaps[first + count // 2]) / 2
    if rounded:
        total = np.append(0.0, np.cumsum(gaps))
        typical = (total[first + count] - total[first]) / count
    cheapest = np.argsort(typical, kind="stable")
    enough = int(np.searchsorted(np.cumsum(count[cheapest]), _CHEAPEST * count.sum())) + 1
    chosen = np.concatenate([gaps[first[cell] : first[cell] + count[cell]] for cell in cheapest[:enough].tolist()])
    return float(chosen.mean() if rounded else np.median(chosen))
