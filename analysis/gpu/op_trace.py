"""A GPU recording as an op trace: what ran on the GPUs, and the host work between the calls that launched it.

In: a recording, its matches and clock offsets. Out: an `OpTrace` with the rule `kineto`, which finds who waits for whom
(`analysis/graph/rules/kineto.py`). The whole recording is one step of the trace, for GPU work runs on across the steps
of a training loop; those are the label `profiler_step`.

Ops of a rank:

- `window`: from the start of the recording to the first event of the rank; profilers start at different times.
- on each host thread, `host` work up to each call, from the call before of that thread, or of the one that handed over
  to it, and `synchronise` for what is left of a synchronising call once the GPU has finished;
- GPU ops, on their streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.matching import ELEMENTS_OF_ALL, Matches
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.numeric.coincidence import waits_beyond_chance
from tracekit.gpu_activity import Activity, CallRole, KernelClass
from tracekit.gpu_recording import GpuRecording
from tracekit.op_trace import OpTrace

#: Of the ops that a rank launched, this share may begin before their launch, by noise: the rest shows how far the
#: clocks of host and GPU are apart.
_EARLY_SHARE = 0.01
#: Calls that wait for the whole device.
_OF_DEVICE = r"(?i)(Device|Ctx|Context)Synchronize|Alloc|Free"
#: A thread that did nothing that was recorded for this long may have waited for the GPU (seconds): not every call that
#: waits is recorded.
_LONG_GAP_S = 1e-3

_SYNCHRONISES = {"kind": pl.lit("synchronise"), "role": pl.lit("synchronise")}


@dataclass(frozen=True, slots=True, eq=False)
class GpuOpTrace:
    """`trace`: the ops; `skew_s`: how far the clock of each rank's host was ahead of its GPU's, [ranks]."""

    trace: OpTrace
    skew_s: dict[int, float]


def gpu_op_trace(recording: GpuRecording, matches: Matches, clocks: ClockOffsets) -> GpuOpTrace:
    """Lay a recording out as ops, by corrected clocks, from 0."""
    gpu, calls, pauses, steps, skew = _aligned(recording, clocks)
    host = _with_pauses(
        _host_ops(calls, gpu, pl.concat([one.select("rank", "start") for one in (pauses, steps)])), pauses
    )
    first = float(min(frame["start"].to_numpy().min() for frame in (gpu, host) if frame.height))
    window = _windows(gpu, host, first)
    gpu = gpu.with_columns(pl.col("start") - first)
    host = host.with_columns(pl.col("start") - first)
    before_host, before_gpu = window.height, window.height + host.height
    row_of_call = np.full(calls.height, -1, np.int64)
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
    ops = pl.concat(
        [frame.select(name for name in frame.columns if name in read) for frame in (window, host, gpu)], how="diagonal"
    )
    peer, from_end = _peers(ops, recording.step_spans)
    # Of what was cut off by the beginning or the end of windows or files, what every rank has.
    whole = ~from_end & _on_all_ranks(np.zeros(ops.height, np.int64), ops) & (not recording.cut)
    on_all = _on_all_ranks(peer, ops) | whole
    host_in_no_step = pl.col("role").ne("gpu") & pl.col("profiler_step").is_null()
    ops = ops.with_columns(
        peer=pl.Series(peer), comparable=~pl.col("role").eq("window") & ~host_in_no_step & pl.Series(on_all)
    )
    if recording.hosts:
        hosts = pl.Series([recording.hosts.get(rank) for rank in recording.ranks], dtype=pl.String)
        ops = ops.with_columns(host=hosts[np.searchsorted(recording.ranks, ops["rank"].to_numpy())])
    rank = ops["rank"].to_numpy()
    for label, of_rank in recording.coordinates.items():
        places = np.array([of_rank[one] for one in recording.ranks], np.int32)
        ops = ops.with_columns(pl.Series(label, places[np.searchsorted(recording.ranks, rank)]))
    columns = [name for name in COLUMNS if name in ops.columns and ops[name].null_count() < ops.height]
    trace = OpTrace(ops.select(*columns, *recording.coordinates), recording.name, recording.axes, rules=("kineto",))
    return GpuOpTrace(trace, skew)


#: Columns of the trace: those of every op trace, labels, and what the rule reads.
COLUMNS = (
    "rank", "start", "duration", "stream", "peer", "comparable", "rendezvous",
    "kind", "name", "phase", "host", "group", "profiler_step", "operator",
    "role", "communicates", "launched_by", "resumed_by", "in_collective", "scope", "copied",
    "waits_stream", "waits_for_stream", "recorded_at",
)  # fmt: skip


#: What says, beside name and role, which ops are the same.
_OF_PEERS = ("shape", "collective", "elements")


def _aligned(
    recording: GpuRecording, clocks: ClockOffsets
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, pl.DataFrame, dict[int, float]]:
    """GPU ops, calls, pauses and steps by corrected clocks; the host's are moved to the GPU's."""
    gpu, calls = recording.gpu_ops, recording.calls
    called = np.append(calls["start"].to_numpy(), np.nan)[gpu["launch"].fill_null(-1).to_numpy()]
    delay = gpu["start"].to_numpy() - called
    rank = gpu["rank"].to_numpy()
    skew = {}
    for one in recording.ranks:
        delays = delay[(rank == one) & np.isfinite(delay)]
        skew[one] = max(0.0, -float(np.quantile(delays, _EARLY_SHARE))) if len(delays) else 0.0
    ahead = dict(zip(clocks.ranks, clocks.ahead.tolist(), strict=True))

    def corrected(frame: pl.DataFrame, extra: dict[int, float]) -> pl.DataFrame:
        late = pl.col("rank").replace_strict(
            {one: ahead[one] + extra.get(one, 0.0) for one in recording.ranks}, return_dtype=pl.Float64
        )
        times = [name for name in ("start", "busy_since", "recorded_at") if name in frame.columns]
        return frame.with_columns((pl.col(name) - late) for name in times)

    communicates = pl.col("kernel_class") == str(KernelClass.COMMUNICATION)
    phases = pl.concat([calls["phase"], pl.Series([None], dtype=pl.String)])[gpu["launch"].fill_null(-1)]
    ops = corrected(gpu, {}).with_columns(
        stream=_named("stream", gpu["stream"]) if gpu["device"].n_unique() <= len(recording.ranks) else
        pl.format("gpu {} stream {}", "device", "stream"),
        kind=pl.col("kernel_class"),
        role=pl.lit("gpu"),
        communicates=communicates,
        phase=phases,
        profiler_step="step",
    )  # fmt: skip
    pauses, steps = corrected(recording.pauses, skew), corrected(recording.step_spans, skew)
    return ops.drop("step"), corrected(calls, skew), pauses, steps, skew


def _host_ops(calls: pl.DataFrame, gpu: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """What each host thread did: a `host` op up to each call, `synchronise` behind those that waited for the GPU.

    `marks`: what else says since when a rank's host was at work, `rank` and `start`.
    """
    times = _times_of_calls(calls, gpu, marks)
    start = times.start
    common = calls.select(
        "rank", "thread", "name", "phase", "operator",
        stream=_named("thread", calls["thread"]), profiler_step="step", call=pl.Series(np.arange(len(start))),
    )  # fmt: skip
    waiting = common.with_columns(
        **_SYNCHRONISES, start=pl.Series(times.freed), duration=pl.Series(times.busy - times.freed),
        name=pl.lit("waiting for the GPU"), scope=pl.lit("device"), part=pl.lit(-1),
        resumed_by_call=pl.Series(times.resumed),
    ).filter(pl.Series(times.blocked))  # fmt: skip
    begun = np.where(times.blocked, times.busy, times.begun)
    waits_for_stream = pl.col("role") == str(CallRole.STREAM_WAIT)
    host = common.with_columns(
        calls.select(
            pl.when(waits_for_stream).then(pl.lit("stream-wait")).otherwise(pl.lit("host")).alias("role"),
            "waits_stream", "waits_for_stream", "recorded_at", in_collective="collective_call",
        ),
        start=pl.Series(begun), duration=pl.Series(start - begun), kind=pl.lit("host"), part=pl.lit(0),
        resumed_by_call=pl.Series(np.where(times.blocked, -1, times.resumed)),
    )  # fmt: skip
    scope = pl.when(pl.col("name").str.contains(_OF_DEVICE)).then(pl.lit("device")).otherwise(pl.lit("stream"))
    synchronise = common.with_columns(
        **_SYNCHRONISES, start=pl.Series(times.done), duration=pl.Series(times.end - times.done),
        copied=pl.Series(times.copied), waits_for_stream=calls["waits_for_stream"], part=pl.lit(1),
    ).filter(pl.Series(times.waits)).with_columns(scope=scope)  # fmt: skip
    every = pl.concat([waiting, host, synchronise], how="diagonal")
    order = np.lexsort([every[name].to_numpy() for name in ("part", "call", "thread", "rank")])
    return every[order].drop("part")


def _named(prefix: str, numbers: pl.Series) -> pl.Series:
    """The number of a thread or a stream as its name, such as "stream 7"."""
    code = numbered(numbers)
    first = np.zeros(int(code.max(initial=-1)) + 1, np.int64)
    first[code] = np.arange(len(code))
    return pl.Series([f"{prefix} {number}" for number in numbers.gather(first).to_list()], dtype=pl.String)[code]


@dataclass(frozen=True, slots=True, eq=False)
class _TimesOfCalls:
    """Seconds, [calls], unless said.

    `begun`: when the host work up to a call began; `busy`: since when the thread was inside an operator. `waits`: which
    calls waited for the GPU, `done`: until when. `copied`: the copy that a call waited for, -1 for none. `resumed`: the
    call of another thread that handed over, -1 for none. `blocked`: before which calls the thread waited for the GPU in
    a way that was not recorded, `freed`: until when.
    """

    start: Floats
    end: Floats
    begun: Floats
    busy: Floats
    waits: npt.NDArray[np.bool_]
    done: Floats
    copied: Ints
    resumed: Ints
    blocked: npt.NDArray[np.bool_]
    freed: Floats


def _times_of_calls(calls: pl.DataFrame, gpu: pl.DataFrame, marks: pl.DataFrame) -> _TimesOfCalls:
    """When host threads worked, and when they waited."""
    rank, thread = calls["rank"].to_numpy(), calls["thread"].to_numpy()
    start, end = calls["start"].to_numpy(), (calls["start"] + calls["duration"]).to_numpy()
    busy = np.minimum(calls["busy_since"].to_numpy(), start)
    copied = _copies_waited_for(calls, gpu)
    waits = (calls["role"] == str(CallRole.SYNCHRONISE)).to_numpy() | (copied >= 0)
    released = np.where(waits, end, start)
    order = np.lexsort((start, thread, rank))
    previous = np.full(len(start), -np.inf)
    same = (rank[order][1:] == rank[order][:-1]) & (thread[order][1:] == thread[order][:-1])
    previous[order[1:][same]] = released[order[:-1][same]]
    resumed = _handed_over(calls, previous, released)
    base = np.maximum(previous, np.append(released, -np.inf)[resumed])
    # A thread that nobody handed over to begins with its first call; the first of a rank, with its window.
    begun = np.where(np.isfinite(base), np.minimum(base, start), busy)
    for one, mark in marks.group_by("rank").agg(pl.col("start").min()).iter_rows():
        mine = np.flatnonzero(rank == one)
        if len(mine):
            first = mine[start[mine].argmin()]
            begun[first] = min(begun[first], mark)
    freed, before = _last_gpu_end(rank, busy, gpu)
    _, earlier = _last_gpu_end(rank, begun, gpu)
    blocked = busy - begun >= _LONG_GAP_S
    blocked[blocked] = waits_beyond_chance(
        *(values[blocked] for values in (busy - begun, busy - freed, before - earlier, _places(calls)))
    )
    done = np.maximum(start, _last_gpu_end(rank, end, gpu)[0])
    return _TimesOfCalls(start, end, begun, busy, waits, done, copied, resumed, blocked, freed)


def _with_pauses(host: pl.DataFrame, pauses: pl.DataFrame) -> pl.DataFrame:
    """Host work that is mostly a pause gets the pause's kind: the data loader, a garbage collection.

    Both by rank and thread, in order of start.
    """
    rows = np.flatnonzero((host["kind"] == "host").to_numpy())
    if not pauses.height or not len(rows):
        return host.drop("thread")
    thread = numbered(pl.concat([host["thread"].gather(rows), pauses["thread"]]))
    rank = np.concatenate([host["rank"].to_numpy()[rows], pauses["rank"].to_numpy()]).astype(np.int64)
    lane = rank * (int(thread.max()) + 1) + thread
    start, length = host["start"].to_numpy()[rows], host["duration"].to_numpy()[rows]
    order = np.lexsort((start, lane[: len(rows)]))
    rows, start, end, mine = rows[order], start[order], (start + length)[order], lane[: len(rows)][order]
    begun = pauses["start"].to_numpy()
    over = begun + pauses["duration"].to_numpy()
    first, last = np.zeros(len(begun), np.int64), np.zeros(len(begun), np.int64)
    theirs = lane[len(rows) :]
    for one in np.unique(theirs):
        here, low, high = theirs == one, *np.searchsorted(mine, [one, one + 1])
        first[here] = low + np.searchsorted(end[low:high], begun[here], side="right")
        last[here] = low + np.searchsorted(start[low:high], over[here], side="left")
    count = np.maximum(last - first, 0)
    pause = np.repeat(np.arange(len(begun)), count)
    at = np.arange(len(pause)) - np.repeat(np.cumsum(count) - count - first, count)
    covered = np.minimum(end[at], over[pause]) - np.maximum(start[at], begun[pause])
    kinds = pauses["kind"].unique(maintain_order=True)
    of_kind = [
        np.bincount(at, weights=covered * (pauses["kind"] == kind).to_numpy()[pause], minlength=len(rows))
        for kind in kinds
    ]
    most = np.argmax(of_kind, axis=0)
    mostly = np.flatnonzero((2 * np.max(of_kind, axis=0) > end - start) & (end > start))
    kind = np.full(host.height, -1)
    kind[rows[mostly]] = most[mostly]
    named = pl.concat([kinds, pl.Series([None], dtype=pl.String)])[kind]
    return host.drop("thread").with_columns(kind=named.fill_null(host["kind"]))


def _copies_waited_for(calls: pl.DataFrame, gpu: pl.DataFrame) -> Ints:
    """The copy that each call launched and returned after, -1 for none: it waited for it."""
    copies = gpu.with_row_index("row").filter(
        pl.col("launch").is_not_null() & pl.col("activity").eq(str(Activity.MEMCPY))
    )
    found = np.full(calls.height, -1, np.int64)
    launch = copies["launch"].to_numpy()
    ended = (copies["start"] + copies["duration"]).to_numpy()
    returned = (calls["start"] + calls["duration"]).to_numpy()[launch]
    waited = returned >= ended
    found[launch[waited]] = copies["row"].to_numpy()[waited]
    return found


def _handed_over(calls: pl.DataFrame, previous: Floats, released: Floats) -> Ints:
    """The call of another thread of the rank after which a thread went on, -1 where it went on from its own.

    A thread that was inside no operator when another one called may have waited for it, as the main thread waits for
    the one that computes gradients: the latest such call before the thread became busy counts.
    """
    rank, thread = calls["rank"].to_numpy(), calls["thread"].to_numpy()
    busy = np.minimum(calls["busy_since"].to_numpy(), calls["start"].to_numpy())
    found = np.full(len(rank), -1, np.int64)
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        threads = np.unique(thread[mine])
        best = np.full(len(mine), -np.inf)
        for other in threads:
            theirs = mine[thread[mine] == other]
            theirs = theirs[np.argsort(released[theirs], kind="stable")]
            at = np.searchsorted(released[theirs], busy[mine], side="right") - 1
            late = np.where((at >= 0) & (thread[mine] != other), released[theirs][at], -np.inf)
            later = (late > previous[mine]) & (late > best)
            best[later] = late[later]
            found[mine[later]] = theirs[at[later]]
    return found


def _places(calls: pl.DataFrame) -> Ints:
    """A number for each place in a step's calls, the same in all steps and on all ranks.

    Operators say nothing here: times of whole microseconds leave open whether a call begins inside one.
    """
    thread = ["rank", "thread"]
    pair = ["name", "before"]
    placed = calls.with_columns(before=pl.col("name").shift(1).over(thread)).with_columns(
        position=pl.int_range(pl.len()).over([*thread, "step", *pair])
    )
    return numbered(*(placed[name] for name in (*pair, "position")))


def _last_gpu_end(rank: Ints, until: Floats, gpu: pl.DataFrame) -> tuple[Floats, Ints]:
    """When the last GPU op of the rank that had ended by a time did so, -inf for none, and how many had, [times]."""
    ends, counts = np.full(len(rank), -np.inf), np.zeros(len(rank), np.int64)
    of_gpu, all_ends = gpu["rank"].to_numpy(), (gpu["start"] + gpu["duration"]).to_numpy()
    for one in np.unique(rank):
        mine = rank == one
        ended = np.sort(all_ends[of_gpu == one])
        at = np.searchsorted(ended, until[mine], side="right") - 1
        ends[mine] = np.where(at >= 0, ended[at], -np.inf) if len(ended) else -np.inf
        counts[mine] = at + 1
    return ends, counts


def _windows(gpu: pl.DataFrame, host: pl.DataFrame, first: float) -> pl.DataFrame:
    """From the start of the recording to the first event of each rank."""
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
    """Rows by number, null for a number that is null or -1, or has none."""
    found = np.append(rows, -1)[numbers.fill_null(-1).to_numpy()]
    return pl.Series(found).set(pl.Series(found < 0), None)


def _rendezvous(gpu_ops: int, matches: Matches, clocks: ClockOffsets) -> pl.Series:
    """The instance of each GPU op, null for none. Whoever left a rooted collective before all had come met nobody."""
    start, end = matches.start - clocks.of(matches.rank), matches.end - clocks.of(matches.rank)
    last = np.full(matches.matched, -np.inf)
    np.maximum.at(last, matches.instance, start)
    meets = matches.synchronising[matches.instance] | (end >= last[matches.instance])
    meets &= np.bincount(matches.instance[meets], minlength=matches.matched)[matches.instance] > 1
    found = np.full(gpu_ops, -1, np.int64)
    found[matches.row[meets]] = matches.instance[meets]
    return pl.Series(found).set(pl.Series(found < 0), None)


def _on_all_ranks(peer: Ints, ops: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether every rank has an op of the same class in the same step, [ops]."""
    kind, rank = numbered(pl.Series(peer), ops["profiler_step"]), numbered(ops["rank"])
    ranks = int(rank.max(initial=-1)) + 1
    there = np.zeros((int(kind.max(initial=-1)) + 1, ranks), np.bool_)
    there[kind, rank] = True
    return np.asarray(there.all(axis=1))[kind]


def _peers(ops: pl.DataFrame, marked: pl.DataFrame) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """A number for each class of comparable ops: same name, shape and position among those of its step.

    Host work is comparable by what it launches. What was launched before a rank's first mark, STEP_SCHEMA, is counted
    from the end, for ranks' windows begin at different ops; the second result says which ops were.
    """
    what = _what_it_is(ops)
    early = ops["profiler_step"].is_null().to_numpy()
    step = ops["profiler_step"].fill_null(-1).cast(pl.Int64).to_numpy()
    first_mark = marked.group_by("rank").agg(pl.col("step").min().cast(pl.Int64))
    rank = ops["rank"].to_numpy()
    mark = np.full(int(rank.max(initial=0)) + 1, -1)
    mark[first_mark["rank"].to_numpy()] = first_mark["step"].to_numpy()
    from_end = early | (step < mark[rank])
    kind = numbered(pl.Series(what), pl.Series(step))
    place = numbered(pl.Series(kind), ops["rank"])
    order = np.lexsort((ops["start"].to_numpy(), place))
    first = np.concatenate([[True], np.diff(place[order]) != 0])
    counts = np.diff(np.append(np.flatnonzero(first), len(order)))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order)) - np.repeat(np.flatnonzero(first), counts)
    most = np.zeros(int(kind.max(initial=0)) + 1, np.int64)
    np.maximum.at(most, kind[order[first]], counts)
    position += np.where(from_end, most[kind] - counts[place], 0)
    peer = numbered(pl.Series(what), pl.Series(position), pl.Series(early))
    launches = np.full(ops.height, -1, np.int64)
    launched = np.flatnonzero(ops["launched_by"].is_not_null().to_numpy())[::-1]
    launches[ops["launched_by"].cast(pl.Int64).gather(launched).to_numpy()] = peer[launched]
    return numbered(pl.Series(np.where(launches >= 0, launches, peer)), ops["role"]), from_end


def _what_it_is(ops: pl.DataFrame) -> Ints:
    """A number for ops that are alike but for their place: role, name, shape, and what a collective says."""
    alike = [ops[name] for name in ("role", "name", "shape") if name in ops.columns]
    if "collective" not in ops.columns:
        return numbered(*alike)
    of_collective = np.full(ops.height, -1, np.int64)
    said = np.flatnonzero(ops["collective"].is_not_null().to_numpy())
    table = ops.select("collective", "elements")[said].with_columns(ELEMENTS_OF_ALL)
    of_collective[said] = numbered(table["collective"], table["elements"])
    return numbered(*alike, pl.Series(of_collective))
