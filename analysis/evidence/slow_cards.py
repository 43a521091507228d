"""Find slow network cards: the ones that explain slow rings, or slow links to several hosts.

In: `Traffic`. Out: `SlowCard`s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, lower_quantile, median
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.analysis.evidence.transfers import Traffic

#: A ring this many times slower than those of the other stages contains a slow card, if it is slowed by at least this
#: share of its transfers' slowdown; otherwise the stage just has more parameters.
SMALLEST_RING_FACTOR = 1.5
RING_SHARE = 0.3
#: Among the cards of a slow ring, the slow card's transfers take this many times as long as the usual card's.
CARD_MARGIN = 1.5
#: A side of a card is slow if its fastest transfers take at least this share of the other side's.
SIDE_SHARE = 0.5
SENDING, RECEIVING = "sending", "receiving"
#: All transfers of a slow link are slow, except for some that are recorded too short. A link with some fast transfers
#: only waits behind another one.
FASTEST_SHARE = 0.1
#: In a step in which a link or card is slow, all of its transfers but this share are slow.
FASTER_SHARE = 0.25
#: Seconds; no transfer is faster.
NO_TIME_S = 1e-9


class SlowCard(Struct, frozen=True, eq=False):
    """A slow network card: the number of its host, the host's workers, the sides that are slow.

    `factor`: transfer time over the usual in each step, [steps]; `fastest_factor`: that of the fastest transfers;
    `ring_factor`: collective time over the usual. `flows`: transfers through its slow sides, [slots, dp_ranks];
    `stages`: stages whose rings pass it; `steps`: a mask of the steps in which it is slow, [steps].
    """

    host: int
    workers: tuple[Worker, ...]
    sides: tuple[str, ...]
    flows: Bools
    stages: tuple[int, ...]
    steps: Bools
    factor: Floats
    fastest_factor: float
    ring_factor: float


def slow_cards(traffic: Traffic) -> tuple[SlowCard, ...]:
    """The slow cards, those that explain most first."""
    if not traffic.seconds.size:
        return ()
    by_host: dict[int, SlowCard] = {}
    for side in (SENDING, RECEIVING):
        for number, card in (*_cards_of_slow_rings(traffic, side), *_cards_without_rings(traffic, side)):
            by_host[number] = _merged(by_host.get(number), card)
    cards = [_with_slow_sides(traffic, card) for card in by_host.values()]
    return tuple(sorted(cards, key=lambda card: -int(card.flows.sum() * card.steps.sum())))


def passing(traffic: Traffic, side: str) -> tuple[Ints, Bools]:
    """The host whose card each link passes on this side, and which links pass one, [slots, dp_ranks] each."""
    host, peer = traffic.hosts_of_flows(side), traffic.hosts_of_flows(RECEIVING if side == SENDING else SENDING)
    return host, np.isfinite(traffic.link_s) & (host != peer)  # transfers within a host pass no card


def _ring_stages(traffic: Traffic, host: int) -> tuple[int, ...]:
    """The stages of a host's workers whose rings leave the host."""
    stages = np.unique(np.argwhere(traffic.host_number == host)[:, 0])
    return tuple(
        int(stage) for stage in stages if len(np.unique(traffic.host_number[stage])) > 1 and traffic.rings.size
    )


def _cards_of_slow_rings(traffic: Traffic, side: str) -> Iterator[tuple[int, SlowCard]]:
    """For each slow ring, the card whose transfers are slow compared with those of its other cards."""
    if not traffic.rings.size:
        return
    host, passes = passing(traffic, side)
    for stage in range(traffic.job.stages):
        steps = traffic.ring_factor[stage] > SMALLEST_RING_FACTOR
        cards = np.unique(traffic.host_number[stage])
        if steps.sum() < traffic.fewest_steps or len(cards) < 2:
            continue
        flows = [passes & (host == card) for card in cards]
        levels = np.array([_level(traffic, of_card, steps) for of_card in flows])
        ring = float(median(traffic.ring_factor[stage, steps], (0,)))
        # Congestion hits many transfers of a card by chance, and spares some.
        slow, level = np.all(levels > CARD_MARGIN * lower_median(levels, 0), axis=1), levels[:, 0]
        # Of several, take the one whose transfers are as slow as the ring; the others have a slow link.
        best = int(np.where(slow, np.abs(np.log(level / ring)), np.inf).argmin())
        if slow[best] and ring > RING_SHARE * level[best]:
            yield int(cards[best]), _card(traffic, int(cards[best]), side, flows[best], steps, ring)


def _level(traffic: Traffic, flows: Bools, steps: Bools) -> tuple[float, float]:
    """Transfer time over the usual in these steps on the fastest of these links, on average and of its faster
    transfers; 1 if there are none.
    """
    factor = traffic.factor.transpose(1, 0, 2)[steps][:, flows]
    if not factor.size:
        return 1.0, 1.0
    seconds = traffic.seconds.transpose(0, 3, 1, 2)[flows][..., steps]
    faster = lower_quantile(seconds.reshape(len(seconds), -1), 1, FASTER_SHARE) / traffic.usual_s[flows]
    return max(float(factor.mean(axis=0).min()), NO_TIME_S), max(float(faster.min()), NO_TIME_S)


def _cards_without_rings(traffic: Traffic, side: str) -> Iterator[tuple[int, SlowCard]]:
    """Cards outside of any ring whose links to several hosts are all slow at the same time."""
    host, passes = passing(traffic, side)
    peer = traffic.hosts_of_flows(RECEIVING if side == SENDING else SENDING)
    for card in np.unique(host[traffic.slow.any(axis=1) & passes]):
        flows = passes & (host == card)
        steps: Bools = np.any(traffic.slow.transpose(1, 0, 2)[:, flows], axis=1)
        seconds = traffic.seconds.transpose(0, 3, 1, 2)[flows][..., steps]
        fastest = lower_quantile(seconds.reshape(len(seconds), -1), 1, FASTEST_SHARE) / traffic.usual_s[flows]
        alike = fastest.min() > max(CARD_MARGIN, SIDE_SHARE * fastest.max())
        several = len(np.unique(peer[flows])) > 1 and steps.sum() >= traffic.fewest_steps
        if alike and several and not _ring_stages(traffic, int(card)):
            yield int(card), _card(traffic, int(card), side, flows, steps, 1.0)


def _card(traffic: Traffic, host: int, side: str, flows: Bools, steps: Bools, ring_factor: float) -> SlowCard:
    members = np.argwhere(traffic.host_number == host)
    workers = tuple(sorted(traffic.job.worker(stage, at) for stage, at in members))
    factor = np.where(steps, traffic.factor.transpose(1, 0, 2)[:, flows].mean(axis=1), 1.0)
    seconds = traffic.seconds.transpose(0, 3, 1, 2)[flows][..., steps]
    fastest = 1.0
    if seconds.size:
        fastest = max(float(np.nanquantile(seconds / traffic.usual_s[flows][:, None, None], FASTEST_SHARE)), 1.0)
    return SlowCard(host, workers, (side,), flows, _ring_stages(traffic, host), steps, factor, fastest, ring_factor)


def _with_slow_sides(traffic: Traffic, card: SlowCard) -> SlowCard:
    """The card with only the sides that are slow themselves: a send and a receive in one call look equally slow."""
    if len(card.sides) == 1:
        return card
    fastest = {}
    for side in card.sides:
        host, passes = passing(traffic, side)
        seconds = traffic.seconds.transpose(0, 3, 1, 2)[passes & (host == card.host)][..., card.steps]
        fastest[side] = float(np.nanquantile(seconds, FASTEST_SHARE))
    slow = tuple(side for side in card.sides if fastest[side] >= SIDE_SHARE * max(fastest.values()))
    return replace(card, sides=slow)


def _merged(side: SlowCard | None, other: SlowCard) -> SlowCard:
    """Both sides of a card as one."""
    if side is None:
        return other
    return SlowCard(
        side.host,
        side.workers,
        (*side.sides, *other.sides),
        side.flows | other.flows,
        side.stages,
        side.steps | other.steps,
        np.maximum(side.factor, other.factor),
        min(side.fastest_factor, other.fastest_factor),
        max(side.ring_factor, other.ring_factor),
    )
