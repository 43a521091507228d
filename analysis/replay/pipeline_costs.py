"""Own and ideal costs of the ops of a pipeline.

In: a `DependencyGraph`. Out: its `Durations`.

If the recording keeps all transfers of a call until the last one is over, their own times are separated first. A call
that sends to one stage and receives from another ends when the later of the two peers is done; its recorded ops show
only that end. So a transfer is assumed to be as fast as its link usually is, unless that leaves the ends of both its
calls unexplained: then it was the slow one. A link whose transfers all wait for slower ones, on every DP rank, is
assumed to be as fast as the other links.

The ideal cost of an op is its duration if no worker and no step were slower than usual: of a compute op, the mean of
its kind over all steps, DP ranks and stages; of a communication op, the median (OSDI'25). That compares ops with ops,
so an op that only one worker has would be its own ideal and cost nothing by definition: a rank that spends half of each
step in the garbage collector would look healthy. So ops that only some workers or steps have are compared as a total
per worker and step, which is zero where the op is absent. Ops that the loop schedules in some steps, a checkpoint or an
evaluation, are compared only among the workers of the same step: their absence from other steps makes no worker slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph import Posting
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph, Template
from tracekit.analysis.graph.lanes import StructureKey
from tracekit.analysis.graph.megatron import COMPUTE_STREAM, GRADIENT_REDUCTION
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.numeric.statistics import lower_median, lower_median_of, lower_quantile
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.graph_replay import Durations, split_durations
from tracekit.trace.model import DP_COLLECTIVES, KINDS, OpKind

#: The usual transfer of a link is one of its fastest: with virtual stages, nearly all others wait for one of their
#: call. Chosen.
USUAL_SHARE = 0.05
#: Transfers up to this many times the usual keep their measured time. Chosen.
LONG_FACTOR = 2.0
#: The end of a call is explained if it is met to this share of a transfer, and to this many seconds. Chosen.
UNEXPLAINED_SHARE, UNEXPLAINED_S = 0.5, 50e-6
#: Kinds that a worker need not have in every step. Any worker may have them, so their peers are all workers.
OCCASIONAL = frozenset({OpKind.GC, OpKind.CHECKPOINT, OpKind.EVALUATION, OpKind.HOST_DELAY})
#: Of these, the ones that the loop runs every few steps: peers are the workers of the same step.
SCHEDULED = frozenset({OpKind.CHECKPOINT, OpKind.EVALUATION})
#: The same, but depending on the stage (the first one loads tokens, the last one labels): peers share the stage.
OCCASIONAL_BY_STAGE = frozenset({OpKind.DATA_LOAD})


def measure_durations(graph: DependencyGraph, method: Method = Method.TRACEKIT, whole: Whole = UNDIVIDED) -> Durations:
    """Split every recorded duration of a pipeline job into the op's own cost and waiting. `whole`: the job of which
    the graph may be some steps.
    """

    def ideals(costs: Sequence[Floats]) -> tuple[Floats, ...]:
        if graph.posting.rule is Posting.BATCHED:
            separate_transfers(graph.blocks, costs, whole)
        return ideal_rows(graph.blocks, costs, graph.layout.pp, method, whole=whole)

    durations = split_durations(graph, ideals)
    for block, delay in zip(graph.blocks, durations.launch_delay, strict=True):
        if block.present is not None:  # an absent op at the start of a lane does not delay others
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[~block.present] = 0.0
            delay[first] = (block.start - block.template.begin[:, None])[first]
        if graph.rank_begin_s is not None:
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[first] -= graph.rank_begins(block, np.arange(len(delay)))[first]
    return durations


def keeps_delay(template: Template) -> Bools:
    """Rows with launch delays that the host causes, [rows]: of collectives, those that wait for nothing but work of
    their worker. Forwards have waited for the parameters long before gradients are reduced.
    """
    collective = np.isin(template.kind, [kind.code for kind in DP_COLLECTIVES])
    waiting = np.repeat(np.arange(template.rows), np.diff(template.first_wait))
    awaited = template.kind[template.waits_for]
    for_work = np.isin(awaited, [kind.code for kind in COMPUTE_STREAM])
    reduces = np.isin(template.kind[waiting], [kind.code for kind in GRADIENT_REDUCTION])
    for_work |= reduces & (awaited == OpKind.PARAMS_ALL_GATHER.code)
    waits_for_others = np.bincount(waiting[~for_work])
    begins = np.arange(template.rows) >= len(waits_for_others)
    begins[: len(waits_for_others)] |= waits_for_others == 0
    by_host: Bools = ~template.is_communication | (collective & begins)
    return by_host


def separate_transfers(blocks: Sequence[Block], costs: Sequence[Floats], whole: Whole = UNDIVIDED) -> None:
    """Subtract from the transfers in `costs`, [rows, lanes] per block, the time that their calls waited for others."""
    of_blocks = (
        _Calls(block, cost) for block, cost in zip(blocks, costs, strict=True) if block.structure.call is not None
    )
    calls = {of_block.block.key: of_block for of_block in of_blocks if len(of_block.send)}
    usual = whole.combined(lambda: {key: of_block.usual for key, of_block in calls.items()}, _usual_of_links)
    hidden = {key: of_link > LONG_FACTOR * lower_median(of_link, 0) for key, of_link in usual.items()}
    if any(mask.any() for mask in hidden.values()):
        # unless such a link is slow itself, and some calls end with its transfers
        assumed = {key: np.where(hidden[key], lower_median(of_link, 0), of_link) for key, of_link in usual.items()}
        ending = whole.combined(lambda: {key: block.ending(assumed[key]) for key, block in calls.items()}, _end_calls)
        usual = {key: np.where(hidden[key] & ~ending[key], assumed[key], usual[key]) for key in usual}
    for key, of_block in calls.items():
        slow = of_block.unexplained(usual[key])
        of_block.cost[of_block.send] = of_block.cost[of_block.recv] = np.where(
            slow, of_block.measured, of_block.quick(usual[key])
        )


def ideal_rows(
    blocks: Sequence[Block],
    costs: Sequence[Floats],
    stages: int,
    method: Method,
    by_other_method: Sequence[Floats] | None = None,
    whole: Whole = UNDIVIDED,
) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if some ops of a row are absent.

    `costs`: the cost of each op, seconds, [rows, lanes] per block. `by_other_method`: the ideal cost by another
    method. `whole`: the job of which the blocks may be some steps.
    """
    ideal = [np.zeros(block.template.rows) for block in blocks]
    rows_of = {kind: [np.flatnonzero(block.template.kind == kind.code) for block in blocks] for kind in KINDS}
    present_kinds = [kind for kind, rows in rows_of.items() if any(len(part) for part in rows)]
    by_total = [
        kind for kind in present_kinds if method is Method.TRACEKIT and kind in OCCASIONAL | OCCASIONAL_BY_STAGE
    ]
    if by_other_method is not None and all(
        costs_of_rows.ndim == 1 for costs_of_rows in by_other_method
    ):  # methods differ in occasional kinds only
        present_kinds = [kind for kind in present_kinds if kind in OCCASIONAL | OCCASIONAL_BY_STAGE]
        ideal = [
            np.where(np.isin(block.template.kind, [kind.code for kind in present_kinds]), 0.0, cost_of_rows)
            for block, cost_of_rows in zip(blocks, by_other_method, strict=True)
        ]
    usual: dict[OpKind, float] = {}
    by_op = [kind for kind in present_kinds if kind not in by_total]

    def compare(kind: OpKind) -> None:
        usual[kind] = _usual_cost(kind, [_costs_of(kind, blocks, costs, rows_of[kind])])

    if not whole.divided:  # the costs of all kinds at once would take as much memory as the matrices
        parallel.each(compare, by_op, numbers=sum(cost.size for cost in costs))
    totals = {
        (kind, group): _Totals.of(blocks, costs, kind, group)
        for kind in by_total
        for group in ([range(stages)] if kind in OCCASIONAL else [range(stage, stage + 1) for stage in range(stages)])
    }

    def contribution() -> _Contribution:
        costs_of_kinds = {kind: _costs_of(kind, blocks, costs, rows_of[kind]) for kind in by_op if whole.divided}
        present = {name: total.present for name, total in totals.items() if name[0] not in SCHEDULED}
        return _Contribution(costs_of_kinds, present, sum(block.lanes for block in blocks))

    combined, usual_totals = whole.combined(contribution, _usual_costs)
    usual |= combined
    for kind in by_op:
        for number, part in enumerate(rows_of[kind]):
            _set(blocks, ideal, number, part, usual[kind])
    for (kind, group), of_group in totals.items():
        by_step = of_group.by_step(blocks, len(group)) if kind in SCHEDULED else None
        for (number, rows), count in zip(of_group.workers, of_group.counts, strict=True):
            cost = usual_totals[kind, group] if by_step is None else by_step[blocks[number].step]
            same = (count == count[0]).all()
            _set(blocks, ideal, number, rows, cost / np.maximum(count[0] if same else count, 1))
    return tuple(ideal)


def _set(blocks: Sequence[Block], ideal: list[Floats], number: int, rows: Ints, cost: float | Floats) -> None:
    """Set the ideal cost of some rows of a block, seconds, one value or [lanes]; absent ops keep 0."""
    block = blocks[number]
    partial = block.present is not None and not block.present[rows].all()
    if ideal[number].ndim == 1 and not partial and np.ndim(cost) == 0:
        ideal[number][rows] = cost
    elif np.any(cost):
        if ideal[number].ndim == 1:
            ideal[number] = np.repeat(ideal[number][:, None], block.lanes, axis=1)
        full = np.broadcast_to(cost, (len(rows), block.lanes))
        ideal[number][rows] = full if block.present is None else np.where(block.present[rows], full, 0.0)


#: A kind of op and the stages whose workers are peers.
_Group = tuple[OpKind, range]
#: Of the ops of a kind: the cost of each transfer, or the sums over each lane, seconds, and how many there are.
_Costs = tuple[Sequence[Floats], int]


class _Contribution(Struct, frozen=True, eq=False):
    """What some steps contribute to the ideals of a job. `present`: `_Totals.present`. `lanes`: how many there are."""

    costs: Mapping[OpKind, _Costs]
    present: Mapping[_Group, Floats]
    lanes: int


def _usual_costs(parts: Sequence[_Contribution]) -> tuple[dict[OpKind, float], dict[_Group, float]]:
    """The usual cost of each kind, and the usual total of a worker and step, seconds."""
    lanes = sum(part.lanes for part in parts)
    usual = {kind: _usual_cost(kind, of_parts) for kind, of_parts in by_name([part.costs for part in parts]).items()}
    totals = {
        (kind, group): lower_median_of(np.concatenate(present), len(group) * lanes)
        for (kind, group), present in by_name([part.present for part in parts]).items()
    }
    return usual, totals


def _costs_of(kind: OpKind, blocks: Sequence[Block], costs: Sequence[Floats], rows: Sequence[Ints]) -> _Costs:
    parts, ops = [], 0
    for block, matrix, part in zip(blocks, costs, rows, strict=True):
        if len(part):
            cost, present = matrix[part], None if block.present is None else block.present[part]
            ops += cost.size if present is None else int(present.sum())
            if not kind.is_communication:
                cost = sum_of_rows(cost)
            elif present is not None:
                cost = cost[present]
            parts.append(cost.ravel())
    return parts, ops


def _usual_cost(kind: OpKind, parts: Sequence[_Costs]) -> float:
    """Mean (compute) or median (communication) of a kind's own costs, seconds."""
    arrays = [array for arrays_of_part, _ in parts for array in arrays_of_part]
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if kind.is_communication:  # indexing copied the values, so the median may sort them in place
        return float(np.median(values, overwrite_input=True))
    return math.fsum(values) / sum(ops for _, ops in parts)  # exact, so that it does not depend on the batches


def sum_of_rows(matrix: Floats) -> Floats:
    """The sum of each column, [columns]; one row after the other, however many columns there are."""
    return np.asarray(np.cumsum(matrix, axis=0)[-1] if matrix.shape[1] == 1 and len(matrix) else matrix.sum(axis=0))


class _Totals(Struct, frozen=True, eq=False):
    """The total cost of a kind on each worker and step. `workers`: (block, rows) of each stage of each block that has
    such ops; `counts`: the number of these that each lane has, [lanes] per worker. `present`: totals of workers and
    steps that have some, seconds, of all `workers` one after the other.
    """

    workers: Sequence[tuple[int, Ints]]
    counts: Sequence[Ints]
    present: Floats

    @classmethod
    def of(cls, blocks: Sequence[Block], costs: Sequence[Floats], kind: OpKind, stages: range) -> _Totals:
        workers = list(_workers_with(blocks, kind, stages))
        counts = [_ops_of_lanes(blocks[number], rows) for number, rows in workers]
        parts = zip(workers, counts, strict=True)
        totals = [sum_of_rows(costs[number][rows])[count > 0] for (number, rows), count in parts]
        return cls(workers, counts, np.concatenate(totals) if totals else np.empty(0))

    def by_step(self, blocks: Sequence[Block], stages: int) -> Floats:
        """The usual total of a worker in each step, seconds, [steps]."""
        parts = zip(self.workers, self.counts, strict=True)
        steps = [blocks[number].step[count > 0] for (number, _), count in parts]
        lanes = np.bincount(np.concatenate([block.step for block in blocks]))
        return _usual_by_step(self.present, np.concatenate([np.empty(0, np.int64), *steps]), stages * lanes)


def _usual_by_step(present: Floats, step: Ints, cells: Ints) -> Floats:
    """The lower median of each step's workers, seconds, [steps]. `present`: totals that are not zero, with the `step`
    of each; `cells`: the number of workers in each step.
    """
    order = np.lexsort((present, step))
    count = np.bincount(step, minlength=len(cells))
    first = np.cumsum(count) - count
    place = (cells - 1) // 2 - (cells - count)
    usual = np.zeros(len(cells))
    nonzero = place >= 0
    usual[nonzero] = present[order][(first + place)[nonzero]]
    return usual


def _ops_of_lanes(block: Block, rows: Ints) -> Ints:
    """Number of the rows that each lane has, [lanes]."""
    if block.present is None:
        return np.full(block.lanes, len(rows))
    count: Ints = block.present[rows].sum(axis=0)
    return count


def _workers_with(blocks: Sequence[Block], kind: OpKind, stages: range) -> Iterator[tuple[int, Ints]]:
    """(block, rows) of each stage of each block that has ops of `kind`."""
    for number, block in enumerate(blocks):
        template = block.template
        for stage in stages:
            rows = np.flatnonzero((template.kind == kind.code) & (template.pp_rank == stage))
            if len(rows):
                yield number, rows


def _usual_of_links(parts: Sequence[Mapping[StructureKey, Floats]]) -> dict[StructureKey, Floats]:
    """The usual transfer time of each link on all lanes, seconds, [links], from `_Calls.usual` of batches of steps."""
    return {key: lower_median(np.concatenate(of_parts, axis=1), 1) for key, of_parts in by_name(parts).items()}


def _end_calls(parts: Sequence[Mapping[StructureKey, tuple[Ints, Ints, int]]]) -> dict[StructureKey, Bools]:
    """Links whose transfers end some calls, [links], from `_Calls.ending` of batches of steps."""
    ending = {}
    for key, of_batches in by_name(parts).items():
        links, late, lanes = zip(*of_batches, strict=True)
        share = np.bincount(links[0], np.sum(late, axis=0) / sum(lanes))
        ending[key] = share >= USUAL_SHARE * np.bincount(links[0])
    return ending


class _Calls:
    """The transfers of a block that are parts of calls, and their `measured` time, seconds, [transfers, lanes].

    `link`: of each transfer. `usual`: the usual transfer time of each link in each lane, seconds, [links, lanes]. If
    all transfers of a link share their calls with slow ones, its lane does not show how fast they are; those of the
    same link in other lanes do.
    """

    def __init__(self, block: Block, cost: Floats) -> None:
        assert block.structure.call is not None, "only blocks with calls"
        self.block, self.cost, self.call = block, cost, block.structure.call
        self.send, self.recv = _pairs(block, self.call)
        self.measured = np.minimum(cost[self.send], cost[self.recv])
        forward = block.template.kind[self.send] == OpKind.FORWARD_SEND.code
        links, self.link = np.unique(block.template.pp_rank[self.send] * np.int64(2) + forward, return_inverse=True)
        of_links = [lower_quantile(self.measured[self.link == link], 0, USUAL_SHARE) for link in range(len(links))]
        self.usual = np.maximum(np.stack(of_links), 0.0) if of_links else np.empty((0, block.lanes))

    def _own(self, most: Floats) -> Floats:
        """The usual time of the link of each transfer, seconds, [transfers, lanes]. `most`: of each link."""
        return np.minimum(self.usual, most[:, None])[self.link]

    def quick(self, most: Floats) -> Floats:
        """The time of transfers that are about as fast as usual, seconds, [transfers, lanes]. `most`: as in `_own`."""
        own = self._own(most)
        return np.where(self.measured <= LONG_FACTOR * own, self.measured, own)

    def ending(self, most: Floats) -> tuple[Ints, Ints, int]:
        """The link of each transfer, in how many lanes it is unexplained, and the number of lanes."""
        return self.link, self.unexplained(most).sum(axis=1), self.block.lanes

    def unexplained(self, most: Floats) -> Bools:
        """Transfers that must be slow: their two calls end later than any quick transfer explains, [transfers, lanes].

        `most`: as in `_own`.
        """
        block, call, quick = self.block, self.call, self.quick(most)
        begin = np.maximum(block.start[self.send], block.start[self.recv])
        shape = (int(call.max()) + 1, block.lanes)
        explained, recorded, slack = (np.full(shape, -np.inf) for _ in range(3))
        for rows in (self.send, self.recv):
            np.maximum.at(explained, call[rows], begin + quick)
            np.maximum.at(recorded, call[rows], block.start[rows] + block.duration[rows])
            np.maximum.at(slack, call[rows], UNEXPLAINED_SHARE * self._own(most) + UNEXPLAINED_S)
        late = recorded > explained + slack
        return np.asarray(late[call[self.send]] & late[call[self.recv]])


def _pairs(block: Block, call: Ints) -> tuple[Ints, Ints]:
    """Rows of the sends and of the receives that belong to calls."""
    send, recv = paired_rows(block.template)
    real = (call[send] >= 0) & (call[recv] >= 0)
    return send[real], recv[real]
