"""The job with a faster network: links and cards as the usual ones, and without single transfers that hang.

In: `Traffic`. Out: `Change`s, and `Hiccups`.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.changes import Change, Scale, Together
from tracekit.analysis.evidence.transfers import (
    LINK_SPREADS,
    NO_TIME_S,
    SMALLEST_RING_FACTOR,
    Bools,
    SlowCard,
    Traffic,
)
from tracekit.analysis.graph.op_grid import OpGrid, TransferGrid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, median
from tracekit.records import dataclass

#: A card that four workers share makes a transfer four times as long; one half as long again hangs.
HICCUP_FACTOR = 6.0
#: Beside transfers that hang, those this much longer than usual in the same step met the same trouble.
BESIDE_FACTOR = 2.5


def links_as_usual(traffic: Traffic, links: Bools) -> Change:
    """The transfers of `links` [slots, steps, dp_ranks] as fast as those of the usual link, and no wait behind them.

    What shares a card with them waits where they pass one after the other; what goes the other way ends with them
    where both are one call.
    """
    evidence = traffic.evidence
    anywhere: Bools = np.any(links, axis=1)
    waits = traffic.beside(anywhere) | anywhere.reshape(-1, 2, anywhere.shape[1])[:, ::-1].reshape(anywhere.shape)
    long = traffic.seconds > BESIDE_FACTOR * traffic.usual_s
    steps: Bools = np.any(links, axis=(0, 2))
    where = links[:, None] | (waits[:, None, None, :] & steps[:, None] & long)
    return Scale(evidence.transfers, _to_usual(traffic.seconds, traffic.usual_s, where))


def card_as_usual(traffic: Traffic, card: SlowCard) -> Change:
    """All that passes a card as fast as elsewhere: transfers, collectives of its stages, gradients of the embedding."""
    evidence = traffic.evidence
    changes: list[Change] = [links_as_usual(traffic, card.flows[:, None, :] & card.steps[:, None])]
    rings = _through(card, traffic.rings)
    if rings.any():
        factor = _to_usual(traffic.rings, traffic.usual_ring_s[:, :, None], rings)
        changes.append(Scale(evidence.collectives, factor[..., None]))
    exchanges = _exchanged(traffic, card)
    if exchanges.any():
        factor = _to_usual(traffic.exchanges, _usual_exchange_s(traffic, card), exchanges)
        changes.append(Scale(evidence.embedding_exchanges, factor[None]))
    return Together(tuple(changes))


def _through(card: SlowCard, rings: Floats) -> Bools:
    """The collectives that pass a slow card, [stages, ops, steps]."""
    here = np.zeros(rings.shape, np.bool_)
    here[list(card.stages)] = card.steps
    return here


def _exchanged(traffic: Traffic, card: SlowCard) -> Bools:
    """The exchanges of embedding gradients that pass a slow card, [ops, steps, dp_ranks]."""
    evidence = traffic.evidence
    ends = {0, evidence.stages - 1}
    dp_ranks = {worker.dp_rank for worker in card.workers if worker.pp_rank in ends}
    here: Bools = card.steps[:, None] & np.isin(evidence.dp_ranks, list(dp_ranks))
    long = traffic.exchanges > SMALLEST_RING_FACTOR * _usual_exchange_s(traffic, card)
    return here & long


def _usual_exchange_s(traffic: Traffic, card: SlowCard | None = None) -> Floats:
    """The usual exchange of embedding gradients, seconds, [ops, 1, 1].

    Where the exchanges of all DP ranks pass the card, none says what is usual: they are as much slower as the fastest
    transfers over the card are.
    """
    seconds = median(traffic.exchanges, (1,))
    usual = lower_median(seconds, axis=1)[:, None, None]
    if card is None or not traffic.exchanges.size:
        return usual
    dp_ranks = {worker.dp_rank for worker in card.workers if worker.pp_rank in {0, traffic.evidence.stages - 1}}
    return usual if len(dp_ranks) < seconds.shape[1] else usual / card.fastest_factor


@dataclass(frozen=True, slots=True)
class Hiccups:
    """Transfers and collectives that hang: how many of how many, the longest over its usual, the change without them.

    `lost_s`: seconds beyond the usual, [steps].
    """

    count: int
    of: int
    longest: float
    lost_s: Floats
    change: Change


def hiccups(traffic: Traffic) -> Hiccups:
    """What takes many times as long as the same transfer usually does, slow links and cards taken as they are."""
    evidence = traffic.evidence
    links = traffic.slow_links.copy()
    ring_s = np.broadcast_to(median(traffic.rings, (2,))[:, :, None], traffic.rings.shape).copy()
    exchange_s = np.broadcast_to(_usual_exchange_s(traffic), traffic.exchanges.shape).copy()
    for card in traffic.cards:
        links |= card.flows[:, None, :] & card.steps[:, None]
        mine, exchanged = _through(card, traffic.rings), _exchanged(traffic, card)
        ring_s[mine] = np.fmax(ring_s, traffic.rings)[mine]
        exchange_s[exchanged] = traffic.exchanges[exchanged]
    link_s = np.fmax(traffic.link_s[:, None], np.where(links, traffic.factor * traffic.usual_s, 0.0))
    link_s = np.fmax(link_s, max(traffic.usual_s, LINK_SPREADS / HICCUP_FACTOR * traffic.spread_s))
    # What the same transfer takes in most steps comes of the schedule, not by chance.
    transfer_s = np.fmax(link_s[:, None], median(traffic.seconds, (2,))[:, :, None]) + traffic.shared_s
    return _hanging(
        len(evidence.replay.graph.steps),
        [
            _Sent(evidence.transfers, traffic.seconds, transfer_s),
            _Sent(evidence.collectives, traffic.rings[..., None], ring_s[..., None]),
            _Sent(evidence.embedding_exchanges, traffic.exchanges[None], exchange_s[None]),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """What some ops took, and usually take, seconds; both broadcast to their grid."""

    grid: OpGrid | TransferGrid
    seconds: Floats
    usual: Floats


def _hanging(steps: int, sent: list[_Sent]) -> Hiccups:
    """Those that hang, and what met the same trouble beside them."""
    over = [part.seconds / np.maximum(part.usual, NO_TIME_S) for part in sent]
    hang = [part > HICCUP_FACTOR for part in over]
    hit = np.zeros(steps, np.bool_)
    for part in hang:
        hit |= part.any(axis=(0, 1, 3))
    lost_s = np.zeros(steps)
    changes: list[Change] = []
    for met, ratio in zip(sent, over, strict=True):
        long = (ratio > BESIDE_FACTOR) & hit[:, None]
        lost_s += np.where(long, met.seconds - met.usual, 0.0).sum(axis=(0, 1, 3))
        if long.any():
            changes.append(Scale(met.grid, _to_usual(met.seconds, met.usual, long)))
    return Hiccups(
        count=sum(int(part.sum()) for part in hang),
        of=sum(int(np.isfinite(part).sum()) for part in over),
        longest=max(
            (float(ratio[long].max()) for ratio, long in zip(over, hang, strict=True) if long.any()), default=1
        ),
        lost_s=lost_s,
        change=Together(tuple(changes)),
    )


def _to_usual(seconds: Floats, usual: Floats | float, where: Bools) -> Floats:
    """The factor that takes `seconds` down to `usual` where that is wanted, 1 elsewhere."""
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where(where & (seconds > usual), usual / seconds, 1.0)
    return np.where(np.isfinite(factor), factor, 1.0)
