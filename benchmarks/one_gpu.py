"""Known losses, put at random into real traces of one GPU, and what `tracekit whatif` says about them.

python -m benchmarks one-gpu FOLDER [--seed N] [--count M] [--keep NEW] [--tracekit COMMAND]

FOLDER has traces of torch.profiler, as FOLDER/*/*.json[.gz] or FOLDER/*.json[.gz]; NEW gets the changed ones. Knows
tracekit by its command only. A changed trace is simulated again. The host has one clock, which a hole moves for all
threads: holes are put where only one of them works. A GPU op starts after its launch, after the op before it on its
stream, and after an op of another stream that it waited for: it keeps its distance to the one that it waited for, and
to the others the least distance of the trace. A waiting call ends when the GPU has done what it waited for. The trace
without the loss is the fix: the true saving is how much later the changed trace ends.

A loss is found if it is among the first three findings. Its price may be wrong by 10 % or by 0.5 % of the recording, or
by what TOLERANCE says; what is said about the unchanged trace may be subtracted. A loss of less than 1 % of the
recording must not be shown as more than that, and an unchanged trace must not have a loss that it has no time for. On
every trace, idle_s must be right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.measure import table, tracekit

Event = dict[str, Any]
Thread = tuple[Any, Any]
#: Plays a loss from a moment on, and says when the host goes on.
Play = Callable[["Changed", float], float]
GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
HOST = (*CALLS, "cpu_op", "user_annotation", "python_function", "python_gc")
#: Of each kind, the reason and the name that its finding must have.
EXPECTED = {
    "loader": ("loader", "DataLoader"), "sync": ("synchronise", r"aten::item|_local_scalar_dense|train\.py\(88\)"),
    "python": ("python", "log_metrics"), "gc": ("gc", "(?i)gc|garbage"),
    "allocation": ("allocation", "Malloc|Free|aten::empty"), "slow": ("kernel", "aten::(add)?mm|ampere_sgemm"),
    "tiny": ("launch-bound", "aten::add_"), "pageable": ("transfer", "Pageable|HtoD|aten::copy_"),
    "checkpoint": ("checkpoint", "save"),
}  # fmt: skip
KINDS = (*EXPECTED, "none", "small")
TOLERANCE = {"slow": 0.20, "tiny": 0.30, "pageable": 0.30}
SMALL = 0.01
_WAITS = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip)Free$")
_ALLOCATES = r"^(cuda|hip|cu)(Mem)?(Malloc|Alloc|Free|Host|Create|Map|Unmap|Release)"
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
        self.zero, end = _reach(events)
        self.length = end - self.zero
        self.host = sorted(_of(events, HOST), key=lambda e: (e["ts"], -e["dur"]))
        gpu = sorted(_of(events, GPU), key=lambda e: float(e["ts"]))
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
        work = [e for e in _of(self.host, (*CALLS, "cpu_op")) if _thread(e) in self.threads]
        self.between: list[float] = []
        reach, last = 0.0, None
        for event in work:
            start, end = self.times(event)
            if start > reach and last == self.main == _thread(event) and start <= self.calls[-1].start:
                self.between.append((reach + start) / 2)
            if end > reach:
                reach, last = end, _thread(event)
        self.python = [e for e in _of(self.host, ("python_function",)) if _thread(e) == self.main]
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


def _hole(us: float, *layers: tuple[str, str]) -> Play:
    def play(run: Changed, now: float) -> float:
        for depth, (category, name) in enumerate(layers):
            run.host(category, name, now + depth * 0.4, now + us - depth * 0.4)
        return now + us

    return play


def _item(stacks: bool, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        done = run.gpu(now + 3.0, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1.5, bytes=4)
        end = max(done, now + 9.0) + 4.0
        run.host("cuda_runtime", f"{vendor}MemcpyAsync", now + 3.0, now + 8.0, correlation=run.number)
        run.host("cuda_runtime", f"{vendor}StreamSynchronize", now + 9.0, end)
        run.host("cpu_op", "aten::_local_scalar_dense", now + 1.5, end + 1.0)
        run.host("cpu_op", "aten::item", now + 1.0, end + 1.5)
        if stacks:
            run.host("python_function", "train.py(88): log_loss", now, end + 3.0)
        return end + 3.0

    return play


def _allocation(us: float, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        freed = max([now + 1.0, *run.ends.values()]) + 0.6 * us  # to free waits for the GPU
        end = freed + 1.0 + 0.4 * us
        run.host("cuda_runtime", f"{vendor}Free", now + 1.0, freed)
        run.host("cuda_runtime", f"{vendor}Malloc", freed + 1.0, end)
        run.host("cpu_op", "aten::empty", now, end + 1.0)
        return end + 1.5

    return play


def _loop(count: int, us: float, vendor: str) -> Play:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"

    def play(run: Changed, now: float) -> float:
        for begin in (now + number * us for number in range(count)):
            run.gpu(begin + 1.5, "kernel", name, 2.0, grid=[1, 1, 1], block=[128, 1, 1])
            called = f"{vendor}LaunchKernel"
            run.host("cuda_runtime", called, begin + 1.5, begin + 1.5 + 0.5 * us, correlation=run.number)
            run.host("cpu_op", "aten::add_", begin, begin + us - 0.5)
        return now + count * us

    return play


def _copy(size: int, rate: float, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        done = run.gpu(now + 3.0, "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", size / rate, bytes=size)
        run.host("cuda_runtime", f"{vendor}MemcpyAsync", now + 3.0, done + 4.0, correlation=run.number)
        run.host("cuda_runtime", f"{vendor}StreamSynchronize", done + 5.0, done + 8.0)
        run.host("cpu_op", "aten::copy_", now, done + 9.0)
        return done + 10.0

    return play


def planned(kind: str, recording: Recording, rng: Random, scale: float) -> PlantedLoss | None:
    """A loss of this kind, `scale` times as large as usual; None if the recording has no place for it."""
    stacks = bool(recording.python)
    vendor = "hip" if recording.calls[0].event["name"].startswith("hip") else "cuda"
    if kind == "slow":
        return _slow(recording, rng, scale)
    if kind == "allocation":
        count = rng.randint(20, 60)
        every = recording.inside[rng.randrange(3) :: max(len(recording.inside) // count, 1)][:count]
        lengths = [rng.uniform(200.0, 2000.0) * scale for _ in every]
        plays = [(one, _allocation(us, vendor)) for one, us in zip(every, lengths, strict=True)]
        return PlantedLoss(plays, sum(lengths)) if len(every) >= 10 else None
    counts = {"loader": (3, 5), "sync": (10, 60), "python": (3, 20), "gc": (2, 12), "tiny": (1, 1), "pageable": (2, 5),
              "checkpoint": (2, 5)}  # fmt: skip
    count = rng.randint(*counts[kind])
    if kind == "sync":
        count = max(1, round(count * scale))
    moments = recording.between if kind in ("gc", "tiny") else recording.in_own_code
    if len(moments) < count:
        return None
    chosen = sorted(rng.sample(moments, count))
    share = rng.uniform(0.03, 0.4) * recording.length / count  # of a hole or a copy
    if kind == "sync":
        return PlantedLoss([(one, _item(stacks, vendor)) for one in chosen], 30.0 * count)
    if kind == "tiny":
        kernels, us = max(1, round(rng.randint(500, 2000) * scale)), rng.uniform(6.0, 9.0)
        return PlantedLoss([(one, _loop(kernels, us, vendor)) for one in chosen], kernels * us)
    if kind == "pageable":
        rate = rng.uniform(2000.0, 4000.0)  # bytes per microsecond
        # Pinned, a copy still has to be launched: of shorter ones, that is the largest part.
        sizes = [int(min(max(share, 300.0) * rate, 4e8) * scale * rng.uniform(0.7, 1.3)) + 4096 for _ in chosen]
        return PlantedLoss(
            [(one, _copy(size, rate, vendor)) for one, size in zip(chosen, sizes, strict=True)], sum(sizes) / rate
        )
    layers = {
        "loader": [("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")],
        "python": [("python_function" if stacks else "user_annotation", "train.py(120): log_metrics")],
        "checkpoint": [
            ("python_function", "train.py(140): keep"),
            ("python_function", "torch/serialization.py(944): save"),
            ("python_function", "<built-in method write_record of PyTorchFileWriter object at 0x7f00>"),
        ]
        if stacks
        else [("user_annotation", "save_checkpoint")],
        # The first is what torch 2.13 writes.
        "gc": [rng.choice([("python_function", "Python GC"), ("python_gc", "Python GC"), ("python_gc", "gc")])],
    }[kind]
    if kind == "loader" and stacks:
        layers.insert(0, ("python_function", "torch/utils/data/dataloader.py(733): __next__"))
    lengths = [max(min(share, 100_000.0) * rng.uniform(0.7, 1.3) * scale, 5.0) for _ in chosen]
    return PlantedLoss([(one, _hole(us, *layers)) for one, us in zip(chosen, lengths, strict=True)], sum(lengths))


def _slow(recording: Recording, rng: Random, scale: float) -> PlantedLoss | None:
    """All kernels of one matrix product of 16-bit numbers become slow ones of 32 bits."""
    products = defaultdict(list)
    for call in recording.calls:
        around = recording.launched_in.get(id(call), {"name": ""})
        product = around["name"] in ("aten::mm", "aten::addmm")
        if product and re.search("Half|BFloat", str(around["args"].get("Input type"))):
            kernels = [(op, around) for op in call.ops if op.call is call and op.event["cat"] == "kernel"]
            products[around["name"]] += kernels
    if not products:
        return None
    chosen, factor = products[rng.choice(sorted(products))], 1 + rng.uniform(3.0, 7.0) * scale
    loss = PlantedLoss([], sum(op.end - op.start for op, _ in chosen) * (factor - 1))
    for op, around in chosen:
        types = ["float" if re.search("Half|BFloat", one) else one for one in around["args"]["Input type"]]
        loss.longer[id(op)] = factor
        loss.renamed[id(op.event)] = {**op.event, "name": "ampere_sgemm_128x64_tn"}
        loss.renamed[id(around)] = {**around, "args": {**around["args"], "Input type": types}}
    return loss


def drawn(recordings: Sequence[Recording], kind: str, seed: str) -> tuple[str, Recording, dict[str, Any], float]:
    """The kind of a loss, the recording without it and the trace with it, and the true saving in seconds."""
    for attempt in range(1000):
        rng = Random(f"{seed} {attempt}")
        recording = rng.choice(recordings)
        if kind == "none":
            return kind, recording, Changed(recording, PlantedLoss()).document(), 0.0
        of, state = rng.choice(list(EXPECTED)) if kind == "small" else kind, rng.getstate()
        loss = planned(of, recording, rng, 1.0)
        if loss is not None and kind == "small":
            rng.setstate(state)
            loss = planned(of, recording, rng, Random(seed).uniform(0.002, 0.008) * recording.length / loss.us)
        if loss is not None:
            document = Changed(recording, loss).document()
            begin, end = _reach(document["traceEvents"])
            saved = end - begin - recording.length
            # Too little in a long recording is of the kind `small`; kernels that the GPU is busy with are not tiny.
            enough = (saved if kind == "sync" else loss.us) > 2 * SMALL * recording.length
            tiny = kind != "tiny" or saved > 0.5 * loss.us
            if (saved < SMALL * (end - begin)) if kind == "small" else (enough and tiny):
                return of, recording, document, saved * 1e-6
    sys.exit(f"no trace has a place for {kind}")


def judged(loss: str, true: float, events: Sequence[Event], report: Event, bare: Event) -> tuple[list[str], list[bool]]:
    """What a report says of a trace, as cells, and whether loss, price and idle time are right in it.

    `bare` is the report of the trace without the loss, `true` the true saving in seconds.
    """
    begin, end = _reach(events)
    length, idle = (end - begin) * 1e-6, sum(_gaps(events)) * 1e-6
    reason, names = EXPECTED.get(loss, ("", ""))
    rank, said, without = None, None, 0.0
    if loss == "none":
        most = _most(events, length)
        over = [_saves(f) for f in _findings(report) if _saves(f) > most.get(f["reason"], length) + 2 * SMALL * length]
        is_found = price = bool(report) and not over
        said = max(over, default=None)
    else:
        hits = [(at, _saves(f)) for at, f in enumerate(_findings(report), 1) if _is(f, reason, names)]
        if hits:  # all launches are one finding, which is named after the longest
            without = max((_saves(f) for f in _findings(bare) if _is(f, reason, names * (loss != "tiny"))), default=0.0)
        if true < SMALL * length:
            rank, said = max(hits, key=lambda pair: pair[1], default=(None, None))
            is_found = price = bool(report) and (said or 0.0) - without <= true + SMALL * length
        else:
            rank, said = hits[0] if hits else (None, None)
            is_found = rank is not None and rank <= 3
            slack = TOLERANCE[loss] * true if loss in TOLERANCE else max(0.1 * true, 0.005 * length)
            price = said is not None and min(abs(said - true), abs(said - without - true)) <= slack
    right = [is_found, price, abs(report.get("idle_s", _NEVER) - idle) <= max(0.01 * idle, 2e-5)]
    saying = ("nothing" if said is None else f"{said * 1e3:.2f}") + (
        f", {without * 1e3:.2f} without" if without else ""
    )
    yes = ["yes" if one else "**no**" for one in right]
    return [f"{true * 1e3:.2f} ({true / length:.1%})", saying, str(rank or ""), *yes], right


def _most(events: Sequence[Event], length: float) -> dict[str, float]:
    """The most that a fix of a reason can save: all the time that has to do with it, seconds."""

    def spent(pattern: str, categories: Sequence[str]) -> float:
        return sum(e["dur"] for e in _of(events, categories) if re.search(pattern, e["name"])) * 1e-6

    busy = sum(e["dur"] for e in _of(events, GPU)) * 1e-6
    launches = len({e["args"].get("correlation") for e in _of(events, GPU)}) * 0.5e-3  # none takes longer
    return {
        "loader": spent("DataLoader", HOST), "gc": spent("", ["python_gc"]) + spent("Python GC", ["python_function"]),
        "checkpoint": spent("save", ("python_function", "user_annotation")),
        "allocation": spent(_ALLOCATES, CALLS), "launch-bound": min(length - busy, launches),
        "transfer": spent("", ["gpu_memcpy"]) + spent("Memcpy|StreamSynchronize", CALLS),
    }  # fmt: skip


def section(folder: Path, seed: int, count: int, keep: Path, command: str) -> str:
    """The Markdown of the outcomes and their totals."""
    recordings = [
        Recording(path)
        for pattern in ("*.json", "*.json.gz", "*/*.json", "*/*.json.gz")
        for path in sorted(folder.glob(pattern))
    ]
    bare: dict[str, Event] = {}
    rows, took = [], []
    right: dict[str, list[list[bool]]] = {kind: [] for kind in (*KINDS, "all")}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        loss, recording, document, true = drawn(recordings, kind, f"{seed} {number}")
        name = recording.name
        if name not in bare:
            bare[name] = _report(recording.document, keep / f"without_{name}", command)
        report = _report(document, keep / f"{number:03d}", command)
        cells, verdicts = judged(loss, true, document["traceEvents"], report, bare[name])
        took.append(report.get("took_s", 0.0))
        rows.append([f"{number:03d}", f"small {loss}" if kind == "small" else kind, name, *cells, f"{took[-1]:.2f}"])
        right[kind].append(verdicts)
        right["all"].append(verdicts)
    head = ["", "kind", "trace", "true ms", "said ms", "rank", "found", "price", "idle", "s"]
    totals = [
        [kind, str(len(of)), *(str(sum(column)) for column in zip(*of, strict=True))]
        for kind, of in right.items()
        if of
    ]
    seconds = f"Seconds per trace: median {median(took):.2f}, mean {mean(took):.2f}, most {max(took):.2f}."
    return "\n\n".join([table(head, rows), table(["kind", "traces", "found", "price", "idle"], totals), seconds])


def _report(document: dict[str, Any], folder: Path, command: str) -> Event:
    """What a command of tracekit says about the GPU of a trace, and how long it took; empty if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "trace.json.gz", "wt", compresslevel=1) as file:
        json.dump(document, file)
    began = time.perf_counter()
    done = subprocess.run([command, "whatif", folder, "--json"], capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began
    try:
        return {**json.loads(done.stdout)["gpu"], "took_s": took_s}
    except (ValueError, KeyError, TypeError):
        print(f"{folder}: {done.stderr[-300:] or 'no report of a GPU'}", file=sys.stderr)
        return {}


def _document(path: Path) -> dict[str, Any]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        document: dict[str, Any] = json.load(file)
    return document


def _of(events: Iterable[Event], categories: Sequence[str]) -> list[Event]:
    return [e for e in events if e.get("ph") == "X" and e.get("cat") in categories]


def _thread(event: Event) -> Thread:
    return event["pid"], event["tid"]


def _findings(report: Event) -> list[Event]:
    return report.get("findings") or []


def _is(finding: Event, reason: str, names: str) -> bool:
    said = json.dumps([finding.get("name"), finding.get("where"), finding.get("names")])
    return finding.get("reason") == reason and re.search(names, said) is not None


def _saves(finding: Event) -> float:
    return float(finding.get("saves_s") or 0.0)


def _reach(events: Iterable[Event]) -> tuple[float, float]:
    of = _of(events, HOST + GPU)
    return min(e["ts"] for e in of), max(e["ts"] + e["dur"] for e in of)


def _gaps(events: Iterable[Event]) -> list[float]:
    """Between the first and the last GPU op, the times without one."""
    gaps, reach = [], float("inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in _of(events, GPU)):
        gaps.append(max(start - reach, 0.0))
        reach = max(reach, end) if reach < float("inf") else end
    return gaps


def main(arguments: list[str]) -> None:
    """Print the outcomes of the draws that the command line asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks one-gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="where the changed traces stay")
    parser.add_argument("--tracekit", default=tracekit()[0], help="the command that is judged")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(section(asked.folder, asked.seed, asked.count, asked.keep or Path(folder), asked.tracekit))


if __name__ == "__main__":
    main(sys.argv[1:])
