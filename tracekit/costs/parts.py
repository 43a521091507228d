"""The parts of a bill, and claims to seconds of a stretch of time.

Imported by all that divides time, of one step or of a whole run, so that they use the same parts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np

#: Seconds that no clock resolves: what is left of a difference.
LEAST_S = 1e-9


class BillPart(StrEnum):
    """What an hour went to, in the order of the bill."""

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
