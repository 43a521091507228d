"""Delays put into real traces of torch.profiler: the trouble is known, and everything else is real.

Does not import tracekit. Takes a folder of traces of one job; writes the same traces with one rank delayed, and returns
how much longer the job takes. Every call and every GPU op is two moments, its start and its end. A moment follows
others: the previous call of its thread, its launch, the previous op of its stream, the kernels it waited for, and, for
the end of a collective, the starts of all members. It keeps its distance to the latest of these, which it waited for,
and to the others the shortest distance seen for such a pair. Delaying a moment moves all that follow it.

Ranks of a real job differ. `Moments.exchangeable` removes the amount by which a rank is slower than others at the same
call or kernel in all steps, and deals the rest among the ranks at random: the noise stays real, and only chance makes a
rank slower than the others.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation")
_COMMUNICATION = re.compile("nccl|rccl", re.IGNORECASE)
_SYNCHRONISES = re.compile(r"Synchronize|^(cuda|hip)(Malloc|Free)")
#: Reading the time of an event means that the GPU has passed it; the call that waited for that is not recorded.
_AFTER_EVENTS = re.compile(r"EventElapsedTime")
_STEP = re.compile(r"ProfilerStep#(\d+)")
#: An op that starts so soon after one of another stream, and so long after everything else it follows, waited for it.
_SOON_US, _LONG_US = 30.0, 100.0
#: Ranks take about as long for the same work; beyond this ratio to the median, the real job had a trouble of its own.
_OUTLIER, _LEAST_OUTLIER_US = 3.0, 500.0


@dataclass(slots=True, eq=False)
class _TimedOp:
    """A call or a GPU op. `track`: its thread or stream. `key`: equal for comparable ops of all ranks."""

    event: dict[str, Any]
    rank: int
    track: Any
    start: float
    end: float
    gpu: bool
    step: int = -1
    launch: _TimedOp | None = None
    key: tuple[Any, ...] = ()
    moment: int = -1  # of its start among the moments; its end is the next

    @property
    def communicates(self) -> bool:
        return self.gpu and _COMMUNICATION.search(self.event["name"]) is not None


@dataclass(frozen=True, slots=True)
class _Lag:
    """An op's own time, `us`: the distance of a moment from its predecessor with this `number`."""

    op: _TimedOp
    moment: int
    number: int
    us: float

    @property
    def place(self) -> tuple[Any, ...]:
        """The same in all steps and on all ranks."""
        gpu, track, name, _, count = self.op.key
        return gpu, track, name, count


@dataclass(frozen=True)
class Delay:
    """`us` more per step on a rank: spread over its calls or its kernels, or as one pause before a call."""

    rank: int
    kind: str  # pause, calls or kernels
    us: float
    place: float = 0.5  #: of a pause: which part of the step's calls come before it


@dataclass
class Moments:
    """A job as moments that come after each other."""

    documents: list[dict[str, Any]]
    ops: list[_TimedOp]
    ahead: Mapping[int, float]
    after: list[list[tuple[int, float]]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    later: Mapping[int, float] = field(default_factory=dict)  #: each rank begins so much later than recorded

    @classmethod
    def read(cls, folder: Path) -> Moments:
        """The traces of a folder, one per rank in the order of names."""
        documents = [_document(path) for path in sorted(folder.glob("*.json.gz"))]
        by_rank = [_ops(document["traceEvents"], rank) for rank, document in enumerate(documents)]
        instances = _collectives([[op for op in ops if op.communicates] for ops in by_rank])
        ahead = _ahead(instances, len(by_rank))
        for ops, off in zip(by_rank, ahead.values(), strict=True):
            early = [op.start - op.launch.start for op in ops if op.launch is not None]
            skew = max(0.0, -float(np.quantile(early, 0.01))) if early else 0.0
            for op in ops:
                shift = off if op.gpu else off + skew
                op.start, op.end = op.start - shift, op.end - shift
        moments = cls(documents, [op for ops in by_rank for op in ops], ahead)
        moments._join(by_rank, instances)
        return moments

    @property
    def step_us(self) -> float:
        """Median length of a step, by the annotations of the ranks."""
        return median(
            event["dur"]
            for document in self.documents
            for event in document["traceEvents"]
            if event.get("cat") == "user_annotation" and _STEP.match(event.get("name", ""))
        )

    @property
    def steps(self) -> int:
        """Number of marked steps."""
        return len({op.step for op in self.ops if op.step >= 0})

    def times(self, delays: Sequence[Delay] = ()) -> list[float]:
        """The time of each moment with these delays."""
        more = self._more(delays)
        times = [0.0] * len(self.after)
        for moment in self.order:
            before = self.after[moment]
            begin = self._recorded(moment) + self.later.get(self.ops[moment // 2].rank, 0.0)
            first = max(times[one] + lag for one, lag in before) if before else begin
            times[moment] = first + more.get(moment, 0.0)
        return times

    def took_us(self, times: Sequence[float]) -> float:
        """From the first moment to the last."""
        return max(times) - min(times)

    def exchangeable(self, seed: int) -> Moments:
        """The same job with the times of comparable ops dealt among the ranks, which all begin at the same time.

        First removes the time by which a rank is slower at the same op in every step, which is no noise.
        """
        draw = np.random.default_rng(seed)
        after = [list(before) for before in self.after]
        dealt = [lags for lags in self._lags_of_peers() if len(lags) == len(self.documents)]
        of_rank: defaultdict[tuple[int, Any], list[float]] = defaultdict(list)
        for lag in (lag for lags in dealt for lag in lags):
            of_rank[lag.op.rank, lag.place].append(lag.us)
        usual = {key: median(some) for key, some in of_rank.items()}
        for lags in dealt:
            middle = median(usual[lag.op.rank, lag.place] for lag in lags)
            own = [max(0.0, lag.us + middle - usual[lag.op.rank, lag.place]) for lag in lags]
            most = max(_OUTLIER * median(own), median(own) + _LEAST_OUTLIER_US)
            own = [median(own) if us > most else us for us in own]
            draw.shuffle(own)
            for lag, us in zip(lags, own, strict=True):
                after[lag.moment][lag.number] = (after[lag.moment][lag.number][0], us)
        begins = [min(op.start for op in self.ops if op.rank == rank) for rank in range(len(self.documents))]
        later = {rank: median(begins) - begin for rank, begin in enumerate(begins)}
        return Moments(self.documents, self.ops, self.ahead, after, self.order, later)

    def _lags_of_peers(self) -> Iterator[list[_Lag]]:
        """Times of each rank for the same kernel, or for a thread's work before the same call, in the same step."""
        alike: defaultdict[tuple[Any, ...], list[_TimedOp]] = defaultdict(list)
        for op in self.ops:
            if op.step >= 0 and not op.communicates:
                alike[op.key].append(op)
        for ops in alike.values():
            if len({op.rank for op in ops}) < len(ops):
                continue
            lags = []
            for op in ops:
                moment = op.moment + 1 if op.gpu else op.moment
                if (number := self._own(op, moment)) is not None:
                    lags.append(_Lag(op, moment, number, self.after[moment][number][1]))
            yield lags

    def write(self, folder: Path, times: Sequence[float]) -> None:
        """Files as the profiler would have written them."""
        shifts = _shifts(self.ops, times)
        own = {id(op.event): (times[op.moment] - op.start, times[op.moment + 1] - op.end) for op in self.ops}
        for rank, document in enumerate(self.documents):
            events = []
            for event in document["traceEvents"]:
                shift = own.get(id(event)) or _shift(event, shifts.get((rank, _track(event))))
                events.append(_moved(event, *shift))
            text = json.dumps({**document, "traceEvents": events}, separators=(",", ":"))
            (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1))

    def _recorded(self, moment: int) -> float:
        op = self.ops[moment // 2]
        return op.end if moment % 2 else op.start

    def _own(self, op: _TimedOp, moment: int) -> int | None:
        """The predecessor of a moment that gives the op's own time."""
        if op.gpu:
            return 0
        # The latest one, if it is of the thread: otherwise the call waited for something else.
        latest = max(
            range(len(self.after[moment])), key=lambda place: self._recorded(self.after[moment][place][0]), default=None
        )
        return latest if latest is not None and not self.ops[self.after[moment][latest][0] // 2].gpu else None

    def _more(self, delays: Sequence[Delay]) -> dict[int, float]:
        """Delay of each moment."""
        more: defaultdict[int, float] = defaultdict(float)
        for delay in delays:
            own = [op for op in self.ops if op.rank == delay.rank and op.step >= 0]
            for step in {op.step for op in own}:
                calls = sorted((op for op in own if not op.gpu and op.step == step), key=lambda op: op.start)
                kernels = [op for op in own if op.gpu and op.step == step and not op.communicates]
                if delay.kind == "pause":
                    more[calls[int(delay.place * (len(calls) - 1))].moment] += delay.us
                elif delay.kind == "calls":
                    for op in calls:
                        more[op.moment] += delay.us / len(calls)
                else:
                    whole = sum(op.end - op.start for op in kernels)
                    for op in kernels:
                        more[op.moment + 1] += delay.us * (op.end - op.start) / whole
        return more

    def _join(self, by_rank: Sequence[Sequence[_TimedOp]], instances: Sequence[Sequence[_TimedOp]]) -> None:
        """Find the predecessors of each moment."""
        for number, op in enumerate(self.ops):
            op.moment = 2 * number
        causes: list[list[int]] = [[] for _ in range(2 * len(self.ops))]
        for ops in by_rank:
            for after, before in _causes(ops):
                causes[after].append(before)
        least = self._least(causes)
        for moment, before in enumerate(causes):
            now = self._recorded(moment)
            latest = max(map(self._recorded, before), default=0.0)
            lags = []
            for other in before:
                lag = now - self._recorded(other)
                if self._recorded(other) < latest:
                    lag = min(lag, least[self._kind(other, moment)])
                lags.append((other, lag))
            self.after.append(lags)
        for members in instances:
            last = max(op.start for op in members)
            for op in members:
                if op.end >= last:
                    self.after[op.moment + 1] = [(other.moment, op.end - last) for other in members]
        graph = {at: [one for one, _ in before] for at, before in enumerate(self.after)}
        self.order = list(TopologicalSorter(graph).static_order())

    def _kind(self, before: int, after: int) -> tuple[Any, ...]:
        """The kind of a pair of moments."""
        first, second = self.ops[before // 2], self.ops[after // 2]
        name = second.event["name"] if first is second else ""
        return first.gpu, second.gpu, before % 2, after % 2, name

    def _least(self, causes: Sequence[Sequence[int]]) -> dict[tuple[Any, ...], float]:
        """Shortest distance of each kind of pair: the tenth percentile where nothing else was waited for."""
        seen: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
        for moment, before in enumerate(causes):
            if before:
                latest = max(before, key=self._recorded)
                seen[self._kind(latest, moment)].append(self._recorded(moment) - self._recorded(latest))
        least: defaultdict[tuple[Any, ...], float] = defaultdict(float)
        least.update({kind: float(np.quantile(lags, 0.1)) for kind, lags in seen.items()})
        return least


def _document(path: Path) -> dict[str, Any]:
    """A trace without the events that this module does not use."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    wanted = {*_GPU, *_CALLS, *_HOST}
    document["traceEvents"] = [one for one in document["traceEvents"] if one.get("cat") in wanted and one["ph"] == "X"]
    return document


def _track(event: Mapping[str, Any]) -> Any:
    """The thread or stream of an event."""
    if event["cat"] in _GPU:
        return ("gpu", event["args"].get("device"), event["args"].get("stream"))
    return ("host", event["tid"])


def _ops(events: Sequence[dict[str, Any]], rank: int) -> list[_TimedOp]:
    """The calls and GPU ops of a rank, by start, with launches, steps and keys."""
    ops = [
        _TimedOp(event, rank, _track(event), float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)),
            gpu=event["cat"] in _GPU)
        for event in events if event["cat"] in (*_GPU, *_CALLS)
    ]  # fmt: skip
    ops.sort(key=lambda op: (op.start, op.end))
    calls = {op.event["args"].get("correlation"): op for op in ops if not op.gpu}
    steps = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(match[1]))
        for event in events
        if event["cat"] == "user_annotation" and (match := _STEP.match(event["name"]))
    )
    main = next((("host", event["tid"]) for event in events if _STEP.match(event["name"])), None)
    load = Counter(op.track for op in ops)
    busiest = sorted(load, key=lambda track: (track != main, -load[track]))
    counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for op in ops:
        op.launch = calls.get(op.event["args"].get("correlation")) if op.gpu else None
        called = (op.launch or op).start if op.launch or not op.gpu else -1.0
        op.step = next((number for begin, end, number in steps if begin <= called <= end), -1)
        same = (op.gpu, busiest.index(op.track), op.event["name"], op.step)
        op.key = (*same, counts[same])
        counts[same] += 1
    return ops


def _causes(ops: Sequence[_TimedOp]) -> Iterator[tuple[int, int]]:
    """(moment, moment before it) of one rank."""
    threads = [op for op in ops if not op.gpu]
    yield from _host_causes(threads)
    on_gpu = [op for op in ops if op.gpu]
    ends = sorted(on_gpu, key=lambda op: op.end)
    times = [op.end for op in ends]
    copies = {id(op.launch): op for op in on_gpu if op.event["cat"] == "gpu_memcpy"}
    for call in threads:
        yield call.moment + 1, call.moment
        if _AFTER_EVENTS.search(call.event["name"]) and (last := bisect_right(times, call.start)):
            yield call.moment, ends[last - 1].moment + 1
        waited = None
        if _SYNCHRONISES.search(call.event["name"]):
            last = bisect_right(times, call.end) - 1
            waited = ends[last] if last >= 0 else None
        elif (copy := copies.get(id(call))) is not None and copy.end <= call.end:
            # Kernels end all the time: a copy's call waits for its own copy or for nothing.
            waited = copy
        if waited is not None and waited.end > call.start:
            yield call.moment + 1, waited.moment + 1
    previous: dict[Any, _TimedOp] = {}
    launched: dict[Any, _TimedOp] = {}
    by_launch = sorted(on_gpu, key=lambda op: op.launch.start if op.launch else -1.0)
    producers = {}
    for op in by_launch:
        if op.launch is None:
            continue
        if op.communicates:
            producers[id(op)] = launched.get(op.launch.track)
        else:
            launched[op.launch.track] = op
    for op in on_gpu:
        yield op.moment + 1, op.moment
        candidates = []
        if op.launch is not None:
            candidates.append((op.launch.start, op.launch.moment))
        if (before := previous.get(op.track)) is not None and before.end <= op.start + 5:
            candidates.append((before.end, before.moment + 1))
        if (producer := producers.get(id(op))) is not None and producer.end <= op.start + 5:
            candidates.append((producer.end, producer.moment + 1))
        last = bisect_right(times, op.start) - 1
        ready = max((time for time, _ in candidates), default=-1e18)
        if last >= 0 and op.start - times[last] < _SOON_US and ready < times[last] - _LONG_US:
            candidates.append((times[last], ends[last].moment + 1))
        previous[op.track] = op
        yield from ((op.moment, one) for _, one in candidates)


def _host_causes(calls: Sequence[_TimedOp]) -> Iterator[tuple[int, int]]:
    """Calls of one thread follow each other; a thread that did nothing for long may go on after another one's call."""
    by_end: defaultdict[Any, list[_TimedOp]] = defaultdict(list)
    for call in sorted(calls, key=lambda op: op.end):
        by_end[call.track].append(call)
    ends = {track: [op.end for op in some] for track, some in by_end.items()}
    last: dict[Any, _TimedOp] = {}
    for call in calls:
        before = last.get(call.track)
        since = before.end if before is not None else -1e18
        if before is not None:
            yield call.moment, before.moment + 1
        for track in ends.keys() - {call.track} if call.start - since > _LONG_US else ():
            latest = bisect_right(ends[track], call.start) - 1
            if latest >= 0 and ends[track][latest] > since:
                yield call.moment, by_end[track][latest].moment + 1
        last[call.track] = call


def _collectives(kernels: Sequence[Sequence[_TimedOp]]) -> list[list[_TimedOp]]:
    """Kernels in order, each rank shifted against the one with most: most alike, then ends that are closest."""

    def looks(op: _TimedOp) -> tuple[Any, ...]:
        args = op.event["args"]
        return op.event["name"].split("(")[0], args.get("Collective name"), args.get("In msg nelems"), args.get("dtype")

    reference = max(kernels, key=len)
    instances: list[list[_TimedOp | None]] = [[None] * len(kernels) for _ in reference]
    for rank, own in enumerate(kernels):

        def quality(shift: int, own: Sequence[_TimedOp] = own) -> tuple[int, float]:
            pairs = [(one, reference[at + shift]) for at, one in enumerate(own) if 0 <= at + shift < len(reference)]
            same = [abs(one.end - other.end) for one, other in pairs if looks(one) == looks(other)]
            return len(same), -median(same) if same else 0.0

        best = max(range(-3, len(reference) - len(own) + 4), key=quality)
        for place, kernel in enumerate(own):
            if 0 <= place + best < len(reference) and looks(kernel) == looks(reference[place + best]):
                instances[place + best][rank] = kernel
    return [[op for op in members if op is not None] for members in instances if None not in members]


def _ahead(instances: Sequence[Sequence[_TimedOp]], ranks: int) -> dict[int, float]:
    """Offset of each rank's clock: the median of its collectives' ends, relative to those of all ranks."""
    off: defaultdict[int, list[float]] = defaultdict(list)
    for members in instances:
        middle = median(op.end for op in members)
        for op in members:
            off[op.rank].append(op.end - middle)
    return {rank: median(off[rank]) if off[rank] else 0.0 for rank in range(ranks)}


def _shifts(ops: Sequence[_TimedOp], times: Sequence[float]) -> dict[tuple[int, Any], tuple[np.ndarray, np.ndarray]]:
    """For each track, recorded times and their delays, ascending."""
    points: defaultdict[tuple[int, Any], list[tuple[float, float]]] = defaultdict(list)
    for op in ops:
        recorded = float(op.event["ts"]), float(op.event["ts"]) + float(op.event.get("dur", 0))
        points[op.rank, op.track] += [
            (recorded[0], times[op.moment] - op.start),
            (recorded[1], times[op.moment + 1] - op.end),
        ]
    shifts = {track: np.array(sorted(some)) for track, some in points.items()}
    return {track: (some[:, 0], some[:, 1]) for track, some in shifts.items()}


def _shift(event: Mapping[str, Any], shift: tuple[np.ndarray, np.ndarray] | None) -> tuple[float, float]:
    """Delays of the start and end of an event that is no op: those of the first and last moment in it."""
    if shift is None:
        return 0.0, 0.0
    begin, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
    recorded, later = shift
    first = min(int(np.searchsorted(recorded, begin)), len(recorded) - 1)
    last = max(int(np.searchsorted(recorded, end, side="right")) - 1, 0)
    return float(later[first]), float(later[max(first, last)])


def _moved(event: Mapping[str, Any], begin: float, end: float) -> dict[str, Any]:
    """The event with its start and end delayed."""
    start, last = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
    return {**event, "ts": round(start + begin, 3), "dur": round(max(0.0, last + end - start - begin), 3)}
