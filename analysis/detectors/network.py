"""Links, network cards and times in which transfers take longer than usual."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.detectors.detector import Advice, Candidate, Detector, Repair
from tracekit.analysis.detectors.stops import network_time, on_one_host
from tracekit.analysis.detectors.trace_faults import TRACE_FAULTS
from tracekit.analysis.evidence.congestion import (
    CONGESTION,
    card_as_usual,
    congestion_of,
    links_as_usual,
    shared_anyway_s,
)
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives, transfers
from tracekit.analysis.evidence.transfers import TRAFFIC, traffic_of
from tracekit.analysis.numeric.statistics import lower_median, median
from tracekit.analysis.whatif.interventions import Scale, step_times
from tracekit.base.text import ratio
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, Link, LossKind, Place, Unit, confidence_from


class SlowTransferThresholds(Struct, frozen=True):
    """When a network card or single transfers are slow."""

    #: How many times as long as the other members of its ring one takes. Chosen; `eventsim` and `causes` name slow
    #: cards with it, and none in healthy jobs.
    member_factor: float = 1.5
    #: The shortest collective between workers, seconds. Definition: less was waited for, or measured by a wrong clock.
    shortest_s: float = 1e-6
    #: Transfers that are long. Definition: one shows it.
    fewest_long: int = 1


SLOW_TRANSFERS = SlowTransferThresholds()


class SlowLink(Detector):
    """The connection between two neighbouring stages of one DP rank is slow.

    Paper: no signature. A slow sender shows on the receiver's recv, so tracekit uses the shorter of the two sides of
    each transfer, which no wrong clock can lengthen. A link is slow if nearly all its transfers of a step take three
    times as long as on the usual link, within a host or between hosts as it is, and longer than the usual differences
    between links. A slow card explains the slowness of its links. If all DP ranks' links between two stages are slow at
    once, and only at times, or links without a host in common are slow in the same steps, it is congestion.
    """

    kind = "slow-p2p-link"
    title = "Link between two stages is slow"
    signature = "all transfers between two workers take longer, one way or both, and both sides agree"
    refuted_by = "other transfers of the same two network cards, or their collectives, are as slow: then it is a card"
    next_check = Advice(
        gpu="node_infiniband_symbol_error_total, link_downed_total, port_transmit_wait_total, hw_counters/"
        "out_of_sequence and local_ack_timeout_err of both ends; NVLINK_*_ERROR_COUNT_TOTAL within a host",
        cpu="errors, drops and speed of the network cards at both ends (ethtool -S, ip -s link); iperf3 between them",
    )
    suggested_fix = (
        "have the link between {ends} checked: cable, ports, route (ibdiagnet: symbol errors, link_downed); if it has"
        " errors, swap the node at that end for a spare"
    )
    part = "network"
    repair = Repair(
        "repair-link",
        "Repair the link, so that its transfers are as fast as the others'",
        "the speed of other links afterwards",
    )

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if transfers(job).empty:
            return
        traffic = traffic_of(job)
        slow, factor = traffic.slow_links, traffic.factor
        # With two stages, the direction from the last stage to the first uses the same connection as that from the
        # first to the last: one cause, named after the slow direction.
        ways = 2 * job.stages if job.stages == 2 else 2
        for link in range(2 * job.stages // ways):
            of_link = slow & (np.arange(len(slow)) // ways == link)[:, None, None]
            if not of_link.any():
                continue
            usual = float(np.median(factor[of_link]))
            figures = (Figure("transfer time over the usual", usual, TRAFFIC.link, Unit.FACTOR),)
            stage = int(of_link.any(axis=(1, 2)).argmax()) // 2
            links = tuple(
                Link(job.dp_ranks[int(dp_index)], stage, (stage + 1) % job.stages)
                for dp_index in np.flatnonzero(of_link.any(axis=(0, 1)))
            )
            series = np.where(of_link.any(axis=(0, 2)), usual, 1.0)
            change = links_as_usual(traffic, of_link)
            effect = f"transfers take {ratio(figures[0].value)} times as long as on the usual link"
            yield Candidate(
                self.kind,
                Place(links=links),
                effect,
                figures,
                confidence_from(figures),
                change,
                time=network_time(job, series),
                excess=figures[0].value - 1,
            )


def slow_cards(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Yield slow network cards, by the transfers that pass them; without any, members of a ring that take longer."""
    if len(job.replay.graph.steps) < TRACE_FAULTS.fewest_steps:
        return
    cards = () if transfers(job).empty else traffic_of(job).cards
    for card in cards:
        figures: tuple[Figure, ...] = (
            Figure("transfer time over the usual", float(card.factor.max()), TRAFFIC.link, Unit.FACTOR),
        )
        if card.ring_factor > TRAFFIC.ring:
            ring = Figure("its collectives over those of other stages", card.ring_factor, TRAFFIC.ring, Unit.FACTOR)
            figures = (*figures, ring)
        effect = f"transfers over one network card take {ratio(figures[0].value)} times as long as usual"
        if len(figures) > 1:
            effect += f"; the collectives of its stage take {ratio(card.ring_factor)} times as long as other stages'"
        yield Candidate(
            kind,
            Place(workers=card.workers, host=job.hosts.get(card.workers[0])),
            effect,
            figures,
            confidence_from(figures),
            card_as_usual(traffic_of(job), card),
            time=network_time(job, np.where(card.steps, float(card.factor[card.steps].mean()), 1.0)),
            title=f"Network card is slow in {' and '.join(card.sides)}",
            excess=figures[0].value - 1,
        )
    if not cards:
        yield from _slow_members(kind, job)


def _slow_members(kind: str, job: PipelineSubject) -> Iterator[Candidate]:
    """Workers whose collectives take longer than those of their peers in the same rings."""
    if collectives(job).empty or len(job.dp_ranks) < 2 or on_one_host(job):
        return
    member_s = collectives(job).gather(job.replay.durations.cost)
    usual = lower_median(median(member_s, (2,)), axis=-1)
    # Peers with transfers of almost no time were waited for, or measured by a wrong clock; they do not measure a
    # card.
    usual = np.where(usual > SLOW_TRANSFERS.shortest_s, usual, np.nan)
    factor = median(member_s / usual[:, :, None, None], (1, 2))
    if not np.isfinite(factor).any():
        return
    hit = factor > SLOW_TRANSFERS.member_factor * max(1.0, float(np.nanmedian(factor)))
    if not hit.any():
        return
    longest = float(factor[hit].max())
    figures = (Figure("transfer time over that of its peers", longest, SLOW_TRANSFERS.member_factor, Unit.FACTOR),)
    change = Scale(collectives(job), 1 / np.where(hit, factor, 1.0)[:, None, None, :])
    where = Place(workers=job.workers_where(hit))
    effect = f"collectives take {ratio(longest)} times as long as on its peers in the same ring"
    yield Candidate(kind, where, effect, figures, confidence_from(figures), change, excess=longest - 1)


class NetworkCongestion(Detector):
    """Transfers and collectives all over the job take longer at some times than at others: congestion, or a flapping
    port.

    Paper: uses the median, not the mean, as the ideal of communication, which a few long transfers do not affect; no
    signature. tracekit compares each transfer with itself in calm steps. Either most of a step's take one and a half
    times as long, those of all stages or those between two stages on all DP ranks; or a few take longer than noise and
    sharing a card explain.
    """

    kind = "congestion"
    title = "A few transfers take many times as long as usual"
    signature = (
        "transfers are very long in some steps, or a few of them are, on changing links; they are as usual otherwise"
    )
    refuted_by = "the long transfers are all on one link, or pass one card"
    next_check = "switch port flaps and ECN/PFC counters in those steps; hw_counters/np_cnp_sent, out_of_sequence"
    suggested_fix = (
        "have the network team look for flapping ports and congested uplinks (port flaps, ECN and PFC counters)"
    )
    loss = LossKind.COMMUNICATION
    by_chance = True
    repair = Repair("calm-network", "Remove the very long transfers", assumes="all very long transfers go")

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if transfers(job).empty and collectives(job).empty:
            return
        if on_one_host(job):
            return
        congestion = congestion_of(job)
        if not congestion.shows:
            return
        congested, most = congestion.level > 1, float(congestion.level.max())
        if congested.any():
            figures: tuple[Figure, ...] = (
                Figure("transfer time over that of calm steps", most, CONGESTION.level, Unit.FACTOR),
            )
            title = "Transfers all over the job take longer in some steps"
            effect = (
                f"in {congested.sum():,} of {len(congested):,} steps transfers take up to {ratio(most)} times as long"
                " as the same ones in the others"
            )
        else:
            figures = (
                Figure("long transfers", congestion.count, SLOW_TRANSFERS.fewest_long),
                Figure("longest over the usual", congestion.longest, congestion.needed, Unit.FACTOR),
            )
            title = self.title
            effect = (
                f"{congestion.count:,} of {congestion.of:,} transfers and collectives take up to"
                f" {ratio(congestion.longest)} times as long as usual, on changing links"
            )
        # Single long transfers are random, so the place of a few of them does not predict the next ones.
        time = network_time(job, congestion.level) if congested.any() else None
        yield Candidate(
            self.kind, Place(), effect, figures, confidence_from(figures), congestion.change, time=time, title=title
        )


class SharedCard(Detector):
    """Transfers between stages wait behind the job's own collectives, which pass the same cards at the same time.

    Paper: no signature; such waits increase S, because the ideal of transfers is the median. tracekit subtracts from
    each transfer the time in which a collective of one of its ends ran, and names what that saves. It blames nobody and
    promises nothing: the bytes have to be transferred at some time.
    """

    kind = "shared-network-card"
    title = "Transfers share the network with the job's own collectives"
    signature = "transfers are long while a data-parallel collective of one of their ends runs, and short otherwise"
    refuted_by = "the same transfers are as long without overlapped collectives"
    next_check = "a run without the overlap, or with collectives in smaller buckets: does the step get shorter?"
    suggested_fix = (
        "try smaller buckets (bucket_cap_mb) and fewer channels (NCCL_MAX_NCHANNELS) for the overlapped collectives, or"
        " another card for the pipeline"
    )
    loss = LossKind.COMMUNICATION

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if transfers(job).empty:
            return
        traffic = traffic_of(job)
        usual = np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
        congestion = congestion_of(job)
        shared_s = shared_anyway_s(traffic, congestion.rings if congestion.shows else np.ones(traffic.rings.shape))
        alone = np.maximum(traffic.seconds - shared_s, usual)
        long = (shared_s > 0) & (traffic.seconds > CONGESTION.hiccup * usual) & (alone < traffic.seconds)
        if not long.any():
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            factor = np.where(long, alone / traffic.seconds, 1.0)
        change = Scale(transfers(job), factor)
        share = 1 - float(step_times(job.replay, (change,)).mean()) / job.unchanged_s
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
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures[:1]), change)
