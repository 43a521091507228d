"""Own cost of each op: durations without waiting, launch delays, and the ideal.

In: a `DependencyGraph`. Out: per block, the cost of each op (`cost`), its launch delay and its ideal cost. Waiting for
peers is removed from communication ops: transfer duration = recorded end - latest recorded start in the group. Launch
delay = recorded start - latest recorded end of the ops that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tracekit.analysis import native
from tracekit.analysis.graph.compiled import LabelledBlock, LabelledGraph
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph, Template
from tracekit.analysis.graph.lanes import StructureKey
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.graph.posting import HOST_KINDS, Posting
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.numeric.robust import lower_median, lower_quantile
from tracekit.analysis.replay.ideal import ideal_rows
from tracekit.analysis.replay.method import Method
from tracekit.trace.model import DP_COLLECTIVES, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph

#: Clocks differ: a transfer or delay down to this far below zero is kept, so that the replay reproduces the recording;
#: one below that is set to 0 and counted.
CLOCK_TOLERANCE_S = 10e-3


class Durations(Struct, frozen=True, eq=False):
    """Costs of all ops of a graph, seconds; one array per block.

    `cost`: own cost of each op, `launch_delay`: how long it was ready before it started, [rows, lanes]. `ideal`:
    duration of the ops of a row without stragglers (see `ideal`), [rows], or [rows, lanes] if lanes differ.
    `clamped_transfers`, `clamped_delays`: how many values were more than 10 ms below zero and were set to 0. An absent
    op of a block (`LabelledBlock.present`) has 0 everywhere.
    """

    cost: tuple[Floats, ...]
    launch_delay: tuple[Floats, ...]
    ideal: tuple[Floats, ...]
    clamped_transfers: int
    clamped_delays: int


def measure_durations(graph: DependencyGraph, method: Method = Method.TRACEKIT, whole: Whole = UNDIVIDED) -> Durations:
    """Split every recorded duration of a pipeline job into the op's own cost and waiting. `whole`: the job of which
    the graph may be some steps.
    """

    def ideals(costs: Sequence[Floats]) -> tuple[Floats, ...]:
        if graph.posting.rule is Posting.BATCHED:
            separate_transfers(graph.blocks, costs, whole)
        return ideal_rows(graph.blocks, costs, graph.layout.pp, method, whole=whole)

    durations = _split(graph, ideals)
    for block, delay in zip(graph.blocks, durations.launch_delay, strict=True):
        if block.present is not None:  # an absent op at the start of a lane does not delay others
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[~block.present] = 0.0
            delay[first] = (block.start - block.template.begin[:, None])[first]
        if graph.rank_begin_s is not None:
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[first] -= graph.rank_begins(block, np.arange(len(delay)))[first]
    return durations


def measure_op_durations(graph: FoldedGraph) -> Durations:
    """Split every recorded duration of an op graph into the op's own cost and waiting."""
    from tracekit.analysis.replay.ideal import ideals_of_peers

    return _split(graph, lambda costs: ideals_of_peers(graph, costs))


def keeps_delay(template: Template) -> Bools:
    """Rows with launch delays that the host causes, [rows]: of collectives, those that wait only for host work."""
    collective = np.isin(template.kind, [kind.code for kind in DP_COLLECTIVES])
    for_work = np.isin(template.kind[template.waits_for], [kind.code for kind in HOST_KINDS])
    waits_for_others = np.bincount(np.repeat(np.arange(template.rows), np.diff(template.first_wait))[~for_work])
    begins = np.arange(template.rows) >= len(waits_for_others)
    begins[: len(waits_for_others)] |= waits_for_others == 0
    by_host: Bools = ~template.is_communication | (collective & begins)
    return by_host


def _split(graph: LabelledGraph, ideals: Callable[[Sequence[Floats]], tuple[Floats, ...]]) -> Durations:
    """Split the durations. `ideals`: the ideal costs, given costs from which it may subtract other waits."""
    rendezvous_start = np.full((graph.rendezvous_count, len(graph.steps)), -np.inf)
    for block in graph.blocks:
        template = block.template
        native.rendezvous_starts(
            template.order, template.first_of_group, template.rendezvous, block.start, block.step, rendezvous_start
        )
    costs, delays = [], []
    clamped_transfers = clamped_delays = 0
    for block in graph.blocks:
        (cost, transfers), (block_delay, late) = parallel.both(
            partial(_op_costs, block, rendezvous_start), partial(_launch_delays, block), numbers=block.start.size
        )
        costs.append(cost)
        delays.append(block_delay)
        clamped_transfers += transfers
        clamped_delays += late
    ideal = ideals(costs)
    return Durations(
        cost=tuple(costs),
        launch_delay=tuple(delays),
        ideal=ideal,
        clamped_transfers=clamped_transfers,
        clamped_delays=clamped_delays,
    )


def _op_costs(block: LabelledBlock, rendezvous_start: Floats) -> tuple[Floats, int]:
    template = block.template
    cost = block.duration.copy()
    clamped = native.transfer_durations(
        template.order, template.first_of_group, template.rendezvous, template.is_communication,
        block.start, block.step, rendezvous_start, -CLOCK_TOLERANCE_S, cost,
    )  # fmt: skip
    return cost, clamped


def _launch_delays(block: LabelledBlock) -> tuple[Floats, int]:
    template = block.template
    delay = block.start.copy()
    lowest = -CLOCK_TOLERANCE_S if block.present is None else -np.inf
    clamped = native.launch_delays(template.first_wait, template.waits_for, block.start, block.duration, lowest, delay)
    early = (template.begin != 0) & (np.diff(template.first_wait) == 0)
    delay[early] -= template.begin[early][:, None]
    if block.present is not None:  # an absent op has no recorded start that could contradict the graph
        waits = np.diff(template.first_wait) > 0
        low = (delay < -CLOCK_TOLERANCE_S) & waits[:, None]
        clamped = int(np.count_nonzero(low & block.present))
        delay[low] = 0.0
    return delay, clamped


#: The usual transfer of a link is one of its fastest: with virtual stages, nearly all others wait for one of their
#: call.
USUAL_SHARE = 0.05
#: Transfers up to this many times the usual keep their measured time.
LONG_FACTOR = 2.0
#: The end of a call is explained if it is met to this share of a transfer, and to this many seconds.
UNEXPLAINED_SHARE, UNEXPLAINED_S = 0.5, 50e-6


def separate_transfers(blocks: Sequence[Block], costs: Sequence[Floats], whole: Whole = UNDIVIDED) -> None:
    """Subtract from the transfers in `costs`, [rows, lanes] per block, the time that their calls waited for others."""
    of_blocks = (
        _Calls(block, cost) for block, cost in zip(blocks, costs, strict=True) if block.structure.call is not None
    )
    calls = {one.block.key: one for one in of_blocks if len(one.send)}
    usual = whole.agreed(lambda: {key: one.usual for key, one in calls.items()}, _usual_of_links)
    hidden = {key: of_link > LONG_FACTOR * lower_median(of_link, 0) for key, of_link in usual.items()}
    if any(mask.any() for mask in hidden.values()):
        # unless such a link is slow itself, and some calls end with its transfers
        assumed = {key: np.where(hidden[key], lower_median(of_link, 0), of_link) for key, of_link in usual.items()}
        ending = whole.agreed(lambda: {key: one.ending(assumed[key]) for key, one in calls.items()}, _end_calls)
        usual = {key: np.where(hidden[key] & ~ending[key], assumed[key], usual[key]) for key in usual}
    for key, of_block in calls.items():
        slow = of_block.unexplained(usual[key])
        of_block.cost[of_block.send] = of_block.cost[of_block.recv] = np.where(
            slow, of_block.measured, of_block.quick(usual[key])
        )


def _usual_of_links(parts: Sequence[Mapping[StructureKey, Floats]]) -> dict[StructureKey, Floats]:
    """The usual transfer time of each link on all lanes, seconds, [links], from `_Calls.usual` of batches of steps."""
    return {key: lower_median(np.concatenate(some, axis=1), 1) for key, some in by_name(parts).items()}


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
        of_links = [lower_quantile(self.measured[self.link == at], 0, USUAL_SHARE) for at in range(len(links))]
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
