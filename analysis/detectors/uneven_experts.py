"""Experts of some ranks get more tokens than those of others: which, and whether always."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.whatif.interventions import Intervention, SetOps
from tracekit.report.experts import CauseOfImbalance
from tracekit.report.finding import Figure, Place, Unit

_LOG = "log tokens per expert (docs/experts.md), then `tracekit whatif --experts --expert-loads FILE`"


class UnevenExperts(Detector):
    """Ranks wait for each other in the all-to-alls of experts, because their experts get unequal numbers of tokens.

    tracekit fits the time of experts and transfers against the rows that each rank sends and
    receives, and replays the job with equal ones; who is slow beyond that is judged on the job as it would be then.
    `words`: what is uneven.
    """

    signature = (
        "the time of a rank's experts goes with the rows that it receives, and others wait for it in all-to-alls"
    )
    refuted_by = "the same rank is as late with equal rows on all ranks"
    next_check = f"which experts are hot, and whether always: {_LOG}"
    label = "uneven work"
    repair = Repair("balance-experts", "Give the experts of all ranks equally many tokens", "equal tokens on all ranks")
    words = ""

    def in_ops(self, evidence: OpEvidence) -> Iterator[Candidate]:
        """See `Detector.in_ops`."""
        found = evidence.uneven_experts
        if found is not None and found.cause == self.kind:
            yield self._candidate(evidence, found, SetOps(evidence.experts.job.balanced_cost))

    def in_pipeline(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Detector.in_pipeline`."""
        exchanges, change = evidence.exchanges, evidence.even_experts
        found = None if exchanges is None or change is None else exchanges.uneven_experts
        if exchanges is not None and found is not None and found.cause == self.kind:
            yield self._candidate(exchanges, found, change)

    def _candidate(self, evidence: OpEvidence, found: CauseOfImbalance, change: Intervention | None) -> Candidate:
        layers = [one for one in evidence.experts.layers() if one.layer in found.layers]
        factor = sum(one.max_over_mean for one in layers) / max(len(layers), 1)
        fit = min(line.r2 for name, line in evidence.experts.job.lines.items() if name.startswith("experts"))
        who = {"rank": "" if found.rank is None else found.rank, "expert": "" if found.expert is None else found.expert}
        return Candidate(
            self.kind,
            Place(),
            f"{self.words.format(**who)}: the heaviest rank of a layer gets {factor:.2f} times the mean tokens, and the"
            " others wait for it in all-to-alls",
            (
                Figure("tokens of the heaviest rank over the mean", factor, 1.0, Unit.FACTOR),
                Figure("time of the experts that their tokens explain", fit, 0.0, Unit.SHARE),
            ),
            max(fit, 0.0),
            change,
        )


class HotExpert(UnevenExperts):
    """One expert of a layer gets most of what is uneven, always the same one. Paper: no signature."""

    kind = "hot-expert"
    title = "One expert gets too many tokens"
    words = "expert {expert} gets most of what is uneven, in every step"
    suggested_fix = "replicate the hot expert (--rebalance replicas=N prices that), or balance the router"


class HotRank(UnevenExperts):
    """The experts of one rank get more tokens than those of others, in every layer. Paper: no signature."""

    kind = "hot-rank"
    title = "The experts of one rank get too many tokens"
    words = "the experts of rank {rank} get most tokens in every layer"
    suggested_fix = "place experts anew, so that this rank has fewer hot ones, or balance the router"


class Rotating(UnevenExperts):
    """One expert of a layer gets most of what is uneven, each step another one. Paper: no signature."""

    kind = "rotating"
    title = "Every step, another expert gets too many tokens"
    words = "one expert a layer gets most of what is uneven, in each step another one"
    suggested_fix = (
        "balance the router (its auxiliary loss or bias), or cap tokens per expert; no fixed placement helps"
    )


class Skew(UnevenExperts):
    """Experts get unequal numbers of tokens, none of them most. Paper: no signature."""

    kind = "skew"
    title = "Experts get unequal numbers of tokens"
    words = "experts get unequal numbers of tokens"
    suggested_fix = "balance the router, or place and replicate experts by load"
