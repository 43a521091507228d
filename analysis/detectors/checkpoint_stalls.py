"""Checkpoints that stop workers or the whole job."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.detectors.stops import (
    SMALLEST_STOP_SHARE,
    do_it_for_all,
    figures_of_stops,
    longest_share,
    said_of_few,
    slow_at_it,
    stops_s,
)
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.grids import checkpoints
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.whatif.interventions import Intervention, NoStalls, Scale, Together
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, confidence_from
from tracekit.report.verdict import LossKind
from tracekit.trace.model import OpKind, Worker

_UNRECORDED = "as for a checkpoint that is not recorded"
TOGETHER_TITLE = f"All ranks stop together, {_UNRECORDED}"
ALONE_TITLE = f"A rank stops while the others wait, {_UNRECORDED}"
#: Confidence that an unrecorded stall of all ranks is a checkpoint. No experiment.
UNRECORDED_CONFIDENCE = 0.9
STALL_CHECK = (
    "what the loop does in these steps: its checkpoint and evaluation intervals against the period; record it as a span"
)


class Checkpoints(Detector):
    """Checkpoints stop workers while all others wait, or stop the whole job.

    Paper: leaves out steps with a checkpoint. tracekit names checkpoints that were recorded as ops and prices them by a
    replay without them. An unrecorded checkpoint shows as time in which no rank does anything, before anybody begins a
    step or between two steps: a tenth of the usual step or more, in some steps but not in most. Or all ranks, or the
    first DP rank alone, are late with the first ops of every n-th step (see `evidence/step_edges.py`). Data that is
    late for all ranks is late in every step, or in irregular ones. A period makes the stall a checkpoint (or an
    evaluation); without one, time in which no rank does anything is still named, with less confidence.
    """

    kind = "checkpoint-stalls"
    title = "Checkpoints stop the job"
    signature = "recorded checkpoints that make up a large share of the time; or all ranks stand still every n steps"
    refuted_by = "the steps stay as long with checkpoints off"
    next_check = "how long a rank writes and to where; bandwidth of the storage; whether all ranks wait for one"
    suggested_fix = (
        "write checkpoints in the background (torch.distributed.checkpoint.async_save), each rank its own shard"
    )
    part = "checkpoint"
    loss = LossKind.STALLS
    stragglers_where_few = True
    lost_to = "go to checkpoints"
    planned = OpKind.CHECKPOINT
    repair = Repair("async-checkpoint", "Write checkpoints asynchronously")

    def find(self, job: Subject) -> Iterator[Candidate]:
        yield from self._recorded(job)
        yield from self._on_host(job)

    @only_in(PipelineSubject)
    def _recorded(self, job: PipelineSubject) -> Iterator[Candidate]:
        stops, breaks = stops_s(job, checkpoints(job)), job.breaks
        recorded = longest_share(job, stops) >= SMALLEST_STOP_SHARE
        still_s = stalled_s(job) + (0.0 if breaks is None else breaks.late_s.max(axis=(0, 2)))
        stalled = float(still_s.mean()) >= SMALLEST_STOP_SHARE * job.unchanged_s
        if not recorded and not stalled:
            return
        lost_s = still_s * stalled + stops.max(axis=(0, 2)) * recorded
        figures = figures_of_stops(
            job, lost_s, *(("checkpoints", "a checkpoint") if recorded else ("all ranks stand still", "a stall"))
        )
        changes: list[Intervention] = [Scale(checkpoints(job), np.array(0.0))] if recorded else []
        changes += [NoStalls()] if stalled else []
        changes += [breaks.change] if stalled and breaks is not None else []
        few = _stop_the_others(job, stops, recorded=recorded, stalled=stalled)
        title = ALONE_TITLE if few else TOGETHER_TITLE
        yield Candidate(
            self.kind,
            Place(workers=slow_at_it(job, stops) if recorded and not stalled else ()),
            self._effect(job, few, lost_s, figures, recorded=recorded),
            figures,
            confidence_from(figures) * (1.0 if recorded else UNRECORDED_CONFIDENCE),
            Together(tuple(changes)),
            1 + lost_s / job.unchanged_s,
            title=None if recorded else title,
            next_check=None if recorded else STALL_CHECK,
        )

    @only_in(RecordingSubject)
    def _on_host(self, job: RecordingSubject) -> Iterator[Candidate]:
        from tracekit.analysis.detectors.checkpoints_on_host import (
            checkpoints_on_host,  # which a pipeline does not need
        )

        return checkpoints_on_host(self.kind, job)

    def _effect(
        self,
        job: PipelineSubject,
        few: tuple[Worker, ...],
        lost_s: Floats,
        figures: tuple[Figure, ...],
        *,
        recorded: bool,
    ) -> str:
        """What the checkpoints do. `lost_s`: seconds of each step; `few`: who stops the others."""
        if few and recorded:
            return said_of_few(job, few, lost_s, "writes a checkpoint", "write checkpoints")
        if few:
            return said_of_few(job, few, lost_s, "stands still", "stand still")
        return (
            f"{'checkpoints take' if recorded else 'all ranks stand still for'} {figures[0].value:.0%} of the time, in"
            f" {figures[1].value:,.0f} of {len(lost_s):,} steps, up to {seconds(figures[2].value)}"
        )


def _stop_the_others(job: PipelineSubject, stops: Floats, *, recorded: bool, stalled: bool) -> tuple[Worker, ...]:
    """The workers for whose checkpoints, recorded or not, the others wait; empty if all stop together."""
    if recorded:
        return () if stalled else do_it_for_all(job, stops)
    breaks = job.breaks
    return () if breaks is None or stalled_s(job).any() else job.workers_where(breaks.alone)


@evidence(PipelineSubject)
def stalled_s(job: PipelineSubject) -> Floats:
    """Seconds in which no rank does anything, [steps]."""
    none = np.zeros(len(job.replay.graph.steps))
    return none if job.replay.stalled_s is None else job.replay.stalled_s
