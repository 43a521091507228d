"""The network: slow links and network cards, and the steps in which they are slow.

In: `PipelineSubject`. Out: `Traffic`.

A transfer between stages passes two network cards and the wire between them; a collective passes the cards of all its
members. So a slow wire shows in the transfers of one link. A slow card shows in everything that it sends (or receives):
transfers to both neighbours and the collectives of its stage. A ring is as slow as its slowest card, for all members
alike: it identifies the stage, and the transfers identify the DP rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives, embedding_exchanges, transfers
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, lower_median, lower_quantile, median
from tracekit.trace.model import OpKind, Worker

SENDING, RECEIVING = "sending", "receiving"
#: Seconds; no transfer is faster.
NO_TIME_S = 1e-9


class TrafficThresholds(Struct, frozen=True):
    """When a link or a network card is slow. `causes`: the benchmark of 582 simulated jobs."""

    #: A link is slow if it is this many times slower than the usual one; transfers scatter, and a few may share a
    #: card. Benchmark `causes`.
    link: float = 3.0
    #: ... and slower by this many spreads between links: if clock errors are as large as a transfer, they spread
    #: links too. Statistic: no normal link of a million.
    link_spreads: float = 6.0
    #: With fewer DP ranks, none of them shows what is usual. Definition.
    fewest_peers: int = 3
    #: A link only waits for others if at least this many of its transfers did not have to. Chosen: fewer are chance.
    fewest_free: int = 3
    #: If more than this share of the links is slow at once, the whole network is, and a link is compared with the
    #: others. Benchmark `causes`.
    whole_share: float = 0.7
    #: A link or card is slow in at least this many steps ... Chosen: fewer are chance.
    fewest_steps: int = 2
    #: ... and in this share of them. Benchmark `causes`.
    step_share: float = 0.1
    #: Times a gathering of parameters from which on a reduction is waiting. Definition: gradients in full precision
    #: are twice the bytes of parameters in half precision.
    wait: float = 2.5
    #: A transfer recorded as this many times its cost ... Benchmark `causes`.
    waited: float = 1.5
    #: ... and this many seconds waited for others of the same call. Chosen: less than that is clock error.
    waited_s: float = 300e-6
    #: A ring this many times slower than those of the other stages contains a slow card ... Benchmark `causes`.
    ring: float = 1.5
    #: ... if it is slowed by at least this share of its transfers' slowdown; otherwise the stage just has more
    #: parameters. Benchmark `causes`.
    ring_share: float = 0.3
    #: Among the cards of a slow ring, the slow card's transfers take this many times as long as the usual card's.
    #: Benchmark `causes`.
    card: float = 1.5
    #: A side of a card is slow if its fastest transfers take at least this share of the other side's. Benchmark
    #: `causes`.
    side_share: float = 0.5
    #: All transfers of a slow link are slow, except for this share that are recorded too short. A link with some fast
    #: transfers only waits behind another one. Benchmark `causes`.
    fastest_share: float = 0.1
    #: In a step in which a link or card is slow, all of its transfers but this share are slow. Benchmark `causes`.
    faster_share: float = 0.25


TRAFFIC = TrafficThresholds()


class Traffic(Struct, frozen=True, eq=False, dict=True):
    """The transfers and collectives of a job. Slot of a transfer: 2 x link + direction, as in `TransferGrid`.

    All members end together, and the last to begin does not wait: so the shortest recorded duration is the transfer
    time, on any clock. `seconds`: of each transfer, [slots, ops, steps, dp_ranks]; `assumed`: those that only waited
    for others of their call and are taken to be as fast as usual, same shape; `rings`: of each collective over DP
    ranks, seconds, [stages, ops, steps]; `exchanges`: of the embedding's gradients, seconds, [ops, steps, dp_ranks].
    """

    job: PipelineSubject
    seconds: Floats
    assumed: Bools
    rings: Floats
    exchanges: Floats

    @cached_property
    def link_s(self) -> Floats:
        """The usual transfer of each link and direction, seconds, nan if it has none, [slots, dp_ranks]."""
        if not self.seconds.size:
            return np.full((len(self.seconds), self.seconds.shape[3]), np.nan)
        return median(self.seconds, (1, 2))

    @cached_property
    def usual_s(self) -> Floats:
        """The transfer of the usual link, as `usual_of`."""
        return self.usual_of(self.link_s)

    def usual_of(self, link_s: Floats) -> Floats:
        """The transfer of the usual link, seconds, [slots, dp_ranks]: of those within hosts and between hosts, each for
        itself; the faster of two middle ones, because half of the links may be slow. `link_s`: of each link.
        """
        usual = np.full(link_s.shape, NO_TIME_S)
        for kind in filter(np.any, self.kinds):
            usual[kind] = np.fmax(lower_median(link_s[kind], 0), NO_TIME_S)
        return usual

    @cached_property
    def kinds(self) -> tuple[Bools, Bools]:
        """Masks of the links that stay within a host, and of those that join hosts, [slots, dp_ranks] each."""
        between: Bools = self.hosts_of_flows(SENDING) != self.hosts_of_flows(RECEIVING)
        return ~between, between

    @cached_property
    def spread_s(self) -> float:
        """Spread of the links around the usual one, seconds: clocks, routes, shared cards.

        Links between other stages can transfer more data, so the usual link is that of other DP ranks, if there are
        any.
        """
        peers = self.link_s.shape[1] >= TRAFFIC.fewest_peers
        usual: Floats = lower_median(self.link_s, axis=1)[:, None] if peers else self.usual_s
        return MAD_TO_SIGMA * float(lower_median(np.abs(self.link_s - usual).ravel(), 0))

    @cached_property
    def limit_s(self) -> Floats:
        """A link is slow if its transfers take longer than this, seconds, [slots, dp_ranks]."""
        return np.maximum(TRAFFIC.link * self.usual_s, self.usual_s + TRAFFIC.link_spreads * self.spread_s)

    @cached_property
    def shared_s(self) -> Floats:
        """Seconds that a collective of one of its ends ran during each transfer, [slots, ops, steps, dp_ranks].

        Both pass the same cards, so the schedule causes what a transfer takes meanwhile.
        """
        return self._overlap(np.ones(self.rings.shape))

    def shared_with(self, share: Floats) -> Floats:
        """As `shared_s`, with only the `share`, [stages, ops, steps], of each collective."""
        if not share.any() or not self.shared_s.any():
            return np.zeros(self.seconds.shape)
        return self._overlap(share)

    def _overlap(self, share: Floats) -> Floats:
        job, stages = self.job, self.job.stages
        shared = np.zeros(self.seconds.shape)
        if not self.seconds.size or collectives(job).empty:
            return shared
        ring_end = collectives(job).ends(job.replay.graph.blocks)
        ring_begin = ring_end - self.rings[..., None]

        def run(slot: int) -> None:
            seconds, end = self.seconds[slot], self._end_s(slot)
            begin = end - seconds
            for stage in (slot // 2, (slot // 2 + 1) % stages):
                with_one = np.zeros(seconds.shape)
                for one_begin, one_end, counts in zip(ring_begin[stage], ring_end[stage], share[stage], strict=True):
                    overlap = np.minimum(end, one_end)
                    overlap -= np.maximum(begin, one_begin)
                    np.fmax(overlap, 0.0, out=overlap)
                    with_one += overlap * counts[:, None]
                np.maximum(shared[slot], with_one, out=shared[slot])
            np.minimum(shared[slot], np.nan_to_num(seconds), out=shared[slot])

        parallel.each(run, range(len(shared)), numbers=shared.size)
        return shared

    def _end_s(self, slot: int) -> Floats:
        """Ends of the transfers of a slot, seconds after the step began, [ops, steps, dp_ranks]."""
        return np.asarray(transfers(self.job).recvs.only(slot).ends(self.job.replay.graph.blocks)[0])

    @cached_property
    def slow(self) -> Bools:
        """Mask of slow links by step, [slots, steps, dp_ranks]."""
        if not self.seconds.size:
            return np.zeros((len(self.seconds), *self.seconds.shape[2:]), np.bool_)
        faster = lower_quantile(self.seconds, 1, TRAFFIC.faster_share)
        limit_s = np.repeat(self.limit_s[:, None], faster.shape[1], axis=1)
        for kind in filter(np.any, self.kinds):
            of_kind = faster.transpose(1, 0, 2)[:, kind] / self.usual_s[kind]
            level = np.fmax(lower_quantile(of_kind, 1, 1 - TRAFFIC.whole_share), 1.0)
            limit_s *= np.where(kind[:, None], level[:, None], 1.0)
        return np.asarray(faster > limit_s)

    @cached_property
    def factor(self) -> Floats:
        """Transfer time over the usual in each step, [slots, steps, dp_ranks]; 1 if there is no transfer."""
        if not self.seconds.size:
            return np.ones((len(self.seconds), *self.seconds.shape[2:]))
        factor = median(self.seconds, (1,)) / self.usual_s[:, None]
        return np.where(np.isfinite(factor), factor, 1.0)

    @cached_property
    def usual_ring_s(self) -> Floats:
        """The usual collective, seconds, [stages, ops]: as fast as on the other stages, or as itself in most steps."""
        own = median(self.rings, (2,))
        return np.fmin(own, lower_median(own, axis=0)[None])

    @cached_property
    def ring_factor(self) -> Floats:
        """Collective time over the usual in each step, [stages, steps]; 1 if there is no collective."""
        factor = median(self.rings / np.maximum(self.usual_ring_s, NO_TIME_S)[:, :, None], (1,))
        return np.where(np.isfinite(factor), factor, 1.0)

    @cached_property
    def unseen_wait_s(self) -> Floats:
        """Time that collectives wait for workers that were not recorded, seconds, [stages, ops, steps]; 0 if all were
        recorded.

        A worker whose start was not recorded makes its rings look long. Parameters are gathered at the beginning of a
        step, when no worker is late yet, and have as many bytes as the gradients: so the extra time of reducing
        gradients is waiting.
        """
        waits = np.zeros(self.rings.shape)
        gathers, reductions = self.bytes_alike
        if self.job.all_workers_traced or not (gathers.any() and reductions.any()):
            return waits
        gather_s = median(np.where(gathers[:, :, None], self.rings, np.nan), (1, 2))
        beyond = self.rings - gather_s[:, None, None]
        late = reductions[:, :, None] & (self.rings > TRAFFIC.wait * gather_s[:, None, None])
        return np.where(late, beyond, 0.0)

    @cached_property
    def bytes_alike(self) -> tuple[Bools, Bools]:
        """Masks of rings that gather parameters, and that reduce gradients of the same size, [stages, ops] each."""
        shape = self.rings.shape[:2]
        gathers, reductions = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        for place in collectives(self.job).places:
            kind = self.job.replay.graph.blocks[place.block].template.kind[place.rows].reshape(len(place.rows), -1)
            gathers[place.slot, : len(kind)] = (kind == OpKind.PARAMS_ALL_GATHER.code).all(axis=1)
            reductions[place.slot, : len(kind)] = (kind == OpKind.GRADS_REDUCE_SCATTER.code).all(axis=1)
        return gathers, reductions

    @cached_property
    def transfer_share(self) -> Floats:
        """The share of each collective that is transfer, not waiting for unrecorded workers, [stages, ops, steps]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            share = 1 - self.unseen_wait_s / self.rings
        return np.where(np.isfinite(share), share, 1.0)

    @cached_property
    def cards(self) -> tuple[SlowCard, ...]:
        """The slow cards, those that explain most first."""
        return slow_cards(self)

    @cached_property
    def slow_links(self) -> Bools:
        """Slow links that no slow card explains, [slots, steps, dp_ranks]."""
        unexplained = self.slow.copy()
        for card in self.cards:
            ends = np.isin(self.hosts_of_flows(SENDING), card.host) | np.isin(self.hosts_of_flows(RECEIVING), card.host)
            unexplained &= ~ends[:, None, :]
        unexplained &= ~self._shared(unexplained)[:, :, None]
        unexplained &= (unexplained.sum(axis=1) >= self.fewest_steps)[:, None, :]
        slow_links = unexplained.copy()
        slow = unexplained.any(axis=1)
        for slot, dp_index in np.argwhere(slow):
            links = np.zeros(self.link_s.shape, np.bool_)
            links[slot, dp_index] = True
            sharing_cards = self.sharing_cards(links)
            steps = np.asarray(unexplained.transpose(1, 0, 2)[:, sharing_cards].any(axis=1))
            fastest = np.nanquantile(self.seconds[slot][:, steps, dp_index], TRAFFIC.fastest_share)
            slow_links[slot, :, dp_index] &= fastest > self.limit_s[slot, dp_index]
            sharing_cards[slot, dp_index] = False
            slow_links[slot, :, dp_index] &= not self._only_waits((slot, dp_index), sharing_cards & slow, steps)
        return slow_links & ~self._at_once(slow_links)[:, None]

    def _shared(self, slow: Bools) -> Bools:
        """Mask of steps in which all DP ranks' links between two stages are slow, if fast at other times, [slots,
        steps].

        Single links or cards do not fail together: something that their hosts share is slow.
        """
        used = np.isfinite(self.link_s)
        together = slow.sum(axis=2) > TRAFFIC.whole_share * np.maximum(used.sum(axis=1), 1)[:, None]
        sometimes = (~together).sum(axis=1) >= self.fewest_steps
        several = [
            min(len(np.unique(self.hosts_of_flows(side)[slot])) for side in (SENDING, RECEIVING)) > 1
            for slot in range(len(slow))
        ]
        return np.asarray(together & (sometimes & several)[:, None])

    def _at_once(self, slow: Bools) -> Bools:
        """Links that are slow in exactly the same steps as one without a host in common, and fast in others, [slots,
        dp_ranks]: two links do not come and go together, so what lies between their hosts is slow.
        """
        together = np.zeros(self.link_s.shape, np.bool_)
        ends = np.stack([self.hosts_of_flows(side) for side in (SENDING, RECEIVING)])
        sometimes = slow.any(axis=1) & ~slow.all(axis=1)
        for slot, dp_index in np.argwhere(sometimes):
            alike = sometimes & (slow == slow[slot, :, dp_index][:, None]).all(axis=1)
            together[slot, dp_index] = (alike & ~np.isin(ends, ends[:, slot, dp_index]).any(axis=0)).any()
        return together

    def _only_waits(self, link: tuple[int, int], others: Bools, steps: Bools) -> bool:
        """True if a link is fast where it need not wait for slow transfers of `others`, [slots, dp_ranks]."""
        slot, lane = link
        seconds = self.seconds[slot][:, steps, lane]
        ends_s = {other_slot: self._end_s(other_slot) for other_slot in {slot, *np.argwhere(others)[:, 0].tolist()}}
        begin, free = ends_s[slot][:, steps, lane] - seconds, np.isfinite(seconds)
        for other_slot, dp_index in np.argwhere(others):
            long = self.seconds[other_slot][:, steps, dp_index]
            end = np.where(long > self.limit_s[other_slot, dp_index], ends_s[other_slot][:, steps, dp_index], np.nan)
            under_way = (end - long < begin[:, None] + self.usual_s[slot, lane]) & (end > begin[:, None])
            free &= ~under_way.any(axis=1)
        return int(free.sum()) >= TRAFFIC.fewest_free and bool(np.median(seconds[free]) <= self.limit_s[slot, lane])

    @property
    def fewest_steps(self) -> int:
        """The number of steps in which a link or card must be slow."""
        return fewest_of(self.seconds.shape[2])

    def sharing_cards(self, links: Bools) -> Bools:
        """Links that share a card with any of `links`, [slots, dp_ranks], including these."""
        together = links.copy()
        for side in (SENDING, RECEIVING):
            host = self.hosts_of_flows(side)
            together |= np.isin(host, host[links])
        return together

    @cached_property
    def host_number(self) -> Ints:
        """A number per host, [stages, dp_ranks]; if hosts are unknown, every worker has its own."""
        job = self.job
        cells = [(stage, dp_index) for stage in range(job.stages) for dp_index in range(len(job.dp_ranks))]
        names = [job.hosts.get(job.worker(stage, dp_index)) for stage, dp_index in cells]
        keys = [name if name is not None else cell for name, cell in zip(names, cells, strict=True)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return np.array([numbers[key] for key in keys], np.int64).reshape(job.stages, len(job.dp_ranks))

    def hosts_of_flows(self, side: str) -> Ints:
        """The host that each link's transfers leave (or reach), [slots, dp_ranks]."""
        link, backward = np.divmod(np.arange(len(self.seconds)), 2)
        after = (link + 1) % self.job.stages
        stage = np.where((backward == 0) == (side == SENDING), link, after)
        return self.host_number[stage]


@evidence(PipelineSubject)
def traffic_of(job: PipelineSubject) -> Traffic:
    """Links, cards and collectives of the network."""
    recorded = [block.duration for block in job.replay.graph.blocks]
    return Traffic(
        job,
        *_transfers(job, recorded),
        # A member whose own end of a ring is slow ends after the others; these show how long the ring took.
        np.fmin(
            _shortest(collectives(job).gather(recorded), 3),
            _shortest(collectives(job).gather(job.replay.durations.cost), 3),
        ),
        _shortest(embedding_exchanges(job).gather(recorded), 0),
    )


def fewest_of(steps: int) -> int:
    """How many of these steps rule out an accident."""
    return max(TRAFFIC.fewest_steps, round(TRAFFIC.step_share * steps))


def _transfers(job: PipelineSubject, recorded: Sequence[Floats]) -> tuple[Floats, Bools]:
    """Seconds of transfers, and a mask of those that waited for others of their call: these without the wait."""
    seconds = transfers(job).gather(recorded)
    blocks = job.replay.graph.blocks
    if not any(block.structure.call is not None for block in blocks):
        return seconds, np.zeros(seconds.shape, np.bool_)
    cost = transfers(job).gather(job.replay.durations.cost)
    waited = seconds > TRAFFIC.waited * np.abs(cost) + TRAFFIC.waited_s
    return np.where(waited, np.maximum(cost, 0.0), seconds), waited


def _shortest(seconds: Floats, axis: int) -> Floats:
    """The least value over `axis`, nan if there is none."""
    least = np.where(np.isfinite(seconds), seconds, np.inf).min(axis=axis, initial=np.inf)
    return np.where(np.isfinite(least), least, np.nan)


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
        steps = traffic.ring_factor[stage] > TRAFFIC.ring
        cards = np.unique(traffic.host_number[stage])
        if steps.sum() < traffic.fewest_steps or len(cards) < 2:
            continue
        flows = [passes & (host == card) for card in cards]
        levels = np.array([_level(traffic, of_card, steps) for of_card in flows])
        ring = float(median(traffic.ring_factor[stage, steps], (0,)))
        # Congestion hits many transfers of a card by chance, and spares some.
        slow, level = np.all(levels > TRAFFIC.card * lower_median(levels, 0), axis=1), levels[:, 0]
        # Of several, take the one whose transfers are as slow as the ring; the others have a slow link.
        best = int(np.where(slow, np.abs(np.log(level / ring)), np.inf).argmin())
        if slow[best] and ring > TRAFFIC.ring_share * level[best]:
            yield int(cards[best]), _card(traffic, int(cards[best]), side, flows[best], steps, ring)


def _level(traffic: Traffic, flows: Bools, steps: Bools) -> tuple[float, float]:
    """Transfer time over the usual in these steps on the fastest of these links, on average and of its faster
    transfers; 1 if there are none. What waited for others of its call shows no speed.
    """
    factor = traffic.factor.transpose(1, 0, 2)[steps][:, flows]
    if not factor.size:
        return 1.0, 1.0
    seconds, assumed = (ops.transpose(0, 3, 1, 2)[flows][..., steps] for ops in (traffic.seconds, traffic.assumed))
    measured = np.where(assumed, np.nan, seconds)
    faster = lower_quantile(measured.reshape(len(measured), -1), 1, TRAFFIC.faster_share) / traffic.usual_s[flows]
    return max(float(factor.mean(axis=0).min()), NO_TIME_S), max(float(np.nan_to_num(faster, nan=1.0).min()), NO_TIME_S)


def _cards_without_rings(traffic: Traffic, side: str) -> Iterator[tuple[int, SlowCard]]:
    """Cards outside of any ring whose links to several hosts are all slow at the same time."""
    host, passes = passing(traffic, side)
    peer = traffic.hosts_of_flows(RECEIVING if side == SENDING else SENDING)
    for card in np.unique(host[traffic.slow.any(axis=1) & passes]):
        flows = passes & (host == card)
        steps: Bools = np.any(traffic.slow.transpose(1, 0, 2)[:, flows], axis=1)
        seconds = traffic.seconds.transpose(0, 3, 1, 2)[flows][..., steps]
        fastest = lower_quantile(seconds.reshape(len(seconds), -1), 1, TRAFFIC.fastest_share) / traffic.usual_s[flows]
        alike = fastest.min() > max(TRAFFIC.card, TRAFFIC.side_share * fastest.max())
        several = len(np.unique(peer[flows])) > 1 and steps.sum() >= traffic.fewest_steps
        if alike and several and not _ring_stages(traffic, int(card)):
            yield int(card), _card(traffic, int(card), side, flows, steps, 1.0)


def _card(traffic: Traffic, host: int, side: str, flows: Bools, steps: Bools, ring_factor: float) -> SlowCard:
    members = np.argwhere(traffic.host_number == host)
    workers = tuple(sorted(traffic.job.worker(stage, dp_index) for stage, dp_index in members))
    factor = np.where(steps, traffic.factor.transpose(1, 0, 2)[:, flows].mean(axis=1), 1.0)
    seconds = traffic.seconds.transpose(0, 3, 1, 2)[flows][..., steps]
    fastest = 1.0
    if seconds.size:
        over = seconds / traffic.usual_s[flows][:, None, None]
        fastest = max(float(np.nanquantile(over, TRAFFIC.fastest_share)), 1.0)
    return SlowCard(host, workers, (side,), flows, _ring_stages(traffic, host), steps, factor, fastest, ring_factor)


def _with_slow_sides(traffic: Traffic, card: SlowCard) -> SlowCard:
    """The card with only the sides that are slow themselves: a send and a receive in one call look equally slow."""
    if len(card.sides) == 1:
        return card
    fastest = {}
    for side in card.sides:
        host, passes = passing(traffic, side)
        seconds = traffic.seconds.transpose(0, 3, 1, 2)[passes & (host == card.host)][..., card.steps]
        fastest[side] = float(np.nanquantile(seconds, TRAFFIC.fastest_share))
    slow = tuple(side for side in card.sides if fastest[side] >= TRAFFIC.side_share * max(fastest.values()))
    return replace(card, sides=slow)


def _merged(side: SlowCard | None, other: SlowCard) -> SlowCard:
    """Both sides of a card as one."""
    if side is None:
        return other
    return replace(
        side,
        sides=(*side.sides, *other.sides),
        flows=side.flows | other.flows,
        steps=side.steps | other.steps,
        factor=np.maximum(side.factor, other.factor),
        fastest_factor=min(side.fastest_factor, other.fastest_factor),
        ring_factor=max(side.ring_factor, other.ring_factor),
    )
