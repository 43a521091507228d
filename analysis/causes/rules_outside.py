"""Rules for causes outside the workers: links, network cards, clocks, the trace itself.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.causes.episode_figures import time_of_episodes
from tracekit.analysis.causes.model import (
    SMALLEST_BLAMELESS_SHARE,
    Candidate,
    CauseKind,
    Figure,
    Link,
    Unit,
    Where,
    confidence_from,
)
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale, step_times_with
from tracekit.analysis.evidence.congestion import SMALLEST_LEVEL
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.network_repairs import HICCUP_FACTOR, card_as_usual, links_as_usual, shared_anyway_s
from tracekit.analysis.evidence.significance import episodes_of
from tracekit.analysis.evidence.slow_cards import SMALLEST_RING_FACTOR
from tracekit.analysis.evidence.transfers import SMALLEST_LINK_FACTOR
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, median
from tracekit.base.text import ratio, seconds

#: A member of a ring that takes this many times as long as the others has a slow card.
SMALLEST_NIC_FACTOR = 1.5
#: Report waiting for an unrecorded worker if it takes at least this share of the step.
SMALLEST_LATENESS_SHARE = 0.02
FEWEST_LONG = 1
FEWEST_STEPS = 3
#: No collective between workers is faster, seconds.
SMALLEST_TRANSFER_S = 1e-6
#: Network time protocols keep clocks closer than this, seconds; report larger offsets.
SMALLEST_OFFSET_S = 1.5e-3


def _time(evidence: Evidence, series: Floats) -> TimePattern:
    """When the network is slow. `series`: by which factor, 1 if it is not, [steps]."""
    return time_of_episodes(evidence, episodes_of(np.log(series)[None], 2, fewest=1, remembers=False), 0, series)


class SlowLink(Rule):
    """The connection between two neighbouring stages of one DP rank is slow.

    Paper: no signature. A slow sender shows on the receiver's recv, so tracekit uses the shorter of the two sides of
    each transfer, which no wrong clock can lengthen. A link is slow if nearly all its transfers of a step take three
    times as long as on the usual link, within a host or between hosts as it is, and longer than the usual differences
    between links. A slow card explains the slowness of its links. If all DP ranks' links between two stages are slow at
    once, and only at times, it is congestion.
    """

    kind = CauseKind.SLOW_LINK
    title = "Link between two stages is slow"
    signature = "all transfers between two workers take longer, one way or both, and both sides agree"
    refuted_by = "other transfers of the same two network cards, or their collectives, are as slow: then it is a card"
    next_check = (
        "node_infiniband_symbol_error_total, link_downed_total, port_transmit_wait_total, hw_counters/"
        "out_of_sequence and local_ack_timeout_err of both ends; NVLINK_*_ERROR_COUNT_TOTAL within a host"
    )
    suggested_fix = (
        "have the link between {ends} checked: cable, ports, route (ibdiagnet: symbol errors, link_downed); if it has"
        " errors, swap the node at that end for a spare"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.transfers.empty:
            return
        traffic = evidence.traffic
        slow, factor = traffic.slow_links, traffic.factor
        # With two stages, the direction from the last stage to the first uses the same connection as that from the
        # first to the last: one cause, named after the slow direction.
        ways = 2 * evidence.stages if evidence.stages == 2 else 2
        for link in range(2 * evidence.stages // ways):
            mine = np.zeros_like(slow)
            mine[ways * link : ways * (link + 1)] = slow[ways * link : ways * (link + 1)]
            if not mine.any():
                continue
            figures = (
                Figure(
                    "transfer time over the usual", float(np.median(factor[mine])), SMALLEST_LINK_FACTOR, Unit.FACTOR
                ),
            )
            stage = int(mine.any(axis=(1, 2)).argmax()) // 2
            links = tuple(
                Link(evidence.dp_ranks[int(at)], stage, (stage + 1) % evidence.stages)
                for at in np.flatnonzero(mine.any(axis=(0, 1)))
            )
            series = np.where(mine.any(axis=(0, 2)), float(np.median(factor[mine])), 1.0)
            change = links_as_usual(traffic, mine)
            effect = f"transfers take {ratio(figures[0].value)} times as long as on the usual link"
            yield Candidate(
                self.kind,
                Where(links=links),
                effect,
                figures,
                confidence_from(figures),
                change,
                time=_time(evidence, series),
            )


class SlowNic(Rule):
    """The network card of a worker's host is slow in sending, in receiving, or in both.

    Paper: no signature. A card carries the transfers to both neighbouring stages and the collectives of its stage. So a
    slow card shows in all transfers of one side (three times the usual), and in the ring of its stage, which is as slow
    as its slowest card: one and a half times the rings of the other stages. If members of a ring are recorded until
    they themselves are done, a member that takes half as long again as its peers is evidence enough. A ring that is
    slow on all members alike, without transfers that identify one of them, blames nobody.
    """

    kind = CauseKind.SLOW_NIC
    title = "Network card of a worker is slow"
    signature = "all transfers of one side of a card, and the collectives of its stage; or those of one worker alone"
    refuted_by = "one of the links over the same card is as fast as usual"
    next_check = (
        "node_infiniband_port_transmit_wait_total, symbol_error_total, hw_counters/np_cnp_sent of its network card;"
        " DCGM_FI_DEV_PCIE_REPLAY_COUNTER; NCCL Inspector's coll_busbw_gbs of its ranks"
    )
    suggested_fix = (
        "have the network card of {hosts} checked: cable, port, PCIe slot (symbol errors, transmit_wait, PCIe replays);"
        " if it has errors, swap the node for a spare"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if len(evidence.replay.graph.steps) < FEWEST_STEPS:
            return
        cards = () if evidence.transfers.empty else evidence.traffic.cards
        for card in cards:
            figures: tuple[Figure, ...] = (
                Figure("transfer time over the usual", float(card.factor.max()), SMALLEST_LINK_FACTOR, Unit.FACTOR),
            )
            if card.ring_factor > SMALLEST_RING_FACTOR:
                ring = Figure(
                    "its collectives over those of other stages", card.ring_factor, SMALLEST_RING_FACTOR, Unit.FACTOR
                )
                figures = (*figures, ring)
            effect = f"transfers over one network card take {ratio(figures[0].value)} times as long as usual"
            if len(figures) > 1:
                effect += (
                    f"; the collectives of its stage take {ratio(card.ring_factor)} times as long as other stages'"
                )
            yield Candidate(
                self.kind,
                Where(workers=card.workers, host=evidence.hosts.get(card.workers[0])),
                effect,
                figures,
                confidence_from(figures),
                card_as_usual(evidence.traffic, card),
                time=_time(evidence, np.where(card.steps, float(card.factor[card.steps].mean()), 1.0)),
                title=f"Network card is slow in {' and '.join(card.sides)}",
            )
        if not cards:
            yield from self._of_one_member(evidence)

    def _of_one_member(self, evidence: Evidence) -> Iterator[Candidate]:
        """Workers whose collectives take longer than those of their peers in the same rings."""
        if evidence.collectives.empty or len(evidence.dp_ranks) < 2 or _on_one_host(evidence):
            return
        member_s = evidence.collectives.gather(evidence.replay.durations.cost)
        usual = lower_median(median(member_s, (2,)), axis=-1)
        # Peers with transfers of almost no time were waited for, or measured by a wrong clock; they do not measure a
        # card.
        usual = np.where(usual > SMALLEST_TRANSFER_S, usual, np.nan)
        factor = median(member_s / usual[:, :, None, None], (1, 2))
        if not np.isfinite(factor).any():
            return
        hit = factor > SMALLEST_NIC_FACTOR * max(1.0, float(np.nanmedian(factor)))
        if not hit.any():
            return
        figures = (
            Figure("transfer time over that of its peers", float(factor[hit].max()), SMALLEST_NIC_FACTOR, Unit.FACTOR),
        )
        change = Scale(evidence.collectives, 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        where = Where(workers=evidence.workers_where(hit))
        effect = f"collectives take {ratio(figures[0].value)} times as long as on its peers in the same ring"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change)


class UnrecordedWorkerLate(Rule):
    """A worker that was not recorded is late: its peers wait for it in their collectives.

    Paper: traces all ranks. tracekit gets the missing workers from the layout, and infers waiting from collectives that
    move the same number of bytes: reducing gradients takes longer than gathering parameters, on all recorded members
    and in most steps. The difference is time spent waiting for the missing workers, not transfer time, and no other fix
    claims it.
    """

    kind = CauseKind.UNRECORDED_WORKER_LATE
    title = "A worker that was not recorded is late"
    signature = "the trace lacks workers, and their peers take far longer to reduce gradients than to gather as many"
    refuted_by = "the missing workers do not exist, or gradients are many times the bytes of the parameters"
    next_check = "record the missing workers: why does the collector not run there, and what are they doing?"
    suggested_fix = "find out why the collector does not run on all ranks, and record again with the missing ones"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.collectives.empty or evidence.all_workers_traced:
            return
        traffic = evidence.traffic
        wait_s = traffic.unseen_wait_s.sum(axis=1)
        longest = wait_s.max(axis=0)
        late_s = float(longest.mean())
        if (longest > 0).mean() < 0.5 or late_s < SMALLEST_LATENESS_SHARE * evidence.unchanged_s:
            return
        missing = evidence.trace.coverage().missing_workers
        stages = sorted({worker.pp_rank for worker in missing})
        group = f"the data-parallel group of stage {stages[0]}" if len(stages) == 1 else "a data-parallel group"
        figures = (Figure("its peers wait", late_s, SMALLEST_LATENESS_SHARE * evidence.unchanged_s, Unit.SECONDS),)
        yield Candidate(
            self.kind,
            Where(workers=missing),
            f"its peers wait {seconds(late_s)} of each step for it",
            figures,
            confidence_from(figures),
            Scale(evidence.collectives, traffic.transfer_share[..., None]),
            1 + longest / evidence.unchanged_s,
            title=f"A worker of {group} that was not recorded is late by {seconds(late_s)}",
            bound=True,  # what else the worker holds up in its own pipeline was not recorded
        )


def _on_one_host(evidence: Evidence) -> bool:
    """Whether nothing passes a network: copies within a host are held up by its cores or memory."""
    hosts = evidence.hosts
    return len(set(hosts.values())) == 1 and len(hosts) == len(evidence.dp_ranks) * evidence.stages


class Congestion(Rule):
    """Transfers and collectives all over the job take longer at some times than at others: congestion, or a flapping
    port.

    Paper: uses the median, not the mean, as the ideal of communication, which a few long transfers do not affect; no
    signature. tracekit compares each transfer with itself in calm steps. Either most of a step's take one and a half
    times as long, those of all stages or those between two stages on all DP ranks; or a few take longer than noise and
    sharing a card explain.
    """

    kind = CauseKind.CONGESTION
    title = "A few transfers take many times as long as usual"
    signature = (
        "transfers are very long in some steps, or a few of them are, on changing links; they are as usual otherwise"
    )
    refuted_by = "the long transfers are all on one link, or pass one card"
    next_check = "switch port flaps and ECN/PFC counters in those steps; hw_counters/np_cnp_sent, out_of_sequence"
    suggested_fix = (
        "have the network team look for flapping ports and congested uplinks (port flaps, ECN and PFC counters)"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.transfers.empty and evidence.collectives.empty:
            return
        if _on_one_host(evidence):
            return
        found = evidence.congestion
        if not found.shows:
            return
        congested, most = found.level > 1, float(found.level.max())
        if congested.any():
            figures: tuple[Figure, ...] = (
                Figure("transfer time over that of calm steps", most, SMALLEST_LEVEL, Unit.FACTOR),
            )
            title = "Transfers all over the job take longer in some steps"
            effect = (
                f"in {congested.sum():,} of {len(congested):,} steps transfers take up to {ratio(most)} times as long"
                " as the same ones in the others"
            )
        else:
            figures = (
                Figure("long transfers", found.count, FEWEST_LONG),
                Figure("longest over the usual", found.longest, found.needed, Unit.FACTOR),
            )
            title = self.title
            effect = (
                f"{found.count:,} of {found.of:,} transfers and collectives take up to {ratio(found.longest)} times as"
                " long as usual, on changing links"
            )
        # Single long transfers are random, so the place of a few of them does not predict the next ones.
        time = _time(evidence, found.level) if congested.any() else None
        yield Candidate(
            self.kind, Where(), effect, figures, confidence_from(figures), found.change, time=time, title=title
        )


class SharedCard(Rule):
    """Transfers between stages wait behind the job's own collectives, which pass the same cards at the same time.

    Paper: no signature; such waits increase S, because the ideal of transfers is the median. tracekit subtracts from
    each transfer the time in which a collective of one of its ends ran, and names what that saves. It blames nobody and
    promises nothing: the bytes have to be transferred at some time.
    """

    kind = CauseKind.SHARED_CARD
    title = "Transfers share the network with the job's own collectives"
    signature = "transfers are long while a data-parallel collective of one of their ends runs, and short otherwise"
    refuted_by = "the same transfers are as long without overlapped collectives"
    next_check = "a run without the overlap, or with collectives in smaller buckets: does the step get shorter?"
    suggested_fix = (
        "try smaller buckets (bucket_cap_mb) and fewer channels (NCCL_MAX_NCHANNELS) for the overlapped collectives, or"
        " another card for the pipeline"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.transfers.empty:
            return
        traffic = evidence.traffic
        usual = np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
        found = evidence.congestion
        shared_s = shared_anyway_s(traffic, found.rings if found.shows else np.ones(traffic.rings.shape))
        alone = np.maximum(traffic.seconds - shared_s, usual)
        long = (shared_s > 0) & (traffic.seconds > HICCUP_FACTOR * usual) & (alone < traffic.seconds)
        if not long.any():
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            factor = np.where(long, alone / traffic.seconds, 1.0)
        change = Scale(evidence.transfers, factor)
        share = 1 - float(step_times_with(evidence.replay, (change,)).mean()) / evidence.unchanged_s
        if share < SMALLEST_BLAMELESS_SHARE:
            return
        figures = (
            Figure("what goes without, over the step", share, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
            Figure("transfers that wait", int(long.sum()), 0.0),
        )
        longest = float(np.nanmax((traffic.seconds / traffic.usual_s[:, None, None])[long]))
        effect = (
            f"{long.sum():,} transfers take up to {ratio(longest)} times as long as usual while a collective of the job"
            " passes the same card"
        )
        yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures[:1]), change)


class ClockError(Rule):
    """The clock of a worker is off: its ops seem early or late, its transfers long, but nothing is slow.

    Paper: assumes synchronised clocks. tracekit compares clocks wherever ops end together (see
    `tracekit.analysis.replay.clocks`) and removes offsets before all measurements, so that it does not blame a rank
    whose clock is off. This rule names offsets above 1.5 ms.
    """

    kind = CauseKind.CLOCK_ERROR
    title = "Clock of a worker is off"
    signature = "a worker leaves every collective earlier or later than all others, by the same time"
    refuted_by = "chrony or PTP report the hosts in step within the offset"
    next_check = "chronyc tracking (or ptp4l's offset) on the host; record again with tracekit's clock probe"
    suggested_fix = "synchronise the clocks (chrony, ptp4l); the figures here are corrected for the offset"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        offset = evidence.replay.clocks.offset_s
        hit = np.abs(offset) >= SMALLEST_OFFSET_S
        if not hit.any() or evidence.trace.one_clock:
            return
        figures = (Figure("offset", float(np.abs(offset).max()), SMALLEST_OFFSET_S, Unit.SECONDS),)
        where = Where(workers=evidence.workers_where(hit))
        effect = f"clock is off by {seconds(figures[0].value)}"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), None)


class TooLittleTrace(Rule):
    """Workers or steps are missing, so that what they did counts as waiting elsewhere.

    Paper: traces a sample of steps of all ranks. tracekit uses what there is and reports the gaps.
    """

    kind = CauseKind.TOO_LITTLE_TRACE
    title = "Too little was traced"
    signature = "fewer than three steps, or workers without ops in some steps"
    refuted_by = "the missing workers do not exist: then correct the layout"
    next_check = "whether the collector ran on all ranks; its count of dropped records"
    suggested_fix = "trace all ranks for at least ten steps"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        steps = len(evidence.replay.graph.steps)
        if evidence.all_lanes_replayed and steps >= FEWEST_STEPS:
            return
        coverage = evidence.trace.coverage()
        if coverage.complete and steps >= FEWEST_STEPS:
            return
        missing = 1 - coverage.worker_steps_traced / coverage.worker_steps_expected
        figures = (Figure("share of worker-steps missing", missing, 0.0, Unit.SHARE), Figure("steps", steps, 0.0))
        effect = f"{steps:,} step{'s' if steps != 1 else ''} traced"
        if missing:
            effect += f"; {missing:.1%} of the workers' steps are missing"
        yield Candidate(self.kind, Where(workers=coverage.missing_workers), effect, figures, 1.0, None)
