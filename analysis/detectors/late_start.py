"""A rank whose recording begins after those of its peers."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.culprit import culprit_of
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.gpu.noise import LARGEST_CHANCE
from tracekit.analysis.whatif.interventions import Intervention, SetSomeOps
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit


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
