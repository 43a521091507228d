"""A worker that was not recorded and is late."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.grids import collectives
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.fixes.plan import MACHINE, SPEED_OF_PEERS
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: Report waiting for an unrecorded worker if it takes at least this share of the step.
SMALLEST_LATENESS_SHARE = 0.02


class UnrecordedWorkerLate(Detector):
    """A worker that was not recorded is late: its peers wait for it in their collectives.

    Paper: traces all ranks. tracekit gets the missing workers from the layout, and infers waiting from collectives that
    move the same number of bytes: reducing gradients takes longer than gathering parameters, on all recorded members
    and in most steps. The difference is time spent waiting for the missing workers, not transfer time, and no other fix
    claims it.
    """

    kind = "unrecorded-worker-late"
    title = "A worker that was not recorded is late"
    signature = "the trace lacks workers, and their peers take far longer to reduce gradients than to gather as many"
    refuted_by = "the missing workers do not exist, or gradients are many times the bytes of the parameters"
    next_check = "record the missing workers: why does the collector not run there, and what are they doing?"
    suggested_fix = "find out why the collector does not run on all ranks, and record again with the missing ones"
    part = "unrecorded"
    repair = Repair("replace-workers", "Get the worker that was not recorded on time", SPEED_OF_PEERS, excludes=MACHINE)

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if collectives(job).empty or job.all_workers_traced:
            return
        traffic = traffic_of(job)
        wait_s = traffic.unseen_wait_s.sum(axis=1)
        longest = wait_s.max(axis=0)
        late_s = float(longest.mean())
        if (longest > 0).mean() < 0.5 or late_s < SMALLEST_LATENESS_SHARE * job.unchanged_s:
            return
        missing = job.trace.coverage().missing_workers
        stages = sorted({worker.pp_rank for worker in missing})
        group = f"the data-parallel group of stage {stages[0]}" if len(stages) == 1 else "a data-parallel group"
        figures = (Figure("its peers wait", late_s, SMALLEST_LATENESS_SHARE * job.unchanged_s, Unit.SECONDS),)
        yield Candidate(
            self.kind,
            Place(workers=missing),
            f"its peers wait {seconds(late_s)} of each step for it",
            figures,
            confidence_from(figures),
            Scale(collectives(job), traffic.transfer_share[..., None]),
            1 + longest / job.unchanged_s,
            title=f"A worker of {group} that was not recorded is late by {seconds(late_s)}",
            bound=True,  # what else the worker holds up in its own pipeline was not recorded
        )
