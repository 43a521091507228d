"""The calls of a recording: when ops were launched, which calls wait for the GPU, and what looks like a checkpoint.

In: a recording; `host_time` says which call launched an op. Out: seconds of each op, `WaitingCalls`, the job without
waits, and the parts of `host_time` that save tensors.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.gpu.host_ops import QUEUE
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.whatif.interventions import Intervention, LessTime, QueuedAhead, Together
from tracekit.trace.gpu_activity import PROFILER_LINE

#: A launched op that nothing else keeps waiting begins within this time, seconds.
LATEST_ARRIVAL_S = 100e-6


@evidence(RecordingSubject)
def arrives_s(job: RecordingSubject) -> Floats:
    """How long after its launch each op began, seconds, [ops]; nan if it was not launched, or waited for something.

    Beyond `LATEST_ARRIVAL_S`, an op waited for something else.
    """
    ops = job.graph.ops
    since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[host_time(job).launched_by]
    return np.where(since_s <= LATEST_ARRIVAL_S, since_s, np.nan)


@evidence(RecordingSubject)
def launch_latency_s(job: RecordingSubject) -> Floats:
    """How much of its launch delay each op owes to a launch of its own, seconds, [ops].

    Ops of a CUDA graph have one launch for all, and follow each other as those do that were launched long before.
    """
    delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
    own = np.isfinite(arrives_s(job))
    in_queue = delay_s[~own & (host_time(job).launched_by >= 0)]
    usual_s = float(np.median(in_queue)) if len(in_queue) else 0.0
    return np.where(own, np.maximum(delay_s - usual_s, 0.0), 0.0)


@evidence(RecordingSubject)
def in_queue_s(job: RecordingSubject) -> float:
    """How long a GPU takes between an op and the next, if that was launched long before; seconds, 0 if none was."""
    ops, launched_by = job.graph.ops, host_time(job).launched_by
    since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[launched_by]
    delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
    queued = (launched_by >= 0) & np.isnan(arrives_s(job)) & (2 * delay_s < since_s)
    return float(np.median(delay_s[queued])) if queued.any() else 0.0


def without_waits(job: RecordingSubject, calls: Bools, kept_s: Floats | float = 0.0) -> Intervention:
    """Return the job in which these calls do not wait for the GPU, and take only `kept_s`, seconds, [ops]."""
    ops = job.graph.ops
    on_gpu = job.ops["role"].eq("gpu").to_numpy()
    less = LessTime(np.where(calls, np.maximum(job.pace.cost - kept_s, 0.0), 0.0))
    gone = calls[ops.after] & on_gpu[ops.before]
    ahead = QueuedAhead(arrives_s(job), host_time(job).launched_by)
    return Together((job.pace.without_edges(gone), less, ahead)) if gone.any() else less


#: Calls that allocate or free memory of the GPU, which wait for it, too.
_ALLOCATES = "(?i)Alloc|Free"


class WaitingCalls(Struct, frozen=True, eq=False):
    """`rows`: of the calls among the ops; `table`: `name`, `operator` and `own` (line of Python) of each;
    `waited_s`: how long each lasted, the wait for the GPU included, seconds.
    """

    rows: Ints
    table: pl.DataFrame
    waited_s: Floats
    ops: int

    @property
    def calls(self) -> Bools:
        """Which ops they are, [ops]."""
        calls = np.zeros(self.ops, np.bool_)
        calls[self.rows] = True
        return calls

    @property
    def names(self) -> list[str]:
        """Their names, each once."""
        return self.table["name"].unique(maintain_order=True).to_list()


def waiting_calls(job: RecordingSubject, *, allocates: bool) -> WaitingCalls:
    """Find the calls that wait, either those that allocate or free memory, or all others; none of the profiler.

    A launch that waits for a place in a full queue is none: the host is far ahead.
    """
    ops, graph = job.ops, job.graph.ops
    of_kind = ops["name"].cast(pl.String).str.contains(_ALLOCATES)
    waits = ops["role"].eq("synchronise") & (of_kind if allocates else ~of_kind)
    if "scope" in ops.columns:
        waits &= ops["scope"].cast(pl.String).ne_missing(QUEUE)
    if "own" in ops.columns:
        waits &= ~ops["own"].cast(pl.String).fill_null("").str.contains(f"^({PROFILER_LINE.pattern})")
    rows = np.flatnonzero(waits.fill_null(value=False).to_numpy())
    table = job.columns("name", "operator", "own")[rows]
    called = np.full(len(graph.start), np.inf)
    host = np.isin(graph.after, rows) & ops["role"].ne("gpu").to_numpy()[graph.before]
    np.minimum.at(called, graph.after[host], (graph.start + graph.duration)[graph.before[host]])
    since = np.minimum(called[rows], graph.start[rows])
    return WaitingCalls(rows, table, graph.start[rows] + graph.duration[rows] - since, ops.height)


#: A run of copies of so many tensors and bytes at least: values to log are smaller, results to keep are fewer.
_FEWEST_COPIES, _FEWEST_BYTES = 8, 1 << 20


def unnamed_saves(job: RecordingSubject) -> Bools:
    """Return which parts of `host_time` are from such a run of copies to the next launch, [parts]; none
    if stacks were recorded, which tell.
    """
    ops, graph, work = job.ops, job.graph.ops, host_time(job)
    saves = np.zeros(len(work.op), np.bool_)
    if job.gpu is None or job.gpu.stacks or "bytes" not in ops.columns:
        return saves
    launched = np.flatnonzero(work.launched_by >= 0)
    by = work.launched_by[launched]
    order = np.lexsort((launched, graph.start[by], work.lane[by]))
    launched, by = launched[order], by[order]
    copies = ops["name"].gather(launched).cast(pl.String).str.contains("DtoH", literal=True).to_numpy()
    moved = ops["bytes"].gather(launched).fill_null(0).to_numpy()
    first = np.flatnonzero(np.diff(copies, prepend=False) & copies)
    last = np.flatnonzero(np.diff(copies, append=False) & copies)
    begin_s, lane = graph.start[work.op], work.lane[work.op]
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        following = high + 1
        if high - low + 1 < _FEWEST_COPIES or moved[low : high + 1].sum() < _FEWEST_BYTES or following >= len(by):
            continue
        if (work.lane[by[low : following + 1]] == work.lane[by[low]]).all():
            since_s, until_s = graph.start[by[low]], graph.start[by[following]]
            saves |= (lane == work.lane[by[low]]) & (begin_s > since_s) & (begin_s <= until_s)
    return saves
