"""The parts of a bill, who pays it, and what the mean step of a window goes to: placed losses, and the rest.

In: what a report shows, or the JSON object that a store keeps of it. Out: claims to the seconds of a step. Imported
by all that divides time, of one step or of a whole run, so that they use the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.report.finding import LossKind

#: Seconds that no clock resolves: what is left of a difference.
LEAST_S = 1e-9
#: Free metadata that identifies who pays; that with "label" is of the scheduler.
TEAM_KEYS = ("team", "project", "label_team", "label_project")


class PlacedLoss(Struct, frozen=True):
    """What the mean step loses to one cause at one place: `seconds`, and `planned_s` on planned work of the critical
    path, which is billed as the part `work`. Of what goes only with several causes, it has its share.

    `saved_s`: what the mean step saves if this cause alone goes, as a fix is priced; None where there is no price of
    its own.

    `kind`: of the loss, None for losses that hide each other. `ranks`: global ranks, none for the whole job; `hosts`:
    of these, as far as known. `first_step`, `last_step`: those of the window that it slows down; `since`, `until`: when
    the first began and the last ended, seconds since the epoch; None where unknown.
    """

    kind: LossKind | None
    part: BillPart
    cause: str
    seconds: float
    planned_s: float = 0.0
    work: BillPart | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    since: float | None = None
    until: float | None = None
    saved_s: float | None = None

    @property
    def overlaps(self) -> bool:
        """Whether it shares time with other causes, so that it costs another figure than it saves alone."""
        return self.saved_s is not None and abs(self.seconds + self.planned_s - self.saved_s) > LEAST_S


class ClaimedCosts(Struct, frozen=True):
    """Seconds of the mean step. `planned`: of data loading, checkpoints and evaluation on the critical path; `losses`:
    beyond that. `rest`: what else the step goes to, in order; the last claim gets all that is left.

    `gpus`: of the job, None if not known. `length_s`: seconds of all steps, None if they are as many times the mean
    step. `doubt`: why the losses are not known, None if they are.
    """

    planned: Mapping[BillPart, float]
    losses: tuple[PlacedLoss, ...]
    rest: tuple[Claim, ...]
    gpus: int | None
    length_s: float | None = None
    doubt: str | None = None

    @property
    def lost(self) -> dict[tuple[BillPart, str], float]:
        """The losses beyond planned work, by part and cause."""
        lost = dict[tuple[BillPart, str], float]()
        for loss in self.losses:
            lost[loss.part, loss.cause] = lost.get((loss.part, loss.cause), 0.0) + loss.seconds
        return {target: seconds for target, seconds in lost.items() if seconds > LEAST_S}

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of a step beyond planned work, in order."""
        return (*((*target, seconds) for target, seconds in self.lost.items()), *self.rest)


def stored_costs(text: str) -> ClaimedCosts | None:
    """The costs in a JSON object; None if it has none."""
    try:
        costs = msgspec.json.decode(text, type=ClaimedCosts)
    except (msgspec.MsgspecError, RecursionError):
        return None
    # JSON has no infinity.
    return replace(costs, rest=tuple((part, cause, ALL if s is None else s) for part, cause, s in costs.rest))


class BillPart(StrEnum):
    """The parts of a bill, in its order."""

    USEFUL = "useful"
    STRAGGLERS = "stragglers"
    HOST = "host"
    COMMUNICATION = "communication"
    COMPUTE = "compute"
    POST_TRAINING = "post-training"
    INPUT = "input"
    CHECKPOINTS = "checkpoints"
    EVALUATION = "evaluation"
    IDLE = "idle"
    START = "start-up"
    RESTARTS = "restarts"
    UNKNOWN = "unknown"


#: A part, a cause, and the seconds that they get of each stretch: a number or an array, infinite for all that is left.
Claim = tuple[BillPart, str, Any]
ALL = np.inf
USEFUL: Claim = BillPart.USEFUL, "training", ALL


def team_of(metadata: Mapping[str, Any]) -> str | None:
    """Who pays for a job, by its free metadata; None if that is not known."""
    return next((metadata[key] for key in TEAM_KEYS if isinstance(metadata.get(key), str)), None)
