"""The job with a faster network: links and cards as fast as usual.

In: `Traffic`. Out: `Intervention`s.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.grids import collectives, embedding_exchanges, transfers
from tracekit.analysis.evidence.slow_cards import SMALLEST_RING_FACTOR, SlowCard
from tracekit.analysis.evidence.transfers import Traffic
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import lower_median, median, nan_mean
from tracekit.analysis.whatif.interventions import Intervention, Scale, Together

#: A card shared by four workers makes a transfer four times as long; at one and a half times that, it hangs.
HICCUP_FACTOR = 6.0
#: Transfers in the same step as one that hangs, and this much longer than usual, have the same problem.
BESIDE_FACTOR = 2.5
#: A link is held up by its own DP rank if this much more of its transfers are long than on other DP ranks.
HELD_UP_SHARE = 0.1


def links_as_usual(traffic: Traffic, links: Bools) -> Intervention:
    """The transfers of `links` [slots, steps, dp_ranks] as fast as on the usual link, and no waits behind them."""
    return Scale(transfers(traffic.job), _of_links(traffic, links))


def _of_links(traffic: Traffic, links: Bools) -> Floats:
    """The factor of each transfer for `links_as_usual`."""
    where = links[:, None] | _waiting_behind(traffic, links)
    usual_s = traffic.usual_s[:, None]
    level = np.where(links, traffic.factor * usual_s, np.inf)[:, None]
    return to_usual(traffic.seconds, usual_s[:, None], where, level)


def rings_faster(traffic: Traffic, factor: Floats, of_transfers: Floats | float = 1.0) -> Intervention:
    """Multiply data-parallel collectives by `factor`, [stages, ops, steps], and shorten what waits for them on the same
    cards.

    `of_transfers`: factors of transfers from another repair.
    """
    job = traffic.job
    rings: Intervention = Scale(collectives(job), factor[..., None])
    if not traffic.seconds.size:
        return rings
    if not (factor < 1).any():
        return Scale(transfers(job), np.broadcast_to(of_transfers, traffic.seconds.shape))
    usual_s = np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
    alone_s = np.maximum(traffic.seconds - traffic.shared_with(1 - factor), usual_s)
    wait = traffic.seconds > BESIDE_FACTOR * usual_s  # so long that they must be waiting
    with np.errstate(invalid="ignore", divide="ignore"):
        waited = np.where(wait & (alone_s < traffic.seconds), alone_s / traffic.seconds, 1.0)
    return Together((rings, Scale(transfers(job), np.minimum(waited, of_transfers))))


def shared_anyway_s(traffic: Traffic, factor: Floats) -> Floats:
    """Time in which transfers share cards with collectives that pass no slow card; as `shared_s`.

    `factor`: the share of each collective that remains after another repair, [stages, ops, steps].
    """
    for card in traffic.cards:
        factor = factor * _card_rings(traffic, card)
    return traffic.shared_s - traffic.shared_with(1 - factor)


def _waiting_behind(traffic: Traffic, links: Bools) -> Bools:
    """Mask of the transfers that wait behind those of `links` [slots, steps, dp_ranks], [slots, ops, steps, dp_ranks].

    A transfer that shares a card with them waits if the two pass the card one after the other; a transfer in the other
    direction ends with them if both are one call. A waiting transfer holds up others in turn, all along the pipeline.
    There, a link is held up if its transfers are long more often than those of the same link on other DP ranks.
    """
    anywhere: Bools = np.any(links, axis=1)
    near = traffic.beside(anywhere) | anywhere.reshape(-1, 2, anywhere.shape[1])[:, ::-1].reshape(anywhere.shape)
    steps: Bools = np.any(links, axis=(0, 2))
    long = traffic.seconds > BESIDE_FACTOR * traffic.usual_s[:, None, None]
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


def card_as_usual(traffic: Traffic, card: SlowCard) -> Intervention:
    """Everything that passes a card as fast as elsewhere: transfers, collectives of its stages, embedding gradients."""
    job = traffic.job
    links = _of_links(traffic, card.flows[:, None, :] & card.steps[:, None])
    rings = _card_rings(traffic, card)
    changes = [rings_faster(traffic, rings, links)]
    passing = exchanged(traffic, card)
    if passing.any():
        level = level_s(traffic.exchanges, card, 1)
        factor = to_usual(traffic.exchanges, usual_exchange_s(traffic, card), passing, level)
        changes.append(Scale(embedding_exchanges(job), factor[None]))
    return Together(tuple(changes))


def _card_rings(traffic: Traffic, card: SlowCard) -> Floats:
    """The factor that makes the collectives through a slow card as fast as usual, [stages, ops, steps]."""
    passing = through(card, traffic.rings)
    if not passing.any():
        return np.ones(traffic.rings.shape)
    return to_usual(traffic.rings, traffic.usual_ring_s[:, :, None], passing, level_s(traffic.rings, card, 2))


def level_s(seconds: Floats, card: SlowCard, axis: int) -> Floats:
    """The usual duration of collectives while a card is slow: the median over these steps, `axis` (kept as 1)."""
    return np.expand_dims(median(np.compress(card.steps, seconds, axis=axis), (axis,)), axis)


def through(card: SlowCard, rings: Floats) -> Bools:
    """The collectives that pass a slow card, [stages, ops, steps]."""
    passing = np.zeros(rings.shape, np.bool_)
    passing[list(card.stages)] = card.steps
    return passing


def exchanged(traffic: Traffic, card: SlowCard) -> Bools:
    """The exchanges of embedding gradients that pass a slow card, [ops, steps, dp_ranks]."""
    job = traffic.job
    ends = {0, job.stages - 1}
    dp_ranks = {worker.dp_rank for worker in card.workers if worker.pp_rank in ends}
    passing: Bools = card.steps[:, None] & np.isin(job.dp_ranks, list(dp_ranks))
    long = traffic.exchanges > SMALLEST_RING_FACTOR * usual_exchange_s(traffic, card)
    return passing & long


def usual_exchange_s(traffic: Traffic, card: SlowCard) -> Floats:
    """The usual exchange of embedding gradients, seconds, [ops, 1, 1].

    If the exchanges of all DP ranks pass the card, none of them shows what is usual: they are assumed to be slowed as
    much as the fastest transfers over the card.
    """
    seconds = median(traffic.exchanges, (1,))
    usual = lower_median(seconds, axis=1)[:, None, None]
    if not traffic.exchanges.size:
        return usual
    dp_ranks = {worker.dp_rank for worker in card.workers if worker.pp_rank in {0, traffic.job.stages - 1}}
    return usual if len(dp_ranks) < seconds.shape[1] else usual / card.fastest_factor


def to_usual(seconds: Floats, usual: Floats | float, where: Bools, level: Floats | float = np.inf) -> Floats:
    """The factor that takes `seconds` down to `usual` at `where`, 1 elsewhere.

    `level`: the usual time while the problem lasts. What hangs longer than that keeps its excess.
    """
    long = where & (seconds > usual)
    if not long.any():
        return np.broadcast_to(1.0, long.shape)
    seconds, usual, level = (np.broadcast_to(each, long.shape)[long] for each in (seconds, usual, level))
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = usual / np.where(seconds > HICCUP_FACTOR * level, level, seconds)
    factors = np.ones(long.shape)
    factors[long] = np.where(np.isfinite(factor), factor, 1.0)
    return factors
