"""Verdicts: the kind of loss that costs a job most, and how much.

In: what the diagnosis found. Out: `Verdict`, the first line of every report.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.finding import Finding
from tracekit.trace.facts import Fact


class LossKind(StrEnum):
    """What most of the lost time is spent on."""

    STRAGGLER = "straggler"
    INPUT = "input-bound"
    HOST = "host-bound"
    COMMUNICATION = "communication-bound"
    COMPUTE = "compute-bound"
    IDLE = "idle"
    STALLS = "stalls"
    EVALUATION = "evaluation"
    QUEUEING = "queueing"
    TAIL = "tail"
    ENGINES = "engines"
    TOOLS = "tools"
    REWARD = "reward"
    SYNC = "sync"
    UNACCOUNTED = "unaccounted"
    PHASES = "phases"
    MINOR = "minor"
    BALANCED = "balanced"
    CONTRADICTION = "contradiction"


#: Losses of post-training.
OF_POST_TRAINING = frozenset(
    (LossKind.QUEUEING, LossKind.TAIL, LossKind.ENGINES, LossKind.TOOLS, LossKind.REWARD, LossKind.SYNC)
)
#: Kinds that name no loss to act on: it is small, or unknown. Only a balanced job loses nothing.
UNNAMED = frozenset((LossKind.UNACCOUNTED, LossKind.PHASES, LossKind.MINOR, LossKind.CONTRADICTION))


#: What a verdict of a kind rests on. It is not given where the source lacks that.
NEEDS = {
    LossKind.STRAGGLER: Fact.RANKS,
    LossKind.INPUT: Fact.COMPUTE,
    LossKind.HOST: Fact.COMPUTE,
    LossKind.COMMUNICATION: Fact.COMPUTE,
    LossKind.COMPUTE: Fact.COMPUTE,
    LossKind.IDLE: Fact.COMPUTE,
    LossKind.QUEUEING: Fact.REQUESTS,
    LossKind.TAIL: Fact.REQUESTS,
    LossKind.ENGINES: Fact.REQUESTS,
}


class Loss(Struct, frozen=True, eq=False):
    """The cost of one kind of loss, seconds of the mean step, and its causes in the order in which to address them.

    `explained_s`: the part of `lost_s` that goes when these causes go; the rest has no known cause.
    """

    kind: LossKind
    lost_s: float
    causes: tuple[Finding, ...]
    explained_s: float


class Verdict(Struct, frozen=True, eq=False):
    """The kind of loss that costs most, and the total loss.

    `headline_s`: seconds of the mean step that `kind` costs; `lost_s`: that all losses cost together; `share`: the
    total loss over the recorded step. `step_lost_s`: what each step loses, [steps], `lost_s` in the mean. `label`: what
    readers see of the kind, which tells slow ranks from ranks with more work. `sentence`: the verdict in words, without
    its kind. `confidence`: that of the leading cause, 0 to 1, None if no cause is named. `parts`: what S consists of,
    with all causes. `of_mean_ops`: the loss is what S counts, compared with mean ops.
    """

    kind: LossKind
    label: str
    headline_s: float
    lost_s: float
    share: float
    step_lost_s: Floats
    lost_gpu_hours: float
    lost_gpu_hours_per_day: float
    sentence: str
    confidence: float | None
    losses: tuple[Loss, ...]
    parts: Parts
    of_mean_ops: bool = False
