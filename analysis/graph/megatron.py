"""The dependency rules of pipeline jobs such as Megatron's, among the ops of one lane.

In: the ops of one lane (one model-parallel group in one step) as columns in row order, that is, by (pp_rank, kind,
seq). Out: a `Structure`, the edges and groups among those rows. Lanes with the same structure share it, so this runs
once per distinct structure, not once per lane.

The rules are those of "Understanding Stragglers in Large Model Training" (OSDI'25, section 3); docs/method.md
states them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole
from tracekit.base.errors import GraphError
from tracekit.trace.canonical import Trace
from tracekit.trace.model import DP_COLLECTIVES, KINDS, Layout, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.lanes import PlacedLanes

#: Kinds that run one after the other on a worker, in order of start. The last of them precedes the collectives and the
#: optimizer at the end of the step.
COMPUTE_STREAM = (
    OpKind.FORWARD_COMPUTE,
    OpKind.BACKWARD_COMPUTE,
    OpKind.DATA_LOAD,
    OpKind.CHECKPOINT,
    OpKind.HOST_DELAY,
    OpKind.ALL_TO_ALL,
    OpKind.FORWARD_COLLECTIVES,
    OpKind.BACKWARD_COLLECTIVES,
    OpKind.GC,
    OpKind.LOSS,
    OpKind.EVALUATION,
    OpKind.BACKWARD_WEIGHT,
)
#: Kinds that share the data-parallel stream, in order of start.
DP_STREAM = (OpKind.PARAMS_ALL_GATHER, OpKind.GRADS_REDUCE_SCATTER, OpKind.ALL_REDUCE)
#: Host work, which a loop may also do between the collectives of its end, or after the optimizer.
HOST_WORK = (OpKind.DATA_LOAD, OpKind.CHECKPOINT, OpKind.HOST_DELAY, OpKind.GC, OpKind.EVALUATION)
#: The collectives that combine gradients over the DP ranks; DistributedDataParallel uses all-reduce.
GRADIENT_REDUCTION = (OpKind.GRADS_REDUCE_SCATTER, OpKind.ALL_REDUCE)
#: Largest tolerance in comparing recorded times, seconds, to detect a send that waited for a reduction. Chosen.
HELD_SLACK_S = 50e-6


class Direction(Struct, frozen=True):
    """One direction of the pipeline: its op kinds and how activations (or gradients) move through the stages."""

    compute: OpKind
    send: OpKind
    recv: OpKind
    stride: int


FORWARD = Direction(OpKind.FORWARD_COMPUTE, OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, 1)
BACKWARD = Direction(OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV, -1)


class LaneOps(Struct, frozen=True, eq=False):
    """The ops of one lane in row order, [rows] each; `start` and `end` in seconds; `where` opens error messages.

    `stream_order`: orders the ops of a stream; their starts, or numbers in the same order. `microbatch`: of each op, if
    receives were inferred from the computes and there are no sends; None if transfers were recorded. `virtual`: the
    `virtual_stages` of the job. `after_tail`: how many ops at the end of the step each row follows (see `step_tail`).
    """

    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]
    start: Floats
    end: Floats
    stream_order: Floats
    stages: int
    virtual: Ints
    where: str
    after_tail: Ints
    microbatch: Int32s | None = None


class Structure(Struct, frozen=True, eq=False):
    """Dependencies among the rows of a lane.

    `before`, `after`: edges, [edges] row numbers. `group`: rows that start their transfer together share a number,
    [rows]. `dp_key`: rows that also wait for the same op on all other DP ranks share a number, which is the same in
    every structure of the job; -1 for other rows, [rows]. `call`: sends and receives of one stage posted in one call
    share a number; -1 for other rows, [rows]; None if every transfer is a call of its own. `late`: host work done
    among the ops at the end of the step, [rows]; None if there is none.
    """

    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]
    before: Ints
    after: Ints
    group: Ints
    dp_key: Ints
    call: Ints | None = None
    late: Bools | None = None

    @property
    def in_stream(self) -> Bools:
        """Rows in the compute stream of their stage, [rows]."""
        rows: Bools = np.isin(self.kind, [kind.code for kind in COMPUTE_STREAM])
        return rows if self.late is None else rows & ~self.late


def build_structure(ops: LaneOps) -> Structure:
    """Apply the dependency rules to one lane. Raises GraphError for a send without its recv and the like."""
    builder = _Builder(ops)
    for stage in range(ops.stages):
        builder.add_streams(stage)
        builder.add_collectives(stage)
        builder.add_held_send(stage)
    for direction in (FORWARD, BACKWARD):
        if ops.microbatch is not None:
            builder.add_inferred(direction, ops.microbatch)
            continue
        sends: dict[int, Ints] = {}
        recvs: dict[int, Ints] = {}
        for stage in range(ops.stages):
            recvs |= builder.match(direction, stage, receiving=True)
            sends |= builder.match(direction, stage, receiving=False)
        builder.pair(direction, sends, recvs)
    builder.join_stages()
    return Structure(
        pp_rank=ops.pp_rank,
        kind=ops.kind,
        seq=ops.seq,
        chunk=ops.chunk,
        before=np.concatenate(builder.before),
        after=np.concatenate(builder.after),
        group=builder.group,
        dp_key=_dp_keys(ops),
        late=ops.after_tail > 0,
    )


def merged_order(start: Floats, ranges: list[Ints]) -> Ints:
    """Rows of several kinds in order of start, [rows]; each kind keeps its own order (seq)."""
    rows = np.concatenate(ranges)
    # A running maximum keeps seq order if a recorded start goes back in time.
    keys = np.concatenate([np.maximum.accumulate(start[part]) if len(part) else start[part] for part in ranges])
    return rows[np.argsort(keys, kind="stable")]


def step_tail(rows: Callable[[OpKind], Ints], start: Floats) -> Ints:
    """The collectives and the optimizer at the end of a stage's step, in order. `rows`: the stage's rows of a kind."""
    separate = rows(OpKind.SEPARATE_GRADS_ALL_REDUCE)
    reductions = merged_order(start, [rows(kind) for kind in GRADIENT_REDUCTION])
    before, after = (
        np.concatenate([rows(kind) for kind in kinds])
        for kinds in (
            (OpKind.LAYERNORM_GRADS_ALL_REDUCE, OpKind.EMBEDDING_GRADS_ALL_REDUCE),
            (OpKind.OPTIMIZER_CLIP_MAIN_GRAD, OpKind.OPTIMIZER),
        )
    )
    return np.concatenate([before, separate if len(separate) else reductions, after])


def with_late_work(tail: Ints, late: Ints, after_tail: Ints) -> Ints:
    """The end of a step with the host work among it. `late`: its rows, in order; `after_tail`: as in `LaneOps`."""
    return np.insert(tail, after_tail[late], late)


def in_order_of_computes(transfers: Ints, virtual: Ints, of_computes: Ints) -> Ints:
    """The transfers of a V-shaped pipeline in the order of their computes; as they are if their chunks are unknown.

    A link keeps the order of its computes, but a stage has two links. `virtual`: the virtual stage of each transfer,
    `of_computes`: of each compute.
    """
    by_transfer, by_compute = np.argsort(virtual, kind="stable"), np.argsort(of_computes, kind="stable")
    if not np.array_equal(virtual[by_transfer], of_computes[by_compute]):
        return transfers
    ordered = np.empty_like(transfers)
    ordered[by_compute] = transfers[by_transfer]
    return ordered


def is_held(send_start: Floats, reduction_start: Floats, reduction_end: Floats) -> Bools:
    """True if a send was recorded after a reduction, not before or during it; times in seconds."""
    slack = np.minimum(HELD_SLACK_S, (reduction_end - reduction_start) / 2)
    held: Bools = send_start > reduction_end - slack
    return held


def _dp_keys(ops: LaneOps) -> Ints:
    """A number per (collective, seq) that joins DP ranks: one per stage; for clipping, one for all stages."""
    keys = np.full(len(ops.kind), -1, np.int64)
    for kind in (*DP_COLLECTIVES, OpKind.OPTIMIZER_CLIP_MAIN_GRAD):
        rows = np.flatnonzero(ops.kind == kind.code)
        stage = ops.pp_rank[rows] if kind in DP_COLLECTIVES else 0
        keys[rows] = (ops.seq[rows].astype(np.int64) * len(KINDS) + kind.code) * ops.stages + stage
    return keys


class _Builder:
    """Collects edges and groups; each instance builds one structure."""

    def __init__(self, ops: LaneOps) -> None:
        self.ops = ops
        self.before: list[Ints] = []
        self.after: list[Ints] = []
        self.group = np.arange(len(ops.kind), dtype=np.int64)
        cell = ops.pp_rank.astype(np.int64) * len(KINDS) + ops.kind
        self._bounds = np.searchsorted(cell, np.arange(ops.stages * len(KINDS) + 1))
        self._compute: dict[int, Ints] = {}
        self._late: dict[int, Ints] = {}
        self._stage_of = np.argsort(ops.virtual.reshape(-1)) % ops.stages
        #: Whether even and odd chunks of a stage go over different links.
        self._v_shaped = bool((self._stage_of[ops.stages :] != self._stage_of[: -ops.stages]).any())

    def rows(self, stage: int, kind: OpKind) -> Ints:
        """Rows of that kind on that stage, in order of seq."""
        cell = stage * len(KINDS) + kind.code
        return np.arange(self._bounds[cell], self._bounds[cell + 1])

    def edge(self, before: Ints | int, after: Ints | int) -> None:
        """Let `after[i]` wait for `before[i]`; a single row is repeated to match the other side."""
        sources, targets = np.broadcast_arrays(np.atleast_1d(before), np.atleast_1d(after))
        self.before.append(sources.astype(np.int64))
        self.after.append(targets.astype(np.int64))

    def add_streams(self, stage: int) -> None:
        """Order the ops of each stream; the first backward p2p waits for the end of the warm-up."""
        compute = merged_order(self.ops.stream_order, [self.rows(stage, kind) for kind in COMPUTE_STREAM])
        is_late = self.ops.after_tail[compute] > 0
        compute, self._late[stage] = compute[~is_late], compute[is_late]
        self._compute[stage] = compute
        self.edge(compute[:-1], compute[1:])
        collectives = merged_order(self.ops.stream_order, [self.rows(stage, kind) for kind in DP_STREAM])
        self.edge(collectives[:-1], collectives[1:])
        if self.ops.microbatch is not None:  # inferred receives wait for nothing but the compute that they bring
            return
        for direction in (FORWARD, BACKWARD):
            for kind in (direction.send, direction.recv):
                rows = self.rows(stage, kind)
                chunk = self.ops.chunk[rows]
                for of_link in (rows[chunk % 2 == 0], rows[chunk % 2 == 1]) if self._v_shaped else (rows,):
                    self.edge(of_link[:-1], of_link[1:])
        steps = compute[np.isin(self.ops.kind[compute], (FORWARD.compute.code, BACKWARD.compute.code))]
        backward = np.flatnonzero(self.ops.kind[steps] == BACKWARD.compute.code)
        if len(backward) and backward[0] >= 2:
            for kind in (BACKWARD.send, BACKWARD.recv):
                self.edge(steps[backward[0] - 2], self.rows(stage, kind)[:1])

    def add_collectives(self, stage: int) -> None:
        """Gather parameters before the forwards; reduce gradients and run the optimizer after the backwards."""
        forward, backward = self.rows(stage, FORWARD.compute), self.rows(stage, BACKWARD.compute)
        for row in self.rows(stage, OpKind.PARAMS_ALL_GATHER):
            self.edge(int(row), self._of_chunk(forward, row)[:1])
        compute = self._compute[stage]
        last = compute[-1:]
        reductions = merged_order(self.ops.stream_order, [self.rows(stage, kind) for kind in GRADIENT_REDUCTION])
        overlapped = len(self.rows(stage, OpKind.SEPARATE_GRADS_ALL_REDUCE)) > 0
        tail = step_tail(partial(self.rows, stage), self.ops.stream_order)
        self.edge(tail[:-1], tail[1:])
        self.edge(last, tail[: len(last)])
        if len(self._late[stage]):
            tail = with_late_work(tail, self._late[stage], self.ops.after_tail)
            self.edge(tail[:-1], tail[1:])
        if overlapped:
            for row in reductions:
                self.edge(self._of_chunk(backward, row)[-1:], int(row))
            self.edge(reductions[-1:], tail[: len(reductions[-1:])])

    def add_held_send(self, stage: int) -> None:
        """Let the last backward and its send wait for the reductions inside it (DistributedDataParallel)."""
        reductions, sends = self.rows(stage, OpKind.ALL_REDUCE), self.rows(stage, BACKWARD.send)
        if len(reductions) and len(sends):
            reduction, send = int(reductions[-1]), int(sends[-1])
            if is_held(self.ops.start[send], self.ops.start[reduction], self.ops.end[reduction]):
                self.edge(reduction, send)

    def _of_chunk(self, computes: Ints, collective: int) -> Ints:
        """The computes of the collective's chunk; all computes if it has no chunk."""
        chunk = self.ops.chunk[collective]
        return computes if chunk < 0 else computes[self.ops.chunk[computes] == chunk]

    def match(self, direction: Direction, stage: int, *, receiving: bool) -> dict[int, Ints]:
        """Order the recvs (or sends) of a stage relative to the computes of their direction; returns those that pair
        with a transfer of another stage, by link.
        """
        kind = direction.recv if receiving else direction.send
        computes, rows = self.rows(stage, direction.compute), self.rows(stage, kind)
        link = self._link(direction, stage, receiving=receiving)
        inner, at_edge = link >= 0, receiving and stage == self._edge_stage(direction, receiving=True)
        for idle in self._idle(direction, stage, receiving=receiving):
            transfers = rows[: len(rows) - idle] if receiving else rows[idle:]
            if len(transfers) == len(computes):
                matched = computes
            elif at_edge and len(transfers) == len(computes) - 1:
                matched = computes[1:]
            elif len(transfers) == inner.sum():
                matched = computes[inner]
            else:
                continue
            if self._v_shaped:
                transfers = in_order_of_computes(transfers, self._virtual(transfers), self._virtual(matched))
            if receiving:
                self.edge(transfers, matched)
                previous = matched - 1
                posted = previous >= (computes[0] if len(computes) else 0)
                self.edge(previous[posted], transfers[posted])
            else:
                self.edge(matched, transfers)
            of_link = link[matched - computes[:1]]
            return {number: transfers[of_link == number] for number in np.unique(of_link).tolist() if number >= 0}
        raise self._unmatched(kind, rows, direction.compute, computes, stage)

    def add_inferred(self, direction: Direction, microbatch: Int32s) -> None:
        """Let each inferred receive wait for the compute whose result it brings, and a compute for its receive."""
        ops = self.ops
        virtual = self._virtual(np.arange(len(ops.kind)))
        computes = np.flatnonzero(ops.kind == direction.compute.code)
        places = zip(virtual[computes].tolist(), microbatch[computes].tolist(), strict=True)
        row_of = dict(zip(places, computes.tolist(), strict=True))
        for stage in range(ops.stages):
            consumers, rows = self.rows(stage, direction.compute), self.rows(stage, direction.recv)
            inner = consumers[self._link(direction, stage, receiving=True) >= 0]
            if len(rows) != len(inner):
                raise self._unmatched(direction.recv, rows, direction.compute, consumers, stage)
            needed = zip((virtual[inner] - direction.stride).tolist(), microbatch[inner].tolist(), strict=True)
            self.edge(np.array([row_of[op] for op in needed], np.int64), rows)
            self.edge(rows, inner)

    def _idle(self, direction: Direction, stage: int, *, receiving: bool) -> list[int]:
        """Numbers of transfers of a stage that may never have run, most likely first.

        With virtual stages, some recorders add a send before the first compute and a recv after the last one. The
        stages that transfer something for each compute show how many: those they have beyond their computes.
        """
        ops, kind = self.ops, direction.recv if receiving else direction.send
        computes, rows = self.rows(stage, direction.compute), self.rows(stage, kind)
        if len(ops.virtual) == 1 or not len(computes):
            return [0]
        edge = self._edge_stage(direction, receiving=receiving)
        whole = [other for other in range(ops.stages) if other != edge] if stage == edge else [stage]
        extra = [len(self.rows(other, kind)) - len(self.rows(other, direction.compute)) for other in whole]
        beyond = len(rows) - int((self._link(direction, stage, receiving=receiving) >= 0).sum())
        likely = dict.fromkeys([min(extra, default=0), 0, beyond])
        return [idle for idle in likely if idle == 0 or (idle > 0 and not self._ran(computes, rows, idle, receiving))]

    def _ran(self, computes: Ints, rows: Ints, idle: int, receiving: bool) -> bool:
        """True if a compute in between shows that the last `idle` recvs (first sends) ran."""
        if idle > len(rows):
            return True
        if receiving:
            return bool(self.ops.start[rows[-idle]] < self.ops.start[computes[-2:][0]])
        return bool(self.ops.start[rows[idle - 1]] > self.ops.end[computes[0]])

    def _virtual(self, rows: Ints) -> Ints:
        """The virtual stage of each row; rows without a chunk count as those of chunk 0."""
        virtual: Ints = self.ops.virtual[np.maximum(self.ops.chunk[rows], 0), self.ops.pp_rank[rows]]
        return virtual

    def _edge_stage(self, direction: Direction, *, receiving: bool) -> int:
        """The stage at the end of the model, which has one chunk without a peer to receive from (or send to)."""
        return int(self._stage_of[0 if receiving == (direction.stride > 0) else -1])

    def _link(self, direction: Direction, stage: int, *, receiving: bool) -> Ints:
        """The link that brings each compute its input (or takes its result), [computes]: a number for each sender and
        receiver; -1: none, as at the ends of the model.
        """
        virtual = self._virtual(self.rows(stage, direction.compute))
        peer = virtual + (-direction.stride if receiving else direction.stride)
        inside = (peer >= 0) & (peer < len(self._stage_of))
        other = self._stage_of[np.where(inside, peer, 0)]
        sender, receiver = (other, stage) if receiving else (stage, other)
        return np.where(inside & (other != stage), sender * self.ops.stages + receiver, -1)

    def pair(self, direction: Direction, sends: dict[int, Ints], recvs: dict[int, Ints]) -> None:
        """Let the k-th send and the k-th recv of a link transfer together."""
        for link in sorted(sends.keys() | recvs.keys()):
            sent, received = (rows.get(link, np.empty(0, np.int64)) for rows in (sends, recvs))
            if len(sent) != len(received):
                stage, peer = divmod(link, self.ops.stages)
                raise GraphError(
                    f"{self.ops.where}: stage {stage} has {len(sent)} {direction.send} ops for stage {peer}, which has"
                    f" {len(received)} {direction.recv} ops; every send needs its recv: record the step again or"
                    " leave it out with --ignore-steps"
                )
            self.group[received] = self.group[sent]

    def join_stages(self) -> None:
        """Join first and last stage by embedding gradients, and all stages by clipping."""
        last = self.ops.stages - 1
        for kind, stages in (
            (OpKind.EMBEDDING_GRADS_ALL_REDUCE, (0, last)),
            (OpKind.OPTIMIZER_CLIP_MAIN_GRAD, range(1, last + 1)),
        ):
            first = self.rows(0, kind)
            for stage in stages:
                rows = self.rows(stage, kind)
                common = min(len(first), len(rows))
                self.group[rows[:common]] = self.group[first[:common]]

    def _unmatched(self, kind: OpKind, rows: Ints, compute: OpKind, computes: Ints, stage: int) -> GraphError:
        return GraphError(
            f"{self.ops.where}, stage {stage}: {len(rows)} {kind} ops for {len(computes)} {compute} ops; expected one"
            " for each (none at the model's ends): record the step again or leave it out with --ignore-steps"
        )


def virtual_stages(layout: Layout, *, v_shaped: bool = False) -> Ints:
    """The number of each virtual stage, [chunks, stages]. `v_shaped`: odd chunks run from the last stage on.

    Usually chunks wrap around: after the last stage, the next chunk begins on the first one. In a V-shaped pipeline
    (ZBV, DualPipeV), it stays on the last stage and runs back to the first.
    """
    number = np.arange(layout.vpp * layout.pp).reshape(layout.vpp, layout.pp)
    if v_shaped:
        number[1::2] = number[1::2, ::-1].copy()
    return number


def is_v_shaped(trace: Trace, whole: Whole = UNDIVIDED) -> bool:
    """Whether most lanes compute in the order of a V-shaped pipeline.

    Between its forward and its backward, a microbatch passes all later parts of the model. So an odd chunk holds it
    longer on the first stage if chunks wrap around, and longer on the last stage in a V. Each stage measures that by
    its own clock.
    """
    layout = trace.layout
    return layout.pp > 1 and layout.vpp > 1 and whole.combined(lambda: _v_shaped_lanes(trace), _most)


def _most(lanes: Sequence[tuple[int, int]]) -> bool:
    """Whether most lanes are V-shaped, given how many are, and how many there are, in each batch of steps."""
    v_shaped, total = np.sum(lanes, axis=0).tolist()
    return bool(2 * v_shaped > total)


def _v_shaped_lanes(trace: Trace) -> tuple[int, int]:
    """The number of lanes in that order, and of all that can tell."""
    layout = trace.layout
    first, forward = pl.col("pp_rank") == 0, pl.col("kind") == OpKind.FORWARD_COMPUTE
    lanes = (
        trace.of_stages((0, layout.pp - 1))
        .filter(
            pl.col("kind").is_in([str(OpKind.FORWARD_COMPUTE), str(OpKind.BACKWARD_COMPUTE)]), pl.col("chunk") % 2 == 1
        )
        .group_by("step", "dp_rank", "pp_rank", "kind")
        .agg(pl.len().alias("count"), longer=pl.when(first != forward).then("start").otherwise(-pl.col("start")).sum())
        .group_by("step", "dp_rank")
        .agg(pl.len(), pl.col("count").n_unique(), pl.col("longer").sum())  # on the first stage than on the last
        .filter(len=4, count=1)  # the same microbatches on both
    )
    return int((lanes["longer"] < 0).sum()), lanes.height


def stage_rows(by_stage: Int32s, stage: int, kind: OpKind) -> Ints:
    """The rows of a kind on a stage. `by_stage`: their numbers, [stages, kinds]."""
    end = int(by_stage.reshape(-1)[: stage * len(KINDS) + kind.code + 1].sum())
    return np.arange(end - by_stage[stage, kind.code], end)


def ops_ended(placed: PlacedLanes, stage: int, begin: Floats, lanes: Ints) -> Ints:
    """How many ops at the end of a stage's step had ended when host work began at `begin`, seconds, in these `lanes`,
    [ops] each; 0 if a compute began later.
    """
    count = np.zeros(len(begin), np.int64)
    computes = [stage_rows(placed.by_stage, stage, kind) for kind in COMPUTE_STREAM if kind not in HOST_WORK]
    last_s = placed.start[np.concatenate(computes)].max(axis=0, initial=-np.inf)
    behind = np.flatnonzero(begin > last_s[lanes])
    for row in step_tail(partial(stage_rows, placed.by_stage, stage), placed.start[:, 0]) if len(behind) else ():
        start = placed.start[row, lanes[behind]]
        count[behind] += is_held(begin[behind], start, start + placed.duration[row, lanes[behind]])
    return count


def first_after_tail(placed: PlacedLanes) -> Ints:
    """`LaneOps.after_tail` in the first lane, [rows]."""
    after_tail = np.zeros(len(placed.start), np.int64)
    for rows, of_lanes in after_tails(placed.only(np.arange(1))):
        after_tail[rows] = of_lanes[:, 0]
    return after_tail


def after_tails(placed: PlacedLanes) -> Iterator[tuple[Ints, Ints]]:
    """The rows of each stage's host work, and how many ops at the end of the step they follow, [rows, lanes]."""
    for stage in range(len(placed.by_stage)):
        rows = np.concatenate([stage_rows(placed.by_stage, stage, kind) for kind in HOST_WORK])
        if not len(rows):
            continue
        lanes = np.tile(np.arange(len(placed.step)), len(rows))
        yield rows, ops_ended(placed, stage, placed.start[rows].ravel(), lanes).reshape(len(rows), len(placed.step))
