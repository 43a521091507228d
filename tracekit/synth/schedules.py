"""Pipeline schedules: the ops of one model-parallel group in a step, and their dependencies.

In: the sizes of a job and a schedule. Out: a `LanePlan`, the ops of one lane (one DP rank, all its stages) in an order
in which they can run. Written independently of the analysis, so that a simulated trace is an independent check of the
dependency graph that the analysis rebuilds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter

from tracekit.trace.compute_order import Compute, Schedule, check_schedule, compute_order
from tracekit.trace.model import Layout, OpKind


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op of a lane.

    `seq`: 0-based order of the kind on its stage. `waits_for`: indices in `LanePlan.ops` of the ops that must end
    first. `no_op`: a send or recv that a profiler records although nothing is transferred. `draw_key`: identifies the
    op's random draws: kind code, stage, seq; a recv shares those of its send.
    """

    kind: OpKind
    pp_rank: int
    seq: int
    microbatch: int | None
    chunk: int | None
    waits_for: tuple[int, ...]
    draw_key: tuple[int, int, int]
    no_op: bool = False


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The ops of one lane, and the groups that transfer together: tuples of indices in `ops`, in runnable order."""

    ops: tuple[PlannedOp, ...]
    groups: tuple[tuple[int, ...], ...]


def plan_lane(
    schedule: Schedule, layout: Layout, microbatches: int, *, overlap_dp: bool, record_no_ops: bool = False
) -> LanePlan:
    """Plan one step of one DP rank.

    `overlap_dp`: reduce each chunk's gradients as soon as its last backward ends, else all of them at the end.
    `record_no_ops`: with virtual stages, also record the sends and recvs at the model's two ends and before the first
    or after the last compute, which never transfer anything. Raises LayoutError for sizes that the schedule cannot run.
    """
    check_schedule(schedule, layout, microbatches)
    planner = _Planner(layout, record_no_ops=record_no_ops and layout.vpp > 1 and layout.pp > 1)
    for stage in range(layout.pp):
        order = compute_order(schedule, layout, microbatches, stage)
        computes = planner.add_pipeline(stage, order, planner.add_gathers(stage))
        planner.add_tail(stage, order, computes, overlap_dp=overlap_dp)
    groups = planner.groups()
    return LanePlan(tuple(planner.ops), tuple(_runnable(planner.ops, groups)))


@dataclass
class _Direction:
    """The planned ops of one direction of one stage."""

    recv: OpKind
    send: OpKind
    last_recv: tuple[int, ...] = ()
    last_send: tuple[int, ...] = ()
    last_compute: tuple[int, ...] = ()


@dataclass
class _Planner:
    """Collects the ops of a lane; each instance plans one lane."""

    layout: Layout
    record_no_ops: bool
    ops: list[PlannedOp] = field(default_factory=list)
    counts: dict[tuple[int, OpKind], int] = field(default_factory=dict)
    sends: dict[tuple[int, OpKind], list[int]] = field(default_factory=dict)
    recvs: dict[tuple[int, OpKind], list[int]] = field(default_factory=dict)
    joined: dict[OpKind, list[int]] = field(default_factory=dict)

    def add(
        self,
        kind: OpKind,
        stage: int,
        waits_for: Sequence[int],
        *,
        microbatch: int | None = None,
        chunk: int | None = None,
        no_op: bool = False,
    ) -> tuple[int, ...]:
        """Plan one op; returns its index, for the next op to wait for."""
        seq = self.counts.get((stage, kind), 0)
        self.counts[stage, kind] = seq + 1
        waits, draw_key = tuple(sorted(set(waits_for))), (kind.code, stage, seq)
        self.ops.append(PlannedOp(kind, stage, seq, microbatch, chunk, waits, draw_key, no_op))
        return (len(self.ops) - 1,)

    def add_gathers(self, stage: int) -> list[tuple[int, ...]]:
        """One params-all-gather per chunk, in turn; returns, per chunk, the ops that its first forward waits for."""
        if not self.layout.has_dp_collectives:
            return [()] * self.layout.vpp
        gathers: list[tuple[int, ...]] = []
        for chunk in range(self.layout.vpp):
            before = gathers[-1] if gathers else ()
            gathers.append(self.add(OpKind.PARAMS_ALL_GATHER, stage, before, chunk=chunk))
        return gathers

    def add_pipeline(self, stage: int, order: Sequence[Compute], gathered: list[tuple[int, ...]]) -> list[int]:
        """The computes of a stage with their recvs and sends; returns the indices of the computes."""
        forward = _Direction(OpKind.FORWARD_RECV, OpKind.FORWARD_SEND)
        backward = _Direction(OpKind.BACKWARD_RECV, OpKind.BACKWARD_SEND)
        first_backward = next(position for position, compute in enumerate(order) if not compute.forward)
        computes: list[int] = []
        open_chunks = set(range(self.layout.vpp))
        for index, compute in enumerate(order):
            direction = forward if compute.forward else backward
            first = index in {0, first_backward}
            warm = (computes[index - 2],) if index == first_backward and index >= 2 else ()
            if first and self.record_no_ops:
                direction.last_send = self.add(direction.send, stage, warm, no_op=True)
            waits = [*computes[-1:], *self._recv(stage, compute, direction, warm)]
            if compute.forward and compute.chunk in open_chunks:
                open_chunks.remove(compute.chunk)
                waits += gathered[compute.chunk]
            kind = OpKind.FORWARD_COMPUTE if compute.forward else OpKind.BACKWARD_COMPUTE
            direction.last_compute = self.add(kind, stage, waits, microbatch=compute.microbatch, chunk=compute.chunk)
            computes += direction.last_compute
            self._send(stage, compute, direction)
        if self.record_no_ops:
            for direction in (forward, backward):
                self.add(direction.recv, stage, (*direction.last_recv, *direction.last_compute), no_op=True)
        return computes

    def _recv(self, stage: int, compute: Compute, direction: _Direction, warm: tuple[int, ...]) -> tuple[int, ...]:
        """The recv of a compute's input, posted once the previous compute in its direction has ended."""
        transfers = self._crosses(stage, compute, inbound=True)
        if not transfers and not self.record_no_ops:
            return ()
        waits = (*direction.last_recv, *direction.last_compute, *(() if direction.last_recv else warm))
        direction.last_recv = self.add(direction.recv, stage, waits, no_op=not transfers)
        if transfers:
            self.recvs.setdefault((stage, direction.recv), []).extend(direction.last_recv)
        return direction.last_recv

    def _send(self, stage: int, compute: Compute, direction: _Direction) -> None:
        transfers = self._crosses(stage, compute, inbound=False)
        if not transfers and not self.record_no_ops:
            return
        direction.last_send = self.add(
            direction.send, stage, (*direction.last_send, *direction.last_compute), no_op=not transfers
        )
        if transfers:
            self.sends.setdefault((stage, direction.send), []).extend(direction.last_send)

    def _crosses(self, stage: int, compute: Compute, *, inbound: bool) -> bool:
        """True if the compute's input (or output) comes from (or goes to) another stage."""
        if self.layout.pp == 1:
            return False
        at_front = inbound == compute.forward
        edge_stage, edge_chunk = (0, 0) if at_front else (self.layout.pp - 1, self.layout.vpp - 1)
        return not (stage == edge_stage and compute.chunk == edge_chunk)

    def add_tail(self, stage: int, order: Sequence[Compute], computes: list[int], *, overlap_dp: bool) -> None:
        """Gradient reduction, clipping and the optimizer."""
        collectives = self.layout.has_dp_collectives
        last_backward = {compute.chunk: computes[i] for i, compute in enumerate(order) if not compute.forward}
        in_order = sorted(last_backward, key=lambda chunk: last_backward[chunk])
        reduced: tuple[int, ...] = tuple(
            number for number, op in enumerate(self.ops) if op.kind is OpKind.PARAMS_ALL_GATHER and op.pp_rank == stage
        )[-1:]
        if collectives and overlap_dp:
            for chunk in in_order:
                waits = (*reduced, last_backward[chunk])
                reduced = self.add(OpKind.GRADS_REDUCE_SCATTER, stage, waits, chunk=chunk)
        last = self.add(OpKind.GC, stage, computes[-1:])
        last = self.add(OpKind.LAYERNORM_GRADS_ALL_REDUCE, stage, (*last, *(reduced if overlap_dp else ())))
        if self.layout.pp > 1 and stage in (0, self.layout.pp - 1):
            last = self.add(OpKind.EMBEDDING_GRADS_ALL_REDUCE, stage, last)
            self.joined.setdefault(OpKind.EMBEDDING_GRADS_ALL_REDUCE, []).extend(last)
        if collectives and overlap_dp:
            last = self.add(OpKind.SEPARATE_GRADS_ALL_REDUCE, stage, last)
        elif collectives:
            for chunk in in_order:
                last = self.add(OpKind.GRADS_REDUCE_SCATTER, stage, (*last, *reduced), chunk=chunk)
                reduced = last
        last = self.add(OpKind.OPTIMIZER_CLIP_MAIN_GRAD, stage, last)
        self.joined.setdefault(OpKind.OPTIMIZER_CLIP_MAIN_GRAD, []).extend(last)
        self.add(OpKind.OPTIMIZER, stage, last)

    def groups(self) -> list[tuple[int, ...]]:
        """Indices of ops that transfer together: each send with its recv, each collective over stages; others alone."""
        groups: list[tuple[int, ...]] = [tuple(members) for members in self.joined.values()]
        for send, recv, stride in (
            (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, 1),
            (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV, -1),
        ):
            for stage in range(self.layout.pp):
                sent = self.sends.get((stage, send), [])
                received = self.recvs.get(((stage + stride) % self.layout.pp, recv), [])
                groups += zip(sent, received, strict=True)
                for sending, receiving in zip(sent, received, strict=True):
                    self.ops[receiving] = replace(self.ops[receiving], draw_key=self.ops[sending].draw_key)
        grouped = {number for group in groups for number in group}
        return groups + [(number,) for number in range(len(self.ops)) if number not in grouped]


def _runnable(ops: Sequence[PlannedOp], groups: Sequence[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    """The groups in an order in which each comes after everything that it waits for."""
    group_of = {number: group for group in groups for number in group}
    waits = {group: {group_of[before] for number in group for before in ops[number].waits_for} for group in groups}
    return TopologicalSorter(waits).static_order()
