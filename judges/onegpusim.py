"""Real recordings of one GPU, simulated again with a loss put in.

In: a trace of torch.profiler. Out: the trace as it would have been with the loss. The host has one clock, which a hole
moves for all threads: holes are put where only one of them works. A GPU op starts after its launch, after the op before
it on its stream, and after an op of another stream that it waited for: it keeps its distance to the one that it waited
for, and to the others the least distance of the trace. A waiting call ends when the GPU has done what it waited for.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

Event = dict[str, Any]
Thread = tuple[Any, Any]
#: Plays a loss from a moment on, and says when the host goes on.
Play = Callable[["Changed", float], float]
GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
HOST = (*CALLS, "cpu_op", "user_annotation", "python_function", "python_gc")
_WAITS = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip)Free$")
_LIBRARY = re.compile(r"<|torch/|nn\.Module|threading\.py")
#: An op that starts so soon after one of another stream, and so long after all else that it follows, waited for it.
_SOON_US, _LONG_US = 30.0, 10.0
_NEVER = float("-inf")


@dataclass(slots=True, eq=False)
class _Op:
    """A GPU op, what it follows, and at which distance. `new`, `new_end`: in the changed trace."""

    event: Event
    start: float
    end: float
    stream: tuple[Any, Any]
    call: _Call | None = None
    previous: _Op | None = None
    other: _Op | None = None
    after_call: float = 0.0
    after_previous: float = 0.0
    new: float = 0.0
    new_end: float = 0.0


@dataclass(slots=True, eq=False)
class _Call:
    """A call that launches or waits. `lag`: from what it waits for to its end; None if it does not wait."""

    event: Event
    start: float
    end: float
    thread: Thread
    ops: list[_Op] = field(default_factory=list)
    lag: float | None = None

    def waited_for(self, launched: Iterable[_Op]) -> list[_Op]:
        """A copy waits for itself, other calls for all before them, as far as that was done when they returned."""
        return [op for op in (self.ops or launched) if op.end <= self.end]


class Recording:
    """A trace as GPU ops and calls that follow each other. Times are microseconds since its first event."""

    def __init__(self, path: Path) -> None:
        self.name = path.parent.name if path.name.startswith("trace.json") else path.name.partition(".json")[0]
        self.document = _document(path)
        events = self.document["traceEvents"]
        self.zero, end = reach(events)
        self.length = end - self.zero
        self.host = sorted(events_of(events, HOST), key=lambda e: (e["ts"], -e["dur"]))
        gpu = sorted(events_of(events, GPU), key=lambda e: float(e["ts"]))
        self.ops = [_Op(e, *self.times(e), (e["pid"], e["args"].get("stream", e["tid"]))) for e in gpu]
        self._launch()
        self._follow()
        launched = list(self.early)
        for call in self.calls:
            launched += call.ops
            copies = any(op.event["cat"] == "gpu_memcpy" and op.end <= call.end for op in call.ops)
            if copies or _WAITS.search(call.event["name"]):
                call.lag = call.end - max([call.start, *(op.end for op in call.waited_for(launched))])
        self._places()

    def times(self, event: Event) -> tuple[float, float]:
        """Start and end."""
        start = event["ts"] - self.zero
        return start, start + event["dur"]

    def _launch(self) -> None:
        called = [_Call(e, *self.times(e), _thread(e)) for e in self.host if e["cat"] in CALLS]
        by_id = {call.event["args"].get("correlation"): call for call in called}
        self.early: list[_Op] = []  # launched before the recording
        last: dict[Any, _Op] = {}
        homes: dict[Any, list[_Op]] = {}
        for op in self.ops:
            op.call, op.previous = by_id.get(op.event["args"].get("correlation")), last.get(op.stream)
            # Without a known launch, an op only follows the one before it.
            homes[op.stream] = op.call.ops if op.call else homes.get(op.stream, self.early)
            homes[op.stream].append(op)
            last[op.stream] = op
        self.threads = {call.thread for call in called if call.ops}
        self.calls = [c for c in called if c.ops or (_WAITS.search(c.event["name"]) and c.thread in self.threads)]
        self.main = next((thread for thread in self.threads if thread[0] == thread[1]), self.calls[0].thread)
        streams = [op.stream for op in self.ops if op.call and op.call.thread == self.main]
        self.stream = max(sorted(set(streams), key=str), key=streams.count)

    def _follow(self) -> None:
        direct, queued = [], []
        for op in self.ops:
            if op.call and op.call.start >= (op.previous.end if op.previous else _NEVER):
                direct.append(op.start - op.call.start)
            elif op.previous:
                queued.append(op.start - op.previous.end)
        least_call = quantiles(direct, n=10)[0] if len(direct) > 1 else 10.0
        least_gap = max(quantiles(queued, n=10)[0], 0.0) if len(queued) > 1 else 1.0
        self.latency = min(max(least_call, 3.0), 25.0)
        by_end = sorted(self.ops, key=lambda op: op.end)
        ends = [op.end for op in by_end]
        for op in self.ops:
            called, ended = op.call.start if op.call else _NEVER, op.previous.end if op.previous else _NEVER
            op.after_call, op.after_previous = min(op.start - called, least_call), min(op.start - ended, least_gap)
            by_call, by_previous = called + op.after_call, ended + op.after_previous
            near = by_end[bisect_left(ends, op.start - _SOON_US) : bisect_right(ends, op.start)]
            others = [one for one in near if one.stream != op.stream and one.call and one.call.start < called]
            if others and op.start - max(by_call, by_previous) > _LONG_US:
                op.other = others[-1]
            elif by_call >= by_previous:
                op.after_call = op.start - called
            else:
                op.after_previous = op.start - ended

    def _places(self) -> None:
        """Where the main thread is alone and between operators, and where an operator that launches has just begun."""
        work = [e for e in events_of(self.host, (*CALLS, "cpu_op")) if _thread(e) in self.threads]
        self.between: list[float] = []
        reach, last = 0.0, None
        for event in work:
            start, end = self.times(event)
            if start > reach and last == self.main == _thread(event) and start <= self.calls[-1].start:
                self.between.append((reach + start) / 2)
            if end > reach:
                reach, last = end, _thread(event)
        self.python = [e for e in events_of(self.host, ("python_function",)) if _thread(e) == self.main]
        frames = zip(self.between, self._innermost(self.python, self.between), strict=True)
        self.in_own_code = [at for at, frame in frames if frame and not _LIBRARY.match(frame["name"])] or self.between
        operators = [e for e in work if e["cat"] == "cpu_op" and _thread(e) == self.main]
        calls = [call for call in self.calls if call.thread == self.main and call.ops]
        around = self._innermost(operators, [call.start for call in calls])
        self.launched_in = {id(call): event for call, event in zip(calls, around, strict=True) if event}
        bounds = sorted({moment for event in work for moment in self.times(event)})
        starts = sorted({self.times(event)[0] for event in self.launched_in.values()})
        self.inside = [(start + bounds[bisect_right(bounds, start)]) / 2 for start in starts]

    def _innermost(self, events: Sequence[Event], moments: Sequence[float]) -> list[Event | None]:
        """The innermost of a thread's sorted events at each of the sorted moments."""
        innermost: list[Event | None] = []
        stack: list[Event] = []
        number = 0
        for moment in moments:
            while number < len(events) and self.times(events[number])[0] <= moment:
                stack.append(events[number])
                number += 1
            while stack and self.times(stack[-1])[1] < moment:
                stack.pop()
            innermost.append(stack[-1] if stack else None)
        return innermost


@dataclass
class PlantedLoss:
    """A loss to put into a recording: plays by their moment, and GPU ops that take longer, by their id.

    `renamed` has events in the place of others. `us` is roughly what it adds, on the host or on the GPU.
    """

    plays: list[tuple[float, Play]] = field(default_factory=list)
    us: float = 0.0
    longer: dict[int, float] = field(default_factory=dict)
    renamed: dict[int, Event] = field(default_factory=dict)


class Changed:
    """A recording simulated with a loss."""

    def __init__(self, recording: Recording, loss: PlantedLoss) -> None:
        self.recording, self.loss = recording, loss
        # Times are written from here on: the nanoseconds of larger ones do not fit into a float.
        self.zero = recording.zero if recording.zero < 1e13 else recording.zero % 1e12
        self.added: list[Event] = []
        self.number = 90_000_000  # of the last launch added
        self.starts, self.pieces = [_NEVER], [(0.0, 0.0, 1.0)]  # of the host's clock: moment, new moment, rate
        self.ends: dict[Any, float] = {}  # of the streams
        self.inserted: dict[Any, float] = {}  # of what was added to them
        launched = list(recording.early)
        for op in launched:
            self._start(op, _NEVER)
        items: list[tuple[float, int, _Call | Play]] = [(call.start, 1, call) for call in recording.calls]
        items += [(at, 0, play) for at, play in loss.plays]
        for moment, _, item in sorted(items, key=lambda item: item[:2]):
            begun = self.clock(moment)
            if not isinstance(item, _Call):
                self._turn(moment, item(self, begun), 1.0)
                continue
            for op in item.ops:
                self._start(op, begun)
            launched += item.ops
            if item.lag is not None and moment >= self.pieces[-1][0]:
                waited = item.waited_for(launched)
                added = self.inserted.values() if waited and not item.ops else ()
                end = max([begun, *(op.new_end for op in waited), *added]) + item.lag
                self._turn(moment, begun, (end - begun) / max(item.end - moment, 1e-9))
                self._turn(item.end, end, 1.0)

    def clock(self, moment: float) -> float:
        """When the host does what it did at this moment."""
        start, new, rate = self.pieces[bisect_right(self.starts, moment) - 1]
        return new + (moment - start) * rate

    def _turn(self, start: float, new: float, rate: float) -> None:
        self.starts.append(start)
        self.pieces.append((start, new, rate))

    def _start(self, op: _Op, called: float) -> None:
        follows = [op.start] if op.call is None and op.previous is None else []
        if op.call is not None:
            follows.append(called + op.after_call)
        if op.previous is not None:
            follows.append(op.previous.new_end + op.after_previous)
        if op.other is not None:
            follows.append(op.other.new_end + op.start - op.other.end)
        if op.stream in self.inserted:
            follows.append(self.inserted[op.stream] + 1.0)
        op.new = max(follows)
        op.new_end = op.new + (op.end - op.start) * self.loss.longer.get(id(op), 1.0)
        self.ends[op.stream] = max(op.new_end, self.ends.get(op.stream, _NEVER))

    def host(self, cat: str, name: str, start: float, end: float, thread: Thread | None = None, **args: Any) -> None:
        """Add an event, of the main thread if no other is named."""
        pid, tid = thread or self.recording.main
        times = {"ts": round(self.zero + start, 3), "dur": round(end - start, 3)}
        self.added.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def gpu(self, called: float, cat: str, name: str, us: float, **args: Any) -> float:
        """Add a GPU op on the main stream, whose call is known as `number`. Returns its end."""
        stream = self.recording.stream
        like = next(op.event for op in self.recording.ops if op.stream == stream)
        start = max(called + self.recording.latency, self.ends.get(stream, _NEVER) + 1.0)
        self.ends[stream] = self.inserted[stream] = start + us
        self.number += 1
        args |= {"correlation": self.number, "device": like["args"].get("device"), "stream": stream[1]}
        self.host(cat, name, start, start + us, (like["pid"], like["tid"]), **args)
        return start + us

    def document(self) -> dict[str, Any]:
        """The trace, without annotations on the GPU, which are made of what the host has."""
        recording = self.recording
        gpu: dict[Any, _Op] = {id(op.event): op for op in recording.ops}
        gpu |= {(op.event["pid"], op.event["tid"], op.event["ts"]): op for op in recording.ops}  # for arrows

        def moved(event: Event) -> Event:
            new = dict(self.loss.renamed.get(id(event), event))
            if event.get("ph") != "M" and "ts" in event:
                start = event["ts"] - recording.zero
                op = gpu.get(id(event)) or gpu.get((event.get("pid"), event.get("tid"), event["ts"]))
                begin, end = (op.new, op.new_end) if op else map(self.clock, (start, start + event.get("dur", 0.0)))
                new["ts"] = round(self.zero + begin, 3)
                if "dur" in event:
                    new["dur"] = round(end - begin, 3)
            return new

        events = [e for e in recording.document["traceEvents"] if e.get("cat") != "gpu_user_annotation"]
        return {**recording.document, "traceEvents": [*map(moved, events), *self.added]}


def _document(path: Path) -> dict[str, Any]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        document: dict[str, Any] = json.load(file)
    return document


def events_of(events: Iterable[Event], categories: Sequence[str]) -> list[Event]:
    return [e for e in events if e.get("ph") == "X" and e.get("cat") in categories]


def _thread(event: Event) -> Thread:
    return event["pid"], event["tid"]


def reach(events: Iterable[Event]) -> tuple[float, float]:
    of = events_of(events, HOST + GPU)
    return min(e["ts"] for e in of), max(e["ts"] + e["dur"] for e in of)
