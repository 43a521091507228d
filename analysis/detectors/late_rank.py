"""A rank for which the others wait, with nothing recorded that it takes longer for."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.culprit import at_pace, culprit_of
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.gpu.noise import LARGEST_CHANCE
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
    next_check = "a profile of the rank beside one of a peer, with stacks (torch.profiler, py-spy)"
    suggested_fix = "profile {ranks} beside a peer (torch.profiler, py-spy record) and take out what runs only there"
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
