"""Rules for causes outside the workers: links, network cards, clocks, the trace itself.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Link, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.numeric.robust import lower_median, median

#: Transfers scatter; a link (a network card) this many times slower than the others is slow.
SMALLEST_LINK_FACTOR = 3.0
SMALLEST_NIC_FACTOR = 1.5
#: A single transfer this many times the median is a hiccup; up to this share of all may be.
HICCUP_FACTOR = 8.0
LARGEST_HICCUP_SHARE = 0.1
FEWEST_HICCUPS = 3
FEWEST_STEPS = 3
#: No collective between workers is quicker, seconds.
SMALLEST_TRANSFER_S = 1e-6
#: Network time protocols keep clocks closer than this, seconds: a larger offset is worth a word.
SMALLEST_OFFSET_S = 1.5e-3


def _slow_links(evidence: Evidence) -> np.ndarray:
    """Which links are slow, [links x directions, dp_ranks]."""
    slow: np.ndarray = evidence.link_factor > SMALLEST_LINK_FACTOR
    return slow


class SlowLink(Rule):
    """The connection between two neighbouring stages of one DP rank is slow.

    Paper: no signature. A slow sender shows on the
    receiver's recv, so tracekit takes the shorter of the two sides of each transfer, which no wrong clock can
    lengthen, and compares the link's median with that of all links: three times.
    """

    kind = CauseKind.SLOW_LINK
    title = "Link between two stages is slow"
    signature = "send and recv between two workers take longer in all steps, both sides agree"
    refuted_by = "other transfers of the same two network cards are as fast as usual"
    next_check = (
        "node_infiniband_symbol_error_total, link_downed_total, port_transmit_wait_total, hw_counters/"
        "out_of_sequence and local_ack_timeout_err of both ends; NVLINK_*_ERROR_COUNT_TOTAL within a host"
    )
    suggested_fix = "repair the link (cable, port, routing), or move one end"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.transfers.empty:
            return
        slow, factor = _slow_links(evidence), evidence.link_factor
        for link in range(evidence.stages):
            hit = slow[2 * link : 2 * link + 2].any(axis=0)
            if not hit.any():
                continue
            mine = np.zeros_like(slow)
            mine[2 * link : 2 * link + 2] = slow[2 * link : 2 * link + 2]
            figures = (Figure("transfer time over the usual", float(factor[mine].max()), SMALLEST_LINK_FACTOR),)
            links = tuple(
                Link(evidence.dp_ranks[int(at)], link, (link + 1) % evidence.stages) for at in np.flatnonzero(hit)
            )
            change = Scale(evidence.transfers, 1 / np.where(mine, factor, 1.0)[:, None, None, :])
            yield Candidate(self.kind, Where(links=links), figures, confidence_from(figures), change)


class SlowNic(Rule):
    """The data-parallel collectives of one worker take longer than those of its peers.

    Paper: no signature. tracekit compares the median transfer duration of a worker's collectives with that of the
    same collectives on the other DP ranks: one and a half times. Where a slow rank holds up a whole ring, all members
    end late together and no rank stands out; then this rule stays silent rather than blame one.
    """

    kind = CauseKind.SLOW_NIC
    title = "Collectives of one worker are slow"
    signature = "params-all-gather and grads-reduce-scatter of one worker take longer than those of its peers"
    refuted_by = "its p2p transfers over the same network card are as fast as usual"
    next_check = (
        "node_infiniband_port_transmit_wait_total, symbol_error_total, hw_counters/np_cnp_sent of its network card;"
        " DCGM_FI_DEV_PCIE_REPLAY_COUNTER; NCCL Inspector's coll_busbw_gbs of its ranks"
    )
    suggested_fix = "replace the network card or drain the worker"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        few = len(evidence.replay.graph.steps) < FEWEST_STEPS
        if evidence.collectives.empty or len(evidence.dp_ranks) < 2 or few:
            return
        seconds = evidence.collectives.gather(evidence.replay.durations.own)
        usual = lower_median(median(seconds, (2,)), axis=-1)
        # Peers that transfer in no time have been waited for, or measured by a wrong clock: no measure of a card.
        usual = np.where(usual > SMALLEST_TRANSFER_S, usual, np.nan)
        factor = median(seconds / usual[:, :, None, None], (1, 2))
        if not np.isfinite(factor).any():
            return
        hit = factor > SMALLEST_NIC_FACTOR * max(1.0, float(np.nanmedian(factor)))
        if not hit.any():
            return
        figures = (Figure("transfer time over that of its peers", float(factor[hit].max()), SMALLEST_NIC_FACTOR),)
        change = Scale(evidence.collectives, 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        where = Where(workers=evidence.workers_where(hit))
        yield Candidate(self.kind, where, figures, confidence_from(figures), change)


class Congestion(Rule):
    """A few transfers, here and there, take many times as long as usual: congestion or a flapping port.

    Paper: takes the median, not the mean, as the ideal of communication, which such hiccups do not move; no
    signature. tracekit counts transfers longer than eight times their link's median.
    """

    kind = CauseKind.CONGESTION
    title = "A few transfers take many times as long as usual"
    signature = "up to a tenth of the transfers between stages are very long, on changing links and steps"
    refuted_by = "the long transfers are all on one link"
    next_check = "switch port flaps and ECN/PFC counters in those steps; hw_counters/np_cnp_sent, out_of_sequence"
    suggested_fix = "find the flapping port or the congested uplink"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.transfers.empty:
            return
        seconds = evidence.transfer_s
        # A slow link is slow all the time: its hiccups stand out from its own usual transfer.
        usual = evidence.usual_transfer_s * np.where(_slow_links(evidence), evidence.link_factor, 1.0)[:, None, None, :]
        over = seconds / np.maximum(usual, 1e-9)
        hiccup = over > HICCUP_FACTOR
        count = int(hiccup.sum())
        if count < FEWEST_HICCUPS or count > LARGEST_HICCUP_SHARE * np.isfinite(seconds).sum():
            return
        figures = (
            Figure("long transfers", count, FEWEST_HICCUPS),
            Figure("longest over the usual", float(over[hiccup].max()), HICCUP_FACTOR),
        )
        factor = np.ones_like(seconds)
        factor[hiccup] = 1 / over[hiccup]
        series = 1 + np.where(hiccup, seconds, 0.0).sum(axis=(0, 1, 3)) / evidence.unchanged_s
        change = Scale(evidence.transfers, factor)
        yield Candidate(self.kind, Where(), figures, confidence_from(figures), change, series)


class ClockError(Rule):
    """The clock of a worker is off: its ops seem early or late, its transfers long; nothing is slow.

    Paper: takes synchronised clocks for granted. tracekit compares clocks wherever ops end together (see
    `tracekit.analysis.replay.clocks`) and removes offsets before anything is measured, so that the rank whose clock is
    off is not blamed; this rule names those of more than 1.5 ms.
    """

    kind = CauseKind.CLOCK_ERROR
    title = "Clock of a worker is off"
    signature = "a worker leaves every collective earlier or later than all others, by the same time"
    refuted_by = "chrony or PTP report the hosts in step within the offset"
    next_check = "chronyc tracking (or ptp4l's offset) on the host; record again with tracekit's clock probe"
    suggested_fix = "synchronise the clocks; the figures here are corrected for the offset"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        offset = evidence.replay.clocks.offset_s
        hit = np.abs(offset) >= SMALLEST_OFFSET_S
        if not hit.any():
            return
        figures = (Figure("offset", float(np.abs(offset).max()), SMALLEST_OFFSET_S, "s"),)
        yield Candidate(self.kind, Where(workers=evidence.workers_where(hit)), figures, confidence_from(figures), None)


class TooLittleTrace(Rule):
    """Workers or steps are missing, so that what they did counts as waiting elsewhere.

    Paper: traces a sample of steps of all ranks. tracekit takes what there is and says so.
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
        figures = (Figure("share of worker-steps missing", missing, 0.0), Figure("steps", steps, 0.0))
        yield Candidate(self.kind, Where(workers=coverage.missing_workers), figures, 1.0, None)
