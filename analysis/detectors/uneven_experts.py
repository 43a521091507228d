"""Experts of some ranks get more tokens than those of others: which, and whether always."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, structs

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.late_rank import OneLaunchQueue
from tracekit.analysis.evidence.graph_subject import GraphSubject, culprit_of, experts_of, uneven_experts, unknown_loads
from tracekit.analysis.evidence.subject import Cause, Subject
from tracekit.analysis.experts.expert_loads import EXPERT_LOADS
from tracekit.analysis.gpu.pace import PACE
from tracekit.analysis.whatif.interventions import SetOps
from tracekit.report.finding import Figure, Place, Unit
from tracekit.report.questions import CauseOfImbalance

_LOG = "log tokens per expert (docs/plans.md), then `tracekit whatif --experts --expert-loads FILE`"


class ExpertThresholds(Struct, frozen=True):
    """When ranks wait for each other in all-to-alls for other reasons than loads."""

    #: Share of the job that a rank costs the others, whose loads are equal. Chosen.
    late_share: float = 0.05


EXPERTS = ExpertThresholds()


def other_causes(job: GraphSubject, findings: Iterable[Cause]) -> Iterator[CauseOfImbalance]:
    """Yield why ranks wait for each other in all-to-alls, other than for loads."""
    late, equal = culprit_of(job), uneven_experts(job) is None and experts_of(job).excess < EXPERT_LOADS.equal
    if late is not None and equal and late.saved_s >= EXPERTS.late_share * job.recorded_s:
        yield CauseOfImbalance("late-peer", late.rank, None, [], late.saved_s / job.steps_in_whole)
    for finding in findings:
        if finding.kind == OneLaunchQueue.kind:
            yield CauseOfImbalance("one-launch-queue", None, None, [], finding.saved_s / job.steps_in_whole)


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
    beyond_experts = False

    def find(self, job: Subject) -> Iterator[Candidate]:
        for candidate in () if job.exchanges is None else self._in_graph(job.exchanges):
            if (change := job.of_exchanges(candidate.change)) is not None:
                yield structs.replace(candidate, change=change)

    def _in_graph(self, job: GraphSubject) -> Iterator[Candidate]:
        imbalance = uneven_experts(job)
        if imbalance is None or imbalance.cause != self.kind:
            return
        layers = [row for row in experts_of(job).layers() if row.layer in imbalance.layers]
        factor = sum(row.max_over_mean for row in layers) / max(len(layers), 1)
        fit = min(line.r2 for name, line in experts_of(job).job.lines.items() if name.startswith("experts"))
        yield Candidate(
            self.kind,
            Place(),
            f"{self.words.format(rank=imbalance.rank, expert=imbalance.expert)}: the heaviest rank of a layer gets"
            f" {factor:.2f} times the mean tokens, and the others wait for it in all-to-alls",
            (
                Figure("tokens of the heaviest rank over the mean", factor, 1.0, Unit.FACTOR),
                Figure("time of the experts that their tokens explain", fit, 0.0, Unit.SHARE),
            ),
            max(fit, 0.0),
            SetOps(experts_of(job).job.balanced_cost),
        )


class UnknownExpertLoads(UnevenExperts):
    """The others wait for a rank whose experts take longer, and its loads are not known. Paper: no signature.

    A slow GPU takes longer for other kernels, too. What experts take beyond that is due to their tokens, or to whatever
    slows experts alone.
    """

    kind = "unknown-loads"
    title = "Experts of one rank take longer, and their loads are not known"
    signature = "the experts of a rank take longer than those of its peers, and its other kernels do not"
    refuted_by = "its loads are those of its peers"
    next_check = _LOG
    suggested_fix = "record all ranks of its group, with split sizes or a log of tokens per expert (--expert-loads)"
    repair = Repair("balance-experts", "Make the experts of the rank as fast as those of its peers")

    def _in_graph(self, job: GraphSubject) -> Iterator[Candidate]:
        imbalance = unknown_loads(job)
        if imbalance is not None:
            yield Candidate(
                self.kind,
                Place(),
                f"the experts of rank {imbalance.rank} take {imbalance.factor - 1:.0%} longer than those of its peers;"
                f" {imbalance.why}, so that a hot expert cannot be told from a slow GPU",
                (Figure("time of its experts over that of its peers", imbalance.factor, 1.0, Unit.FACTOR),),
                1 - PACE.largest_chance,
                SetOps(imbalance.cost),
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
