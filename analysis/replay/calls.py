"""The own time of each transfer in a call, if the recording keeps all transfers of a call until the last one is over.

In: a `Block` whose structure has calls, and the costs measured so far. Out: costs of its transfers. A call that sends
to one stage and receives from another ends when the later of the two peers is done; its recorded ops show only that
end. So a transfer is assumed to be as fast as its link usually is, unless that leaves the ends of both its calls
unexplained: then it was the slow one. A link whose transfers all wait for slower ones, on every DP rank, is assumed to
be as fast as the other links.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, lower_quantile
from tracekit.trace.model import OpKind

#: The usual transfer of a link is one of its fastest: with virtual stages, nearly all others wait for one of their
#: call.
USUAL_SHARE = 0.05
#: Transfers up to this many times the usual keep their measured time.
LONG_FACTOR = 2.0
#: The end of a call is explained if it is met to this share of a transfer, and to this many seconds.
UNEXPLAINED_SHARE, UNEXPLAINED_S = 0.5, 50e-6


def separate_transfers(block: Block, cost: Floats) -> None:
    """Subtract from the transfers in `cost` [rows, lanes] the time that their calls waited for other transfers."""
    call = block.structure.call
    assert call is not None, "only blocks with calls"
    send, recv = _pairs(block, call)
    if not len(send):
        return
    measured = np.minimum(cost[send], cost[recv])
    link = block.template.pp_rank[send].astype(np.int64) * 2 + (block.template.kind[send] == OpKind.FORWARD_SEND.code)
    _, link = np.unique(link, return_inverse=True)
    own = _usual_of_links(measured, link)
    of_link = lower_median(own, 1)
    of_job = lower_median(of_link, 0)
    hidden = of_link > LONG_FACTOR * of_job
    if hidden.any():  # unless such a link is slow itself, and some calls end with its transfers
        assumed = np.where(hidden[:, None], np.minimum(own, of_job), own)
        ends = _unexplained(block, call, (send, recv), _quick(measured, assumed[link]), assumed[link])
        hidden &= np.bincount(link, ends.mean(axis=1)) < USUAL_SHARE * np.bincount(link)
        own = np.where(hidden[:, None], assumed, own)
    usual = own[link]
    quick = _quick(measured, usual)
    slow = _unexplained(block, call, (send, recv), quick, usual)
    cost[send] = cost[recv] = np.where(slow, measured, quick)


def _quick(measured: Floats, usual: Floats) -> Floats:
    """The time of transfers that are about as fast as usual, seconds, [transfers, lanes]."""
    return np.where(measured <= LONG_FACTOR * usual, measured, usual)


def _unexplained(block: Block, call: Ints, ends: tuple[Ints, Ints], quick: Floats, usual: Floats) -> Bools:
    """Transfers that must be slow: their two calls end later than any `quick` transfer explains, [transfers, lanes].

    `ends`: the rows of their sends and of their receives.
    """
    send, recv = ends
    begin = np.maximum(block.start[send], block.start[recv])
    shape = (int(call.max()) + 1, block.lanes)
    explained, recorded, slack = (np.full(shape, -np.inf) for _ in range(3))
    for rows in ends:
        np.maximum.at(explained, call[rows], begin + quick)
        np.maximum.at(recorded, call[rows], block.start[rows] + block.duration[rows])
        np.maximum.at(slack, call[rows], UNEXPLAINED_SHARE * usual + UNEXPLAINED_S)
    late = recorded > explained + slack
    return np.asarray(late[call[send]] & late[call[recv]])


def _pairs(block: Block, call: Ints) -> tuple[Ints, Ints]:
    """Rows of the sends and of the receives that belong to calls."""
    send, recv = paired_rows(block.template)
    real = (call[send] >= 0) & (call[recv] >= 0)
    return send[real], recv[real]


def _usual_of_links(measured: Floats, link: Ints) -> Floats:
    """The usual transfer time of each link in each lane, seconds, [links, lanes]. `link`: of each transfer.

    If all transfers of a link share their calls with slow ones, its lane does not show how fast they are; those of the
    same link on other DP ranks do.
    """
    of_lane = [lower_quantile(measured[link == number], 0, USUAL_SHARE) for number in range(int(link.max()) + 1)]
    usual = np.maximum(np.stack(of_lane), 0.0)
    return np.minimum(usual, lower_median(usual, 1)[:, None])
