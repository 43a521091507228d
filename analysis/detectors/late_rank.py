"""A rank for which the others wait: it begins later, or nothing recorded says what it takes longer for."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.culprit import at_pace, culprit_of
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.gpu.noise import LARGEST_CHANCE
from tracekit.analysis.whatif.interventions import Intervention, SetSomeOps
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit


class LateRank(Detector):
    """The others wait for a rank in their collectives, and no single part of its time is longer than theirs.

    Paper: no signature. The recording gets shorter with this rank at the pace of its peers.
    """

    kind = "late-rank"
    title = "The others wait for a rank"
    signature = "one rank comes last to collectives, and no part of its time alone is longer than its peers'"
    refuted_by = "another rank is last in a longer recording"
    next_check = "profiles of the rank and of a peer, with stacks (torch.profiler, py-spy)"
    suggested_fix = "profile {ranks} and a peer (torch.profiler, py-spy record) and take out what runs only there"
    part = "compute"

    def find(self, job: GraphSubject) -> Iterator[Candidate]:
        culprit = culprit_of(job)
        if culprit is None or culprit.behind or culprit.late_s is not None:
            return
        waited = f"the others wait {seconds(culprit.waited_s)} for it" if culprit.waited_s > 0 else "the others wait"
        yield Candidate(
            self.kind,
            Place(ranks=(culprit.rank,)),
            waited,
            (Figure("saved at the pace of its peers", culprit.saved_s, 0.0, Unit.SECONDS),),
            1 - LARGEST_CHANCE,
            at_pace(job, culprit.rank, freed=True),
        )


class LateStart(Detector):
    """The first recorded event of a rank is late, and with it the collectives in which the others wait.

    Paper: no signature; steps begin together. It costs time once, and the profiler may be the reason.
    """

    kind = "late-start"
    title = "A rank begins later in the recording than its peers"
    signature = "the first event of one rank is far later than those of all others, which wait for it"
    refuted_by = "a longer recording in which the rank is late again"
    next_check = "whether the profiler started later on this rank, or its first step did"
    suggested_fix = "record more steps: the profiler may only have started later on {ranks}"
    part = "host"

    def find(self, job: GraphSubject) -> Iterator[Candidate]:
        culprit = culprit_of(job)
        if culprit is None or culprit.late_s is None:
            return
        usual_s = window_s(job, culprit.rank) - culprit.late_s
        yield Candidate(
            self.kind,
            Place(ranks=(culprit.rank,)),
            f"its first recorded event is {seconds(culprit.late_s)} after those of its peers, which wait for it",
            (Figure("later than its peers", culprit.late_s, 0.0, Unit.SECONDS),),
            1 - LARGEST_CHANCE,
            begins(job, culprit.rank, usual_s),
        )


def window_s(job: GraphSubject, rank: int) -> float:
    """Return how late the recording of a rank begins, seconds."""
    return float(job.ops.filter(kind="window", rank=rank)["duration"].sum())


def begins(job: GraphSubject, rank: int, begin_s: float) -> Intervention:
    """Return the job in which the recording of a rank begins `begin_s` seconds after that of the job."""
    cost = job.pace.with_window(rank, begin_s)
    return SetSomeOps(cost != job.pace.cost, cost)
