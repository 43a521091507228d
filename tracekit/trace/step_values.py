"""What a training loop says of its steps with `tracekit.log`: tokens and loss, in the free metadata of a trace.

In: the metadata of any trace, which strangers may have written. Out: `tokens`, summed over the data-parallel replicas,
and `loss`, by step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

#: The key of the metadata: name -> step -> value.
STEP_VALUES = "step_values"
NAMES = ("tokens", "loss")
#: Of a step; a float of 64 bits counts no further.
MOST_TOKENS = 1 << 53
StepValues = Mapping[str, Mapping[int, float]]
_Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def step_values(metadata: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The values of each step by name, without those that are impossible; a name without any, or with anything that is
    no number, is left out.
    """
    stated = metadata.get(STEP_VALUES)
    possible_by_name = {}
    for name in NAMES:
        try:
            by_step = stated.get(name) if isinstance(stated, dict) else None
            values = msgspec.convert(by_step or {}, dict[_Step, float], strict=False, str_keys=True)
        except msgspec.ValidationError:
            continue
        least, most = (0, MOST_TOKENS) if name == "tokens" else (-sys.float_info.max, sys.float_info.max)
        if possible := {step: value for step, value in values.items() if least <= value <= most}:
            possible_by_name[name] = possible
    return possible_by_name


def tokens_per_s(steps: Iterable[tuple[object, float]]) -> float | None:
    """Tokens a second over steps, each with its tokens (no number if it logs none) and seconds; None without any."""
    logged = [(tokens, took_s) for tokens, took_s in steps if isinstance(tokens, int | float)]
    time_s = sum(took_s for _, took_s in logged)
    return sum(tokens for tokens, _ in logged) / time_s if time_s > 0 else None
