"""Kinds of loss: what a verdict names.

In: what the diagnosis found. Out: `LossKind`, and what a source must show for each.
"""

from __future__ import annotations

from enum import StrEnum

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
