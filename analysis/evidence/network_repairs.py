"""The job with a faster network: links and cards as fast as usual, and no transfers that hang.

In: `Traffic`. Out: `Change`s, and `Hiccups`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.changes import Change, Scale, Together
from tracekit.analysis.evidence.slow_cards import NO_TIME_S, SMALLEST_RING_FACTOR, SlowCard
from tracekit.analysis.evidence.transfers import LINK_SPREADS, Traffic
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, median, nan_mean

#: A card shared by four workers makes a transfer four times as long; at one and a half times that, it hangs.
HICCUP_FACTOR = 6.0
#: Transfers in the same step as one that hangs, and this much longer than usual, have the same problem.
BESIDE_FACTOR = 2.5
#: At most this share of all transfers may hang.
LARGEST_HICCUP_SHARE = 0.3
#: A link is held up by its own DP rank if this much more of its transfers are long than on other DP ranks.
HELD_UP_SHARE = 0.1


def links_as_usual(traffic: Traffic, links: Bools) -> Change:
    """The transfers of `links` [slots, steps, dp_ranks] as fast as on the usual link, and no waits behind them."""
    return Scale(traffic.evidence.transfers, _of_links(traffic, links))


def _of_links(traffic: Traffic, links: Bools) -> Floats:
    """The factor of each transfer for `links_as_usual`."""
    where = links[:, None] | _waiting_behind(traffic, links)
    level = np.where(links, traffic.factor * traffic.usual_s, np.inf)[:, None]
    return _to_usual(traffic.seconds, traffic.usual_s, where, level)


def rings_faster(traffic: Traffic, factor: Floats, transfers: Floats | float = 1.0) -> Change:
    """Multiply data-parallel collectives by `factor`, [stages, ops, steps], and shorten what waits for them on the same
    cards.

    `transfers`: factors of transfers from another repair.
    """
    evidence = traffic.evidence
    rings: Change = Scale(evidence.collectives, factor[..., None])
    if not traffic.seconds.size:
        return rings
    if not (factor < 1).any():
        return Scale(evidence.transfers, np.broadcast_to(transfers, traffic.seconds.shape))
    left = np.maximum(
        traffic.seconds - traffic.shared_with(1 - factor), np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        waited = np.where(_wait(traffic) & (left < traffic.seconds), left / traffic.seconds, 1.0)
    return Together((rings, Scale(evidence.transfers, np.minimum(waited, transfers))))


def _wait(traffic: Traffic) -> Bools:
    """Which transfers are so long that they must be waiting, [slots, ops, steps, dp_ranks]."""
    wait: Bools = traffic.seconds > BESIDE_FACTOR * np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
    return wait


def shared_anyway_s(traffic: Traffic, found: Hiccups) -> Floats:
    """How long transfers share cards with collectives that neither hang nor pass a slow card; as `shared_s`."""
    factor = found.rings if found.rare else np.ones(traffic.rings.shape)
    for card in traffic.cards:
        factor = factor * _card_rings(traffic, card)
    return traffic.shared_s - traffic.shared_with(1 - factor)


def _waiting_behind(traffic: Traffic, links: Bools) -> Bools:
    """Which transfers wait behind those of `links` [slots, steps, dp_ranks], [slots, ops, steps, dp_ranks].

    A transfer that shares a card with them waits if the two pass the card one after the other; a transfer in the other
    direction ends with them if both are one call. A waiting transfer holds up others in turn, all along the pipeline.
    There, a link is held up if its transfers are long more often than those of the same link on other DP ranks.
    """
    anywhere: Bools = np.any(links, axis=1)
    near = traffic.beside(anywhere) | anywhere.reshape(-1, 2, anywhere.shape[1])[:, ::-1].reshape(anywhere.shape)
    steps: Bools = np.any(links, axis=(0, 2))
    long = traffic.seconds > BESIDE_FACTOR * traffic.usual_s
    often = nan_mean(np.where(np.isfinite(traffic.seconds), long, np.nan)[:, :, steps], (1, 2))
    far = _connected(traffic, near) & (often > lower_median(often, axis=1)[:, None] + HELD_UP_SHARE)
    for card in traffic.cards:
        far &= ~card.flows
    far &= ~np.any(traffic.slow_links, axis=1)
    waiting: Bools = (near | far)[:, None, None, :] & steps[:, None] & long
    return waiting


def _connected(traffic: Traffic, links: Bools) -> Bools:
    """Links that `links` [slots, dp_ranks] reach over cards that both ends share, including `links`."""
    reached, more = links, traffic.beside(links)
    while (more & ~reached).any():
        reached, more = more, traffic.beside(more)
    return more


def card_as_usual(traffic: Traffic, card: SlowCard) -> Change:
    """Everything that passes a card as fast as elsewhere: transfers, collectives of its stages, embedding gradients."""
    evidence = traffic.evidence
    links = _of_links(traffic, card.flows[:, None, :] & card.steps[:, None])
    rings = _card_rings(traffic, card)
    changes = [rings_faster(traffic, rings, links)]
    exchanges = _exchanged(traffic, card)
    if exchanges.any():
        level = _level(traffic.exchanges, card, 1)
        factor = _to_usual(traffic.exchanges, _usual_exchange_s(traffic, card), exchanges, level)
        changes.append(Scale(evidence.embedding_exchanges, factor[None]))
    return Together(tuple(changes))


def _card_rings(traffic: Traffic, card: SlowCard) -> Floats:
    """The factor that makes the collectives through a slow card as fast as usual, [stages, ops, steps]."""
    through = _through(card, traffic.rings)
    if not through.any():
        return np.ones(traffic.rings.shape)
    return _to_usual(traffic.rings, traffic.usual_ring_s[:, :, None], through, _level(traffic.rings, card, 2))


def _level(seconds: Floats, card: SlowCard, axis: int) -> Floats:
    """The usual duration of collectives while a card is slow: the median over these steps, `axis` (kept as 1)."""
    return np.expand_dims(median(np.compress(card.steps, seconds, axis=axis), (axis,)), axis)


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

    If the exchanges of all DP ranks pass the card, none of them shows what is usual: they are assumed to be slowed as
    much as the fastest transfers over the card.
    """
    seconds = median(traffic.exchanges, (1,))
    usual = lower_median(seconds, axis=1)[:, None, None]
    if card is None or not traffic.exchanges.size:
        return usual
    dp_ranks = {worker.dp_rank for worker in card.workers if worker.pp_rank in {0, traffic.evidence.stages - 1}}
    return usual if len(dp_ranks) < seconds.shape[1] else usual / card.fastest_factor


class Hiccups(Struct, frozen=True, eq=False):
    """Transfers and collectives that hang: how many of how many, the longest over its usual, the change without them.

    `lost_s`: seconds beyond the usual, [steps]; `rings`: the factor that makes collectives as fast as usual, [stages,
    ops, steps].
    """

    count: int
    of: int
    longest: float
    lost_s: Floats
    rings: Floats
    change: Change

    @property
    def rare(self) -> bool:
        """Whether some transfers hang and most do not."""
        return 0 < self.count <= LARGEST_HICCUP_SHARE * self.of


def hiccups(traffic: Traffic) -> Hiccups:
    """Transfers that take many times as long as the same transfer usually does, with slow links and cards left as they
    are.
    """
    evidence = traffic.evidence
    links = traffic.slow_links.copy()
    ring_s = np.broadcast_to(median(traffic.rings, (2,))[:, :, None], traffic.rings.shape).copy()
    exchange_s = np.broadcast_to(_usual_exchange_s(traffic), traffic.exchanges.shape).copy()
    for card in traffic.cards:
        links |= card.flows[:, None, :] & card.steps[:, None]
        mine, exchanged = _through(card, traffic.rings), _exchanged(traffic, card)
        ring_s[mine] = np.fmax(ring_s, _level(traffic.rings, card, 2))[mine]
        exchange_s[exchanged] = np.fmax(exchange_s, _level(traffic.exchanges, card, 1))[exchanged]
    link_s = np.fmax(traffic.link_s[:, None], np.where(links, traffic.factor * traffic.usual_s, 0.0))
    link_s = np.fmax(link_s, max(traffic.usual_s, LINK_SPREADS / HICCUP_FACTOR * traffic.spread_s))
    # A duration that the same transfer has in most steps is due to the schedule, not to chance.
    transfer_s = np.fmax(link_s[:, None], median(traffic.seconds, (2,))[:, :, None]) + traffic.shared_s
    sent = (
        _Sent(traffic.seconds, transfer_s),
        _Sent(traffic.rings[..., None], ring_s[..., None]),
        _Sent(traffic.exchanges[None], exchange_s[None]),
    )
    hit = np.logical_or.reduce([part.hangs.any(axis=(0, 1, 3)) for part in sent])
    transfers, rings, exchanges = (part.calm(hit) for part in sent)
    changes = [rings_faster(traffic, rings[..., 0], transfers)]
    if (exchanges < 1).any():
        changes.append(Scale(evidence.embedding_exchanges, exchanges))
    return Hiccups(
        count=sum(int(part.hangs.sum()) for part in sent),
        of=sum(int(np.isfinite(part.over).sum()) for part in sent),
        longest=max((float(part.over[part.hangs].max()) for part in sent if part.hangs.any()), default=1),
        lost_s=np.sum([part.lost_s(hit) for part in sent], axis=0),
        rings=rings[..., 0],
        change=Together(tuple(changes)),
    )


class _Sent(Struct, frozen=True, eq=False, dict=True):
    """The actual and the usual time of some ops, seconds, [slots, ops, steps, dp_ranks or 1]."""

    seconds: Floats
    usual: Floats

    @cached_property
    def over(self) -> Floats:
        """Actual over usual time."""
        return self.seconds / np.maximum(self.usual, NO_TIME_S)

    @cached_property
    def hangs(self) -> Bools:
        """Which ops hang."""
        return np.greater(self.over, HICCUP_FACTOR)

    def _long(self, hit: Bools) -> Bools:
        """The ops that hang, and those in the steps `hit` with the same problem."""
        return np.greater(self.over, BESIDE_FACTOR) & hit[:, None]

    def calm(self, hit: Bools) -> Floats:
        """The factor that makes these ops as fast as usual."""
        if not hit.any():
            return np.ones(self.seconds.shape)
        return _to_usual(self.seconds, self.usual, self._long(hit))

    def lost_s(self, hit: Bools) -> Floats:
        """Seconds beyond the usual, [steps]."""
        if not hit.any():
            return np.zeros(len(hit))
        return np.asarray(np.where(self._long(hit), self.seconds - self.usual, 0.0).sum(axis=(0, 1, 3)))


def _to_usual(seconds: Floats, usual: Floats | float, where: Bools, level: Floats | float = np.inf) -> Floats:
    """The factor that takes `seconds` down to `usual` at `where`, 1 elsewhere.

    `level`: the usual time while the problem lasts. What hangs longer than that keeps its excess.
    """
    hangs = seconds > HICCUP_FACTOR * level
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where(where & (seconds > usual), usual / np.where(hangs, level, seconds), 1.0)
    return np.where(np.isfinite(factor), factor, 1.0)
