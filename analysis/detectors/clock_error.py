"""A clock that is off."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from

#: Network time protocols keep clocks closer than this, seconds; report larger offsets.
SMALLEST_OFFSET_S = 1.5e-3


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
        hit = np.abs(offset) >= SMALLEST_OFFSET_S
        if not hit.any() or job.trace.one_clock:
            return
        figures = (Figure("offset", float(np.abs(offset).max()), SMALLEST_OFFSET_S, Unit.SECONDS),)
        where = Place(workers=job.workers_where(hit))
        effect = f"clock is off by {seconds(figures[0].value)}"
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), None)
