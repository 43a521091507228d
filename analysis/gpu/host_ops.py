"""What the host threads of a GPU recording did, as ops: work between calls, and calls that wait for the GPU.

In: the calls and GPU ops of a recording with aligned clocks. Out: frames of `host` and `synchronise` ops, which
`op_trace.py` combines with the GPU ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.numeric.arrays import Floats, Ints, numbered, waits_beyond_chance
from tracekit.trace.gpu_activity import Activity, CallRole

#: Calls that wait for the whole device.
_OF_DEVICE = r"(?i)(Device|Ctx|Context)Synchronize|Alloc|Free"
#: A thread without any recorded activity for this long, seconds, may have waited for the GPU: not every waiting call is
#: recorded.
_LONG_GAP_S = 1e-3
#: A call that launches and takes this long, seconds, waits for a free place if the queue of its stream is as long as it
#: ever gets, give or take a tenth. Queues hold about a thousand launches; short ones are none.
_LONG_CALL_S, _FULL, _SHORTEST_QUEUE = 100e-6, 0.9, 500
#: The scope of such waits.
QUEUE = "queue"

_SYNCHRONISES = {"kind": pl.lit("synchronise"), "role": pl.lit("synchronise")}


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
    begun = np.where(times.blocked, times.busy, times.begun)
    waits_for_stream = pl.col("role") == str(CallRole.STREAM_WAIT)
    host = common.with_columns(
        calls.select(
            pl.when(waits_for_stream).then(pl.lit("stream-wait")).otherwise(pl.lit("host")).alias("role"),
            "waits_stream", "waits_for_stream", "recorded_at", in_collective="collective_call",
            call_s=pl.when(pl.col("waits") | pl.Series(times.freed_by >= 0)).then(0.0).otherwise("duration"),
        ),
        start=pl.Series(begun), duration=pl.Series(start - begun), kind=pl.lit("host"), part=pl.lit(0),
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
    every = pl.concat((one.cast({pl.String: pl.Categorical}) for one in (waiting, host, synchronise)), how="diagonal")
    order = np.lexsort([every[name].to_numpy() for name in ("part", "call", "thread", "rank")])
    return every[order].drop("part")


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
    ended = {one: np.sort((mine["start"] + mine["duration"]).to_numpy()) for (one,), mine in gpu.group_by("rank")}
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
        own = call >= 0
        call, last = call[own], rows[::-1][last[own]]
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
            theirs = rows[thread[rows] == other]
            theirs = theirs[np.argsort(released[theirs], kind="stable")]
            latest = np.searchsorted(released[theirs], busy[rows], side="right") - 1
            late = np.where((latest >= 0) & (thread[rows] != other), released[theirs][latest], -np.inf)
            later = (late > previous[rows]) & (late > best)
            best[later] = late[later]
            handed_by[rows[later]] = theirs[latest[later]]
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
