"""What the host threads of a recording spend their time on, and what taking some of it away would change.

In: the op trace of a recording of GPUs. Out: `HostTime`, which detectors read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.whatif.interventions import LessTime
from tracekit.trace.gpu_activity import PROFILER_LINE, IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import HostWhat


_CALLS = (IdleReason.RUNTIME_CALL, IdleReason.ALLOCATION)
#: A call that takes this many times as long as usual ones does something that they do not.
_MUCH = 10
#: Work that may take longer the first time; that of Python is imports, or the profiler's.
_WARMS = (*_CALLS, IdleReason.OPERATOR)


def of_job(what: HostWhat) -> bool:
    """Whether the job does this, rather than the profiler."""
    return PROFILER_LINE.match(what.where or what.name) is None


#: An operator that takes longer than this each time does more than dispatch, seconds.
LONGEST_DISPATCH_S = 1e-3


class HostPart(Struct, frozen=True, eq=False):
    """Host work of one name. `parts`: positions in the arrays of `HostTime`; `seconds`, `count`: of them all."""

    name: str
    where: str
    names: tuple[str, ...]
    parts: Ints
    seconds: float
    count: int


class HostTime(Struct, frozen=True, eq=False, dict=True):
    """The parts of host ops: their op, what it is (position in `whats`), seconds, in how many pieces; [parts], by op.

    `called_s`: how long the call at the end of each op lasted, seconds, [ops]; 0 for none, or if it waits for the GPU.
    `launched_by`: the op whose call launched each op, -1 for none, [ops]. `lane`: the thread or stream of each op,
    [ops]. `launching`: names of the calls that launch.
    """

    whats: Sequence[HostWhat]
    op: Int32s
    what: Int32s
    seconds: Floats
    called_s: Floats
    launched_by: Ints
    pieces: Int32s
    lane: Ints
    launching: frozenset[str] = frozenset()

    @classmethod
    def of(cls, ops: pl.DataFrame, whats: Sequence[HostWhat]) -> HostTime:
        """Read the columns of the op trace of a recording; of one without them, nothing is known."""
        count = ops.height
        if not {"did", "did_s", "did_n", "call_s", "stream"} <= set(ops.columns):
            none = np.zeros(0, np.int32)
            return cls(
                (), none, none, np.zeros(0), np.zeros(count), np.full(count, -1), none, np.zeros(count, np.int64)
            )
        parts = ops.select("did", "did_s", "did_n").with_row_index("op").drop_nulls().explode("did", "did_s", "did_n")
        launched = ops["launched_by"] if "launched_by" in ops.columns else pl.Series([-1] * count)
        return cls(
            whats,
            parts["op"].cast(pl.Int32).to_numpy(),
            parts["did"].cast(pl.Int32).to_numpy(),
            parts["did_s"].to_numpy(),
            ops["call_s"].fill_null(0.0).to_numpy(),
            launched.fill_null(-1).to_numpy().astype(np.int64),
            parts["did_n"].cast(pl.Int32).to_numpy(),
            numbered(ops["rank"], ops["stream"].fill_null("")),
            frozenset(ops["name"].gather(launched.drop_nulls().cast(pl.Int64)).unique().to_list()),
        )

    @cached_property
    def reason(self) -> tuple[str, ...]:
        """The reason of each of `whats`."""
        return tuple(what.reason for what in self.whats)

    def mask(self, *reasons: IdleReason, where: Callable[[HostWhat], bool] | None = None) -> Bools:
        """Return which parts are of these reasons, and of what `where` accepts, [parts]; none of the profiler."""
        wanted = np.array(
            [of_job(what) and what.reason in reasons and (where is None or where(what)) for what in self.whats],
            np.bool_,
        )
        return wanted[self.what] if len(wanted) else np.zeros(0, np.bool_)

    def by_name(
        self,
        *reasons: IdleReason,
        key: Callable[[HostWhat], str] = lambda what: what.name,
        among: Bools | None = None,
    ) -> Iterable[HostPart]:
        """Yield the host work of these reasons by `key`, what takes longest first; without what has no key, or is the
        profiler's.

        `among`: only of these parts, [parts].
        """
        keys = [key(what) if what.reason in reasons and of_job(what) else "" for what in self.whats]
        distinct = sorted(set(keys) - {""})
        numbers = {one: number for number, one in enumerate(distinct)}
        number = np.array([numbers.get(one, -1) for one in keys], np.int64)
        chosen = (number >= 0)[self.what] if len(number) else np.zeros(0, np.bool_)
        parts = np.flatnonzero(chosen if among is None else chosen & among)
        what, seconds = self.what[parts], self.seconds[parts]
        of_part = number[what] if len(number) else what
        totals = np.bincount(of_part, seconds, len(distinct))
        pieces = np.bincount(of_part, self.pieces[parts], len(distinct))
        by_what = np.bincount(what, seconds, len(self.whats))
        for index in np.argsort(-totals, kind="stable").tolist():
            if not totals[index]:
                return
            of_name = sorted(np.flatnonzero(number == index).tolist(), key=lambda what: -by_what[what])
            named = dict.fromkeys(self.whats[what].name for what in of_name if self.whats[what].name)
            lines = [self.whats[what].where for what in of_name if self.whats[what].where]
            yield HostPart(
                next(iter(named), distinct[index]), lines[0] if lines else "", tuple(named),
                parts[of_part == index], float(totals[index]), int(pieces[index]),
            )  # fmt: skip

    def happens_once(self, name: str) -> bool:
        """Return whether only one part of host work has this name."""
        named = [at for at, what in enumerate(self.whats) if what.name == name]
        return int(np.isin(self.what, named).sum()) == 1

    @cached_property
    def first_excess_s(self) -> Floats:
        """How much longer the first of a kind takes than the median of the others, seconds, [parts].

        Calls that launch count as `first_call_excess_s`. Other calls of the runtime are of one kind by name, operators
        by all that is known of them. The first counts only if it is the longest; a call without others, if it takes
        `_MUCH` times as long as usual calls.
        """
        called = np.array([what.reason in _CALLS for what in self.whats], np.bool_)
        calls = [what.name.partition(" in ")[0] for what in self.whats]
        warms = [
            what.reason in _WARMS and call not in {"", *self.launching}
            for call, what in zip(calls, self.whats, strict=True)
        ]
        keys = [
            call if what.reason in _CALLS else (what.name, what.where)
            for call, what in zip(calls, self.whats, strict=True)
        ]
        distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        excess_s = np.zeros(len(self.op))
        if not len(excess_s):
            return excess_s
        usual = float(np.median(self.seconds[called[self.what]])) if called[self.what].any() else np.inf
        kind = np.array([distinct[key] for key in keys], np.int64)[self.what]
        order = np.argsort(kind, kind="stable")
        for alike in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
            first, others = alike[0], self.seconds[alike[1:]]
            excess = self.seconds[first] - (np.median(others) if len(others) else usual)
            longest = excess > 0 and self.seconds[first] > others.max(initial=0.0)
            tells = len(others) or (called[self.what[first]] and excess > _MUCH * usual)
            if longest and tells and warms[self.what[first]]:
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
            excess_s[rows[first]] = np.where(excess > _MUCH * usual, excess, 0.0)
        return excess_s

    def faster_calls(self, excess_s: Floats) -> LessTime:
        """Return the job in which the call that ends each op takes so much less, seconds, [ops].

        What it launched begins earlier, and so does the next op of its thread, which begins with the call.
        """
        less = np.zeros(len(excess_s))
        for row in np.flatnonzero(excess_s).tolist():
            after = np.flatnonzero(self.lane[row + 1 :] == self.lane[row])
            if len(after):
                less[row + 1 + after[0]] += excess_s[row]
        return LessTime(less, np.append(excess_s, 0.0)[self.launched_by])

    def less_s(self, seconds: Floats) -> LessTime:
        """Return the job in which each part of host work takes so much less, seconds, [parts]."""
        return LessTime(np.bincount(self.op, seconds, len(self.called_s)).astype(np.float64))

    def less(self, parts: Ints | Bools, share: Floats | float = 1.0) -> LessTime:
        """Return the job without these parts of host work, or without a share of each."""
        gone = np.zeros(len(self.op))
        gone[parts] = share
        return self.less_s(gone * self.seconds)


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
    long = work.mask(IdleReason.OPERATOR, where=lambda what: not what.launches) & ~in_head(job)
    return np.asarray(long & (work.steady_s >= LONGEST_DISPATCH_S * work.pieces))
