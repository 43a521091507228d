"""Classify calls by the names of the operators and annotations around them.

In: names. Out: steps, phases of a step, collectives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

COLLECTIVE_OPERATOR = "record_param_comms"
STEP = re.compile(r"ProfilerStep#(\d{1,9})(?!\d)")
#: Names that mark the phase of a step; the first match counts.
_PHASE_PATTERNS = (
    ("optimizer", re.compile(r"^Optimizer\.(step|zero_grad)#|^optimizer", re.IGNORECASE)),
    ("backward", re.compile(r"^autograd::engine::evaluate_function|^#*\s*backward|^PP:\d+[BW]", re.IGNORECASE)),
)
#: Phases by number; the first is the default.
PHASES = ("forward", *(phase for phase, _ in _PHASE_PATTERNS))
#: Calls that make the GPU do something.
LAUNCHES = re.compile(r"Launch|Memcpy|Memset")
#: Calls that wait for the GPU whatever they were given.
SYNCHRONISES = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize")
#: Copies of which one side is the host: neither within a GPU nor between two.
HOST_COPY = re.compile(r"^(?!.*(DtoD|PtoP))")
#: Functions that compute activations again, of torch, Megatron and DeepSpeed; and the backward inside of some of them.
RECOMPUTES = (
    re.compile(
        r"(^|/)torch/utils/checkpoint\.py\(\d+\): (recompute_fn|backward)$"
        r"|(^|/)(tensor_parallel/random|activation_checkpointing/checkpointing)\.py\(\d+\): backward$"
    ),
    re.compile(r"(^|/)torch/autograd/__init__\.py\(\d+\): backward$"),
)
NCCL_ANNOTATION = re.compile(r"^(?:nccl|rccl):(\w+)")


def codes_of_phases(names: Sequence[str]) -> list[list[int]]:
    """Return, for each of PHASES but the first, the positions of the names that mark it."""
    return [[code for code, name in enumerate(names) if pattern.search(name)] for _, pattern in _PHASE_PATTERNS]
