"""Why the GPU of a rank is idle: what the thread that launches its next op does meanwhile.

In: the GPU ops, calls and host work of one rank, by its own clocks. Out: `IdleOfRank`: each gap between GPU ops divided
among reasons, which exclude each other and sum to the gap, and the same for the time before the first op.

A gap ends with the op that starts then; its launch began at `ls` and ended at `le`. Without a recorded launch, all of
it is `unknown`. If the launch began before the gap, work was there and the GPU had not begun it: `queued`, or
`launch-latency` where it began less than 10 us before, because no launch arrives faster. Otherwise the host was late:
`launch-call` until `le`, then `launch-latency`; and before `ls`, whatever the thread did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.trace.gpu_activity import IdleReason

_REASONS = tuple(IdleReason)
_NUMBER = {str(reason): number for number, reason in enumerate(_REASONS)}
#: No launch arrives faster than this, seconds.
ARRIVES_S = 10e-6
#: Times in seconds of whole microseconds differ by rounding.
ROUNDING_S = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class IdleOfRank:
    """The idle time of one rank by `reason`, `name`, `where` (`seconds`), between its GPU ops and before the first one.

    `gaps_of`: the number of gaps with a part of each reason. `gaps`: of each, its `seconds`, `opened_by`, and the
    `call` (a row of calls) in which the host waited when it began, null for none. `busy_s`; `first`, `last`: start of
    the first GPU op and end of the last.
    """

    between: pl.DataFrame
    before: pl.DataFrame
    gaps_of: Mapping[str, int]
    gaps: pl.DataFrame
    busy_s: float
    first: float
    last: float


def idle_of(
    gpu: pl.DataFrame, calls: pl.DataFrame, host: pl.DataFrame, whats: pl.DataFrame, begin: float
) -> IdleOfRank:
    """Divide the idle time. `gpu`, `host`: of one rank; `calls`: all, which `gpu.launch` numbers; `begin`: of all."""
    start, end = gpu["start"].to_numpy(), (gpu["start"] + gpu["duration"]).to_numpy()
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    opens = np.flatnonzero(start[order][1:] > reached[:-1] + ROUNDING_S) + 1  # positions of ops that end a gap
    op, a, b = order[opens], reached[opens - 1], start[order][opens]
    threads, launch = _HostThreads(host, whats), gpu["launch"].gather(op)
    called = {name: calls[name].gather(launch) for name in ("start", "duration", "thread", "name")}
    ls, le = called["start"].to_numpy(), (called["start"] + called["duration"]).to_numpy()
    thread = called["thread"].fill_null(-1).to_numpy()
    unknown, queued = launch.is_null().to_numpy(), ls + ARRIVES_S <= a + ROUNDING_S
    late = ~unknown & (ls >= a - ROUNDING_S)
    begun, done = np.minimum(ls, b), np.minimum(le, b)
    arrived = np.maximum(done, begun)
    ends, none = gpu["name"].gather(op).cast(pl.String), pl.repeat("", len(op), eager=True)
    call = called["name"].cast(pl.String).fill_null("")
    host_reasons, gaps_of = threads.did(np.flatnonzero(late), thread, a, begun)
    parts = [
        (IdleReason.UNKNOWN, none, np.where(unknown, b - a, 0.0)),
        (IdleReason.QUEUED, ends, np.where(queued, b - a, 0.0)),
        (IdleReason.LAUNCH_LATENCY, ends, np.where(late, b - arrived, np.where(unknown | queued, 0.0, b - a))),
        (IdleReason.LAUNCH_CALL, call, np.where(late, done - begun, 0.0).clip(min=0.0)),
    ]
    waits = pl.col("waits") & (pl.col("rank") == gpu["rank"][0])
    waiting = calls.select("rank", "thread", "start", "duration", "waits").with_row_index().filter(waits)
    waited = _waited_at(waiting, thread, a, late)
    opened = np.where(unknown, "unknown", np.where(queued, "queued", np.where(waited >= 0, "synchronise", "host")))
    first, before = int(order[0]), host_reasons.clear()
    launched = gpu["launch"][first]
    if launched is not None and calls["start"][launched] > begin:
        where = np.array([begin]), np.array([min(calls["start"][launched], start[first])])
        before, _ = threads.did(np.zeros(1, np.int64), np.array([calls["thread"][launched]]), *where, alone=True)
    return IdleOfRank(
        between=pl.concat([host_reasons, *(_of_reason(*part) for part in parts)]),
        before=before,
        gaps_of=gaps_of | {str(reason): int((spent > ROUNDING_S).sum()) for reason, _, spent in parts},
        gaps=pl.DataFrame(
            {"seconds": b - a, "opened_by": opened, "call": pl.Series(waited).set(pl.Series(waited < 0), None)}
        ),
        busy_s=float(reached[-1] - start[first] - (b - a).sum()),
        first=float(start[first]),
        last=float(reached[-1]),
    )


_SCHEMA = pl.Schema({"reason": pl.String, "name": pl.String, "where": pl.String, "seconds": pl.Float64})


def _of_reason(reason: IdleReason, names: pl.Series, seconds: Floats) -> pl.DataFrame:
    """Idle time of one reason by name. `seconds`: of each gap."""
    by_name = (
        pl.DataFrame({"name": names, "seconds": seconds}).filter(pl.col("seconds") > ROUNDING_S).group_by("name").sum()
    )
    return by_name.with_columns(reason=pl.lit(str(reason)), where=pl.lit("")).select(_SCHEMA.names()).cast(_SCHEMA)


def _waited_at(calls: pl.DataFrame, thread: Ints, times: Floats, wanted: Bools) -> Ints:
    """The one of `calls` that wait in which a thread waited for the GPU at a time, -1 for none, [times]."""
    waited_in = np.full(len(times), -1, np.int64)
    rows, of_thread = calls["index"].to_numpy(), calls["thread"].to_numpy()
    start, end = calls["start"].to_numpy(), (calls["start"] + calls["duration"]).to_numpy()
    for thread_id in np.unique(thread[wanted]):
        candidates, wanted_rows = np.flatnonzero(of_thread == thread_id), np.flatnonzero(wanted & (thread == thread_id))
        candidates = candidates[np.argsort(start[candidates], kind="stable")]
        place = np.searchsorted(start[candidates], times[wanted_rows], side="right") - 1
        inside = (place >= 0) & (np.append(end[candidates], -np.inf)[place] >= times[wanted_rows])
        waited_in[wanted_rows[inside]] = rows[candidates[place[inside]]]
    return waited_in


class _HostThreads:
    """What the threads of a rank did at any time."""

    def __init__(self, host: pl.DataFrame, whats: pl.DataFrame) -> None:
        self.whats = whats
        self.busy = np.append(whats["busy"].to_numpy(), False)
        self.of: dict[int, tuple[Floats, Floats, Ints]] = {}
        thread, start = host["thread"].to_numpy(), host["start"].to_numpy()
        end, what = start + host["duration"].to_numpy(), host["what"].to_numpy()
        firsts = np.flatnonzero(np.diff(thread, prepend=-1, append=-1))  # by thread and start
        for first, last in pairwise(firsts.tolist()):
            rows = slice(first, last)
            self.of[int(thread[first])] = _gapless(start[rows], end[rows], what[rows])

    def did(
        self, gap: Ints, thread: Ints, begin: Floats, end: Floats, *, alone: bool = False
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        """What the threads did from `begin` to `end` of these gaps, in all; and the number of gaps of each reason.

        Where a thread did nothing, another one counts that works, unless `alone`.
        """
        pieces = [np.zeros((4, 0))]
        for thread_id in np.unique(thread[gap]):
            gaps = gap[(thread[gap] == thread_id) & (end[gap] > begin[gap])]
            if len(gaps):
                pieces.append(np.stack(self._of_thread(gaps, int(thread_id), begin, end)))
        every = np.concatenate(pieces, axis=1)
        number, start, seconds, what = every[:, every[2] > ROUNDING_S]
        whats = what.astype(np.int64)
        if not alone:
            self._others(start + seconds / 2, whats)
        said = self.whats.select("reason", "name", "where")
        said = pl.concat([said, pl.DataFrame([(str(IdleReason.PYTHON), "", "")], said.schema, orient="row")])
        whats = np.where(whats < 0, said.height - 1, whats)
        reason = np.array([_NUMBER[one] for one in said["reason"].to_list()])
        each = np.unique(number.astype(np.int64) * len(_REASONS) + reason[whats]) % len(_REASONS)
        counts = np.bincount(each, minlength=len(_REASONS))
        gaps_of = {str(one): int(count) for one, count in zip(_REASONS, counts, strict=True) if count}
        totals = said.with_columns(seconds=pl.Series(np.bincount(whats, seconds, said.height)))
        return totals.filter(pl.col("seconds") > 0).cast(_SCHEMA), gaps_of

    def _of_thread(self, gap: Ints, thread: int, begin: Floats, end: Floats) -> tuple[Ints, Floats, Floats, Ints]:
        starts, ends, what = self.of.get(thread, _gapless(*(np.zeros(0),) * 2, np.zeros(0, np.int64)))
        first = np.searchsorted(ends, begin[gap], side="right")
        last = np.searchsorted(starts, end[gap], side="left")
        count = last - first
        number = np.repeat(np.arange(len(gap)), count)
        piece = np.arange(len(number)) - np.repeat(np.cumsum(count) - count - first, count)
        start = np.maximum(starts[piece], begin[gap][number])
        return gap[number], start, np.minimum(ends[piece], end[gap][number]) - start, what[piece]

    def _others(self, times: Floats, what: Ints) -> None:
        """Replace "nothing" by what another thread does then, if that is inside an operator or a call."""
        for _, ends, theirs in self.of.values():
            free = np.flatnonzero(what == -1)
            if not len(free):
                return
            doing = theirs[np.searchsorted(ends, times[free], side="right")]
            what[free] = np.where(self.busy[doing], doing, -1)


def _gapless(start: Floats, end: Floats, what: Ints) -> tuple[Floats, Floats, Ints]:
    """The pieces of a thread, ascending, with pieces of -1 in between, before and after."""
    after = np.flatnonzero(start[1:] > end[:-1]) + 1
    holes = np.concatenate([[0], after, [len(start)]])
    begins = np.concatenate([[-np.inf], end[after - 1], end[-1:]])
    ends = np.concatenate([start[:1], start[after], [np.inf]])
    if not len(start):
        return np.array([-np.inf]), np.array([np.inf]), np.array([-1])
    return np.insert(start, holes, begins), np.insert(end, holes, ends), np.insert(what, holes, -1)
