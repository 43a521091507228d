"""What the mean step of a report loses to the parts of a bill.

In: the JSON of a report. Out: seconds of the mean step by part and cause.
"""

from __future__ import annotations

import json

from msgspec import Struct

from tracekit.analysis.detectors.registry import detector_of
from tracekit.bill.bill import ALL, LEAST_S, USEFUL, Claim, Part
from tracekit.report.finding import Place
from tracekit.report.verdict import OF_POST_TRAINING, LossKind
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
    stragglers, by kind of finding, to data that no op shows, and to pauses and stalls; of post-training, to its losses,
    and what is in no phase. `rest`: what all else went to. `length_s`: seconds of all steps, None if they are as many
    times the mean step.
    """

    planned: dict[Part, float]
    lost: dict[tuple[Part, str], float]
    rest: Claim = USEFUL
    length_s: float | None = None


def costs_of(report: str) -> Costs | None:
    """The costs that a report shows; None for a report of a version with other keys."""
    try:
        found = json.loads(report)
        on_path = [(op.get("kind"), op["recorded_s"]) for op in found["critical_path"]]
        of = {loss["kind"]: loss["lost_s"] for loss in found["verdict"]["losses"]}
        causes = [(cause["kind"], max(cause["saved_s"], cause["alone_s"], 0.0), Place(**cause["where"]))
                  for cause in found["causes"]]  # fmt: skip
        trusted, times, unaccounted_s, length_s = found["trust"]["trustworthy"], found["step_time_s"], 0.0, None
        if "rl" in found:
            unaccounted_s, length_s = found["rl"]["unaccounted_s"] or 0.0, found["rl"].get("length_s")
        together_s = times["original"] - times["ideal"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    planned = {part: sum(max(s, 0.0) for kind, s in on_path if kind == of_part) for of_part, part in PLANNED.items()}
    if not trusted:
        return Costs(planned, {}, (Part.UNKNOWN, "analysis not trusted", ALL), length_s)
    lost_s = of.get(LossKind.STRAGGLER, 0.0)
    lost = _divided(Part.STRAGGLERS, [one for one in causes if _is_straggler(one[0], one[2])], lost_s)
    lost[Part.STRAGGLERS, _UNEXPLAINED] = lost_s - sum(lost.values())
    lost |= _divided(Part.POST_TRAINING, [one for one in causes if one[0] in OF_POST_TRAINING], together_s)
    lost[Part.UNKNOWN, "in no phase"] = unaccounted_s
    # What is recorded as an op is not lost once more: stalls include checkpoints.
    lost[Part.INPUT, "late data"] = max(of.get(LossKind.INPUT, 0.0) - planned[Part.INPUT], 0.0)
    still_s = of.get(LossKind.STALLS, 0.0) + of.get(LossKind.IDLE, 0.0) - planned[Part.CHECKPOINTS]
    lost[Part.IDLE, "pauses and stalls"] = max(still_s, 0.0)
    return Costs(planned, {to: seconds for to, seconds in lost.items() if seconds > LEAST_S}, length_s=length_s)


def _divided(part: Part, causes: list[tuple[str, float, Place]], lost_s: float) -> dict[tuple[Part, str], float]:
    """What causes cost by kind; those that hide each other share what they cost together, `lost_s`."""
    by_kind: dict[tuple[Part, str], float] = {}
    for kind, cost_s, _ in causes:
        by_kind[part, kind] = by_kind.get((part, kind), 0.0) + cost_s
    named_s = sum(by_kind.values())
    scale = min(1.0, lost_s / named_s) if named_s else 0.0
    return {to: cost_s * scale for to, cost_s in by_kind.items()}


def _is_straggler(kind: str, where: Place) -> bool:
    try:
        return detector_of(kind).loss_at(where) is LossKind.STRAGGLER
    except KeyError:  # of a plug-in that is not installed here
        return False
