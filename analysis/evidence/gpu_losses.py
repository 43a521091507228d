"""What each kind of loss costs a job of any graph, what hosts did while GPUs idled, and when they launched ops.

In: a job of any graph. Out: seconds by kind of loss and of what hosts did, as recorded and without the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribution import VERDICT, Parts
from tracekit.analysis.evidence.graph_subject import (
    GraphSubject,
    RecordingSubject,
    at_pace,
    culprit_of,
    in_production_s,
    profiler_s,
    uneven_experts,
    unknown_loads,
)
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.gpu.op_trace import QUEUE
from tracekit.analysis.gpu.pace import exposed_s
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, numbered
from tracekit.analysis.whatif.interventions import Intervention, LessTime, QueuedAhead, Together
from tracekit.report.finding import LossKind
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import NOT_THE_HOST, PROFILER_LINE, IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import HostActivity
    from tracekit.report.hardware import GpuTimes


_CALLS = (IdleReason.RUNTIME_CALL, IdleReason.ALLOCATION)
#: Work that may take longer the first time; that of Python is imports, or the profiler's.
_WARMS = (*_CALLS, IdleReason.OPERATOR)


class HostTimeThresholds(Struct, frozen=True):
    """What host time of a recording is unusual. `one_gpu`: the section of RESULTS.md on traces with injected losses."""

    #: A call that takes this many times as long as usual ones does something that they do not. Benchmark `one-gpu`.
    first_call: int = 10
    #: An operator that takes longer than this each time does more than dispatch, seconds. Benchmark `one-gpu`.
    dispatch_s: float = 1e-3
    #: A launched op that nothing else keeps waiting begins within this time, seconds. Benchmark `one-gpu`.
    arrival_s: float = 100e-6
    #: A save is a run of copies of so many tensors ... Chosen: values to log are fewer.
    copies: int = 8
    #: ... and bytes at least. Chosen: values to log are smaller, results to keep are fewer.
    bytes: int = 1 << 20


HOST_TIME = HostTimeThresholds()


@evidence(RecordingSubject, otherwise=0.0)
def exposed_communication_s(job: RecordingSubject) -> float:
    """What a recording would save if transfers took no time once all ranks have arrived, seconds; 0 for other jobs."""
    return exposed_s(job.pace, job.ops)


@evidence(GraphSubject)
def named_s(job: GraphSubject) -> float:
    """What the rank that stands out and uneven experts cost, seconds; 0 if there are none."""
    uneven, late = uneven_experts(job), (unknown_loads(job), culprit_of(job))
    uneven_s = 0.0 if uneven is None else uneven.saved_s * job.steps_in_whole
    return uneven_s + sum(rank.saved_s for rank in late if rank is not None)


@evidence(GraphSubject)
def parts_of_s(job: GraphSubject) -> Parts:
    """The parts of S, seconds: the rank that stands out, noise, and the rest. A single rank cannot straggle."""
    explained_s = named_s(job) if job.shows(Fact.RANKS) else job.noise.lost_s
    return structs.replace(job.noise, explained_s=explained_s)


@evidence(GraphSubject)
def losses_s(job: GraphSubject) -> Mapping[LossKind, float]:
    """What each kind of loss costs, seconds. All ranks lose what the busiest GPU is idle."""
    exposed_s = max(exposed_communication_s(job), 0.0)
    of_single_rank = _idle_by_loss(job)
    if of_single_rank is not None:
        return {LossKind.COMMUNICATION: exposed_s, **of_single_rank}
    straggling_s = named_s(job) + parts_of_s(job).unexplained_s * parts_of_s(job).headline
    return {
        LossKind.STRAGGLER: max(straggling_s, job.straggling_s),
        LossKind.HOST: job.idle_s,
        LossKind.COMMUNICATION: exposed_s,
    }


@evidence(RecordingSubject)
def gpu_alone(job: RecordingSubject) -> GpuTimes | None:
    """What the GPU of the only rank did; None if there are several ranks."""
    return None if job.shows(Fact.RANKS) else job.gpu


@evidence(RecordingSubject)
def _idle_by_loss(job: RecordingSubject) -> dict[LossKind, float] | None:
    """Time in which the GPU of a single rank does nothing, also before its first op, by kind of loss; seconds."""
    gpu = gpu_alone(job)
    if gpu is None:
        return None
    by_loss = dict.fromkeys((LossKind.HOST, LossKind.INPUT, LossKind.IDLE), 0.0)
    by_reason = [*((idle.reason, idle.seconds) for idle in gpu.idle_by_reason), *gpu.before_first.by_reason.items()]
    for reason, spent_s in by_reason:
        unseen = LossKind.IDLE if reason in NOT_THE_HOST else LossKind.HOST
        by_loss[LossKind.INPUT if reason == str(IdleReason.LOADER) else unseen] += spent_s
    by_loss[LossKind.IDLE] += unseen_head_s(job)
    return by_loss


def leads(job: GraphSubject, kind: LossKind) -> bool:
    """Return whether this kind of loss costs most, as recorded or without the profiler."""
    recorded = _costliest(job, losses_s(job), job.recorded_s)
    return kind in {recorded, _costliest(job, lost_in_production_s(job), in_production_s(job))}


def _costliest(job: GraphSubject, lost_s: Mapping[LossKind, float], whole_s: float) -> LossKind:
    """The kind of loss that costs most: one rank, or what all ranks lose together."""
    kind = max(lost_s, key=lambda loss_kind: lost_s[loss_kind])
    if lost_s[kind] >= VERDICT.headline_share * (whole_s or 1.0):
        return kind
    return LossKind.BALANCED if culprit_of(job) is None else LossKind.MINOR


@evidence(GraphSubject)
def lost_in_production_s(job: GraphSubject) -> Mapping[LossKind, float]:
    """What each kind of loss costs of `in_production_s`, seconds: host time without the profiler's, a straggler by what
    the pace of its peers would save, idle time without what lies before the step.
    """
    lost_s = dict(losses_s(job))
    culprit = culprit_of(job)
    if culprit is not None and (saves := job.saves_step((at_pace(job, culprit.rank),))) is not None:
        rest_s = max(lost_s[LossKind.STRAGGLER] - culprit.saved_s, 0.0)
        lost_s[LossKind.STRAGGLER] = min(lost_s[LossKind.STRAGGLER], rest_s + saves.value * job.steps_in_whole)
    lost_s[LossKind.HOST] = max(lost_s[LossKind.HOST] - profiler_s(job), 0.0)
    if LossKind.IDLE in lost_s and job.unprofiled_step is not None:
        lost_s[LossKind.IDLE] = max(lost_s[LossKind.IDLE] - unseen_head_s(job), 0.0)
    return lost_s


@evidence(GraphSubject)
def discrepancy(job: GraphSubject) -> float:
    """The share of time that launch delays add, T(recorded) / T(original) - 1.

    Without time in which the GPU of a rank alone idles, and its host is not late: a finding says so.
    """
    return (job.recorded_s - unseen_s(job)) / (float(job.times.original.mean()) or float("nan")) - 1


@evidence(RecordingSubject, otherwise=0.0)
def unseen_s(job: RecordingSubject) -> float:
    """How much of the time of a single rank goes to work that the recording does not show, by a finding, seconds."""
    gpu = gpu_alone(job)
    if gpu is None:
        return 0.0
    idle_s = sum(idle.seconds for idle in gpu.idle_by_reason if idle.reason in NOT_THE_HOST)
    gone_s = max(unseen_head_s(job), _backlog_s(job)) + idle_s
    return max(min(gone_s, job.recorded_s - float(job.times.original.mean())), 0.0)


@evidence(RecordingSubject)
def _backlog_s(job: RecordingSubject) -> float:
    """How long streams still ran work that was launched before the recording and is not in it, seconds."""
    first = job.ops.select(pl.struct("rank", "stream").is_first_distinct() & pl.col("role").eq("gpu"))
    before = first.to_series().fill_null(value=False).to_numpy() & (host_time(job).launched_by < 0)
    return float(job.replay.delay_of_ops[before].max(initial=0.0))


@evidence(RecordingSubject, otherwise=0.0)
def unseen_head_s(job: RecordingSubject) -> float:
    """How long the GPU of a single rank ran work from before the recording, seconds.

    That is from when the call returned that launched its first op, or from the beginning of a recording without
    that call, to when the op began.
    """
    gpu = gpu_alone(job)
    if gpu is None or not gpu.before_first.seconds:
        return 0.0
    on_gpu = job.ops["role"].eq("gpu").fill_null(value=False).to_numpy()
    first = int(np.where(on_gpu, job.graph.ops.start, np.inf).argmin())
    call_s = np.append(host_time(job).called_s, 0.0)[host_time(job).launched_by[first]]
    head = gpu.before_first
    return max(head.seconds - sum(head.by_reason.values()) - float(call_s), 0.0)


@evidence(RecordingSubject, otherwise=False)
def idles(job: RecordingSubject) -> bool:
    """Whether to ask what the hosts do while GPUs idle: of a rank alone, or if nothing costs several ranks more."""
    return not job.shows(Fact.RANKS) or leads(job, LossKind.HOST)


@evidence(RecordingSubject)
def idle_gpu(job: RecordingSubject) -> GpuTimes | None:
    """The times of the GPU to explain: of one rank, or of the busiest of several that all idle most."""
    return job.gpu if idles(job) else None


def of_job(activity: HostActivity) -> bool:
    """Whether the job does this, rather than the profiler."""
    return PROFILER_LINE.match(activity.where or activity.name) is None


class HostPart(Struct, frozen=True, eq=False):
    """Host work of one name. `parts`: positions in the arrays of `HostTime`; `seconds`, `count`: of them all."""

    name: str
    where: str
    names: tuple[str, ...]
    parts: Ints
    seconds: float
    count: int


class HostTime(Struct, frozen=True, eq=False, dict=True):
    """Host work in parts: op, activity (position in `activities`), seconds and number of pieces; [parts], by op.

    `called_s`: how long the call at the end of each op lasted, seconds, [ops]; 0 for none, or if it waits for the GPU.
    `launched_by`: the op whose call launched each op, -1 for none, [ops]. `lane`: the thread or stream of each op,
    [ops]. `launching`: names of the calls that launch.
    """

    activities: Sequence[HostActivity]
    op: Int32s
    activity: Int32s
    seconds: Floats
    called_s: Floats
    launched_by: Ints
    pieces: Int32s
    lane: Ints
    launching: frozenset[str] = frozenset()

    @classmethod
    def of(cls, ops: pl.DataFrame, activities: Sequence[HostActivity]) -> HostTime:
        """Read the columns of the op trace of a recording; of one without them, nothing is known."""
        count = ops.height
        if not {"did", "did_s", "did_n", "call_s", "stream"} <= set(ops.columns):
            empty = np.zeros(0, np.int32)
            return cls(
                (), empty, empty, np.zeros(0), np.zeros(count), np.full(count, -1), empty, np.zeros(count, np.int64)
            )
        parts = ops.select("did", "did_s", "did_n").with_row_index("op").drop_nulls().explode("did", "did_s", "did_n")
        launched = ops["launched_by"] if "launched_by" in ops.columns else pl.Series([-1] * count)
        return cls(
            activities,
            parts["op"].cast(pl.Int32).to_numpy(),
            parts["did"].cast(pl.Int32).to_numpy(),
            parts["did_s"].to_numpy(),
            ops["call_s"].fill_null(0.0).to_numpy(),
            launched.fill_null(-1).to_numpy().astype(np.int64),
            parts["did_n"].cast(pl.Int32).to_numpy(),
            numbered(ops["rank"], ops["stream"].fill_null("")),
            frozenset(ops["name"].gather(launched.drop_nulls().cast(pl.Int64)).unique().to_list()),
        )

    def mask(self, *reasons: IdleReason, where: Callable[[HostActivity], bool] | None = None) -> Bools:
        """Return which parts are of these reasons, and of what `where` accepts, [parts]; none of the profiler."""
        wanted = np.array(
            [of_job(row) and row.reason in reasons and (where is None or where(row)) for row in self.activities],
            np.bool_,
        )
        return wanted[self.activity] if len(wanted) else np.zeros(0, np.bool_)

    def by_name(
        self,
        *reasons: IdleReason,
        key: Callable[[HostActivity], str] = lambda activity: activity.name,
        among: Bools | None = None,
    ) -> Iterable[HostPart]:
        """Yield the host work of these reasons by `key`, longest first; without work that has no key or is the
        profiler's.

        `among`: only of these parts, [parts].
        """
        keys = [key(row) if row.reason in reasons and of_job(row) else "" for row in self.activities]
        distinct = sorted(set(keys) - {""})
        numbers = {distinct_key: number for number, distinct_key in enumerate(distinct)}
        number = np.array([numbers.get(activity_key, -1) for activity_key in keys], np.int64)
        chosen = (number >= 0)[self.activity] if len(number) else np.zeros(0, np.bool_)
        parts = np.flatnonzero(chosen if among is None else chosen & among)
        activity, seconds = self.activity[parts], self.seconds[parts]
        of_part = number[activity] if len(number) else activity
        totals = np.bincount(of_part, seconds, len(distinct))
        pieces = np.bincount(of_part, self.pieces[parts], len(distinct))
        by_activity = np.bincount(activity, seconds, len(self.activities))
        for index in np.argsort(-totals, kind="stable").tolist():
            if not totals[index]:
                return
            order = sorted(np.flatnonzero(number == index).tolist(), key=lambda row: -by_activity[row])
            alike = [self.activities[row] for row in order]
            named = dict.fromkeys(activity.name for activity in alike if activity.name)
            lines = [activity.where for activity in alike if activity.where]
            yield HostPart(
                next(iter(named), distinct[index]), lines[0] if lines else "", tuple(named),
                parts[of_part == index], float(totals[index]), int(pieces[index]),
            )  # fmt: skip

    def happens_once(self, name: str) -> bool:
        """Return whether only one part of host work has this name."""
        named = [number for number, activity in enumerate(self.activities) if activity.name == name]
        return int(np.isin(self.activity, named).sum()) == 1

    @cached_property
    def first_excess_s(self) -> Floats:
        """How much longer the first of a kind takes than the median of the others, seconds, [parts].

        Calls that launch count as `first_call_excess_s`. Other calls of the runtime are of one kind by name, operators
        by all that is known of them. The first counts only if it is the longest; a call without others, if it takes
        `HOST_TIME.first_call` times as long as usual calls.
        """
        called = np.array([activity.reason in _CALLS for activity in self.activities], np.bool_)
        calls = [activity.name.partition(" in ")[0] for activity in self.activities]
        warms = [
            activity.reason in _WARMS and call not in {"", *self.launching}
            for call, activity in zip(calls, self.activities, strict=True)
        ]
        keys = [
            call if activity.reason in _CALLS else (activity.name, activity.where)
            for call, activity in zip(calls, self.activities, strict=True)
        ]
        distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        excess_s = np.zeros(len(self.op))
        if not len(excess_s):
            return excess_s
        usual = float(np.median(self.seconds[called[self.activity]])) if called[self.activity].any() else np.inf
        kind = np.array([distinct[key] for key in keys], np.int64)[self.activity]
        order = np.argsort(kind, kind="stable")
        for alike in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
            first, others = alike[0], self.seconds[alike[1:]]
            excess = self.seconds[first] - (np.median(others) if len(others) else usual)
            longest = excess > 0 and self.seconds[first] > others.max(initial=0.0)
            tells = len(others) or (called[self.activity[first]] and excess > HOST_TIME.first_call * usual)
            if longest and tells and warms[self.activity[first]]:
                excess_s[first] = excess
        return excess_s

    @property
    def steady_s(self) -> Floats:
        """How long each part takes, but for what is warm-up (`first_excess_s`), seconds, [parts]."""
        return self.seconds - self.first_excess_s

    def first_call_excess_s(self, launched: Ints) -> Floats:
        """As `first_excess_s`, for the call that ends each op, [ops]; `launched`: the number of its kernel."""
        rows = np.flatnonzero(launched >= 0)
        excess_s = np.zeros(len(self.called_s))
        if len(rows):
            usual = float(np.median(self.called_s[rows]))
            _, first = np.unique(launched[rows], return_index=True)
            excess = self.called_s[rows[first]] - usual
            excess_s[rows[first]] = np.where(excess > HOST_TIME.first_call * usual, excess, 0.0)
        return excess_s

    def faster_calls(self, excess_s: Floats) -> LessTime:
        """Return the job in which the call that ends each op takes so much less, seconds, [ops].

        What it launched begins earlier, and so does the next op of its thread, which begins with the call.
        """
        saved_s = np.zeros(len(excess_s))
        for row in np.flatnonzero(excess_s).tolist():
            after = np.flatnonzero(self.lane[row + 1 :] == self.lane[row])
            if len(after):
                saved_s[row + 1 + after[0]] += excess_s[row]
        return LessTime(saved_s, np.append(excess_s, 0.0)[self.launched_by])

    def less_s(self, seconds: Floats) -> LessTime:
        """Return the job in which each part of host work takes so much less, seconds, [parts]."""
        return LessTime(np.bincount(self.op, seconds, len(self.called_s)).astype(np.float64))

    def less(self, parts: Ints | Bools) -> LessTime:
        """Return the job without these parts of host work."""
        removed_s = np.zeros(len(self.op))
        removed_s[parts] = self.seconds[parts]
        return self.less_s(removed_s)


@evidence(RecordingSubject)
def host_time(job: RecordingSubject) -> HostTime:
    """What the host threads of a recording spend their time on."""
    return HostTime.of(job.ops, job.summary.whats)


@evidence(RecordingSubject)
def in_head(job: RecordingSubject) -> Bools:
    """Which parts of `host_time` are before the first op of the GPU of their rank, [parts]."""
    ops, part = job.graph.ops, host_time(job).op
    on_gpu = job.ops["role"].eq("gpu").to_numpy()
    first_s = np.full(int(ops.rank.max(initial=0)) + 1, np.inf)
    np.minimum.at(first_s, ops.rank[on_gpu], ops.start[on_gpu])
    return np.asarray((ops.start + ops.duration)[part] <= first_s[ops.rank[part]])


@evidence(RecordingSubject)
def computes_on_host(job: RecordingSubject) -> Bools:
    """Which parts of `host_time` are of operators that take long each time and launch no kernel, [parts].

    The dispatch of an operator that launches kernels is none of these, however long it takes.
    """
    work = host_time(job)
    long = work.mask(IdleReason.OPERATOR, where=lambda activity: not activity.launches) & ~in_head(job)
    return np.asarray(long & (work.steady_s >= HOST_TIME.dispatch_s * work.pieces))


@evidence(RecordingSubject)
def arrives_s(job: RecordingSubject) -> Floats:
    """How long after its launch each op began, seconds, [ops]; nan if it was not launched, or waited for something.

    Beyond `HOST_TIME.arrival_s`, an op waited for something else.
    """
    ops = job.graph.ops
    since_s = ops.start - np.append(ops.start + ops.duration, np.nan)[host_time(job).launched_by]
    return np.where(since_s <= HOST_TIME.arrival_s, since_s, np.nan)


@evidence(RecordingSubject)
def launch_latency_s(job: RecordingSubject) -> Floats:
    """How much of its launch delay each op owes to a launch of its own, seconds, [ops].

    Ops of a CUDA graph have one launch for all, and follow each other as those do that were launched long before.
    """
    delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
    launched = np.isfinite(arrives_s(job))
    in_queue = delay_s[~launched & (host_time(job).launched_by >= 0)]
    usual_s = float(np.median(in_queue)) if len(in_queue) else 0.0
    return np.where(launched, np.maximum(delay_s - usual_s, 0.0), 0.0)


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
    without_calls = LessTime(np.where(calls, np.maximum(job.pace.cost - kept_s, 0.0), 0.0))
    removed = calls[ops.after] & on_gpu[ops.before]
    ahead = QueuedAhead(arrives_s(job), host_time(job).launched_by)
    return Together((job.pace.without_edges(removed), without_calls, ahead)) if removed.any() else without_calls


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


def unnamed_saves(job: RecordingSubject) -> Bools:
    """Return which parts of `host_time` lie between a long run of copies to the host and the next launch, as in a
    checkpoint, [parts]. None do if stacks were recorded, because they name checkpoints.
    """
    ops, graph, work = job.ops, job.graph.ops, host_time(job)
    saves = np.zeros(len(work.op), np.bool_)
    if job.gpu is None or job.gpu.stacks or "bytes" not in ops.columns:
        return saves
    launched = np.flatnonzero(work.launched_by >= 0)
    caller = work.launched_by[launched]
    order = np.lexsort((launched, graph.start[caller], work.lane[caller]))
    launched, caller = launched[order], caller[order]
    copies = ops["name"].gather(launched).cast(pl.String).str.contains("DtoH", literal=True).to_numpy()
    moved = ops["bytes"].gather(launched).fill_null(0).to_numpy()
    first = np.flatnonzero(np.diff(copies, prepend=False) & copies)
    last = np.flatnonzero(np.diff(copies, append=False) & copies)
    begin_s, lane = graph.start[work.op], work.lane[work.op]
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        following = high + 1
        count, size = high - low + 1, moved[low : high + 1].sum()
        if count < HOST_TIME.copies or size < HOST_TIME.bytes or following >= len(caller):
            continue
        if (work.lane[caller[low : following + 1]] == work.lane[caller[low]]).all():
            since_s, until_s = graph.start[caller[low]], graph.start[caller[following]]
            saves |= (lane == work.lane[caller[low]]) & (begin_s > since_s) & (begin_s <= until_s)
    return saves
