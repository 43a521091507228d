"""What the mean step of a report loses to the parts of a bill.

In: the JSON of a report. Out: seconds of the mean step by part and cause.
"""

from __future__ import annotations

import json

from msgspec import Struct

from tracekit.analysis.detectors.registry import detector_of
from tracekit.bill.bill import LEAST_S, Part
from tracekit.report.verdict import LossKind
from tracekit.trace.model import OpKind

#: The part of work that a report finds on the critical path, and that a run directory records.
PLANNED = {
    OpKind.CHECKPOINT: Part.CHECKPOINTS,
    OpKind.EVALUATION: Part.EVALUATION,
    OpKind.DATA_LOAD: Part.INPUT,
}
_UNEXPLAINED = "unexplained"


class Costs(Struct, frozen=True):
    """Seconds of the mean step. `planned`: of data loading, checkpoints and evaluation on the critical path. `lost`: to
    stragglers, by kind of finding, to data that no op shows, and to pauses and stalls.
    """

    planned: dict[Part, float]
    lost: dict[tuple[Part, str], float]


def costs_of(report: str) -> Costs | None:
    """The costs that a report shows; None for a report of a version with other keys."""
    try:
        found = json.loads(report)
        on_path = [(op.get("kind"), op["recorded_s"]) for op in found["critical_path"]]
        of = {loss["kind"]: loss["lost_s"] for loss in found["verdict"]["losses"]}
        causes = [(cause["kind"], max(cause["saved_s"], cause["alone_s"], 0.0)) for cause in found["causes"]
                  if _is_straggler(cause["kind"], bool(cause["where"]["workers"]))]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    planned = {part: sum(max(s, 0.0) for kind, s in on_path if kind == of_part) for of_part, part in PLANNED.items()}
    stragglers: dict[str, float] = {}
    for kind, cost_s in causes:
        stragglers[kind] = stragglers.get(kind, 0.0) + cost_s
    lost_s, named_s = of.get(LossKind.STRAGGLER, 0.0), sum(stragglers.values())
    scale = min(1.0, lost_s / named_s) if named_s else 0.0
    lost = {(Part.STRAGGLERS, kind): cost_s * scale for kind, cost_s in stragglers.items()}
    lost[Part.STRAGGLERS, _UNEXPLAINED] = lost_s - named_s * scale
    # What is recorded as an op is not lost once more: stalls include checkpoints.
    lost[Part.INPUT, "late data"] = max(of.get(LossKind.INPUT, 0.0) - planned[Part.INPUT], 0.0)
    still_s = of.get(LossKind.STALLS, 0.0) + of.get(LossKind.IDLE, 0.0) - planned[Part.CHECKPOINTS]
    lost[Part.IDLE, "pauses and stalls"] = max(still_s, 0.0)
    return Costs(planned, {to: seconds for to, seconds in lost.items() if seconds > LEAST_S})


def _is_straggler(kind: str, on_workers: bool) -> bool:
    try:
        detector = detector_of(kind)
    except KeyError:  # of a plug-in that is not installed here
        return False
    return detector.loss is LossKind.STRAGGLER or (detector.stragglers_where_few and on_workers)
