"""A GPU recording as an op trace: the work of the GPUs, and the host work between the calls that launched it.

In: a recording, its matches and clock offsets. Out: an `OpTrace` with the rule `kineto`, which finds out which op waits
for which (`analysis/graph/op_rules.py`). The whole recording is one step of the trace, because GPU work continues
across the steps of a training loop; those are the label `profiler_step`.

Ops of a rank:

- `window`: from the start of the recording to the first event of the rank; profilers start at different times.
- On each host thread: `host`, the work before each call, starting at the previous call of that thread or of the thread
  that handed over to it, with lists of what it consists of; `synchronise`, the rest of a synchronising call once the
  GPU has finished.
- GPU ops, on their streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis import native
from tracekit.analysis.gpu.matching import ELEMENTS_OF_ALL, ClockOffsets, Matches
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints, numbered, or_null, waits_beyond_chance
from tracekit.trace.gpu_activity import Activity, CallRole, IdleReason, KernelClass
from tracekit.trace.op import WHAT_SCHEMA, GpuRecording, OpTrace, joined

#: Because of noise, this share of a rank's ops may begin before their launch; the rest shows how far apart the clocks
#: of host and GPU are. Chosen.
_EARLY_SHARE = 0.01
#: Columns of the trace: those of every op trace, labels, and inputs of the rule.
COLUMNS = (
    "rank", "start", "duration", "stream", "peer", "comparable", "rendezvous",
    "kind", "name", "phase", "action", "stage", "microbatch", "host", "group", "profiler_step", "operator",
    "role", "communicates", "launched_by", "resumed_by", "in_collective", "scope", "copied",
    "waits_stream", "waits_for_stream", "recorded_at", "call_s", "recording_s",
    "did", "did_s", "did_n", "bytes", "outer", "inputs", "own", "recomputed", "shape", "occupancy",
    "exchanges", "rows_sent", "rows_received",
)  # fmt: skip
#: The actions of torch's pipeline schedules, such as PP:2SEND_F0, as labels.
_ACTIONS = {
    "F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight", "SEND_F": "forward-send",
    "RECV_F": "forward-recv", "SEND_B": "backward-send", "RECV_B": "backward-recv",
}  # fmt: skip
_ACTION = pl.col("action").cast(pl.String)
_OF_PIPELINE = (
    _ACTION.str.extract(r"^PP:\d+(\D+)\d+$").replace_strict(_ACTIONS, return_dtype=pl.Categorical),
    _ACTION.str.extract(r"^PP:(\d+)").cast(pl.Int32).alias("stage"),
    _ACTION.str.extract(r"(\d+)$").cast(pl.Int32).alias("microbatch"),
)
#: With name, role and shape, these columns identify equal ops.
_OF_PEERS = ("collective", "elements")
#: All-to-alls, and the kernels of libraries that move tokens to experts and back.
_EXCHANGES = (
    pl.coalesce("collective", "name")
    .cast(pl.String)
    .str.contains(r"(?i)all_?to_?all|\b(?:dispatch|combine)\b|a2a_?(?:dispatch|combine)")
)
#: Kinds of host ops that are mostly of one reason.
KINDS = {str(IdleReason.LOADER): "input", str(IdleReason.GC): "gc"}
#: What takes less than this share of all host work goes with the rest of its reason. Chosen: only names follow.
_SMALLEST_SHARE = 1e-3
#: Shorter parts of an op are left out, seconds.
_SHORTEST_S = 1e-7
_LISTS = ("did", "did_s", "did_n")
#: Calls that wait for the whole device.
_OF_DEVICE = r"(?i)(Device|Ctx|Context)Synchronize|Alloc|Free"
#: A thread without any recorded activity for this long, seconds, may have waited for the GPU: not every waiting call
#: is recorded. Chosen.
_LONG_GAP_S = 1e-3
#: A call that launches and takes this long, seconds, waits for a free place if the queue of its stream is as long as
#: it ever gets, give or take a tenth. Queues hold about a thousand launches; short ones are none. Chosen.
_LONG_CALL_S, _FULL, _SHORTEST_QUEUE = 100e-6, 0.9, 500
#: The scope of such waits.
QUEUE = "queue"

_SYNCHRONISES = {"kind": pl.lit("synchronise"), "role": pl.lit("synchronise")}


@dataclass(frozen=True, slots=True, eq=False)
class GpuOpTrace:
    """`trace`: the ops; `skew_s`: how far the clock of each rank's host was ahead of its GPU's, seconds, [ranks].

    `whats`: what host ops consist of, WHAT_SCHEMA, which their column `did` numbers.
    """

    trace: OpTrace
    skew_s: dict[int, float]
    whats: pl.DataFrame


def gpu_op_trace(recording: GpuRecording, matches: Matches, clocks: ClockOffsets) -> GpuOpTrace:
    """Convert a recording to ops with corrected clocks, starting at 0."""
    gpu, calls, steps, pieces, skew = _aligned(recording, clocks)
    marks = pl.concat([steps.select("rank", "start"), _marks(recording, pieces)])
    host, whats = with_work(host_ops(calls, gpu, marks), pieces, recording.whats)
    row_of_call = np.full(calls.height, -1, np.int64)
    del calls, marks, pieces  # the largest tables; each copy of them is as large as all ops
    first = float(min(frame["start"].to_numpy().min() for frame in (gpu, host) if frame.height))
    window = _windows(gpu, host, first)
    gpu = gpu.with_columns(pl.col("start") - first)
    host = host.with_columns(pl.col("start") - first)
    before_host, before_gpu = window.height, window.height + host.height
    launches = host.with_row_index("at").filter(pl.col("role") != "synchronise")
    row_of_call[launches["call"].to_numpy()] = launches["at"].to_numpy() + before_host
    gpu = gpu.with_columns(
        launched_by=_looked_up(gpu["launch"], row_of_call), rendezvous=_rendezvous(gpu.height, matches, clocks)
    )
    host = host.with_columns(
        resumed_by=_looked_up(host["resumed_by_call"], row_of_call),
        copied=pl.when(pl.col("copied") >= 0).then(pl.col("copied") + before_gpu),
    )
    read = {*COLUMNS, *_OF_PEERS}
    parts = [
        frame.select(name for name in frame.columns if name in read).cast({pl.String: pl.Categorical})
        for frame in (window, host, gpu)
    ]
    del host, gpu, launches
    ops = joined(parts).with_columns(_OF_PIPELINE)
    peer, from_end = _peers(ops, recording.step_spans)
    # Of ops at cut-off ends of windows or files, keep those that every rank has.
    whole = ~from_end & _on_all_ranks(np.zeros(ops.height, np.int64), ops) & (not recording.cut)
    on_all = _on_all_ranks(peer, ops) | whole
    host_in_no_step = pl.col("role").ne("gpu") & pl.col("profiler_step").is_null()
    ops = ops.with_columns(
        peer=pl.Series(peer.astype(np.int32)),
        comparable=~pl.col("role").eq("window") & ~host_in_no_step & pl.Series(on_all),
    )
    if recording.hosts:
        hosts = pl.Series([recording.hosts.get(rank) for rank in recording.ranks], dtype=pl.Categorical)
        ops = ops.with_columns(host=hosts[np.searchsorted(recording.ranks, ops["rank"].to_numpy())])
    rank = ops["rank"].to_numpy()
    for label, of_rank in recording.coordinates.items():
        places = np.array([of_rank[rank_number] for rank_number in recording.ranks], np.int32)
        ops = ops.with_columns(pl.Series(label, places[np.searchsorted(recording.ranks, rank)]))
    columns = [name for name in COLUMNS if name in ops.columns and ops[name].null_count() < ops.height]
    trace = OpTrace(ops.select(*columns, *recording.coordinates), recording.name, recording.axes, rules=("kineto",))
    return GpuOpTrace(trace, skew, whats)


def _aligned(
    recording: GpuRecording, clocks: ClockOffsets
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame, dict[int, float]]:
    """GPU ops, calls, steps and host work by corrected clocks; host times are converted to the GPU's clock."""
    gpu, calls = recording.gpu_ops, recording.calls
    called = np.append(calls["start"].to_numpy(), np.nan)[gpu["launch"].fill_null(-1).to_numpy()]
    delay = gpu["start"].to_numpy() - called
    rank = gpu["rank"].to_numpy()
    skew = {}
    for rank_number in recording.ranks:
        delays = delay[(rank == rank_number) & np.isfinite(delay)]
        skew[rank_number] = max(0.0, -float(np.quantile(delays, _EARLY_SHARE))) if len(delays) else 0.0
    ahead = dict(zip(clocks.ranks, clocks.ahead.tolist(), strict=True))

    def corrected(frame: pl.DataFrame, extra: dict[int, float]) -> pl.DataFrame:
        late = pl.col("rank").replace_strict(
            {rank_number: ahead[rank_number] + extra.get(rank_number, 0.0) for rank_number in recording.ranks},
            return_dtype=pl.Float64,
        )
        times = [name for name in ("start", "busy_since", "recorded_at") if name in frame.columns]
        return frame.with_columns((pl.col(name) - late) for name in times)

    communicates = pl.col("kernel_class") == str(KernelClass.COMMUNICATION)
    sizes = {group.name: len(group.ranks) for group in recording.groups}
    size = pl.col("group").replace_strict(sizes, default=None, return_dtype=pl.Int64).fill_null(len(recording.ranks))
    phases = calls["phase"].gather(gpu["launch"])
    ops = corrected(gpu, {}).with_columns(
        stream=name_numbers("stream", gpu["stream"])
        if gpu["device"].n_unique() <= len(recording.ranks)
        else pl.format("gpu {} stream {}", "device", "stream"),
        kind=pl.col("kernel_class"),
        role=pl.lit("gpu"),
        communicates=communicates,
        phase=phases,
        profiler_step="step",
        exchanges=pl.when(communicates & _EXCHANGES).then(size),
        rows_sent=_rows("sent", size),
        rows_received=_rows("received", size),
    )
    steps, pieces = (corrected(table, skew) for table in (recording.step_spans, recording.host))
    at_launch = {"operator": "inner", "inputs": "inputs", "recomputed": "recomputed", "action": "action"}
    around = pl.DataFrame({name: calls[of_call].gather(gpu["launch"]) for name, of_call in at_launch.items()})
    return ops.drop("step").hstack(around), corrected(calls, skew), steps, pieces, skew


def _rows(column: str, ranks: pl.Expr) -> pl.Expr:
    """The sum of the rows to or from each of the ranks, null if they are not stated, or cut or damaged."""
    text = pl.col(column).cast(pl.String)
    whole = text.str.contains(r"^\[\d{1,15}(?:, ?\d{1,15})*\]$") & (text.str.count_matches(r"\d+") == ranks)
    return pl.when(whole).then(text.str.extract_all(r"\d{1,15}").cast(pl.List(pl.Int64)).list.sum())


def _marks(recording: GpuRecording, pieces: pl.DataFrame) -> pl.DataFrame:
    """Work that shows since when the host of a rank was busy with the job; of several, profilers start apart."""
    if len(recording.ranks) > 1:
        stops = recording.whats.with_row_index("what").filter(pl.col("reason").is_in([*KINDS]))
        pieces = pieces.filter(pl.col("what").is_in(stops["what"].implode()))
    return pieces.select("rank", "start")


def _windows(gpu: pl.DataFrame, host: pl.DataFrame, first: float) -> pl.DataFrame:
    """An op from the start of the recording to the first event of each rank."""
    starts = pl.concat([frame.select("rank", "start") for frame in (gpu, host)])
    late = starts.group_by("rank").agg(pl.col("start").min()).sort("rank")
    return late.select(
        "rank",
        start=pl.lit(0.0),
        duration=pl.col("start") - first,
        kind=pl.lit("window"),
        name=pl.lit("before the window"),
        role=pl.lit("window"),
    )


def _looked_up(numbers: pl.Series, rows: Ints) -> pl.Series:
    """Row numbers of values; null for a value that is null or -1, or has no row."""
    return or_null(np.append(rows, -1)[numbers.fill_null(-1).to_numpy()].astype(np.int32))


def _rendezvous(gpu_ops: int, matches: Matches, clocks: ClockOffsets) -> pl.Series:
    """The instance of each GPU op, null for none. A rank that left a rooted collective before all had arrived met
    nobody.
    """
    end, last = matches.end - clocks.of(matches.rank), matches.begun(clocks)[1]
    meets = matches.synchronising[matches.instance] | (end >= last)
    meets &= np.bincount(matches.instance[meets], minlength=matches.matched)[matches.instance] > 1
    instance_of = np.full(gpu_ops, -1, np.int32)
    instance_of[matches.row[meets]] = matches.instance[meets]
    return or_null(instance_of)


def _on_all_ranks(peer: Ints, ops: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether every rank has an op of the same class in the same step, [ops]."""
    kind, rank = numbered(pl.Series(peer), ops["profiler_step"]), numbered(ops["rank"])
    ranks = int(rank.max(initial=-1)) + 1
    present = np.zeros((int(kind.max(initial=-1)) + 1, ranks), np.bool_)
    present[kind, rank] = True
    return np.asarray(present.all(axis=1))[kind]


def _peers(ops: pl.DataFrame, marked: pl.DataFrame) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """A number for each class of comparable ops: same name, shape and position among those of its step.

    Host work is comparable by what it launches. Ops launched before a rank's first mark, STEP_SCHEMA, are counted from
    the end, because the windows of ranks begin at different ops; the second result marks these ops.
    """
    class_ = _class_numbers(ops)
    early = ops["profiler_step"].is_null().to_numpy()
    step = ops["profiler_step"].fill_null(-1).cast(pl.Int64).to_numpy()
    first_mark = marked.group_by("rank").agg(pl.col("step").min().cast(pl.Int64))
    rank = ops["rank"].to_numpy()
    mark = np.full(int(rank.max(initial=0)) + 1, -1)
    mark[first_mark["rank"].to_numpy()] = first_mark["step"].to_numpy()
    from_end = early | (step < mark[rank])
    kind = numbered(pl.Series(class_), pl.Series(step))
    place = numbered(pl.Series(kind), ops["rank"])
    order = np.lexsort((ops["start"].to_numpy(), place))
    first = np.concatenate([[True], np.diff(place[order]) != 0])
    counts = np.diff(np.append(np.flatnonzero(first), len(order)))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order)) - np.repeat(np.flatnonzero(first), counts)
    most = np.zeros(int(kind.max(initial=0)) + 1, np.int64)
    np.maximum.at(most, kind[order[first]], counts)
    position += np.where(from_end, most[kind] - counts[place], 0)
    peer = numbered(pl.Series(class_), pl.Series(position), pl.Series(early))
    launches = np.full(ops.height, -1, np.int64)
    launched = np.flatnonzero(ops["launched_by"].is_not_null().to_numpy())[::-1]
    launches[ops["launched_by"].cast(pl.Int64).gather(launched).to_numpy()] = peer[launched]
    return numbered(pl.Series(np.where(launches >= 0, launches, peer)), ops["role"]), from_end


def _class_numbers(ops: pl.DataFrame) -> Ints:
    """A number for ops that are alike except for their place: role, name, shape, and arguments of a collective."""
    alike = [ops[name] for name in ("role", "name", "shape") if name in ops.columns]
    if "collective" not in ops.columns:
        return numbered(*alike)
    of_collective = np.full(ops.height, -1, np.int64)
    rows = np.flatnonzero(ops["collective"].is_not_null().to_numpy())
    table = ops.select("collective", "elements")[rows].with_columns(ELEMENTS_OF_ALL)
    of_collective[rows] = numbered(table["collective"], table["elements"])
    return numbered(*alike, pl.Series(of_collective))


def with_work(host: pl.DataFrame, pieces: pl.DataFrame, whats: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give host ops the columns `did` (rows of the second result), `did_s` (seconds) and `did_n` (in how many pieces).

    Work that is mostly of a reason in KINDS is of that kind. `host`, `pieces` (HOST_SCHEMA): by rank and thread. Time
    in which nothing was recorded is Python without a name.
    """
    if host.is_empty():
        return host, whats.clear()
    named = pl.concat(
        [whats, pl.DataFrame([(str(IdleReason.PYTHON), "", "", False, False)], WHAT_SCHEMA, orient="row")]
    )
    numbers, total_s = np.arange(named.height, dtype=np.int32), np.zeros(named.height)
    of_kind = [(named["reason"] == reason).to_numpy() for reason in KINDS]
    ranks, mostly = [*_ranks(host, pieces)], []
    for of_rank in ranks:
        row, did, did_s, _ = of_rank.divided(numbers, -np.inf)
        total_s += np.bincount(did, did_s, named.height)
        inside = [np.bincount(row[mask[did]], did_s[mask[did]], len(of_rank.begin)) for mask in of_kind]
        mostly.append((2 * np.array(inside) > of_rank.end - of_rank.begin) & (of_rank.end > of_rank.begin))
    host = host.drop("thread")
    for kind, mask in zip(KINDS.values(), np.concatenate(mostly, axis=1), strict=True):
        is_kind = pl.Series(mask) & (host["kind"] == "host")
        host = host.with_columns(kind=pl.when(is_kind).then(pl.lit(kind)).otherwise("kind"))
    longest, renumbered = _longest(named, total_s)
    return host.hstack(pl.concat(of_rank.lists(renumbered.astype(np.int32)) for of_rank in ranks)), longest


@dataclass(frozen=True, slots=True, eq=False)
class _OfRank:
    """The host ops of a rank: `begin`, `end`, seconds, and which `pieces` of its threads they may share, [ops]."""

    begin: Floats
    end: Floats
    first: Ints
    last: Ints
    pieces: pl.DataFrame

    def divided(self, number: Int32s, shortest_s: float) -> tuple[Ints, Int32s, Floats, Int32s]:
        """The parts of the ops, by op: the op, the number of what it did, seconds, and in how many pieces, [parts].

        `number`: of whats and of nothing.
        """
        ops, room = len(self.begin), int((self.last - self.first).sum()) + len(self.begin)
        bound, did_s = np.zeros(ops + 1, np.int64), np.empty(room)
        did, did_n = np.empty((2, room), np.int32)
        start, activity = self.pieces["start"].to_numpy(), self.pieces["what"].to_numpy()
        count = native.divide_work(
            self.begin, self.end, self.first, self.last, start, start + self.pieces["duration"].to_numpy(), activity,
            number, int(number.max()) + 1, shortest_s, bound, did, did_s, did_n,
        )  # fmt: skip
        return np.repeat(np.arange(ops), np.diff(bound)), did[:count], did_s[:count], did_n[:count]

    def lists(self, number: Int32s) -> pl.DataFrame:
        """The columns `did`, `did_s` and `did_n` of the ops."""
        divided = pl.DataFrame(dict(zip(("row", *_LISTS), self.divided(number, _SHORTEST_S), strict=True)))
        parts = divided.with_columns(pl.col("row").set_sorted()).group_by("row", maintain_order=True).agg(_LISTS)
        place = np.full(len(self.begin), -1)
        place[parts["row"].to_numpy()] = np.arange(parts.height)
        return parts.select(pl.col(_LISTS).gather(or_null(place)))


def _ranks(host: pl.DataFrame, pieces: pl.DataFrame) -> Iterator[_OfRank]:
    """Yield each rank of `host`."""
    for number in host["rank"].unique().sort().to_list():
        bounds = [np.searchsorted(table["rank"].to_numpy(), [number, number + 1]).tolist() for table in (host, pieces)]
        rank_ops, rank_pieces = (table[slice(*bound)] for table, bound in zip((host, pieces), bounds, strict=True))
        begin = rank_ops["start"].to_numpy()
        end, thread = begin + rank_ops["duration"].to_numpy(), rank_ops["thread"].to_numpy()
        start, of_piece = rank_pieces["start"].to_numpy(), rank_pieces["thread"].to_numpy()
        stop = start + rank_pieces["duration"].to_numpy()
        first, last = np.zeros((2, rank_ops.height), np.int64)
        for low, high in pairwise(np.flatnonzero(np.diff(of_piece, prepend=-1, append=-1)).tolist()):
            ops = np.flatnonzero(thread == of_piece[low])
            first[ops] = low + np.searchsorted(stop[low:high], begin[ops], side="right")
            last[ops] = np.maximum(first[ops], low + np.searchsorted(start[low:high], end[ops], side="left"))
        yield _OfRank(begin, end, first, last, rank_pieces)


def _longest(whats: pl.DataFrame, seconds: np.ndarray) -> tuple[pl.DataFrame, np.ndarray]:
    """What takes a share of the time worth naming, then a row for the rest of each reason, and the new row of each."""
    name = numbered(whats["reason"], whats["name"])
    is_long = (np.bincount(name, weights=seconds)[name] >= _SMALLEST_SHARE * seconds.sum()) & (seconds > 0)
    rest = whats.with_columns(name=pl.lit(""), where=pl.lit("")).filter(~is_long).unique("reason", maintain_order=True)
    new_row = np.cumsum(is_long) - 1
    of_rest = {reason: int(is_long.sum()) + number for number, reason in enumerate(rest["reason"])}
    others = np.array([of_rest.get(reason, 0) for reason in whats["reason"]])
    return pl.concat([whats.filter(is_long), rest]), np.where(is_long, new_row, others)


def host_ops(calls: pl.DataFrame, gpu: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """What each host thread did: a `host` op up to each call, and `synchronise` after those that waited for the GPU.

    `marks`: other events that show since when a rank's host was at work, `rank` and `start`.
    """
    times = _times_of_calls(calls, gpu, marks)
    start = times.start
    common = calls.select(
        "rank", "thread", "name", "phase", "action", "own", "recomputed", operator="inner", outer="operator",
        stream=name_numbers("thread", calls["thread"]), profiler_step="step", call=pl.Series(np.arange(len(start))),
    )  # fmt: skip
    waiting = common.with_columns(
        **_SYNCHRONISES, start=pl.Series(times.freed), duration=pl.Series(times.busy - times.freed),
        name=pl.lit("waiting for the GPU"), scope=pl.lit("device"), part=pl.lit(-1),
        resumed_by_call=pl.Series(times.resumed),
    ).filter(pl.Series(times.blocked))  # fmt: skip
    begin = np.where(times.blocked, times.busy, times.begun)
    waits_for_stream = pl.col("role") == str(CallRole.STREAM_WAIT)
    host = common.with_columns(
        calls.select(
            pl.when(waits_for_stream).then(pl.lit("stream-wait")).otherwise(pl.lit("host")).alias("role"),
            "waits_stream", "waits_for_stream", "recorded_at", in_collective="collective_call",
            call_s=pl.when(pl.col("waits") | pl.Series(times.freed_by >= 0)).then(0.0).otherwise("duration"),
        ),
        start=pl.Series(begin), duration=pl.Series(start - begin), kind=pl.lit("host"), part=pl.lit(0),
        recording_s=pl.Series(_recording_s(calls)),
        resumed_by_call=pl.Series(np.where(times.blocked, -1, times.resumed)),
    )  # fmt: skip
    scope = (
        pl.when(pl.col("name").cast(pl.String).str.contains(_OF_DEVICE))
        .then(pl.lit("device"))
        .otherwise(pl.lit("stream"))
    )
    synchronise = common.with_columns(
        **_SYNCHRONISES, start=pl.Series(times.done), duration=pl.Series(times.end - times.done),
        copied=pl.Series(np.maximum(times.copied, times.freed_by)), waits_for_stream=calls["waits_for_stream"],
        part=pl.lit(1),
        scope=pl.when(pl.Series(times.freed_by >= 0)).then(pl.lit(QUEUE)).otherwise(scope),
    ).filter(pl.Series(times.waits))  # fmt: skip
    tables = (table.cast({pl.String: pl.Categorical}) for table in (waiting, host, synchronise))
    all_ops = pl.concat(tables, how="diagonal")
    order = np.lexsort([all_ops[name].to_numpy() for name in ("part", "call", "thread", "rank")])
    return all_ops[order].drop("part")


def _recording_s(calls: pl.DataFrame) -> Floats:
    """What recording cost each thread from the call before to each call, seconds, [calls]."""
    before = pl.col("recorded_s").shift(1, fill_value=0.0).over("rank", "thread", order_by="start")
    return calls.select((pl.col("recorded_s") - before).fill_null(0.0).clip(0.0)).to_series().to_numpy()


def name_numbers(prefix: str, numbers: pl.Series) -> pl.Series:
    """The name of a thread or a stream, such as "stream 7"."""
    code = numbered(numbers)
    first = np.zeros(int(code.max(initial=-1)) + 1, np.int64)
    first[code] = np.arange(len(code))
    return pl.Series([f"{prefix} {number}" for number in numbers.gather(first).to_list()], dtype=pl.Categorical)[code]


@dataclass(frozen=True, slots=True, eq=False)
class _TimesOfCalls:
    """Times of calls, seconds, [calls], unless stated otherwise.

    `begun`: when the host work before a call began; `busy`: since when the thread was inside an operator. `waits`:
    which calls waited for the GPU; `done`: until when. `copied`: the copy that a call waited for, -1 for none;
    `freed_by`: the GPU op whose end made room in a full queue for what a call launched, -1 for none.
    `resumed`: the call of another thread that handed over, -1 for none. `blocked`: before which calls the thread waited
    for the GPU without a record of it; `freed`: until when.
    """

    start: Floats
    end: Floats
    begun: Floats
    busy: Floats
    waits: npt.NDArray[np.bool_]
    done: Floats
    copied: Ints
    freed_by: Ints
    resumed: Ints
    blocked: npt.NDArray[np.bool_]
    freed: Floats


def _times_of_calls(calls: pl.DataFrame, gpu: pl.DataFrame, marks: pl.DataFrame) -> _TimesOfCalls:
    """When host threads worked, and when they waited."""
    rank, thread = calls["rank"].to_numpy(), calls["thread"].to_numpy()
    start, end = calls["start"].to_numpy(), (calls["start"] + calls["duration"]).to_numpy()
    busy = np.minimum(calls["busy_since"].to_numpy(), start)
    copied = _copies_waited_for(calls, gpu)
    freed_by = np.where(copied >= 0, -1, _made_room(calls, gpu))
    waits = (calls["role"] == str(CallRole.SYNCHRONISE)).to_numpy() | (copied >= 0) | (freed_by >= 0)
    released = np.where(waits, end, start)
    order = np.lexsort((start, thread, rank))
    previous = np.full(len(start), -np.inf)
    same = (rank[order][1:] == rank[order][:-1]) & (thread[order][1:] == thread[order][:-1])
    previous[order[1:][same]] = released[order[:-1][same]]
    resumed = _handed_over(calls, previous, released)
    base = np.maximum(previous, np.append(released, -np.inf)[resumed])
    # A thread that no other thread handed over to begins with its first call; the first one of a rank, with its window.
    begun = np.where(np.isfinite(base), np.minimum(base, start), busy)
    for rank_number, mark in marks.group_by("rank").agg(pl.col("start").min()).iter_rows():
        rows = np.flatnonzero(rank == rank_number)
        if len(rows):
            first = rows[start[rows].argmin()]
            begun[first] = min(begun[first], mark)
    by_rank = gpu.group_by("rank")
    ended = {number: np.sort((ops["start"] + ops["duration"]).to_numpy()) for (number,), ops in by_rank}
    freed, before = _last_gpu_end(rank, busy, ended)
    _, earlier = _last_gpu_end(rank, begun, ended)
    blocked = busy - begun >= _LONG_GAP_S
    blocked[blocked] = waits_beyond_chance(
        *(values[blocked] for values in (busy - begun, busy - freed, before - earlier, _places(calls)))
    )
    done = np.maximum(start, _last_gpu_end(rank, end, ended)[0])
    return _TimesOfCalls(start, end, begun, busy, waits, done, copied, freed_by, resumed, blocked, freed)


def _copies_waited_for(calls: pl.DataFrame, gpu: pl.DataFrame) -> Ints:
    """The copy that each call launched and waited for, because it returned after the copy's end; -1 for none.

    A call that copies pageable memory hands it to the GPU piece by piece: it returns with the last piece on its way.
    """
    copies = gpu.with_row_index("row").filter(
        pl.col("launch").is_not_null() & pl.col("activity").eq(str(Activity.MEMCPY))
    )
    waited_for = np.full(calls.height, -1, np.int64)
    launch = copies["launch"].to_numpy()
    ended = (copies["start"] + copies["duration"]).to_numpy()
    returned = (calls["start"] + calls["duration"]).to_numpy()[launch]
    pageable = copies["name"].cast(pl.String).str.contains("Pageable").fill_null(value=False).to_numpy()
    waited = returned >= np.where(pageable, copies["start"].to_numpy(), ended)
    waited_for[launch[waited]] = copies["row"].to_numpy()[waited]
    return waited_for


def _made_room(calls: pl.DataFrame, gpu: pl.DataFrame) -> Ints:
    """The GPU op whose end made room in the full queue of its stream for what each call launched, -1 for none.

    Work that was launched before the recording is in the queue, too.
    """
    freed_by = np.full(calls.height, -1, np.int64)
    start, end = calls["start"].to_numpy(), (calls["start"] + calls["duration"]).to_numpy()
    launch = gpu["launch"].fill_null(-1).to_numpy()
    ended = (gpu["start"] + gpu["duration"]).to_numpy()
    stream = numbered(*(gpu[name] for name in ("rank", "device", "stream") if name in gpu.columns))
    for rows in np.split(np.argsort(stream, kind="stable"), np.flatnonzero(np.diff(np.sort(stream))) + 1):
        if len(rows) < _SHORTEST_QUEUE:
            continue
        call, last = np.unique(launch[rows[::-1]], return_index=True)  # a graph is in the queue until its last op ends
        launched = call >= 0
        call, last = call[launched], rows[::-1][last[launched]]
        call, last = (values[np.argsort(start[call], kind="stable")] for values in (call, last))
        ends = np.sort(np.concatenate([ended[last], ended[rows[launch[rows] < 0]]]))
        queued = np.arange(len(call)) + np.count_nonzero(launch[rows] < 0) - np.searchsorted(ends, end[call], "right")
        longest = int(queued.max(initial=0))
        if longest < _SHORTEST_QUEUE:
            continue
        full = call[(queued >= _FULL * longest) & (end[call] - start[call] >= _LONG_CALL_S)]
        in_order = rows[np.argsort(ended[rows], kind="stable")]
        freed = np.searchsorted(ended[in_order], end[full], "right") - 1
        freed_by[full[freed >= 0]] = in_order[freed[freed >= 0]]
    return freed_by


def _handed_over(calls: pl.DataFrame, previous: Floats, released: Floats) -> Ints:
    """The call of another thread of the rank after which a thread continued, -1 if it continued after its own.

    A thread that was inside no operator when another one called may have waited for it, as the main thread waits for
    the thread that computes gradients. The latest such call before the thread became busy counts.
    """
    rank, thread = calls["rank"].to_numpy(), calls["thread"].to_numpy()
    busy = np.minimum(calls["busy_since"].to_numpy(), calls["start"].to_numpy())
    handed_by = np.full(len(rank), -1, np.int64)
    for rank_number in np.unique(rank):
        rows = np.flatnonzero(rank == rank_number)
        threads = np.unique(thread[rows])
        best = np.full(len(rows), -np.inf)
        for other in threads:
            others_rows = rows[thread[rows] == other]
            others_rows = others_rows[np.argsort(released[others_rows], kind="stable")]
            latest = np.searchsorted(released[others_rows], busy[rows], side="right") - 1
            late = np.where((latest >= 0) & (thread[rows] != other), released[others_rows][latest], -np.inf)
            later = (late > previous[rows]) & (late > best)
            best[later] = late[later]
            handed_by[rows[later]] = others_rows[latest[later]]
    return handed_by


def _places(calls: pl.DataFrame) -> Ints:
    """A number for each place in a step's calls, the same in all steps and on all ranks.

    Ignores operators: times in whole microseconds do not show whether a call begins inside one.
    """
    thread = ["rank", "thread"]
    pair = ["name", "before"]
    placed = calls.with_columns(before=pl.col("name").shift(1).over(thread)).with_columns(
        position=pl.int_range(pl.len()).over([*thread, "step", *pair])
    )
    return numbered(*(placed[name] for name in (*pair, "position")))


def _last_gpu_end(rank: Ints, until: Floats, ended: Mapping[object, Floats]) -> tuple[Floats, Ints]:
    """When the last GPU op of the rank before each time ended, -inf for none, and how many had ended, [times].

    `ended`: when the GPU ops of each rank ended, ascending, seconds.
    """
    ends, counts = np.full(len(rank), -np.inf), np.zeros(len(rank), np.int64)
    for rank_number, its_ends in ended.items():
        rows = np.flatnonzero(rank == rank_number)
        counts[rows] = np.searchsorted(its_ends, until[rows], side="right")
        ends[rows] = np.append(-np.inf, its_ends).take(counts[rows])
    return ends, counts
