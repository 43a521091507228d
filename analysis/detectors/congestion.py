"""Transfers that take longer at some times than at others."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.episode_figures import network_time, on_one_host
from tracekit.analysis.evidence.congestion import SMALLEST_LEVEL, congestion_of
from tracekit.analysis.evidence.grids import collectives, transfers
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.base.text import ratio
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.report.verdict import LossKind

#: By definition, one long transfer shows it.
FEWEST_LONG = 1


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
                Figure("transfer time over that of calm steps", most, SMALLEST_LEVEL, Unit.FACTOR),
            )
            title = "Transfers all over the job take longer in some steps"
            effect = (
                f"in {congested.sum():,} of {len(congested):,} steps transfers take up to {ratio(most)} times as long"
                " as the same ones in the others"
            )
        else:
            figures = (
                Figure("long transfers", congestion.count, FEWEST_LONG),
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
