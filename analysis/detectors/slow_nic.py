"""A slow network card."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.detectors.episode_figures import network_time, on_one_host
from tracekit.analysis.detectors.rank_behind import rank_behind
from tracekit.analysis.detectors.remedies import Advice
from tracekit.analysis.detectors.too_little_trace import FEWEST_STEPS
from tracekit.analysis.evidence.grids import collectives, transfers
from tracekit.analysis.evidence.network_repairs import card_as_usual
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_cards import SMALLEST_RING_FACTOR
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.evidence.transfers import SMALLEST_LINK_FACTOR, traffic_of
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.numeric.robust import lower_median, median
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.text import ratio
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: A member of a ring that takes this many times as long as the others has a slow card.
SMALLEST_NIC_FACTOR = 1.5
#: No collective between workers is faster, seconds.
SMALLEST_TRANSFER_S = 1e-6


class SlowNetworkCard(Detector):
    """The network card of a worker's host is slow in sending, in receiving, or in both.

    Paper: no signature. A card carries the transfers to both neighbouring stages and the collectives of its stage. So a
    slow card shows in all transfers of one side (three times the usual), and in the ring of its stage, which is as slow
    as its slowest card: one and a half times the rings of the other stages. If members of a ring are recorded until
    they themselves are done, a member that takes half as long again as its peers is evidence enough. A ring that is
    slow on all members alike, without transfers that identify one of them, blames nobody.
    """

    kind = "slow-nic"
    title = "Network card of a worker is slow"
    signature = "all transfers of one side of a card, and the collectives of its stage; or those of one worker alone"
    refuted_by = "one of the links over the same card is as fast as usual"
    next_check = Advice(
        gpu="node_infiniband_port_transmit_wait_total, symbol_error_total, hw_counters/np_cnp_sent of its network card;"
        " DCGM_FI_DEV_PCIE_REPLAY_COUNTER; NCCL Inspector's coll_busbw_gbs of its ranks",
        cpu="errors, drops and speed of its network card (ethtool -S, ip -s link); iperf3 from its host to others",
    )
    suggested_fix = (
        "have the network card of {hosts} checked: cable, port, PCIe slot (symbol errors, transmit_wait, PCIe replays);"
        " if it has errors, swap the node for a spare"
    )
    part = "network"
    repair = Repair(
        "repair-nic",
        "Repair the network card, so that all that passes it is as fast as elsewhere",
        "the speed of other cards afterwards",
    )

    def find(self, job: Subject) -> Iterator[Candidate]:
        late = rank_behind(job, Part.TRANSFERS)
        if late is not None:
            yield late.candidate(
                self.kind, "its transfers take longer than those of its peers once all ranks are there"
            )
        yield from self._cards(job)

    @only_in(PipelineSubject)
    def _cards(self, job: PipelineSubject) -> Iterator[Candidate]:
        if len(job.replay.graph.steps) < FEWEST_STEPS:
            return
        cards = () if transfers(job).empty else traffic_of(job).cards
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
            yield from self._of_one_member(job)

    def _of_one_member(self, job: PipelineSubject) -> Iterator[Candidate]:
        """Workers whose collectives take longer than those of their peers in the same rings."""
        if collectives(job).empty or len(job.dp_ranks) < 2 or on_one_host(job):
            return
        member_s = collectives(job).gather(job.replay.durations.cost)
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
        change = Scale(collectives(job), 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        where = Place(workers=job.workers_where(hit))
        effect = f"collectives take {ratio(figures[0].value)} times as long as on its peers in the same ring"
        excess = figures[0].value - 1
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change, excess=excess)
