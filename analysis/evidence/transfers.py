"""The network: slow links and network cards, and the steps in which they are slow.

In: `PipelineSubject`. Out: `Traffic`.

A transfer between stages passes two network cards and the wire between them; a collective passes the cards of all its
members. So a slow wire shows in the transfers of one link. A slow card shows in everything that it sends (or receives):
transfers to both neighbours and the collectives of its stage. A ring is as slow as its slowest card, for all members
alike: it identifies the stage, and the transfers identify the DP rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.grids import collectives, embedding_exchanges, transfers
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_cards import (
    FASTER_SHARE,
    FASTEST_SHARE,
    NO_TIME_S,
    RECEIVING,
    SENDING,
    SlowCard,
    slow_cards,
)
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, lower_quantile, median
from tracekit.trace.model import OpKind

#: A link is slow if it is this many times slower than the usual one; transfers scatter, and a few may share a card.
SMALLEST_LINK_FACTOR = 3.0
#: ... and slower by this many spreads between links: if clock errors are as large as a transfer, they spread links too.
LINK_SPREADS = 6.0
#: With fewer DP ranks, none of them shows what is usual.
FEWEST_PEERS = 3
#: A link only waits for others if at least this many of its transfers did not have to.
FEWEST_FREE = 3
#: If more than this share of the links is slow at once, the whole network is, and a link is compared with the others.
WHOLE_NETWORK_SHARE = 0.7
#: A link or card is slow in at least this many steps, and in this share of them; fewer are chance.
FEWEST_SLOW_STEPS = 2
SMALLEST_STEP_SHARE = 0.1
#: Gradients in full precision are twice the bytes of parameters in half precision; a longer reduction is waiting.
SMALLEST_WAIT_FACTOR = 2.5
#: A transfer recorded as this many times its cost, and this many seconds, waited for others of the same call; less than
#: that is clock error.
WAITED_FACTOR, WAITED_S = 1.5, 300e-6


class Traffic(Struct, frozen=True, eq=False, dict=True):
    """The transfers and collectives of a job. Slot of a transfer: 2 x link + direction, as in `TransferGrid`.

    All members end together, and the last to begin does not wait: so the shortest recorded duration is the transfer
    time, on any clock. `seconds`: of each transfer, [slots, ops, steps, dp_ranks]; `rings`: of each collective over DP
    ranks, seconds, [stages, ops, steps]; `exchanges`: of the embedding's gradients, seconds, [ops, steps, dp_ranks].
    """

    job: PipelineSubject
    seconds: Floats
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
        peers = self.link_s.shape[1] >= FEWEST_PEERS
        usual: Floats = lower_median(self.link_s, axis=1)[:, None] if peers else self.usual_s
        return MAD_TO_SIGMA * float(lower_median(np.abs(self.link_s - usual).ravel(), 0))

    @cached_property
    def limit_s(self) -> Floats:
        """A link is slow if its transfers take longer than this, seconds, [slots, dp_ranks]."""
        return np.maximum(SMALLEST_LINK_FACTOR * self.usual_s, self.usual_s + LINK_SPREADS * self.spread_s)

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
        ring_end = _ends(job, collectives(job))
        ring_begin = ring_end - self.rings[..., None]

        def run(slot: int) -> None:
            seconds, end = self.seconds[slot], self._end_s(slot)
            begin = end - seconds
            for stage in (slot // 2, (slot // 2 + 1) % stages):
                with_one = np.zeros(seconds.shape)
                for one_begin, one_end, counts in zip(ring_begin[stage], ring_end[stage], share[stage], strict=True):
                    both = np.minimum(end, one_end)
                    both -= np.maximum(begin, one_begin)
                    np.fmax(both, 0.0, out=both)
                    with_one += both * counts[:, None]
                np.maximum(shared[slot], with_one, out=shared[slot])
            np.minimum(shared[slot], np.nan_to_num(seconds), out=shared[slot])

        parallel.each(run, range(len(shared)), numbers=shared.size)
        return shared

    def _end_s(self, slot: int) -> Floats:
        """Ends of the transfers of a slot, seconds after the step began, [ops, steps, dp_ranks]."""
        end: Floats = _ends(self.job, transfers(self.job).recvs.only(slot))[0]
        return end

    @cached_property
    def slow(self) -> Bools:
        """Mask of slow links by step, [slots, steps, dp_ranks]."""
        if not self.seconds.size:
            return np.zeros((len(self.seconds), *self.seconds.shape[2:]), np.bool_)
        faster = lower_quantile(self.seconds, 1, FASTER_SHARE)
        limit_s = np.repeat(self.limit_s[:, None], faster.shape[1], axis=1)
        for kind in filter(np.any, self.kinds):
            of_kind = faster.transpose(1, 0, 2)[:, kind] / self.usual_s[kind]
            level = np.fmax(lower_quantile(of_kind, 1, 1 - WHOLE_NETWORK_SHARE), 1.0)
            limit_s *= np.where(kind[:, None], level[:, None], 1.0)
        slow: Bools = faster > limit_s
        return slow

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
        gathers, reductions = self._bytes_alike
        if self.job.all_workers_traced or not (gathers.any() and reductions.any()):
            return waits
        gather_s = median(np.where(gathers[:, :, None], self.rings, np.nan), (1, 2))
        beyond = self.rings - gather_s[:, None, None]
        late = reductions[:, :, None] & (self.rings > SMALLEST_WAIT_FACTOR * gather_s[:, None, None])
        return np.where(late, beyond, 0.0)

    @cached_property
    def _bytes_alike(self) -> tuple[Bools, Bools]:
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
            beside = self.beside(links)
            steps = np.asarray(unexplained.transpose(1, 0, 2)[:, beside].any(axis=1))
            slow_links[slot, :, dp_index] &= (
                np.nanquantile(self.seconds[slot][:, steps, dp_index], FASTEST_SHARE) > self.limit_s[slot, dp_index]
            )
            beside[slot, dp_index] = False
            slow_links[slot, :, dp_index] &= not self._only_waits((slot, dp_index), beside & slow, steps)
        return slow_links

    def _shared(self, slow: Bools) -> Bools:
        """Mask of steps in which all DP ranks' links between two stages are slow, if fast at other times, [slots,
        steps].

        Single links or cards do not fail together: something that their hosts share is slow.
        """
        used = np.isfinite(self.link_s)
        together = slow.sum(axis=2) > WHOLE_NETWORK_SHARE * np.maximum(used.sum(axis=1), 1)[:, None]
        sometimes = (~together).sum(axis=1) >= self.fewest_steps
        several = [
            min(len(np.unique(self.hosts_of_flows(side)[slot])) for side in (SENDING, RECEIVING)) > 1
            for slot in range(len(slow))
        ]
        shared: Bools = together & (sometimes & several)[:, None]
        return shared

    def _only_waits(self, link: tuple[int, int], others: Bools, steps: Bools) -> bool:
        """True if a link is fast where it need not wait for slow transfers of `others`, [slots, dp_ranks]."""
        slot, lane = link
        seconds = self.seconds[slot][:, steps, lane]
        ends_s = {of: self._end_s(of) for of in {slot, *np.argwhere(others)[:, 0].tolist()}}
        begin, free = ends_s[slot][:, steps, lane] - seconds, np.isfinite(seconds)
        for of, dp_index in np.argwhere(others):
            long = self.seconds[of][:, steps, dp_index]
            end = np.where(long > self.limit_s[of, dp_index], ends_s[of][:, steps, dp_index], np.nan)
            under_way = (end - long < begin[:, None] + self.usual_s[slot, lane]) & (end > begin[:, None])
            free &= ~under_way.any(axis=1)
        return int(free.sum()) >= FEWEST_FREE and bool(np.median(seconds[free]) <= self.limit_s[slot, lane])

    @property
    def fewest_steps(self) -> int:
        """The number of steps in which a link or card must be slow."""
        return fewest_of(self.seconds.shape[2])

    def beside(self, links: Bools) -> Bools:
        """Links that share a card with any of `links` [slots, dp_ranks], including these."""
        together = links.copy()
        for side in (SENDING, RECEIVING):
            host = self.hosts_of_flows(side)
            together |= np.isin(host, host[links])
        return together

    @cached_property
    def host_number(self) -> Ints:
        """A number per host, [stages, dp_ranks]; if hosts are unknown, every worker has its own."""
        job = self.job
        cells = [(stage, at) for stage in range(job.stages) for at in range(len(job.dp_ranks))]
        names = [job.hosts.get(job.worker(stage, at)) for stage, at in cells]
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
        _transfers(job, recorded),
        # A member whose own end of a ring is slow ends after the others; these show how long the ring took.
        np.fmin(
            _shortest(collectives(job).gather(recorded), 3),
            _shortest(collectives(job).gather(job.replay.durations.cost), 3),
        ),
        _shortest(embedding_exchanges(job).gather(recorded), 0),
    )


def fewest_of(steps: int) -> int:
    """The number of steps, of so many, that are no accident."""
    return max(FEWEST_SLOW_STEPS, round(SMALLEST_STEP_SHARE * steps))


def _transfers(job: PipelineSubject, recorded: Sequence[Floats]) -> Floats:
    """Seconds of transfers; for transfers in one call with others, without the wait for those."""
    seconds = transfers(job).gather(recorded)
    blocks = job.replay.graph.blocks
    if not any(block.structure.call is not None for block in blocks):
        return seconds
    cost = transfers(job).gather(job.replay.durations.cost)
    waited = seconds > WAITED_FACTOR * np.abs(cost) + WAITED_S
    return np.where(waited, np.maximum(cost, 0.0), seconds)


def _ends(job: PipelineSubject, grid: OpGrid) -> Floats:
    """Ends of the ops of a grid, seconds after the step began."""
    blocks = job.replay.graph.blocks
    return grid.gather([block.start for block in blocks]) + grid.gather([block.duration for block in blocks])


def _shortest(seconds: Floats, axis: int) -> Floats:
    """The least value over `axis`, nan if there is none."""
    least = np.where(np.isfinite(seconds), seconds, np.inf).min(axis=axis, initial=np.inf)
    return np.where(np.isfinite(least), least, np.nan)
