"""What a training loop says of its steps with `tracekit.log`: tokens and loss, in the free metadata of a trace.

In: the metadata of any trace, which strangers may have written. Out: `tokens`, summed over the data-parallel replicas,
and `loss`, by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

#: The key of the metadata: name -> step -> value.
STEP_VALUES = "step_values"
NAMES = ("tokens", "loss")
StepValues = Mapping[str, Mapping[int, float]]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def step_values(metadata: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The finite values of each step by name; a name without any, or with anything else, is left out."""
    told = metadata.get(STEP_VALUES)
    found = {}
    for name in NAMES:
        try:
            by_step = told.get(name) if isinstance(told, dict) else None
            values = msgspec.convert(by_step or {}, dict[_Step, float], strict=False, str_keys=True)
        except msgspec.ValidationError:
            continue
        if finite := {step: value for step, value in values.items() if math.isfinite(value)}:
            found[name] = finite
    return found


def summary(metadata: Mapping[str, Any]) -> dict[str, float]:
    """`tokens_per_step`, the mean over the steps that have them, and the last `loss`; without what nobody logged."""
    values = step_values(metadata)
    found = {}
    if (tokens := values.get("tokens")) and math.isfinite(total := sum(tokens.values())):
        found["tokens_per_step"] = total / len(tokens)
    if loss := values.get("loss"):
        found["loss"] = loss[max(loss)]
    return found
