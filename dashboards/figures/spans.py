"""The ops of one step as spans on tracks, no more of them than a screen shows, and its critical path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.attribution.critical_path import critical_ops
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, RECORDED
from tracekit.analysis.whatif.timeline import compared_frame
from tracekit.trace.chrome import STREAMS
from tracekit.trace.model import KINDS, OpKind

_COMMUNICATES = np.array([kind.is_communication for kind in KINDS])
#: The overview stores a ratio in a byte, in this many steps per 1; 0 is "no op".
OVERVIEW_STEPS = 50

STREAM_NAMES: tuple[str, ...] = tuple(dict.fromkeys(STREAMS.values()))
_STREAM_OF_KIND = np.array([STREAM_NAMES.index(STREAMS[kind]) for kind in KINDS], np.uint8)
_COMPUTE = STREAM_NAMES.index("compute")

_FORWARD, _BACKWARD = (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV), (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV)
#: The sends and receives that go with an op of a microbatch.
_HANDED_ON = dict.fromkeys((OpKind.FORWARD_COMPUTE, *_FORWARD), _FORWARD) | dict.fromkeys(
    (OpKind.BACKWARD_COMPUTE, *_BACKWARD), _BACKWARD
)
#: Peers that take less than this count as if they took this long: below it a ratio is meaningless.
SHORTEST_PEER_S = 1e-6


@dataclass(frozen=True, slots=True)
class Line:
    """One track of every worker."""

    replay: Replay
    stream: str


@dataclass(frozen=True, slots=True)
class Window:
    """The start and end, seconds from the start of the step, and the number of pixel columns that show it."""

    start_s: float
    end_s: float
    columns: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans ordered by track and start.

    `first`: where the spans of each track begin, [tracks + 1]; track = index of the worker x lines + line. `wait`: the
    first part of the span, spent waiting for peers, seconds. `ratio`: own cost over that of the peers. `covers`: total
    seconds of the spans that this one represents, or its own duration if it represents only itself.
    """

    first: npt.NDArray[np.uint32]
    start: Floats
    duration: npt.NDArray[np.float32]
    wait: npt.NDArray[np.float32]
    ratio: npt.NDArray[np.float32]
    covers: npt.NDArray[np.float32]
    seq: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.uint8]


def spans(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, rows: Ints | None = None) -> Spans:
    """The spans of these workers (indices in `ops`), track by track.

    `rows`: the row of each worker, ascending, if several workers share a row; by default, each has its own.
    With a window, only spans that touch it; of those narrower than a pixel column, only the longest and the slowest of
    each column and track, so slow spans never disappear.
    """
    chosen = _ops_of(ops, workers)
    rows = np.arange(len(workers)) if rows is None else rows
    position = np.repeat(rows, ops.first[workers + 1] - ops.first[workers])
    replays = dict.fromkeys(line.replay for line in lines)
    parts = [_columns(ops, chosen, position, lines, replay, window) for replay in replays]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["covers"] = columns["duration"].astype(np.float64)
    if window is not None:
        columns = _thinned(columns, window)
    columns |= {name: columns[name].astype(np.float32) for name in ("ratio", "covers")}
    order = np.lexsort((columns["start"], columns["track"]))
    ordered = {name: values[order] for name, values in columns.items()}
    tracks = np.arange((rows.max(initial=-1) + 1) * len(lines) + 1)
    return Spans(first=np.searchsorted(ordered.pop("track"), tracks).astype(np.uint32), **ordered)


def count(ops: StepOps, workers: Ints, lines: Sequence[Line]) -> int:
    """The number of spans of these workers on these lines."""
    streams = np.bincount(ops.stream(_ops_of(ops, workers)), minlength=len(ops.stream_names))
    return int(sum(streams[ops.stream_names.index(line.stream)] for line in lines))


def _ops_of(ops: StepOps, workers: Ints) -> Ints:
    """The ops of these workers, in their order."""
    begin, length = ops.first[workers], ops.first[workers + 1] - ops.first[workers]
    chosen: Ints = np.arange(length.sum()) + np.repeat(begin - (np.cumsum(length) - length), length)
    return chosen


def _columns(
    ops: StepOps, chosen: Ints, position: Ints, lines: Sequence[Line], replay: Replay, window: Window | None
) -> dict[str, npt.NDArray[Any]]:
    """The spans of one replay as columns, with their track."""
    line_of_stream = np.full(len(ops.stream_names), -1)
    for number, line in enumerate(lines):
        if line.replay is replay:
            line_of_stream[ops.stream_names.index(line.stream)] = number
    line_of_op = line_of_stream[ops.stream(chosen)]
    wanted = line_of_op >= 0
    if window is not None:
        start = ops.start[replay][chosen]
        wanted &= (start <= window.end_s) & (start + ops.duration[replay][chosen] >= window.start_s)
    boxed = chosen[wanted]
    kind, duration = ops.kind[boxed], ops.duration[replay][boxed]
    wait = np.clip(duration - ops.cost[replay][boxed], 0.0, duration)
    return {
        "track": position[wanted] * len(lines) + line_of_op[wanted],
        "start": ops.start[replay][boxed],
        "duration": duration,
        "wait": np.where(_COMMUNICATES[kind], wait, np.float32(0.0)),
        "ratio": ops.ratios(boxed, replay),
        "seq": ops.seq[boxed],
        "microbatch": ops.microbatch[boxed],
        "kind": kind,
    }


def _thinned(columns: dict[str, npt.NDArray[Any]], window: Window) -> dict[str, npt.NDArray[Any]]:
    """Remove the spans narrower than a pixel column that are neither the longest nor the slowest in theirs."""
    width = (window.end_s - window.start_s) / window.columns
    narrow = np.flatnonzero(columns["duration"] < width)
    if not len(narrow):
        return columns
    pixel = np.floor((columns["start"][narrow] - window.start_s) / width).astype(np.int64)
    cell = columns["track"][narrow] * (window.columns + 2) + np.clip(pixel, -1, window.columns) + 1
    duration, ratio = columns["duration"][narrow], columns["ratio"][narrow]
    longest = _last_of_each(np.lexsort((duration, cell)), cell)
    slowest = _last_of_each(np.lexsort((duration, ratio, cell)), cell)
    _, begins = np.unique(np.sort(cell), return_index=True)
    covered = np.add.reduceat(duration[np.argsort(cell, kind="stable")].astype(np.float64), begins)
    columns["covers"][narrow[longest]] = covered
    keep = np.ones(len(columns["track"]), np.bool_)
    keep[narrow] = False
    keep[narrow[longest]] = True
    keep[narrow[slowest]] = True
    return {name: values[keep] for name, values in columns.items()}


def _last_of_each(order: Ints, cell: Ints) -> Ints:
    """The last item of each cell, cells ascending, if `order` sorts the items by cell."""
    ordered = cell[order]
    last: Ints = order[np.append(np.flatnonzero(np.diff(ordered)), len(order) - 1)]
    return last


def overview(ops: StepOps, workers: Ints, replay: Replay, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """The highest ratio among the computes of each part of the step, for these workers top to bottom, [rows, columns].

    The columns go from `ops.begin()` to the end of the replay. In steps of 1 / OVERVIEW_STEPS, at most 255; 0 where
    nothing computes. Workers are pooled evenly if there are more of them than rows.
    """
    chosen = _ops_of(ops, workers)
    position = np.repeat(np.arange(len(workers)), ops.first[workers + 1] - ops.first[workers])
    computes = ops.computes(chosen)
    chosen, position = chosen[computes], position[computes]
    width = max(ops.end(replay) - ops.begin(), 1e-9) / columns
    start = ops.start[replay][chosen] - ops.begin()
    begin = np.clip((start / width).astype(np.int64), 0, columns - 1)
    last = np.clip(((start + ops.duration[replay][chosen]) / width).astype(np.int64), begin, columns - 1)
    value = np.clip(ops.ratios(chosen, replay) * OVERVIEW_STEPS, 1, 255).astype(np.uint8)
    touched = last - begin + 1
    column = np.arange(touched.sum()) - np.repeat(np.cumsum(touched) - touched - begin, touched)
    row = position * rows // max(len(workers), 1)
    picture = np.zeros(rows * columns, np.uint8)
    np.maximum.at(picture, np.repeat(row, touched) * columns + column, np.repeat(value, touched))
    return picture.reshape(rows, columns)


def _largest(values: npt.NDArray[Any], most: int) -> Ints:
    """Indices of the `most` largest values, largest first, equal ones in order; without sorting all of them."""
    if len(values) <= most:
        return np.argsort(-values, kind="stable")
    bound = np.partition(values, len(values) - most)[len(values) - most]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")[:most]]


def sums(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window, words: str = "") -> pl.DataFrame:
    """Time by kind of the ops that the first replay of `lines` shows in a window, largest first.

    Columns: kind, ops, seconds (of all workers, within the window). `words`: only ops that these name.
    """
    chosen, replay = _in_view(ops, workers, lines, window, words), lines[0].replay
    start = ops.start[replay][chosen]
    inside = np.minimum(start + ops.duration[replay][chosen], window.end_s) - np.maximum(start, window.start_s)
    frame = pl.DataFrame({"kind": ops.kinds(chosen), "seconds": inside})
    totals = frame.group_by("kind").agg(pl.len().alias("ops"), pl.col("seconds").sum())
    return totals.sort("seconds", "kind", descending=[True, False])


def _in_view(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, words: str) -> Ints:
    """The ops of these workers that the first replay of `lines` shows in a window, if these words name them."""
    replay = lines[0].replay
    streams = [ops.stream_names.index(line.stream) for line in lines if line.replay is replay]
    chosen = _ops_of(ops, workers)
    wanted = np.isin(ops.stream(chosen), streams) & ops.named(chosen, words)
    if window is not None:
        start = ops.start[replay][chosen]
        wanted &= (start <= window.end_s) & (start + ops.duration[replay][chosen] >= window.start_s)
    return chosen[wanted]


def slowest(
    ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, most: int, words: str = ""
) -> pl.DataFrame:
    """The ops that exceed their peers most, among those that the first replay of `lines` shows; at most `most`.

    `words`: only ops that these name. Times in seconds. `beyond_peers_s`: own cost minus that of the peers; the whole
    cost if there are none.
    """
    replay, chosen = lines[0].replay, _in_view(ops, workers, lines, window, words)
    ratio, peers = ops.ratios(chosen, replay), ops.peers(chosen, replay)
    beyond = ops.cost[replay][chosen] - np.where(np.isinf(ratio), 0.0, peers)
    order = _largest(beyond, most)
    chosen = chosen[order]
    worker = ops.worker_of(chosen)
    return pl.DataFrame(
        {
            "dp_rank": ops.dp_rank[worker],
            "pp_rank": ops.pp_rank[worker],
            "kind": [str(KINDS[code]) for code in ops.kind[chosen]],
            "seq": ops.seq[chosen],
            "microbatch": ops.microbatch[chosen],
            "start_s": ops.start[replay][chosen],
            "duration_s": ops.duration[replay][chosen].astype(np.float64),
            "cost_s": ops.cost[replay][chosen].astype(np.float64),
            "peer_median_s": np.where(np.isinf(ratio[order]), np.nan, peers[order]),
            "ratio": ratio[order],
            "beyond_peers_s": beyond[order].astype(np.float64),
            "launch_delay_s": ops.launch_delay[chosen].astype(np.float64),
        },
        schema_overrides={"kind": pl.String},
    ).with_columns(
        pl.col("peer_median_s").fill_nan(None),
        pl.when(pl.col("ratio").is_finite()).then("ratio").alias("ratio"),
        pl.when(pl.col("microbatch") >= 0).then("microbatch").alias("microbatch"),
    )


class Replay(StrEnum):
    """The times of ops: recorded, replayed without launch delays, or ideal."""

    RECORDED = "recorded"
    ORIGINAL = "original"
    IDEAL = "ideal"


@dataclass(frozen=True, slots=True)
class StepOps:
    """All ops of one step, ordered by worker (dp_rank, pp_rank) and recorded start. Times are seconds.

    `dp_rank`, `pp_rank`: of each worker, [workers]. `first`: where the ops of each worker begin, [workers + 1]. The
    rest is one value per op; `microbatch` and `chunk` are -1 where they do not apply. `cost`: own cost by replay.
    `median`: median own cost per kind as recorded, NaN for kinds that do not occur. `alone`: [kinds, stages], True if
    fewer than half of the workers of the stage ran the kind. `meeting`: a number that the ops share which start
    together, here a send and its receive; -1 for others.

    An op is compared with its peers by its own cost (without waiting): the ratio to the median of its kind over all
    workers and microbatches; in the ideal replay all peers are equal. A kind that is `alone` has no peers there (a
    garbage collection, for example), and its ratio is infinite.
    """

    step: int
    dp_rank: Ints
    pp_rank: Ints
    first: Ints
    kind: npt.NDArray[np.uint8]
    seq: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    start: Mapping[Replay, Floats]
    duration: Mapping[Replay, npt.NDArray[np.float32]]
    cost: Mapping[Replay, npt.NDArray[np.float32]]
    launch_delay: npt.NDArray[np.float32]
    median: Floats
    alone: npt.NDArray[np.bool_]
    meeting: Ints

    @property
    def workers(self) -> int:
        """The number of workers with ops in the step."""
        return len(self.dp_rank)

    def begin(self) -> float:
        """When the view of the whole step begins, in whole milliseconds: 0, or earlier if a rank was early."""
        return min(0.0, float(np.floor(min(start.min() for start in self.start.values()) * 1e3 + 1e-6)) / 1e3)

    def end(self, replay: Replay) -> float:
        """When the last op ends, seconds from the start of the step."""
        return float((self.start[replay] + self.duration[replay]).max())

    def streams(self) -> tuple[str, ...]:
        """The streams that have an op."""
        present = np.unique(_STREAM_OF_KIND[np.unique(self.kind)])
        return tuple(STREAM_NAMES[stream] for stream in present)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The streams that there can be."""
        return STREAM_NAMES

    def stream(self, ops: Ints) -> npt.NDArray[Any]:
        """The stream of each op, as an index into `stream_names`."""
        return _STREAM_OF_KIND[self.kind[ops]]

    def computes(self, ops: Ints) -> npt.NDArray[np.bool_]:
        """Whether the overview shows each op, [ops]."""
        return np.asarray(self.stream(ops) == _COMPUTE)

    def peers(self, ops: Ints, replay: Replay) -> Floats:
        """Own cost of each op's peers, seconds: the median of its kind; in the ideal replay, the op's own cost."""
        return self.cost[replay][ops].astype(np.float64) if replay is Replay.IDEAL else self.median[self.kind[ops]]

    def ratios(self, ops: Ints, replay: Replay) -> Floats:
        """Own cost over that of the peers; infinite without peers, 1 in the ideal replay."""
        if replay is Replay.IDEAL:
            return np.ones(len(ops))
        alone = self.alone[self.kind[ops], self.pp_rank[self.worker_of(ops)]]
        peers = np.maximum(self.peers(ops, replay), SHORTEST_PEER_S)
        return np.where(alone, np.inf, np.maximum(self.cost[replay][ops], 0.0) / peers)

    def worker_of(self, ops: Ints) -> Ints:
        """The index of each op's worker."""
        return np.searchsorted(self.first, ops, side="right") - 1

    def named(self, ops: Ints, words: str) -> npt.NDArray[np.bool_]:
        """Whether each op has all of these words in its name, [ops]; a number also matches the microbatch."""
        matching = np.ones(len(ops), np.bool_)
        for word in words.lower().split():
            fits = np.array([word in name.lower() for name in self.op_names])[self.op_name(ops)]
            number = int(word) if word.isascii() and word.isdecimal() else None
            matching &= fits if number is None else fits | (self.microbatch[ops] == number)
        return matching

    @property
    def op_names(self) -> Sequence[str]:
        """The names of ops."""
        return KINDS

    def op_name(self, ops: Ints) -> npt.NDArray[Any]:
        """The name of each op, as an index into `op_names`."""
        return self.kind[ops]

    def kinds(self, ops: Ints) -> pl.Series:
        """The kind of each op."""
        return pl.Series([str(KINDS[code]) for code in self.kind[ops]], dtype=pl.String)

    def arrows(self, op: int, replay: Replay) -> tuple[Ints, Floats]:
        """The way of the microbatch of an op: the sends of its direction, each with its receive, and when, [arrows, 2].

        An arrow leads from the start of a send to the end of its receive, seconds.
        """
        if (kind := KINDS[self.kind[op]]) not in _HANDED_ON:
            return np.zeros((0, 2), np.int64), np.zeros((0, 2))
        pair = self.dp_rank[self.worker_of(np.arange(len(self.kind)))] == self.dp_rank[self.worker_of(np.array([op]))]
        pair &= (self.microbatch == self.microbatch[op]) & (self.meeting >= 0)
        sends, receives = (np.flatnonzero(pair & (self.kind == end.code)) for end in _HANDED_ON[kind])
        _, sent, received = np.intersect1d(self.meeting[sends], self.meeting[receives], return_indices=True)
        ends = np.column_stack([sends[sent], receives[received]])
        return ends, self.start[replay][ends] + self.duration[replay][ends] * [0, 1]

    def find(self, dp_rank: int, pp_rank: int, kind: str, seq: int) -> int | None:
        """The op with that identity; None if the step has none."""
        worker = np.flatnonzero((self.dp_rank == dp_rank) & (self.pp_rank == pp_rank))
        if not len(worker) or kind not in set(OpKind):
            return None
        ops = np.arange(self.first[worker[0]], self.first[worker[0] + 1])
        matching = ops[(self.kind[ops] == OpKind(kind).code) & (self.seq[ops] == seq)]
        return int(matching[0]) if len(matching) else None


def step_ops(replay: JobReplay) -> StepOps:
    """The ops of a replay that holds a single step (`JobReplay.only_steps`)."""
    frame = compared_frame(replay).sort("dp_rank", "pp_rank", "recorded_start")
    cell = frame["dp_rank"].to_numpy().astype(np.int64) * replay.graph.layout.pp + frame["pp_rank"].to_numpy()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(cell)) + 1])
    kind = frame["kind"].cat.physical().to_numpy().astype(np.uint8)
    recorded_cost = frame["cost"].to_numpy().astype(np.float32)
    dp_rank, pp_rank = np.divmod(cell[begins], replay.graph.layout.pp)
    first = np.append(begins, len(cell))
    return StepOps(
        step=int(replay.graph.steps[0]),
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        first=first,
        kind=kind,
        seq=frame["seq"].to_numpy(),
        microbatch=frame["microbatch"].fill_null(-1).to_numpy(),
        chunk=frame["chunk"].fill_null(-1).to_numpy(),
        start={name: frame[f"{name}_start"].to_numpy() for name in Replay},
        duration={name: frame[f"{name}_duration"].to_numpy().astype(np.float32) for name in Replay},
        cost={
            Replay.RECORDED: recorded_cost,
            Replay.ORIGINAL: recorded_cost,
            Replay.IDEAL: frame["ideal_cost"].to_numpy().astype(np.float32),
        },
        launch_delay=frame["launch_delay"].to_numpy().astype(np.float32),
        median=_medians(kind, recorded_cost),
        alone=_rare_kinds(kind, np.repeat(np.arange(len(begins)), np.diff(first)), pp_rank),
        meeting=frame["transfer"].to_numpy(),
    )


def _medians(kind: npt.NDArray[np.uint8], cost: npt.NDArray[np.float32]) -> Floats:
    """Median own cost per kind, [kinds]."""
    median = np.full(len(KINDS), np.nan)
    for code in np.unique(kind):
        median[code] = np.median(cost[kind == code])
    return median


def _rare_kinds(kind: npt.NDArray[np.uint8], worker: Ints, stage_of_worker: Ints) -> npt.NDArray[np.bool_]:
    """Which kinds fewer than half of the workers of a stage ran, [kinds, stages]."""
    ran = np.zeros((len(KINDS), len(stage_of_worker)), np.bool_)
    ran[kind, worker] = True
    stages = int(stage_of_worker.max()) + 1
    counts = np.stack([np.bincount(stage_of_worker[row], minlength=stages) for row in ran])
    return (counts > 0) & (2 * counts < np.bincount(stage_of_worker, minlength=stages))


_SCENARIOS = {Replay.RECORDED: RECORDED, Replay.ORIGINAL: ORIGINAL, Replay.IDEAL: IDEAL}
_NAME = ["dp_rank", "pp_rank", "kind", "seq"]


@dataclass(frozen=True, slots=True)
class PathSpans:
    """The ops on the path from first to last, [ops] each. `op`, `worker`: indices in the `StepOps`.

    `start`, `duration`: the part of the op that is on the path, without waiting, seconds. Between two ops nothing on
    the path ran: these are launch delays.
    """

    op: Ints
    worker: Ints
    start: Floats
    duration: Floats


def path_spans(replay: JobReplay, ops: StepOps, which: Replay) -> PathSpans:
    """The critical path of the step of `ops` in one of its replays."""
    path = critical_ops(replay.only_steps([ops.step]), _SCENARIOS[which])
    worker = ops.worker_of(np.arange(len(ops.kind)))
    places = pl.DataFrame(
        {
            "dp_rank": ops.dp_rank[worker],
            "pp_rank": ops.pp_rank[worker],
            "kind": ops.kind.astype(np.int64),
            "seq": ops.seq.astype(np.int64),
            "op": np.arange(len(ops.kind)),
        }
    )
    names = path.select(pl.col("dp_rank", "pp_rank", "seq").cast(pl.Int64), pl.col("kind").to_physical().cast(pl.Int64))
    op = names.join(places, on=_NAME, how="left", maintain_order="left")["op"].to_numpy()
    own_s = np.maximum(ops.cost[which][op].astype(np.float64), 0.0)
    end = ops.start[which][op] + ops.duration[which][op]
    return PathSpans(op, worker[op], end - own_s, own_s)
