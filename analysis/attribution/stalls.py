"""Isolated stalls: the few steps that took much longer than the others, by how much, and why.

In: a replay and its `Attribution`. Out: `Stall`s. A recorded step consists of the ops on its critical path and the gaps
between them, so the parts that grew on the path of a slow step account for its extra time.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.attribution.patterns import TRANSIENT_SHARE, TimeShape, pattern_of_series
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.paper import RECORDED
from tracekit.trace.model import KINDS, OpKind


class StallPart(StrEnum):
    """The part of a step that took longer."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    DATA = "data"
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    HOST = "host"


#: The part of each kind that is neither compute nor communication.
_PART = {
    OpKind.DATA_LOAD: StallPart.DATA,
    OpKind.GC: StallPart.GARBAGE_COLLECTION,
    OpKind.CHECKPOINT: StallPart.CHECKPOINT,
    OpKind.EVALUATION: StallPart.EVALUATION,
    OpKind.HOST_DELAY: StallPart.HOST,
}


def _part(kind: OpKind) -> StallPart:
    return _PART.get(kind, StallPart.COMMUNICATION if kind.is_communication else StallPart.COMPUTE)


_PARTS = tuple(StallPart)
#: Index into `_PARTS` for each op kind, by the kind's code.
_PART_OF_KIND = np.array([_PARTS.index(_part(kind)) for kind in KINDS])


class Stall(Struct, frozen=True, eq=False):
    """A step that took `extra_s` seconds longer than the usual one, most of it in `part`."""

    step: int
    extra_s: float
    part: StallPart


def stalls_of(replay: JobReplay, attribution: Attribution) -> tuple[Stall, ...]:
    """The isolated slow steps, longest first; empty if slow steps are common or the job only drifts."""
    recorded = attribution.recorded
    usual_s = float(np.median(recorded))
    pattern = pattern_of_series(recorded / usual_s, attribution.steps.tolist())
    if pattern.shape not in {TimeShape.TRANSIENT, TimeShape.PERIODIC} or not pattern.slow_steps:
        return ()
    slow = np.isin(attribution.steps, pattern.slow_steps)
    if slow.mean() > TRANSIENT_SHARE:
        return ()
    of_slow = _seconds_by_part(replay.only_steps(pattern.slow_steps))
    # The parts of a usual step: the mean over all steps, without the slow ones.
    usual = (_mean_by_part(attribution) * len(recorded) - of_slow.sum(axis=0)) / (~slow).sum()
    longer = (of_slow - usual).argmax(axis=1)
    stalls = [
        Stall(int(step), float(recorded_s) - usual_s, _PARTS[part])
        for step, recorded_s, part in zip(attribution.steps[slow], recorded[slow], longer, strict=True)
    ]
    return tuple(sorted(stalls, key=lambda stall: -stall.extra_s))


def _seconds_by_part(replay: JobReplay) -> Floats:
    """Seconds of each part in each recorded step, [steps, parts]."""
    graph, path = replay.graph, critical_path(replay, RECORDED)
    totals = np.zeros((len(graph.steps), len(_PARTS)))
    for number, block in enumerate(graph.blocks):
        of_block = path.block == number
        part = _PART_OF_KIND[block.template.kind[path.row[of_block]]]
        np.add.at(totals, (path.step[of_block], part), path.cost_s[of_block])
    np.add.at(totals[:, _PARTS.index(StallPart.HOST)], path.step, path.delay_s)
    return totals


def _mean_by_part(attribution: Attribution) -> Floats:
    """Seconds of each part in the mean recorded step, [parts]; kinds that are reported together share a part."""
    path = attribution.critical["recorded"]
    totals = np.zeros(len(_PARTS))
    for name, seconds in path.by_kind.items():
        part = _part(OpKind(name)) if name in set(OpKind) else StallPart.COMMUNICATION
        totals[_PARTS.index(part)] += seconds
    totals[_PARTS.index(StallPart.HOST)] += path.delay_s
    return totals
