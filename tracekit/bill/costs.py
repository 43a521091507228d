"""What the mean step of a report loses to the parts of a bill.

In: the JSON of a report. Out: seconds of the mean step by part and cause.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from tracekit.analysis.detectors.registry import detector_of
from tracekit.bill.bill import Part
from tracekit.report.verdict import LossKind
from tracekit.trace.model import OpKind

#: The part of work that a report finds on the critical path, and that a run directory records.
PLANNED = {
    OpKind.CHECKPOINT: Part.CHECKPOINTS,
    OpKind.EVALUATION: Part.EVALUATION,
    OpKind.DATA_LOAD: Part.INPUT,
}
#: Seconds that no clock resolves.
_LEAST_S = 1e-9
_UNEXPLAINED = "unexplained"


class _Where(Struct):
    workers: list[msgspec.Raw] = []


class _Cause(Struct):
    kind: str
    where: _Where
    saved_s: float
    alone_s: float


class _Loss(Struct):
    kind: str
    lost_s: float


class _Verdict(Struct):
    losses: list[_Loss]


class _OnPath(Struct):
    recorded_s: float
    kind: str | None = None


class _Report(Struct):
    verdict: _Verdict
    causes: list[_Cause]
    critical_path: list[_OnPath]


class Costs(Struct, frozen=True):
    """Seconds of the mean step. `planned`: of data loading, checkpoints and evaluation on the critical path. `lost`: to
    stragglers, by kind of finding, to data that no op shows, and to pauses and stalls.
    """

    planned: dict[Part, float]
    lost: dict[tuple[Part, str], float]


def costs_of(report: str) -> Costs | None:
    """The costs that a report shows; None for a report of a version with other keys."""
    try:
        found = msgspec.json.decode(report, type=_Report)
    except msgspec.DecodeError:
        return None
    planned = dict.fromkeys(PLANNED.values(), 0.0)
    for op in found.critical_path:
        if op.kind in PLANNED:
            planned[PLANNED[OpKind(op.kind)]] += max(op.recorded_s, 0.0)
    of = {loss.kind: loss.lost_s for loss in found.verdict.losses}
    stragglers: dict[str, float] = {}
    for cause in filter(_is_straggler, found.causes):
        stragglers[cause.kind] = stragglers.get(cause.kind, 0.0) + max(cause.saved_s, cause.alone_s, 0.0)
    lost_s, named_s = of.get(LossKind.STRAGGLER, 0.0), sum(stragglers.values())
    scale = min(1.0, lost_s / named_s) if named_s else 0.0
    lost = {(Part.STRAGGLERS, kind): cost_s * scale for kind, cost_s in stragglers.items()}
    lost[Part.STRAGGLERS, _UNEXPLAINED] = lost_s - named_s * scale
    # What is recorded as an op is not lost once more: stalls include checkpoints.
    lost[Part.INPUT, "late data"] = max(of.get(LossKind.INPUT, 0.0) - planned[Part.INPUT], 0.0)
    still_s = of.get(LossKind.STALLS, 0.0) + of.get(LossKind.IDLE, 0.0) - planned[Part.CHECKPOINTS]
    lost[Part.IDLE, "pauses and stalls"] = max(still_s, 0.0)
    return Costs(planned, {to: seconds for to, seconds in lost.items() if seconds > _LEAST_S})


def _is_straggler(cause: _Cause) -> bool:
    try:
        detector = detector_of(cause.kind)
    except KeyError:  # of a plug-in that is not installed here
        return False
    few = detector.stragglers_where_few and bool(cause.where.workers)
    return few or detector.loss is LossKind.STRAGGLER
