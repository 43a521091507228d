"""Transfers that take longer at some times than the same transfers at others: the network is congested.

In: `Traffic`. Out: `Congestion`. The usual time of a transfer is that of calm steps. A step is congested if most
transfers, or most of those between two stages, take longer at once; in others, some transfers may hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.host_code import data_waits_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives, embedding_exchanges, transfers
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.evidence.transfers import (
    NO_TIME_S,
    RECEIVING,
    SENDING,
    TRAFFIC,
    SlowCard,
    Traffic,
    fewest_of,
    passing,
    traffic_of,
)
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, lower_median, median, nan_mean, safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together


class CongestionThresholds(Struct, frozen=True):
    """When the network is congested. `causes`: the benchmark of 582 simulated jobs."""

    #: In a congested step the usual transfer takes this many times as long as in any calm step ... Benchmark
    #: `causes`.
    level: float = 1.5
    #: ... and that gap is this many spreads of the steps on its side with more of them wide. Statistic: no normal
    #: step of a million.
    spreads: float = 6.0
    #: A transfer is long from this many times its usual time on, later if transfers scatter or share a card ...
    #: Benchmark `causes`.
    long: float = 1.25
    #: ... but from this on at the latest. Benchmark `causes`.
    surely_long: float = 4.0
    #: It hangs at this many times that. Benchmark `causes`.
    hangs: float = 1.5
    #: At most this share of all transfers may hang. Definition: most show what is usual.
    hanging_share: float = 0.3
    #: A transfer over a slow link or card hangs at so many times its slow time. Definition: a card shared by four
    #: workers makes it four times as long; this is one and a half times that.
    hiccup: float = 6.0
    #: Transfers in the same step as one that hangs, and this much longer than usual, have the same problem. Benchmark
    #: `causes`.
    waiting_factor: float = 2.5
    #: A link is held up by its own DP rank if this much more of its transfers are long than on other DP ranks.
    #: Benchmark `causes`.
    held_up_share: float = 0.1


CONGESTION = CongestionThresholds()


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
        return bool((self.level > 1).any()) or 0 < self.count <= CONGESTION.hanging_share * self.of


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
        needed=CONGESTION.hangs * min(float(part.long.min(initial=CONGESTION.surely_long)) for part in sent),
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
    rings = traffic.rings[..., None]
    slow = [through(card, traffic.rings)[..., None] for card in traffic.cards]
    level = _levels(traffic, rings, _any_of(slow, rings), np.zeros(len(rings), np.bool_))
    usual_s = median(_when_calm(rings, level), (2, 3))[:, :, None, None]
    return _Sent(rings, _at_cards(traffic, rings, usual_s, slow), level, np.ones(1))


def _exchanges(traffic: Traffic) -> _Sent:
    seconds = traffic.exchanges[None]
    slow = [exchanged(traffic, card)[None] for card in traffic.cards]
    by_slot = np.array([_several((traffic.host_number[0], traffic.host_number[-1]))])
    level = _levels(traffic, seconds, _any_of(slow, seconds), by_slot)
    usual_s = lower_median(median(_when_calm(seconds, level), (2,)), axis=2)[:, :, None, None]
    return _Sent(seconds, _at_cards(traffic, seconds, usual_s, slow), level, np.full(1, 2.0))


def _any_of(masks: Sequence[Bools], seconds: Floats) -> Bools:
    """Where any of the masks is true, shaped as `seconds`."""
    return np.asarray(np.logical_or.reduce([np.zeros(seconds.shape, np.bool_), *masks]))


def _at_cards(traffic: Traffic, seconds: Floats, usual_s: Floats, slow: Sequence[Bools]) -> Floats:
    """The usual time of ops, shaped as `seconds`; of those that pass a slow card, `slow`, their level while it is."""
    usual_s = np.broadcast_to(usual_s, seconds.shape).copy()
    for card, mask in zip(traffic.cards, slow, strict=True):
        usual_s[mask] = np.fmax(usual_s, level_s(seconds, card, 2))[mask]
    return usual_s


def _several(ends: Sequence[Ints]) -> bool:
    """True if links join several pairs of hosts, so that no single one slows all of them. `ends`: two x [dp_ranks]."""
    return len(set(zip(*(end.tolist() for end in ends), strict=True))) > 1


def _levels(traffic: Traffic, seconds: Floats, excluded: Bools, by_slot: Bools) -> Floats:
    """Duration of most transfers over that in calm steps, [slots, steps]; 1 in calm steps.

    `seconds`: [slots, ops, steps, dp_ranks or 1]; those `excluded` do not count. `by_slot`: slots that may be congested
    alone, [slots].
    """
    if not seconds.size:
        return np.ones((len(seconds), seconds.shape[2]))
    with np.errstate(invalid="ignore", divide="ignore"):
        over = seconds / median(seconds, (2,))[:, :, None]
    # All that waits for a slow link or card takes longer in the same steps; if it always does, that is usual.
    held_up = [card.steps for card in traffic.cards] + [traffic.slow_links.any(axis=(0, 2))]
    excluded = excluded | np.logical_or.reduce([steps & ~steps.all() for steps in held_up])[:, None]
    over = np.where(excluded, np.nan, over) if excluded.any() else over
    whole = _level(lower_median(over, (0, 1, 3)))
    alone = lower_median(over, (1, 3))
    slots = zip(alone, by_slot, strict=True)
    return np.array([np.maximum(whole, _level(times)) if by_itself else whole for times, by_itself in slots])


def _level(series: Floats) -> Floats:
    """Each step's value over that of calm steps if it is far above them, else 1, [steps]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(series)
    ordered = np.sort(logs[np.isfinite(logs)])
    for count in np.flatnonzero(np.diff(ordered) >= np.log(CONGESTION.level)) + 1:
        calm, congested = ordered[:count], ordered[count:]
        # A few calm steps do not show how much steps scatter.
        most = max(calm, congested, key=len)
        spread = MAD_TO_SIGMA * float(lower_median(np.abs(most - lower_median(most, 0)), 0))
        if count >= fewest_of(len(series)) and congested[0] - calm[-1] > CONGESTION.spreads * spread:
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
        least = np.maximum(self.streams, np.exp(CONGESTION.spreads * spread))
        return np.clip(least, CONGESTION.long, CONGESTION.surely_long)

    @cached_property
    def hangs(self) -> Bools:
        """Mask of the ops that hang."""
        return np.greater(self.over, CONGESTION.hangs * self.long)

    def calm(self, hit: Bools) -> Floats:
        """The factor that makes ops as fast as usual: in congested steps all, in the steps `hit` the long ones."""
        least = np.where(hit[:, None], self.long, np.inf)
        beyond = np.greater(self.over, np.where((self.level > 1)[:, None, :, None], 1.0, least))
        return to_usual(self.seconds, self.usual, beyond)


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
    rings: Intervention = Together((Scale(collectives(job), factor[..., None]), _hosts_as_late(traffic, factor)))
    if not traffic.seconds.size:
        return rings
    if not (factor < 1).any():
        return Scale(transfers(job), np.broadcast_to(of_transfers, traffic.seconds.shape))
    usual_s = np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
    alone_s = np.maximum(traffic.seconds - traffic.shared_with(1 - factor), usual_s)
    wait = traffic.seconds > CONGESTION.waiting_factor * usual_s  # so long that they must be waiting
    with np.errstate(invalid="ignore", divide="ignore"):
        waited = np.where(wait & (alone_s < traffic.seconds), alone_s / traffic.seconds, 1.0)
    return Together((rings, Scale(transfers(job), np.minimum(waited, of_transfers))))


def _hosts_as_late(traffic: Traffic, factor: Floats) -> Intervention:
    """First forwards whose data comes after their parameters begin no sooner because these do: the delay of their
    launch grows by what `factor`, [stages, ops, steps], takes from the gatherings before it.
    """
    job, waits = traffic.job, data_waits_of(traffic.job)
    gathers, _ = traffic.bytes_alike
    if waits.recorded or not (waits.waits and waits.waits[0].late.any() and gathers.any()):
        return Together(())
    late, starts = waits.waits[0], [block.start for block in job.replay.graph.blocks]
    begin_s, delay_s = (late.ops.gather(of_blocks) for of_blocks in (starts, job.replay.durations.launch_delay))
    sooner_s = np.cumsum(np.where(gathers[..., None], traffic.rings * (1 - factor), 0.0), axis=1)
    awaited = np.isclose(begin_s - delay_s, collectives(job).ends(job.replay.graph.blocks), rtol=0.0, atol=NO_TIME_S)
    sooner_s = np.where(awaited & gathers[..., None, None], sooner_s[..., None], 0.0).max(axis=1, keepdims=True)
    return ScaleDelays(late.ops, np.where(late.late, 1 + sooner_s / safe(delay_s), 1.0))


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
    near = traffic.sharing_cards(anywhere) | anywhere.reshape(-1, 2, anywhere.shape[1])[:, ::-1].reshape(anywhere.shape)
    steps: Bools = np.any(links, axis=(0, 2))
    long = traffic.seconds > CONGESTION.waiting_factor * traffic.usual_s[:, None, None]
    often = nan_mean(np.where(np.isfinite(traffic.seconds), long, np.nan)[:, :, steps], (1, 2))
    far = _connected(traffic, near) & (often > lower_median(often, axis=1)[:, None] + CONGESTION.held_up_share)
    for card in traffic.cards:
        far &= ~card.flows
    far &= ~np.any(traffic.slow_links, axis=1)
    return np.asarray((near | far)[:, None, None, :] & steps[:, None] & long)


def _connected(traffic: Traffic, links: Bools) -> Bools:
    """Links that `links` [slots, dp_ranks] reach over cards that both ends share, including `links`."""
    reached, connected = links, traffic.sharing_cards(links)
    while (connected & ~reached).any():
        reached, connected = connected, traffic.sharing_cards(connected)
    return connected


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
    long = traffic.exchanges > TRAFFIC.ring * usual_exchange_s(traffic, card)
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
    seconds, usual, level = (np.broadcast_to(array, long.shape)[long] for array in (seconds, usual, level))
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = usual / np.where(seconds > CONGESTION.hiccup * level, level, seconds)
    factors = np.ones(long.shape)
    factors[long] = np.where(np.isfinite(factor), factor, 1.0)
    return factors
