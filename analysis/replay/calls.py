"""The own time of each transfer in a call, if the recording keeps all transfers of a call until the last one is over.

In: `Block`s whose structures have calls, and the costs measured so far. Out: costs of its transfers. A call that sends
to one stage and receives from another ends when the later of the two peers is done; its recorded ops show only that
end. So a transfer is assumed to be as fast as its link usually is, unless that leaves the ends of both its calls
unexplained: then it was the slow one. A link whose transfers all wait for slower ones, on every DP rank, is assumed to
be as fast as the other links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.lanes_of_job import StructureKey
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, lower_quantile
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole, by_name
from tracekit.trace.model import OpKind

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
