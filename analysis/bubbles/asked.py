"""Schedules by name, and the orders that they give a pipeline.

In: a schedule as people type it, such as "zb-h1,weight=0.4". Out: `AskedSchedule`, and from it a `ComputeOrder`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from tracekit.analysis.bubbles.order import BACKWARD, FORWARD, WEIGHT, ComputeOrder
from tracekit.base.errors import LayoutError, SelectionError
from tracekit.base.text import quoted
from tracekit.trace.compute_order import Schedule, check_schedule, compute_order
from tracekit.trace.model import Layout

ZB_H1 = "zb-h1"
_FORM = re.compile(r"(gpipe|1f1b|zb-h1|interleaved:chunks=(?P<chunks>\d{1,4}))(,weight=(?P<weight>0?\.\d{1,15}))?")
#: Chunks of fewer layers than one would only take memory.
_MOST_CHUNKS = 64


class AskedSchedule(Struct, frozen=True):
    """A schedule to price. `text`: as asked for; `chunks`: model chunks per stage; `weight`: the share of the weight
    gradients in the whole backward, None if not stated.
    """

    text: str
    name: str
    chunks: int = 1
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> AskedSchedule:
        """Read "interleaved:chunks=2,weight=0.4". Raises SelectionError, with the schedules that exist."""
        read = _FORM.fullmatch(text.strip().lower())
        chunks = int(read["chunks"]) if read and read["chunks"] else None
        weight = float(read["weight"]) if read and read["weight"] else None
        if read is None or weight == 0 or not (chunks is None or 2 <= chunks <= _MOST_CHUNKS):
            raise SelectionError(
                f"--schedule {quoted(text)}: not a schedule; write gpipe, 1f1b, interleaved:chunks=V or zb-h1, with"
                f" ,weight=X behind it for the share of W in the whole backward; V: 2 to {_MOST_CHUNKS}, X: 0 to 1"
            )
        return cls(text, read[1].partition(":")[0], chunks or 1, weight)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the rest of the backward."""
        return self.name == ZB_H1

    def order(self, stages: int, microbatches: int) -> ComputeOrder:
        """The order of that schedule. Raises LayoutError if it cannot run so many microbatches on so many stages."""
        if self.chunks > 1 and stages == 1:
            raise LayoutError(f"schedule {self.name} needs a pipeline of 2 stages or more; the job has 1")
        schedule = Schedule.ONE_F_ONE_B if self.splits_backward else Schedule(self.name)
        layout = Layout(dp=1, pp=stages, tp=1, vpp=self.chunks)
        check_schedule(schedule, layout, microbatches)
        every = (
            (stage, *each) for stage in range(stages) for each in self._of_stage(schedule, layout, microbatches, stage)
        )
        return ComputeOrder.of(every, stages, self.chunks, microbatches)

    def _of_stage(
        self, schedule: Schedule, layout: Layout, microbatches: int, stage: int
    ) -> Iterator[tuple[int, int, int]]:
        """(kind, chunk, microbatch) of the computes of a stage, in order."""
        waiting: list[tuple[int, int, int]] = []
        for compute in compute_order(schedule, layout, microbatches, stage):
            yield FORWARD if compute.forward else BACKWARD, compute.chunk, compute.microbatch
            if self.splits_backward and not compute.forward:
                waiting.append((WEIGHT, compute.chunk, compute.microbatch))
                if len(waiting) > stage:  # of a later stage, more may wait: its backwards are needed sooner
                    yield waiting.pop(0)
        yield from waiting
