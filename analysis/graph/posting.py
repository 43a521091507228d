"""Dependencies that the recorded times of a pipeline show: posted receives, the order of hosts, and gathering.

In: structures made by the rules of the published method, and recorded times of some of their lanes. Out: the rules that
the job follows, and structures with their edges.

Receives are posted ahead of their computes. When, is inferred from the times of the transfers: decisive ops vote, those
that could have begun earlier.

If the recording has the times at which hosts requested transfers and continued after them, nothing is inferred. A host
does one thing at a time. Its computes and other work are in order anyway. It requests a transfer between two of them,
and waits for it between two of them, at the same places in every step. A send that ended before its receive was
requested was buffered: its sender did not wait for the receiver.

In the published method, gathering the parameters of a chunk precedes the chunk's first forward. An optimizer that does
not overlap gathering with the forwards waits for all of it. With virtual stages, a slow gathering of a later chunk then
holds up the first forward, which is not a launch delay. The ops that could have begun before all was gathered vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph import Posting, PostingRule
from tracekit.analysis.graph.megatron import BACKWARD, COMPUTE_STREAM, FORWARD, Structure, merged_order
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.trace.model import OpKind

#: A rule holds if this share of the decisive ops obeys it: code posts all receives alike, but some ops of a trace are
#: rounded, or recorded for transfers that never ran. Chosen.
OBEYED_SHARE = 0.95
#: Fewer decisive ops prove nothing (eight coins fall alike in one of 128 throws): keep the published rule. Statistic.
FEWEST_TELLING = 8
#: An op is decisive if the two times differ by at least this, seconds: traces round to up to 0.1 ms. Chosen.
SMALLEST_GAP_S = 200e-6
#: Lanes to look at per structure: steps and DP ranks run the same code.
MOST_LANES = 64
#: Ops of one call end at the same moment, except for this much rounding: seconds, and share of the transfer. Chosen.
SAME_MOMENT_S, SAME_MOMENT_SHARE = 5e-6, 1e-3

STREAM = tuple(kind.code for kind in COMPUTE_STREAM)
_COMPUTES = (FORWARD.compute.code, BACKWARD.compute.code)
RECVS = (FORWARD.recv.code, BACKWARD.recv.code)
SENDS = (FORWARD.send.code, BACKWARD.send.code)
#: The end of a step, in order: the first of these waits for the last compute.
TAIL = (
    OpKind.LAYERNORM_GRADS_ALL_REDUCE.code,
    OpKind.EMBEDDING_GRADS_ALL_REDUCE.code,
    OpKind.OPTIMIZER_CLIP_MAIN_GRAD.code,
    OpKind.OPTIMIZER.code,
)

_TRANSFERS = (*SENDS, *RECVS)


#: The assumption of the published method.
PUBLISHED = PostingRule(Posting.SAME_DIRECTION, 1.0, 0)
#: No assumption: the trace has the time of each request by the host, and its waits.
RECORDED = PostingRule(Posting.RECORDED, 1.0, 0)


class RecordedLanes(Struct, frozen=True, eq=False):
    """Lanes of one structure with recorded seconds, [rows, lanes] each. `present`, `posted`, `resumed`: as in
    `LaneGroup`.
    """

    structure: Structure
    start: Floats
    end: Floats
    present: Bools | None = None
    posted: Floats | None = None
    resumed: Floats | None = None

    @classmethod
    def joined(cls, parts: Sequence[RecordedLanes]) -> RecordedLanes:
        """The lanes of several parts with the same structure, in order."""
        names = ("start", "end", "posted", "resumed")
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        if any(part.present is not None for part in parts):
            columns["present"] = [
                np.broadcast_to(np.True_ if part.present is None else part.present, part.start.shape) for part in parts
            ]
        recorded = {name: np.concatenate(rows, axis=1) for name, rows in columns.items() if rows[0] is not None}
        return cls(parts[0].structure, **recorded)

    def is_behind(self, first: int, second: int) -> bool:
        """True if row `second` began after row `first` wherever it could have begun before."""
        waits_for, after = self.structure.before, self.structure.after
        begin = self.start[self.structure.pp_rank == self.structure.pp_rank[second]].min(axis=0)
        begin = np.maximum(begin, self.end[waits_for[after == second]].max(axis=0, initial=-np.inf))
        tells = self.end[first] - begin > SMALLEST_GAP_S
        if self.present is not None:  # an absent op has no start of its own
            tells &= self.present[first] & self.present[second]
        behind = tells & (self.start[second] > (begin + self.end[first]) / 2)
        return bool(tells.any() and behind.sum() >= OBEYED_SHARE * tells.sum())

    def done_before(self, rows: Ints, times: Floats) -> Ints:
        """The number of `rows` that were done at each of `times`, [times, lanes], same shape.

        A row counts from its middle on, because rounding can move its begin or end to the other side of such a time.
        """
        middle = (self.start[rows] + self.end[rows]) / 2
        return np.asarray([(middle < time).sum(axis=0) for time in times], np.int64).reshape(times.shape)


def sampled_lanes(count: int) -> Ints:
    """At most `MOST_LANES` of so many lanes, evenly spread."""
    return np.unique(np.linspace(0, count - 1, MOST_LANES).astype(np.int64))


def in_most_lanes(counts: Ints) -> Ints:
    """The usual count of each row, [rows]; `counts`: [rows, lanes]."""
    usual: Ints = np.sort(counts, axis=1)[:, (counts.shape[1] - 1) // 2]
    return usual


def _in_order(structure: Structure, members: Bools) -> list[int]:
    """Some rows in the order of the edges among them; none unless one of them precedes all others."""
    inside = members[structure.before] & members[structure.after]
    following = dict(zip(structure.before[inside].tolist(), structure.after[inside].tolist(), strict=True))
    first = np.setdiff1d(np.flatnonzero(members), structure.after[inside])
    rows: list[int] = first.tolist() if len(first) == 1 else []
    while rows and rows[-1] in following:
        rows.append(following[rows[-1]])
    return rows


def infer_posting(jobs_lanes: Iterable[RecordedLanes]) -> PostingRule:
    """The tightest rule that the recording obeys; the published rule if too few ops are decisive.

    The published method posts a receive after the previous compute of its direction. Megatron issues sends and receives
    in batches between computes, and its host waits for each batch, so a slow transfer holds up what the published rule
    lets overlap. An op is decisive if the op it would wait for ended later than everything else it waits for: it began
    near the one time or near the other. The nearer time wins, so no tolerance has to match how coarsely times are
    rounded.
    """
    votes = {posting: np.zeros(2) for posting in Posting}
    together = np.zeros(2)
    for lanes in jobs_lanes:
        for stage in _stages(lanes):
            votes[Posting.BATCHED] += stage.sends_block()
            together += stage.end_together()
            votes[Posting.ANY_DIRECTION] += stage.behind(stage.previous_any, stage.previous_same)
            votes[Posting.SAME_DIRECTION] += stage.behind(stage.previous_same)
    if votes[Posting.BATCHED][1] < FEWEST_TELLING:  # no send stands alone, so the calls themselves decide
        votes[Posting.BATCHED] = together
    for posting in (Posting.BATCHED, Posting.ANY_DIRECTION, Posting.SAME_DIRECTION):
        obeyed, decisive = votes[posting]
        if decisive >= FEWEST_TELLING and obeyed >= OBEYED_SHARE * decisive:
            return PostingRule(posting, float(obeyed / decisive), int(decisive))
    obeyed, decisive = votes[Posting.SAME_DIRECTION]
    if decisive < FEWEST_TELLING:
        return PUBLISHED
    return PostingRule(Posting.EARLY, float(1 - obeyed / decisive), int(decisive))


def with_posting(lanes: RecordedLanes, rule: PostingRule) -> Structure:
    """The structure of the lanes with the edges of `rule` instead of the published ones."""
    structure = lanes.structure
    if rule.rule is Posting.SAME_DIRECTION:
        return structure
    if rule.rule is Posting.EARLY:
        kind = structure.kind
        posts = np.isin(kind[structure.before], _COMPUTES) & np.isin(kind[structure.after], RECVS)
        return replace(structure, before=structure.before[~posts], after=structure.after[~posts])
    batched = rule.rule is Posting.BATCHED
    call = np.full(len(structure.kind), -1, np.int64)
    edges: list[tuple[Ints, Ints]] = []
    for stage in _stages(lanes):
        edges += [*stage.call_edges(), *stage.work_edges()] if batched else stage.posting_edges()
        for number, (_, ops) in enumerate(stage.calls if batched else (), start=int(call.max()) + 1):
            call[ops] = number
    before = np.concatenate([structure.before, *(before for before, _ in edges)])
    after = np.concatenate([structure.after, *(after for _, after in edges)])
    return replace(structure, before=before, after=after, call=call if batched else None)


def _stages(lanes: RecordedLanes) -> Iterator[_PostingStage]:
    """The stages that receive from or send to other stages."""
    structure = lanes.structure
    kind, before, after = structure.kind, structure.before, structure.after
    received = np.isin(kind[before], RECVS) & np.isin(kind[after], _COMPUTES)
    sent = np.isin(kind[before], _COMPUTES) & np.isin(kind[after], SENDS)
    sent &= (kind[before] == FORWARD.compute.code) == (kind[after] == FORWARD.send.code)
    for pp_rank in np.unique(structure.pp_rank):
        of_recv = received & (structure.pp_rank[before] == pp_rank)
        of_send = sent & (structure.pp_rank[before] == pp_rank)
        if of_recv.any() or of_send.any():
            yield _PostingStage(lanes, int(pp_rank), before[of_recv], after[of_recv], np.unique(after[of_send]))


class _PostingStage:
    """Computes, receives and sends of one stage: the rows in order, and their recorded times."""

    def __init__(self, lanes: RecordedLanes, pp_rank: int, recvs: Ints, computes: Ints, sends: Ints) -> None:
        self.lanes, self.start, self.end, self.structure = lanes, lanes.start, lanes.end, lanes.structure
        self.recvs, self.computes, self.sends = recvs, computes, sends
        of_stage = lanes.structure.pp_rank == pp_rank
        self.stream = self._in_order(np.flatnonzero(of_stage & np.isin(lanes.structure.kind, _COMPUTES)))
        place = np.empty(len(of_stage), np.int64)
        place[self.stream] = np.arange(len(self.stream))
        order = place[computes]
        self.previous_any = np.where(order > 0, self.stream[order - 1], -1)
        self.previous_same = self._previous(computes)
        self.previous_recv = self._previous(recvs)
        self.recv_of = np.full(len(of_stage), -1, np.int64)
        self.recv_of[computes] = recvs

    def _in_order(self, rows: Ints) -> Ints:
        """Rows by their usual start; rows of a kind keep their order."""
        return rows[np.argsort(np.median(self.start[rows], axis=1), kind="stable")]

    def _previous(self, rows: Ints) -> Ints:
        """The previous row of the same kind and stage, -1 if there is none."""
        structure, before = self.structure, np.maximum(rows - 1, 0)
        same = (structure.kind[before] == structure.kind[rows]) & (structure.pp_rank[before] == structure.pp_rank[rows])
        return np.where(same & (rows > 0), before, -1)

    def _ends(self, rows: Ints) -> Floats:
        """Recorded ends, -inf for row -1, [rows, lanes]."""
        return np.where((rows >= 0)[:, None], self.end[rows], -np.inf)

    def behind(self, bound: Ints, *others: Ints) -> Floats:
        """The number of receives that began after `bound`, and the number of decisive ones: (obeyed, telling)."""
        ready = np.maximum.reduce([self._ends(self.previous_recv), *(self._ends(rows) for rows in others)])
        return _votes(self.start[self.recvs], ready, self._ends(bound))

    def sends_block(self) -> Floats:
        """The number of computes and receives that began after the sends before them, and of decisive ones."""
        if not len(self.sends) or not len(self.stream):
            return np.zeros(2)
        start, end = self.start[self.sends], self.end[self.sends]
        following = self._computes_before(self.sends)  # index of the next compute
        exists = following < len(self.stream)
        compute = self.stream[np.minimum(following, len(self.stream) - 1)]
        lane = np.broadcast_to(np.arange(start.shape[1]), compute.shape)
        previous = np.where(following > 0, self.end[self.stream[np.maximum(following - 1, 0)], lane], -np.inf)
        recv = self.recv_of[compute]
        received = np.where(recv >= 0, self.end[recv, lane], -np.inf)
        posted = self.start[recv, lane]
        same_call = (recv < 0) | ((posted > start - SMALLEST_GAP_S) & (posted < (start + end) / 2))
        return _votes(self.start[compute, lane], np.maximum(previous, received), end, exists) + _votes(
            posted, previous, end, exists & ~same_call
        )

    def end_together(self) -> Floats:
        """The number of neighbouring transfers that began together and also ended together, and the number that began
        together.
        """
        transfers = self._in_order(np.concatenate([self.recvs, self.sends]))
        start, end = self.start[transfers], self.end[transfers]
        least = np.minimum(end[1:] - start[1:], end[:-1] - start[:-1])
        moment = np.maximum(SAME_MOMENT_S, SAME_MOMENT_SHARE * least)
        began = (np.abs(np.diff(start, axis=0)) <= moment) & (least > SMALLEST_GAP_S)
        ended = began & (np.abs(np.diff(end, axis=0)) <= moment)
        return np.array([ended.sum(), began.sum()], np.float64)

    def _computes_before(self, rows: Ints) -> Ints:
        """The number of computes that had ended when each op began, [rows, lanes]."""
        return self.lanes.done_before(self.stream, self.start[rows])

    def posting_edges(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield an edge from the previous compute to each receive."""
        follows = self.previous_any >= 0
        yield self.previous_any[follows], self.recvs[follows]

    def call_edges(self) -> Iterator[tuple[Ints, Ints]]:
        """Computes and calls one after the other; an op of a call waits for all ops of the call before."""
        before: Ints = np.empty(0, np.int64)
        for ops in self._turns():
            yield np.repeat(before, len(ops)), np.tile(ops, len(before))
            before = ops
        tail = self._tail()
        yield np.repeat(before, len(tail)), np.tile(tail, len(before))

    def _tail(self) -> Ints:
        """Ops launched after the last call: rows that wait for the last compute and are not reductions."""
        structure = self.structure
        of_stage = structure.pp_rank[structure.after] == structure.pp_rank[self.stream[0]]
        tail: Ints = np.unique(structure.after[of_stage & np.isin(structure.kind[structure.after], TAIL)])
        return tail[:1]

    def work_edges(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield an edge from the last awaited call between two computes to each op of host work there."""
        for work, place in self._host_work():
            calls_here = [ops for after, ops in self.calls if after == place]
            waited_for = [ops for ops in calls_here if any(self.lanes.is_behind(op, work) for op in ops.tolist())]
            if waited_for:
                yield waited_for[-1], np.full(len(waited_for[-1]), work)

    def _host_work(self) -> Iterator[tuple[int, int]]:
        """Other rows in the stream of the computes, each with the number of computes before it."""
        structure, place = self.structure, 0
        of_stage = structure.pp_rank == structure.pp_rank[self.stream[0]]
        for row in _in_order(structure, of_stage & structure.in_stream):
            if structure.kind[row] in _COMPUTES:
                place += 1
            else:
                yield row, place

    def _turns(self) -> Iterator[Ints]:
        """The computes and, between them, the calls, each as the rows of its ops, in order."""
        for place in range(len(self.stream) + 1):
            yield from (ops for after, ops in self.calls if after == place)
            if place < len(self.stream):
                yield self.stream[place : place + 1]

    @cached_property
    def calls(self) -> tuple[tuple[int, Ints], ...]:
        """Transfers posted together: the number of computes before a call, and the rows of its ops."""
        transfers = self._in_order(np.concatenate([self.recvs, self.sends]))
        behind = in_most_lanes(self._computes_before(transfers))
        order = np.argsort(behind, kind="stable")
        transfers, behind = transfers[order], behind[order]
        start, end = self.start[transfers], self.end[transfers]
        separate = start[1:] > (start[:-1] + end[:-1]) / 2
        begins = np.r_[True, (np.diff(behind) > 0) | (separate.mean(axis=1) > 0.5)]
        return tuple(zip(behind[begins].tolist(), np.split(transfers, np.flatnonzero(begins)[1:]), strict=True))


def _votes(start: Floats, ready: Floats, bound: Floats, where: Bools | bool = True) -> Floats:
    """Of the ops for which `bound` ended after `ready`: the number that began nearer to `bound`, and their total
    number.
    """
    decisive = where & (bound > ready + SMALLEST_GAP_S)
    behind = start > np.where(np.isfinite(ready), (ready + bound) / 2, bound - SMALLEST_GAP_S)
    return np.array([(decisive & behind).sum(), decisive.sum()], np.float64)


def with_host_order(lanes: RecordedLanes) -> Structure | None:
    """The structure of the lanes with the order of each host; None without transfers, or if times of one are missing.

    `lanes`: of this structure, as recorded.

    Without this record, the order has to be inferred from the times of transfers (`infer_posting`).
    """
    structure = lanes.structure
    transfers = np.flatnonzero(np.isin(structure.kind, _TRANSFERS))
    posted, resumed = lanes.posted, lanes.resumed
    if posted is None or resumed is None or not len(transfers):
        return None
    if np.isnan(posted[transfers]).any() or np.isnan(resumed[transfers]).any():
        return None
    recorded = np.logical_not(_inferred(structure))
    stages = np.unique(structure.pp_rank[transfers]).tolist()
    edges = [edge for stage in stages for edge in _edges(lanes, posted, resumed, stage)]
    before, after = zip(*edges, strict=True) if edges else ((), ())
    return replace(
        structure,
        before=np.concatenate([structure.before[recorded], np.array(before, np.int64)]),
        after=np.concatenate([structure.after[recorded], np.array(after, np.int64)]),
    )


def _inferred(structure: Structure) -> Bools:
    """Edges that place the host's request for a transfer, [edges]: those from computes, except from the compute whose
    result is sent.
    """
    before, after = structure.kind[structure.before], structure.kind[structure.after]
    requested = np.zeros(len(before), np.bool_)
    for way in (FORWARD, BACKWARD):
        requested |= after == way.recv.code
        requested |= (after == way.send.code) & (before != way.compute.code)
    return np.asarray(requested & np.isin(before, _COMPUTES))


def _edges(lanes: RecordedLanes, posted: Floats, resumed: Floats, stage: int) -> Iterator[tuple[int, int]]:
    """The edges (before, after) of one stage's host."""
    structure = lanes.structure
    transfers = np.flatnonzero((structure.pp_rank == stage) & np.isin(structure.kind, _TRANSFERS))
    host = _host(lanes, stage)
    waited = [not _buffered(structure, posted, resumed, row) for row in transfers.tolist()]
    posted, resumed = posted[transfers], resumed[transfers]
    asked_at, resumed_at = (in_most_lanes(lanes.done_before(host, times)) for times in (posted, resumed))
    for number, row in enumerate(transfers.tolist()):
        if asked_at[number] > 0:
            yield int(host[asked_at[number] - 1]), row
        # After the same work of the host, and waited for before it requested this one.
        before = (resumed_at == asked_at[number]) & (np.median(posted[number] - resumed, axis=1) >= 0) & waited
        for other in transfers[before].tolist():
            yield other, row
        if waited[number] and resumed_at[number] < len(host):
            yield row, int(host[resumed_at[number]])


def _host(lanes: RecordedLanes, stage: int) -> Ints:
    """Work of a stage's host, in order: the rows of its stream, and the first op after them."""
    structure = lanes.structure
    of_stage = structure.pp_rank == stage
    rows = [np.flatnonzero(of_stage & structure.in_stream & (structure.kind == code)) for code in STREAM]
    stream = merged_order(np.median(lanes.start, axis=1), rows)
    tail = [row for code in TAIL for row in np.flatnonzero(of_stage & (structure.kind == code)).tolist()]
    return np.concatenate([stream, np.array(tail[:1], np.int64)])


def _buffered(structure: Structure, posted: Floats, resumed: Floats, row: int) -> bool:
    """True if a send ended in some lanes before its receive was requested."""
    if structure.kind[row] not in SENDS:
        return False
    (recv,) = np.setdiff1d(np.flatnonzero(structure.group == structure.group[row]), [row])
    overlaps = resumed[row] >= posted[recv]
    return bool(overlaps.mean() < OBEYED_SHARE)


def gathers_first(jobs_lanes: Iterable[RecordedLanes]) -> bool:
    """True if the first compute of each stage waits for the parameters of all chunks."""
    obeyed = decisive = 0
    for lanes in jobs_lanes:
        waits_for, after = lanes.structure.before, lanes.structure.after
        for first, gathers in _first_computes(lanes.structure):
            anyway = lanes.end[waits_for[after == first]].max(axis=0)
            gathered = lanes.end[gathers].max(axis=0)
            tells = gathered - anyway > SMALLEST_GAP_S
            decisive += int(tells.sum())
            obeyed += int((tells & (lanes.start[first] > (anyway + gathered) / 2)).sum())
    return decisive >= FEWEST_TELLING and obeyed >= OBEYED_SHARE * decisive


def with_gathering_among_work(structure: Structure, lanes: RecordedLanes) -> Structure:
    """The structure with gatherings and host work (data loading, a checkpoint) in the order in which its lanes did
    them.

    The thread that does the work also requests the parameters, so each gathering begins after the work before it. Work
    begins after a gathering if the thread waited for that. `lanes`: of this structure, as recorded.
    """
    before, after = [], []
    for works, gathers in _leading_work(lanes.structure):
        done, work_before = 0, []  # the amount of work before each gathering
        for gather in gathers:
            behind = [number for number, work in enumerate(works, 1) if lanes.is_behind(work, gather)]
            if max(behind, default=0) > done:
                done = behind[-1]
                before.append(works[done - 1])
                after.append(gather)
            work_before.append(done)
        for position, work in enumerate(works):
            asked = (gather for gather, done in zip(gathers, work_before, strict=True) if done <= position)
            waited_for = [gather for gather in asked if lanes.is_behind(gather, work)]
            if waited_for:
                before.append(waited_for[-1])
                after.append(work)
    return replace(
        structure,
        before=np.concatenate([structure.before, before]).astype(np.int64),
        after=np.concatenate([structure.after, after]).astype(np.int64),
    )


def _leading_work(structure: Structure) -> Iterator[tuple[list[int], list[int]]]:
    """The host work before the first compute of each stage, and the gatherings there, each in order."""
    gathering = structure.kind == OpKind.PARAMS_ALL_GATHER.code
    for stage in np.unique(structure.pp_rank[gathering]):
        of_stage = structure.pp_rank == stage
        stream = _in_order(structure, of_stage & structure.in_stream)
        works = takewhile(lambda row: structure.kind[row] not in _COMPUTES, stream)
        yield list(works), _in_order(structure, of_stage & gathering)


def with_gathers_first(structure: Structure) -> Structure:
    """The structure with the first compute of each stage after the gathering of all its parameters."""
    stages = list(_first_computes(structure))
    before = np.concatenate([structure.before, *(gathers for _, gathers in stages)])
    after = np.concatenate([structure.after, *(np.full(len(gathers), first) for first, gathers in stages)])
    return replace(structure, before=before, after=after)


def _first_computes(structure: Structure) -> Iterator[tuple[int, Ints]]:
    """The first compute of each stage that waits for only some gatherings, and the other gatherings."""
    computes = np.isin(structure.kind, _COMPUTES)
    gathering = structure.kind == OpKind.PARAMS_ALL_GATHER.code
    of_computes = computes[structure.before] & computes[structure.after]
    behind_a_compute = np.zeros(len(computes), np.bool_)
    behind_a_compute[structure.after[of_computes]] = True
    for stage in np.unique(structure.pp_rank[gathering]):
        of_stage = structure.pp_rank == stage
        first = np.flatnonzero(of_stage & computes & ~behind_a_compute)
        gathers = np.flatnonzero(of_stage & gathering)
        waited_for = np.intersect1d(structure.before[np.isin(structure.after, first)], gathers)
        if len(first) == 1 and len(waited_for) and len(waited_for) < len(gathers):
            yield int(first[0]), np.setdiff1d(gathers, waited_for)
