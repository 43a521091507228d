"""Transfers that take longer at some times than the same transfers at others: the network is congested.

In: `Traffic`. Out: `Congestion`. The usual time of a transfer is that of calm steps. A step is congested if most
transfers, or most of those between two stages, take longer at once; in others, some transfers may hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.grids import embedding_exchanges
from tracekit.analysis.evidence.network_repairs import exchanged, level_s, rings_faster, through, to_usual
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_cards import NO_TIME_S, RECEIVING, SENDING, passing
from tracekit.analysis.evidence.transfers import Traffic, fewest_of, traffic_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, median
from tracekit.analysis.whatif.interventions import Intervention, Scale, Together

#: In a congested step the usual transfer takes this many times as long as in any calm step, and that gap is this many
#: spreads of the steps on its side with more of them wide.
SMALLEST_LEVEL = 1.5
SPREADS = 6.0
#: A transfer is long from this many times its usual time on, later if transfers scatter or share a card, but from the
#: larger value on at the latest; it hangs at `HANGS` times that.
SMALLEST_LONG, LARGEST_LONG = 1.25, 4.0
HANGS = 1.5
#: At most this share of all transfers may hang.
LARGEST_HANGING_SHARE = 0.3


class Congestion(Struct, frozen=True, eq=False):
    """Transfers and collectives that take longer than usual: number that hang, of how many, the longest over its usual.

    `needed`: how many times its usual time the first transfer to hang takes; `level`: duration of most over that in
    calm steps, [steps], 1 in calm steps; `rings`: the factor that makes collectives as fast as usual, [stages, ops,
    steps]; `change`: everything as fast as usual.
    """

    count: int
    of: int
    longest: float
    needed: float
    level: Floats
    rings: Floats
    change: Intervention

    @property
    def shows(self) -> bool:
        """True if some steps are congested, or some transfers hang and most do not."""
        return bool((self.level > 1).any()) or 0 < self.count <= LARGEST_HANGING_SHARE * self.of


@evidence(PipelineSubject)
def congestion_of(job: PipelineSubject) -> Congestion:
    """Transfers and collectives that take longer than the same ones usually do; slow links and cards stay slow."""
    traffic = traffic_of(job)
    sent = (_transfers(traffic), _rings(traffic), _exchanges(traffic))
    hit = np.logical_or.reduce([part.hangs.any(axis=(0, 1, 3)) for part in sent])
    transfers, rings, exchanges = (part.calm(hit) for part in sent)
    changes = [rings_faster(traffic, rings[..., 0], transfers)]
    if (exchanges < 1).any():
        changes.append(Scale(embedding_exchanges(traffic.job), exchanges))
    return Congestion(
        count=sum(int(part.hangs.sum()) for part in sent),
        of=sum(int(np.isfinite(part.over).sum()) for part in sent),
        longest=max((float(part.over[part.hangs].max()) for part in sent if part.hangs.any()), default=1),
        needed=HANGS * min(float(part.long.min(initial=LARGEST_LONG)) for part in sent),
        level=np.max([part.level.max(axis=0, initial=1.0) for part in sent], axis=0),
        rings=rings[..., 0],
        change=Together(tuple(changes)),
    )


def _transfers(traffic: Traffic) -> _Sent:
    links = traffic.slow_links.copy()
    for card in traffic.cards:
        links |= card.flows[:, None, :] & card.steps[:, None]
    (sender, passes), (receiver, _) = (passing(traffic, side) for side in (SENDING, RECEIVING))
    level = _levels(
        traffic,
        traffic.seconds,
        links[:, None],
        np.array([_several(ends) for ends in zip(sender, receiver, strict=True)]),
    )
    seconds = _when_calm(traffic.seconds, level)
    link_s = median(seconds, (1, 2)) if seconds.size else traffic.link_s
    usual_s = np.fmax(link_s[:, None], np.where(links, traffic.factor * traffic.usual_s[:, None], 0.0))
    usual_s = np.fmax(usual_s, np.maximum(traffic.usual_of(link_s), traffic.spread_s)[:, None])
    # A duration that the same transfer has in most steps is due to the schedule, not to chance. So is what it shares
    # its card with, except in a congested step, where that lasts longer.
    alone_s = np.fmax(usual_s[:, None], median(seconds, (2,))[:, :, None])
    usual_s = alone_s + traffic.shared_s
    np.copyto(usual_s, alone_s, where=(level > 1)[:, None, :, None])
    streams = np.ones(link_s.shape)
    for host in (sender, receiver):
        _, index, count = np.unique(np.where(passes, host, -1), return_inverse=True, return_counts=True)
        streams = np.where(passes, np.maximum(streams, count[index].reshape(host.shape)), streams)
    return _Sent(traffic.seconds, usual_s, level, streams[:, None, None])


def _rings(traffic: Traffic) -> _Sent:
    through_cards = np.zeros(traffic.rings.shape, np.bool_)
    for card in traffic.cards:
        through_cards |= through(card, traffic.rings)
    rings = traffic.rings[..., None]
    level = _levels(traffic, rings, through_cards[..., None], np.zeros(len(rings), np.bool_))
    usual_s = np.broadcast_to(median(_when_calm(rings, level), (2, 3))[:, :, None], through_cards.shape).copy()
    for card in traffic.cards:
        slow = through(card, traffic.rings)
        usual_s[slow] = np.fmax(usual_s, level_s(traffic.rings, card, 2))[slow]
    return _Sent(rings, usual_s[..., None], level, np.ones(1))


def _exchanges(traffic: Traffic) -> _Sent:
    through_cards = np.zeros(traffic.exchanges.shape, np.bool_)
    for card in traffic.cards:
        through_cards |= exchanged(traffic, card)
    seconds = traffic.exchanges[None]
    level = _levels(
        traffic, seconds, through_cards[None], np.array([_several((traffic.host_number[0], traffic.host_number[-1]))])
    )
    usual_s = lower_median(median(_when_calm(seconds, level)[0], (1,)), axis=1)[:, None, None]
    usual_s = np.broadcast_to(usual_s, through_cards.shape).copy()
    for card in traffic.cards:
        slow = exchanged(traffic, card)
        usual_s[slow] = np.fmax(usual_s, level_s(traffic.exchanges, card, 1))[slow]
    return _Sent(seconds, usual_s[None], level, np.full(1, 2.0))


def _several(ends: Sequence[Ints]) -> bool:
    """True if links join several pairs of hosts, so that no single one slows all of them. `ends`: two x [dp_ranks]."""
    return len(set(zip(*(end.tolist() for end in ends), strict=True))) > 1


def _levels(traffic: Traffic, seconds: Floats, apart: Bools, by_slot: Bools) -> Floats:
    """Duration of most transfers over that in calm steps, [slots, steps]; 1 in calm steps.

    `seconds`: [slots, ops, steps, dp_ranks or 1]; those `apart` do not count. `by_slot`: slots that may be congested
    alone, [slots].
    """
    if not seconds.size:
        return np.ones((len(seconds), seconds.shape[2]))
    with np.errstate(invalid="ignore", divide="ignore"):
        over = seconds / median(seconds, (2,))[:, :, None]
    # All that waits for a slow link or card takes longer in the same steps; if it always does, that is usual.
    held_up = [card.steps for card in traffic.cards] + [traffic.slow_links.any(axis=(0, 2))]
    apart = apart | np.logical_or.reduce([steps & ~steps.all() for steps in held_up])[:, None]
    over = np.where(apart, np.nan, over) if apart.any() else over
    whole = _level(lower_median(over, (0, 1, 3)))
    alone = lower_median(over, (1, 3))
    return np.array([np.maximum(whole, _level(one)) if by else whole for one, by in zip(alone, by_slot, strict=True)])


def _level(series: Floats) -> Floats:
    """Each step's value over that of calm steps if it is far above them, else 1, [steps]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(series)
    ordered = np.sort(logs[np.isfinite(logs)])
    for count in np.flatnonzero(np.diff(ordered) >= np.log(SMALLEST_LEVEL)) + 1:
        calm, congested = ordered[:count], ordered[count:]
        # A few calm steps do not show how much steps scatter.
        most = max(calm, congested, key=len)
        spread = MAD_TO_SIGMA * float(lower_median(np.abs(most - lower_median(most, 0)), 0))
        if count >= fewest_of(len(series)) and congested[0] - calm[-1] > SPREADS * spread:
            return np.where(logs >= congested[0], np.exp(logs - lower_median(calm, 0)), 1.0)
    return np.ones(series.shape)


def _when_calm(seconds: Floats, level: Floats) -> Floats:
    """`seconds`, [slots, ops, steps, ...], with nan in congested steps."""
    congested = level > 1
    return np.where(congested[:, None, :, None], np.nan, seconds) if congested.any() else seconds


class _Sent(Struct, frozen=True, eq=False, dict=True):
    """The actual and the usual time of some ops, seconds, [slots, ops, steps, dp_ranks or 1].

    `level`: as `_levels`; `streams`: how many of them may share a card, broadcasts to `seconds`.
    """

    seconds: Floats
    usual: Floats
    level: Floats
    streams: Floats

    @cached_property
    def over(self) -> Floats:
        """Actual over usual time."""
        return self.seconds / np.maximum(self.usual, NO_TIME_S)

    @cached_property
    def long(self) -> Floats:
        """Least multiple of an op's usual time that neither scatter nor sharing explains."""
        logs = self.over[np.isfinite(self.over) & (self.over > 0)]
        np.abs(np.log(logs, out=logs), out=logs)
        spread = MAD_TO_SIGMA * float(np.median(logs, overwrite_input=True)) if logs.size else 0.0
        return np.clip(np.maximum(self.streams, np.exp(SPREADS * spread)), SMALLEST_LONG, LARGEST_LONG)

    @cached_property
    def hangs(self) -> Bools:
        """Mask of the ops that hang."""
        return np.greater(self.over, HANGS * self.long)

    def calm(self, hit: Bools) -> Floats:
        """The factor that makes ops as fast as usual: in congested steps all, in the steps `hit` the long ones."""
        least = np.where(hit[:, None], self.long, np.inf)
        beyond = np.greater(self.over, np.where((self.level > 1)[:, None, :, None], 1.0, least))
        return to_usual(self.seconds, self.usual, beyond)
