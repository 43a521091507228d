"""A slow link between two stages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.episode_figures import network_time
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.evidence.grids import transfers
from tracekit.analysis.evidence.network_repairs import links_as_usual
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.transfers import SMALLEST_LINK_FACTOR, traffic_of
from tracekit.base.text import ratio
from tracekit.report.finding import Figure, Link, Place, Unit, confidence_from


class SlowLink(Detector):
    """The connection between two neighbouring stages of one DP rank is slow.

    Paper: no signature. A slow sender shows on the receiver's recv, so tracekit uses the shorter of the two sides of
    each transfer, which no wrong clock can lengthen. A link is slow if nearly all its transfers of a step take three
    times as long as on the usual link, within a host or between hosts as it is, and longer than the usual differences
    between links. A slow card explains the slowness of its links. If all DP ranks' links between two stages are slow at
    once, and only at times, it is congestion.
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
            figures = (
                Figure(
                    "transfer time over the usual",
                    usual,
                    SMALLEST_LINK_FACTOR,
                    Unit.FACTOR,
                ),
            )
            stage = int(of_link.any(axis=(1, 2)).argmax()) // 2
            links = tuple(
                Link(job.dp_ranks[int(at)], stage, (stage + 1) % job.stages)
                for at in np.flatnonzero(of_link.any(axis=(0, 1)))
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
