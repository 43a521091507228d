"""What a trace does not show: wrong clocks, too few steps, workers that were not recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives
from tracekit.analysis.evidence.subject import MACHINE, SPEED_OF_PEERS
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class TraceFaultThresholds(Struct, frozen=True):
    """When the trace and not the job is at fault."""

    #: Offset of a clock, seconds. Chosen: network time protocols keep clocks closer; `clocks` removes offsets from 2 ms
    #: on.
    offset_s: float = 1.5e-3
    #: Steps that show which of them are the usual ones. Definition: of two, neither is.
    fewest_steps: int = 3
    #: Share of the step that peers wait for a worker that was not recorded. Chosen: as much as a finding has to cost.
    lateness_share: float = 0.02


TRACE_FAULTS = TraceFaultThresholds()


class ClockError(Detector):
    """The clock of a worker is off: its ops seem early or late, its transfers long, but nothing is slow.

    Paper: assumes synchronised clocks. tracekit compares clocks wherever ops end together (see
    `tracekit.analysis.replay.clocks`) and removes offsets before all measurements, so that it does not blame a rank
    whose clock is off. This rule names offsets above 1.5 ms.
    """

    kind = "clock-error"
    title = "Clock of a worker is off"
    signature = "a worker leaves every collective earlier or later than all others, by the same time"
    refuted_by = "chrony or PTP report the hosts in step within the offset"
    next_check = "chronyc tracking (or ptp4l's offset) on the host; record again with tracekit's clock probe"
    suggested_fix = "synchronise the clocks (chrony, ptp4l); the figures here are corrected for the offset"

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        offset = job.replay.clocks.offset_s
        hit = np.abs(offset) >= TRACE_FAULTS.offset_s
        if not hit.any() or job.trace.one_clock:
            return
        figures = (Figure("offset", float(np.abs(offset).max()), TRACE_FAULTS.offset_s, Unit.SECONDS),)
        where = Place(workers=job.workers_where(hit))
        effect = f"clock is off by {seconds(figures[0].value)}"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), None)


class TooLittleTrace(Detector):
    """Workers or steps are missing, so that what they did counts as waiting elsewhere.

    Paper: traces a sample of steps of all ranks. tracekit uses what there is and reports the gaps.
    """

    kind = "too-little-trace"
    title = "Too little was traced"
    signature = "fewer than three steps, or workers without ops in some steps"
    refuted_by = "the missing workers do not exist: then correct the layout"
    next_check = "whether the collector ran on all ranks; its count of dropped records"
    suggested_fix = "trace all ranks for at least ten steps"

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        steps = len(job.replay.graph.steps)
        if job.all_lanes_replayed and steps >= TRACE_FAULTS.fewest_steps:
            return
        coverage = job.trace.coverage()
        if coverage.complete and steps >= TRACE_FAULTS.fewest_steps:
            return
        missing = 1 - coverage.worker_steps_traced / coverage.worker_steps_expected
        figures = (Figure("share of worker-steps missing", missing, 0.0, Unit.SHARE), Figure("steps", steps, 0.0))
        effect = f"{steps:,} step{'s' if steps != 1 else ''} traced"
        if missing:
            effect += f"; {missing:.1%} of the workers' steps are missing"
        yield Candidate(self.kind, Place(workers=coverage.missing_workers), effect, figures, 1.0, None)


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
        if (longest > 0).mean() < 0.5 or late_s < TRACE_FAULTS.lateness_share * job.unchanged_s:
            return
        missing = job.trace.coverage().missing_workers
        stages = sorted({worker.pp_rank for worker in missing})
        group = f"the data-parallel group of stage {stages[0]}" if len(stages) == 1 else "a data-parallel group"
        figures = (Figure("its peers wait", late_s, TRACE_FAULTS.lateness_share * job.unchanged_s, Unit.SECONDS),)
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
